"""A command on a leash ends with who started it, and takes along what it started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait

import psutil
import pytest

from poolgrid.server.process.leash import NOT_STARTED, leashed

PATIENCE_S = 120.0


def started(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        leashed(0, command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("command", "status"),
    [(("sh", "-c", "exit 7"), 7), (("sh", "-c", "kill -9 $$"), 137), (("/no/such/program",), NOT_STARTED)],
)
def test_its_status_is_the_commands(command: tuple[str, ...], status: int) -> None:
    with started(*command) as process:
        assert process.wait(PATIENCE_S) == status
        assert process.stderr is not None
        assert (b"/no/such/program" in process.stderr.read()) is (status == NOT_STARTED)


def test_the_command_hears_what_it_is_asked() -> None:
    with started("sh", "-c", "trap 'echo asked; exit 3' TERM; echo up; while :; do read x <&1 & wait; done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"asked\n"
        assert process.wait(PATIENCE_S) == 3


def test_a_command_that_is_asked_before_it_runs_ends() -> None:
    """A worker may be stopped the moment after it has started its server: then a fork of the leash hears of it."""
    asked = (
        "import os, signal, sys; from poolgrid.server.process import leash; fork = os.fork\n"
        "def forked():\n"
        "    child = fork()\n"
        "    if not child: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return child\n"
        "os.fork = forked; sys.exit(leash.keep(0, ['sleep', '600']))"
    )
    with subprocess.Popen([sys.executable, "-c", asked], stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()  # the command ends with it


def test_without_its_starter_everything_ends() -> None:
    deaf = "trap '' TERM; sleep 600 & echo $!; wait"
    with started("sh", "-c", deaf) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        grandchild = psutil.Process(int(process.stdout.readline()))
        process.stdin.close()  # as the system does for a starter that was killed
        process.wait(PATIENCE_S)
        psutil.wait_procs([grandchild], PATIENCE_S)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_command_whose_leash_was_cut_ends_too() -> None:
    with started("sh", "-c", "echo $$; exec sleep 600") as process:
        assert process.stdout is not None
        command = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait()
        # The pipe of its output ends with it.
        assert wait([process.stdout.fileno()], PATIENCE_S)
        assert os.read(process.stdout.fileno(), 1) == b""
        psutil.wait_procs([command], PATIENCE_S)  # it closes what it inherited a moment before it is gone
        assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE
