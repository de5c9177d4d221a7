"""Sockets and HTTP of the worker process; they decide nothing."""
