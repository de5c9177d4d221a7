"""Large blocks are returned when they are freed, in a process of their own: the setting is for its whole life."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from poolgrid.server.process.allocation import (
    ATTEMPTS,
    GROWTH_BYTES,
    TRIM_INTERVAL_S,
    TrimSchedule,
    return_large_blocks,
)

PROGRAM = """
import sys
from pathlib import Path
from poolgrid.server.process.allocation import return_large_blocks

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

if sys.argv[1] == "told":
    assert return_large_blocks()
before = resident_mb()
body = b"x" * 30_000_000
del body
for _ in range(3):
    body = b"x" * 20_000_000
    kept = [b"y" * 1000 for _ in range(1000)]  # lies behind it
    del body
sys.stdout.write(str(resident_mb() - before))
"""


def grown_mb(how: str, program: str = PROGRAM) -> float:
    done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep large blocks")
def test_a_large_body_is_returned_although_something_small_came_after_it() -> None:
    assert grown_mb("told") < 10
    assert grown_mb("untold") > 15, "or this test could not tell"


def test_what_the_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")

    assert not return_large_blocks()


IN_PIECES = """
import sys
from poolgrid.server.process import allocation
from poolgrid.server.process.allocation import keep_heap_trimmed
from pathlib import Path

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

if sys.argv[1] == "told":
    allocation.LOOK_INTERVAL_S = 0.05
    assert keep_heap_trimmed()
before = resident_mb()
bodies = [[b"x" * 65_000 for _ in range(300)] for _ in range(5)]
kept = [body[0] for body in bodies]
last = b"y" * 1000
bodies.clear()
import threading
patience = threading.Event()
for _ in range(100 if sys.argv[1] == "told" else 1):
    if resident_mb() - before < 30:
        break
    patience.wait(0.1)
sys.stdout.write(str(resident_mb() - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep holes")
def test_what_came_in_pieces_is_returned_too() -> None:
    assert grown_mb("told", IN_PIECES) < 30
    assert grown_mb("untold", IN_PIECES) > 60, "or this test could not tell"


def test_holes_are_given_back_once_a_minute() -> None:
    schedule = TrimSchedule(0.0, 100)

    assert not schedule.is_due(TRIM_INTERVAL_S - 1, 100)
    assert schedule.is_due(TRIM_INTERVAL_S, 100)
    schedule.note(TRIM_INTERVAL_S, 100)
    assert not schedule.is_due(TRIM_INTERVAL_S + 1, 100)


def test_growth_is_given_back_soon_and_taken_as_use_after_some_attempts() -> None:
    schedule = TrimSchedule(0.0, 0)

    assert not schedule.is_due(5.0, GROWTH_BYTES - 1)
    for attempt in range(ATTEMPTS):
        assert schedule.is_due(5.0 + attempt, GROWTH_BYTES)
        schedule.note(5.0 + attempt, GROWTH_BYTES)
    assert not schedule.is_due(20.0, GROWTH_BYTES)
    assert schedule.is_due(20.0, 2 * GROWTH_BYTES)
