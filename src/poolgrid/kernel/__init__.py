"""What an owner must know, pure."""
