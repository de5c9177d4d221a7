"""Holds what people read to plain technical English: our rules for Harper, and a count per text that only falls."""
