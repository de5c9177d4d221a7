"""Sockets between processes: ZeroMQ, ZMTP on the event loop, TLS and CURVE."""
