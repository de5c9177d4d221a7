"""What is known of names, without a socket, a file or a clock."""
