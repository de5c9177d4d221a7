"""What a forwarded request and its answer are changed in, and which of them are forwarded; pure."""
