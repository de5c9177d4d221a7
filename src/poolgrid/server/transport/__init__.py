"""Sockets between processes: ZeroMQ, ZMTP on the event loop, TLS and CURVE.

May import of the kernel ``wire``; of the server ``process``.
"""
