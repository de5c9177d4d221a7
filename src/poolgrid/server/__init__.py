"""What makes processes of the kernel."""
