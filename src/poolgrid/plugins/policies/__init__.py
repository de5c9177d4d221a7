"""Policies and observers that a router can do without: each is found by its entry point."""
