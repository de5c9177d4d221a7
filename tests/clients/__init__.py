"""Unmodified client frameworks against a fresh pool: ``python -m tests.clients``, or ``make clients``."""
