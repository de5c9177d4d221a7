"""A TCP socket that has its port, for whoever needs no server of ours on it: that takes a while to import."""

from __future__ import annotations

import socket


def bind(host: str, port: int, setting: str, reuse_port: bool = False) -> socket.socket:
    """Return a TCP socket bound to ``host:port``; raises ``OSError`` that names the ``setting``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name of the protocol: asyncio turns Nagle's delay off for sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"binding {setting}: {host}:{port} cannot be used ({error.strerror}); choose a free port, or 0 for any"
        ) from error
    return listener
