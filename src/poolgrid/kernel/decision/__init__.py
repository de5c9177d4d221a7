"""What a choice is."""
