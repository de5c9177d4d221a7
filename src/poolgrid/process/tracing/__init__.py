"""Distributed traces: what happened to a request in this process, kept while it lives, told at its end."""
