"""A port that is kept for a process which may die: bound here for as long as this one lives, and never listened on.

Linux lets a second socket bind a port and listen on it when both allow addresses to be used again and the first one
does not listen. So the part that the port is for takes it, again and again; nobody is given it as "any free port" while
the part is down, and nobody takes it who does not ask for this very port.
"""

from __future__ import annotations

import socket

from poolgrid.transport.bound_socket import bind


class HeldPorts:
    """Ports of the parts of one pool, at one host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def hold(self, port: int = 0) -> int:
        """Keep a port, any free one for 0, and return it.

        One that somebody listens on already cannot be kept: the part that it is for will say so in its own words.
        """
        try:
            held = bind(self._host, port, "port")
        except OSError:
            return port
        self._held.append(held)
        taken: int = held.getsockname()[1]
        return taken

    def close(self) -> None:
        """Keep them no longer."""
        for held in self._held:
            held.close()
        self._held.clear()
