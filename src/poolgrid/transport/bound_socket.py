"""TCP sockets that are bound and not served."""

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


class ReservedPorts:
    """Ports of the parts of one pool, at one host: bound for as long as this process lives, and never listened on.

    Linux lets a second socket bind a port and listen on it when both allow addresses to be used again and the first
    one does not listen. So a part that dies takes its port again, and no other process is given it as "any free port".
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def hold(self, port: int = 0) -> int:
        """Keep a port, any free one for 0, and return it.

        One that is in use already cannot be kept: the part that it is for will report that in its own words.
        """
        try:
            held = bind(self._host, port, "port")
        except OSError:
            return port
        self._held.append(held)
        taken: int = held.getsockname()[1]
        return taken

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()
