"""Parts that can be deleted."""
