"""The language of pool grid documents: reading, checking, comparing and writing them."""
