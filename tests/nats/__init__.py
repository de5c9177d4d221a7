"""Pools whose journal is on NATS: one server in CI, three with ``python -m tests.nats``."""
