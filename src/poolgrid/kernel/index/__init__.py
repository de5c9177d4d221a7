"""Which worker holds which block."""
