"""Distributed traces: what happened to a request in this process, kept while it runs, exported at its end."""
