"""Large blocks are returned when they are freed, in a process of their own: the setting is for its whole life."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys

import pytest

from poolgrid.process.allocation import (
    BUSY_INTERVAL_S,
    LOOK_ANYWAY_S,
    LOOK_INTERVAL_S,
    Heap,
    HeapTrimmer,
    look_repeatedly,
    return_large_blocks,
)

PROGRAM = """
import sys
from pathlib import Path
from poolgrid.process.allocation import return_large_blocks

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


def test_a_look_without_a_free_descriptor_does_not_end_the_thread() -> None:
    looks = iter((OSError(errno.EMFILE, "Too many open files"), None, None))
    seen: list[OSError | None] = []

    def look() -> None:
        seen.append(next(looks))
        if seen[-1] is not None:
            raise seen[-1]

    look_repeatedly(look, lambda: len(seen) == 3)
    assert len(seen) == 3


IN_PIECES = """
import sys
from poolgrid.process import allocation
from poolgrid.process.allocation import _resident_bytes, keep_heap_trimmed

if sys.argv[1] == "told":
    allocation.LOOK_INTERVAL_S = allocation.LOOK_ANYWAY_S = 0.05
    assert keep_heap_trimmed()
before = _resident_bytes()
bodies = [[b"x" * 65_000 for _ in range(300)] for _ in range(5)]
kept = [body[0] for body in bodies]
last = b"y" * 1000
bodies.clear()
import threading
patience = threading.Event()
for _ in range(100 if sys.argv[1] == "told" else 1):
    if _resident_bytes() - before < 30e6:
        break
    patience.wait(0.1)
sys.stdout.write(str((_resident_bytes() - before) / 1e6))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep holes")
def test_what_came_in_pieces_is_returned_too() -> None:
    assert grown_mb("told", IN_PIECES) < 30
    assert grown_mb("untold", IN_PIECES) > 60, "or this test could not tell"


MEGA = 1024 * 1024


class FakeHeap:
    """A process: 100 MB of code, what is in use, and holes of which some are resident. Its trimmer looks when it does.

    What is taken comes from holes first, those that are resident before the others.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.resident_holes = 0
        self.holes = 0
        self.trims = 0
        self.asked = 0
        self.now_s, self.cpu_s = 1000.0, 0.0
        self.trimmer = HeapTrimmer(lambda: self.resident * MEGA, self.ask, self.trim, self.now_s)

    @property
    def resident(self) -> int:
        return 100 + self.in_use + self.resident_holes

    def take(self, mega: int) -> None:
        self.in_use += mega
        self.resident_holes -= min(mega, self.resident_holes)
        self.holes -= min(mega, self.holes)

    def give(self, mega: int) -> None:
        self.in_use -= mega
        self.resident_holes += mega
        self.holes += mega

    def ask(self) -> Heap:
        self.asked += 1
        return Heap(self.resident * MEGA, self.in_use * MEGA, self.holes * MEGA)

    def trim(self) -> None:
        self.resident_holes = 0
        self.trims += 1

    def work(self, mega: int, looks: int = 1) -> None:
        """Take so much and give it again, before each of some looks, with a core busy."""
        for _ in range(looks):
            self.take(mega)
            self.give(mega)
            self.look(busy_share=1.0)

    def look(self, after_s: float = LOOK_INTERVAL_S, busy_share: float = 0.0) -> bool:
        self.now_s += after_s
        self.cpu_s += after_s * busy_share
        return self.trimmer.look(self.now_s, self.cpu_s)


def test_holes_are_given_back_when_they_have_grown_and_only_once() -> None:
    heap = FakeHeap()
    assert not heap.look(), "nothing has happened"
    heap.take(500)
    assert not heap.look(), "what it holds it uses"
    heap.give(60)
    assert heap.look(LOOK_ANYWAY_S)
    assert (heap.trims, heap.resident) == (1, 540)
    assert not heap.look(LOOK_ANYWAY_S), "holes that were given back still count as holes"


def test_what_was_in_use_at_the_last_look_is_given_back_when_it_became_a_hole() -> None:
    heap = FakeHeap()
    heap.take(200)
    heap.give(60)
    assert heap.look(), "with 140 MB still in use"
    heap.give(140)
    assert heap.look(LOOK_ANYWAY_S), "the process has not grown since, and yet there are holes"
    assert heap.resident == 100


def test_malloc_is_asked_every_quarter_of_a_minute_while_as_much_is_resident_as_before() -> None:
    heap = FakeHeap()
    heap.take(500)
    heap.look()
    asked = heap.asked
    looks = int(10 * LOOK_ANYWAY_S / LOOK_INTERVAL_S)
    for number in range(looks):
        heap.take(number % 3)
        heap.give(number % 3)
        assert not heap.look()
    assert heap.asked - asked == 10


def test_a_busy_process_gives_its_holes_back_once_a_minute() -> None:
    heap = FakeHeap()
    heap.take(300)
    minutes = 30
    heap.work(200, looks=int(minutes * 60 / LOOK_INTERVAL_S))
    assert minutes / 2 <= heap.trims <= 60 * minutes / BUSY_INTERVAL_S, "in the place of one for each look"


def test_a_process_gives_its_holes_back_as_soon_as_it_is_idle() -> None:
    heap = FakeHeap()
    heap.work(80, looks=int(1.5 * BUSY_INTERVAL_S / LOOK_INTERVAL_S))
    assert (heap.trims, heap.resident) == (1, 180)
    assert heap.look(LOOK_ANYWAY_S)
    assert heap.resident == 100
