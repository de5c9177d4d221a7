"""What a router knows of its pool."""
