"""What touches the world: sockets and files."""
