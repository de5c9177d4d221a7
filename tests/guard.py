"""Ends the processes that tests have started when the tests are killed, and can end nothing any more.

    python -I -S guard.py

Rules
    1. Standard input is a pipe whose other end the tests hold: process ids come over it, one a line. Its end means that
       the tests are gone.
    2. Whoever lives then gets SIGTERM, and after ``GRACE_S`` SIGKILL. A process that ended before is forgotten at once:
       its number may be another's.
    3. A command that watches over others (``poolgrid up``) ends them itself when it is told to end.

Beside ``poolgrid.server.process.leash``, which stands between the two: here the tests are the parent, and signals, ids
and statuses are the process's own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 20.0

_lock = threading.Lock()
_guards: dict[int, subprocess.Popen[bytes]] = {}
"""By process, so that one that was forked has its own."""


def guarded(pid: int) -> None:
    """Have a child of this process end with it, also when it is killed; where the system can name processes so."""
    if not hasattr(os, "pidfd_open"):
        return
    with _lock:
        guard = _guards.get(os.getpid())
        if guard is None:
            command = [sys.executable, "-I", "-S", __file__]
            guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            _guards[os.getpid()] = guard
        assert guard.stdin is not None
        guard.stdin.write(b"%d\n" % pid)
        guard.stdin.flush()


def keep() -> None:
    """Guard until the tests are gone, and end what is left of them."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    living: set[int] = set()
    rest = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != 0:
                _forget(descriptor, living, poll)
            elif part := os.read(0, 4096):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    try:
                        process = os.pidfd_open(int(line))
                    except ProcessLookupError:
                        continue  # it was reaped before it was known here
                    living.add(process)
                    poll.register(process, select.POLLIN)
            else:
                poll.unregister(0)
                _end(living, poll)
                return


def _end(living: set[int], poll: select.poll) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in living:
            try:
                signal.pidfd_send_signal(process, number)
            except ProcessLookupError:
                pass  # which the poll tells, too
        until_s = time.monotonic() + GRACE_S
        while living and (left_s := until_s - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left_s):
                _forget(descriptor, living, poll)


def _forget(process: int, living: set[int], poll: select.poll) -> None:
    poll.unregister(process)
    living.remove(process)
    os.close(process)


if __name__ == "__main__":
    keep()
