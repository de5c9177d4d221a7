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
    """Turn this process into the command."""
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
