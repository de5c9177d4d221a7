"""Runs a command that ends with the process that started it, whatever becomes of that.

    python -I -S leash.py GRACE_S COMMAND...

Rules
    1. Standard input is a pipe whose other end the starter holds. Its end means that the starter is gone: killed, say,
       with no process left to see it. The command gets SIGTERM then, and after ``GRACE_S`` its whole process group
       SIGKILL.
    2. SIGTERM and SIGINT are handed on to the command, which ends what it has started itself.
    3. The status is the command's; 128 and the signal's number where a signal ended it, 127 where it could not be
       started.
    4. Where this process is killed itself, Linux sends SIGTERM to the command.

It runs as a script, without anything of poolgrid, so that it costs little: a server lives for weeks.

How soon a process that died is started again: at once the first time, then at growing intervals, without end.

Rules
    1. The pause doubles with each death, from ``PAUSE_MIN_S`` to ``PAUSE_MAX_S``. It never ends: what keeps a part from
       starting (a port in use, a full disk) may pass, and meanwhile the others serve.
    2. Each pause is up to a quarter shorter or longer, drawn from the part's name and the number of its death: parts
       that died together do not come back together, and the same run does the same again.
    3. A part that has lived for ``STEADY_S`` since it was ready is taken for well: its next death is its first.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from poolgrid.wire.hashing import stable_u64

PR_SET_PDEATHSIG = 1
"""``prctl``: which signal this process gets when its parent ends."""

HANDED_ON = (signal.SIGTERM, signal.SIGINT)

NOT_STARTED = 127
"""The status of shells for a command that cannot be run."""


def leashed(grace_s: float, command: Sequence[str]) -> list[str]:
    """Return what runs a command so; it is to be started with a pipe as standard input, in a session of its own."""
    return [sys.executable, "-I", "-S", __file__, str(grace_s), *command]


def keep(grace_s: float, command: Sequence[str]) -> int:
    """Run a command until it or the starter ends; return its status."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    handed_on: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in HANDED_ON:
            handed_on.append(number)

    for number in (*HANDED_ON, signal.SIGCHLD):
        signal.signal(number, note)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    starter = os.getpid()
    # A signal that the fork notes before it is the command would be forgotten: it waits until that is there.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    child = os.fork()
    if not child:
        _become(command, starter)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        while handed_on:
            os.kill(child, handed_on.pop(0))
        readable, _, _ = select.select([sys.stdin.fileno(), wake], [], [])
        if wake in readable:
            _drain(wake)
        if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 4096):
            _end_group(child, grace_s, wake)


def _become(command: Sequence[str], parent: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in (*HANDED_ON, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if os.getppid() == parent:  # else it has ended before the line above
            os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"starting {command[0]}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _end_group(child: int, grace_s: float, wake: int) -> None:
    """End the command, and then everything in this process group, this process too."""
    until_s = time.monotonic() + grace_s
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    while not os.waitpid(child, os.WNOHANG)[0] and (left_s := until_s - time.monotonic()) > 0:
        select.select([wake], [], [], left_s)
        _drain(wake)
    os.killpg(0, signal.SIGKILL)


def _drain(wake: int) -> None:
    with suppress(BlockingIOError):
        while os.read(wake, 4096):
            pass


if __name__ == "__main__":
    sys.exit(keep(float(sys.argv[1]), sys.argv[2:]))


PAUSE_MIN_S = 0.1
"""Below what an interpreter takes to start: a part that was killed is back as soon as it can be."""

PAUSE_MAX_S = 15.0
"""A part whose trouble is over is back within this time; one that cannot start costs a second of a core as often."""

JITTER = 0.25

STEADY_S = 30.0
"""Twice the longest pause: a part that dies more often than that waits ever longer."""

DEATHS_LOUD = 5
"""From this exit on the log warns that the part ends again and again, and that the others serve."""


class RestartPace:
    """The deaths of one part; in whatever time its caller lives."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.deaths = 0
        """Since it was last well."""

    def died(self, lived_s: float) -> float:
        """Take note of a death, and how long the part had been ready; return the pause before the next start."""
        self.deaths = 1 if lived_s >= STEADY_S else self.deaths + 1
        pause_s: float = min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(self.deaths - 1, 32))
        drawn = stable_u64(f"{self._name}/{self.deaths}") / 2**64
        return pause_s * (1 + JITTER * (2 * drawn - 1))

    @property
    def is_loud(self) -> bool:
        return self.deaths >= DEATHS_LOUD
