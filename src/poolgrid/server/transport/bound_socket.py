"""TCP sockets that are bound and not served here, and the one that a process is started with.

A supervisor that keeps a listening socket and starts its server with it loses no connection while the server is started
again: clients wait in the kernel's queue. `poolgrid up` does so (``LISTENER_VARIABLE``), and systemd for a service that
has a socket unit (sd_listen_fds(3)).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import MutableMapping

BACKLOG = 2048
"""Connections that wait to be accepted; the kernel refuses more."""

LISTENER_VARIABLE = "POOLGRID_LISTENER"
"""Set by the parent: the descriptor of the listening socket that a process is started with."""

SYSTEMD_FIRST_DESCRIPTOR = 3
"""Descriptors that systemd hands over begin here."""


def inherited_listener(environment: MutableMapping[str, str]) -> socket.socket | None:
    """Return the listening socket that this process was started with, and take its variables out of the environment.

    Raises ``ValueError`` where there is something else, or more than one.
    """
    given = environment.pop(LISTENER_VARIABLE, "")
    count, owner = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_PID", "")
    environment.pop("LISTEN_FDNAMES", None)
    if given:
        name, descriptor = f"{LISTENER_VARIABLE} is {given!r}", int(given) if given.isdecimal() else -1
    elif count and owner == str(os.getpid()):
        name, descriptor = f"LISTEN_FDS is {count!r}", SYSTEMD_FIRST_DESCRIPTOR
        if count != "1":
            raise ValueError(f"taking the listening socket: {name}, allowed is 1: one ListenStream= in the socket unit")
    else:
        return None
    try:
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
        if is_tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return listener
        what = str(listener)
        listener.close()
    except (OSError, OverflowError) as error:
        what = f"no socket ({error})"
    raise ValueError(f"taking the listening socket: {name}, which is {what}; allowed is a listening TCP socket")


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
        if error.errno == errno.EADDRNOTAVAIL:
            fault = f"--host {host}: no address of this machine; 0.0.0.0 stands for all of them"
        else:
            fault = (
                f"binding {setting}: {host}:{port} cannot be used ({error.strerror}); choose a free port, or 0 for any"
            )
        raise OSError(fault) from error
    return listener


def listen(host: str, port: int, setting: str) -> socket.socket:
    """Return a listening socket, to start a server with; raises ``OSError`` that names the ``setting``."""
    listener = bind(host, port, setting)
    listener.listen(BACKLOG)
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
