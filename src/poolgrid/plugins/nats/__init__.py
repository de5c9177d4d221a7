"""Connections to NATS: buckets, leaders, streams."""
