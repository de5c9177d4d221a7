"""systemd's notification protocol: it gets when a process is ready, its heartbeats, and its end.

The protocol is a datagram of ``NAME=value`` lines to the Unix socket in ``NOTIFY_SOCKET`` (sd_notify(3)). A process
started without that variable sends nothing and pays nothing. Heartbeats come from the event loop itself, so that a
loop that hangs is noticed (``WatchdogSec=``), and not only a process that is gone.

The variables are taken out of the environment: what this process starts must not send in its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from contextvars import ContextVar

log = logging.getLogger(__name__)

SIGNS_PER_TIMEOUT = 3
"""Heartbeats in the time after which the manager takes the process for hung: two may be late."""


class ServiceManager:
    """The manager of this process, at a Unix datagram socket."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        """``address`` is a path, or ``@`` and a name; after ``watchdog_s`` of silence the process is ended."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = None if watchdog_s is None else watchdog_s / SIGNS_PER_TIMEOUT
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # A manager that does not read must not hold up who it watches.
        self._socket.setblocking(False)
        self._timer: asyncio.TimerHandle | None = None
        self._failed = False

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> ServiceManager | None:
        """Return the manager that the environment names, and take its variables out; ``None`` without one."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", str(os.getpid()))
        if not address.startswith(("/", "@")):
            return None
        is_watched = microseconds.isdecimal() and int(microseconds) > 0 and watched == str(os.getpid())
        return cls(address, int(microseconds) / 1e6 if is_watched else None)

    def tell_ready(self) -> None:
        self._tell(b"READY=1")

    def tell_stopping(self) -> None:
        """Say that it has begun to end, which may take as long as its drain."""
        self._tell(b"STOPPING=1")

    def begin_signs_of_life(self) -> None:
        """Say from this event loop, as often as is wanted, that it turns."""
        if self._interval_s is not None:
            self._tell(b"WATCHDOG=1")
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.begin_signs_of_life)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _tell(self, state: bytes) -> None:
        try:
            self._socket.sendto(state, self._address)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("telling the service manager %s: %s; it may end this process", state.decode(), error)
            self._failed = True


service_manager: ContextVar[ServiceManager | None] = ContextVar("service_manager", default=None)
"""The manager of this process, for the code that finds out that it is ready; set where the process begins."""
