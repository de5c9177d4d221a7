"""A `poolgrid` command on a terminal, and what it shows there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from tests.e2e.processes import WAIT_TIMEOUT_S

LINES, COLUMNS = 50, 200


class Screen:
    """All that was ever shown."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._shown = b""

    def read_until(self, words: str) -> None:
        """Wait until it shows a text, after what was waited for before."""
        ends_s = monotonic() + WAIT_TIMEOUT_S
        while words.encode() not in self._shown:
            assert select.select([self._terminal], [], [], max(0.0, ends_s - monotonic()))[0], self._shown.decode()
            self._shown += os.read(self._terminal, 65_536)
        self._shown = self._shown.partition(words.encode())[2]


@contextmanager
def screen_of(*arguments: str, **environment: str) -> Iterator[Screen]:
    """Run a command on a terminal of its own, and end it with that."""
    terminal, end = pty.openpty()
    try:
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "poolgrid", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment},
        )
    finally:
        os.close(end)
    try:
        yield Screen(terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
