"""Tests that are killed, by a time limit say: what they started must not live on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 60.0

BEFORE = """
import sys

def wait_to_be_killed():
    print("all is started", flush=True)
    sys.stdin.read()
"""


def assert_it_ends_with_tests_that_are_killed(
    is_it: Callable[[psutil.Process], bool], script: str, *arguments: str
) -> None:
    """Kill a process that runs ``script`` once that calls ``wait_to_be_killed``; ``is_it`` must be true of one of those
    that it started, and none of them be left."""
    with (
        tempfile.TemporaryDirectory(prefix="poolgrid-killed-", ignore_cleanup_errors=True) as directory,
        subprocess.Popen(
            [sys.executable, "-c", BEFORE + script, *arguments],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as tests,
    ):
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"all is started\n"
        started = psutil.Process(tests.pid).children(recursive=True)
        assert any(map(is_it, started))
        tests.kill()

        _, alive = psutil.wait_procs(started, PATIENCE_S)

    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
