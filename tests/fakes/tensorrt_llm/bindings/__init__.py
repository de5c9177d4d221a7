"""What C++ binds."""
