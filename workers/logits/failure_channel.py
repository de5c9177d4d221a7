"""How processors that run in the engine's process report their failures to the worker's process.

A Unix datagram socket that the worker owns: a processor carries only its path, so it can be pickled, and a report never
waits. Overflow policy: a report that does not fit into the socket's buffer is dropped; the next ones count again.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

REPORT_BYTES_MAX = 128
"""A processor's name."""


class FailureReporter:
    """The sending end, in whatever process the processor runs."""

    def __init__(self, path: str) -> None:
        self._path = path

    def report(self, name: str) -> None:
        """Say that the processor of this name failed once; never raises and never waits."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(name.encode()[:REPORT_BYTES_MAX], self._path)
        except OSError:
            pass  # the worker is gone, or has a full buffer of such reports already


class FailureChannel:
    """The receiving end; made on a running event loop, closed by ``close``."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="poolgrid-"))
        path = self._directory / "failures"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)
        self.reporter = FailureReporter(str(path))

    def _receive(self) -> None:
        while True:
            try:
                name = self._socket.recv(REPORT_BYTES_MAX)
            except OSError:
                return
            self._on_failure(name.decode(errors="replace"))

    def close(self) -> None:
        """Stop receiving and remove the socket."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)
