"""The thread that writes the journal: order, failures, slowness, and what happens when too much waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn, Now
from poolgrid.kernel.wire.ingest import Unknown
from poolgrid.server.consolidator import journal_writer
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from poolgrid.server.consolidator.journal_writer import JournalWriter
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.tasks import BulkWork


class Disk(MemoryJournal):
    """A journal whose writes wait for ``go``, and fail as often as told."""

    in_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.failures = 0
        self.sync_failures = 0
        self.writes: list[int] = []
        self.syncs = 0

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        self.go.wait(10)
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        self.writes.append(len(payloads))
        super().append(payloads, now_ms)

    def sync(self) -> None:
        self.syncs += 1
        if self.sync_failures:
            self.sync_failures -= 1
            raise OSError(5, "Input/output error")


class Scene:
    """A writer over a disk, and what it told."""

    def __init__(self, fsync: Any = "never") -> None:
        self.disk = Disk()
        self.told: list[int] = []
        self.calls: list[str] = []
        self.executor = ThreadPoolExecutor(2)
        self.writer = JournalWriter(
            self.disk,
            fsync,
            5.0,
            SystemClock(),
            self.executor,
            lambda turn, payloads: self.told.append(turn.now.wall_ms),
            lambda: self.calls.append("full"),
            lambda: self.calls.append("room"),
            lambda error: self.calls.append(f"fenced: {error}"),
            BulkWork(SystemClock()),
        )

    def put(self, number: int, records: int = 1, size: int = 10) -> None:
        self.writer.put(ConsolidatorTurn(Now(0.0, number)), [b"x" * size] * records)

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(120):
            while len(self.told) < count:  # noqa: ASYNC110 - what is under test tells a list
                await asyncio.sleep(0.001)


async def test_turns_are_told_in_order_and_those_that_wait_are_written_together() -> None:
    scene = Scene()
    scene.disk.go.clear()
    for number in range(50):
        scene.put(number, records=number % 3)
    await asyncio.sleep(0.02)
    assert scene.told == [0], "it has no records; all others wait for the disk, also those without"

    scene.disk.go.set()
    await scene.until_told(50)
    assert scene.told == list(range(50))
    assert scene.disk.writes == [49]
    assert scene.disk.next_offset == 49


async def test_what_one_write_has_stored_is_told_bit_by_bit() -> None:
    scene = Scene()
    scene.disk.go.clear()
    for number in range(20):
        scene.put(number, size=journal_writer.TELL_BYTES // 2)
    seen: list[int] = []

    def look() -> None:
        seen.append(len(scene.told))
        if len(scene.told) < 20:
            asyncio.get_running_loop().call_soon(look)

    look()
    scene.disk.go.set()
    await scene.until_told(20)
    assert scene.disk.writes in ([1, 19], [20])
    assert {now - before for before, now in pairwise(seen)} <= {0, 1, 2}, "others had their turn between"
    assert scene.writer._waiting_bytes == 0


async def test_the_loop_runs_while_the_disk_does_not() -> None:
    scene = Scene()
    scene.disk.go.clear()
    scene.put(1)
    await asyncio.sleep(journal_writer.SLOW_MS / 1000 + 0.05)
    assert scene.writer.slow_ms >= journal_writer.SLOW_MS
    assert not scene.writer.stalled
    scene.disk.go.set()
    await scene.until_told(1)
    assert scene.writer.slow_ms >= journal_writer.SLOW_MS, "said for a while after"
    scene.put(2)
    await scene.until_told(2)
    assert scene.writer.slow_ms == 0.0


async def test_what_fails_is_tried_again_before_anything_behind_it() -> None:
    scene = Scene()
    scene.disk.failures = 3
    for number in range(5):
        scene.put(number)
    await scene.until_told(5)

    assert scene.told == list(range(5))
    assert scene.writer.errors == 3
    assert not scene.writer.stalled
    assert scene.disk.next_offset == 5


async def test_after_a_sync_that_failed_only_the_sync_is_tried_again() -> None:
    scene = Scene("always")
    scene.disk.sync_failures = 2
    scene.put(0, records=2)
    await scene.until_told(1)

    assert scene.disk.writes == [2]
    assert scene.disk.syncs == 3


async def test_beyond_its_bound_the_queue_asks_for_a_pause_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "QUEUE_BYTES_MAX", 100_000)

    scene = Scene()
    scene.disk.go.clear()
    for number in range(200):
        scene.put(number, size=1000)
    assert scene.calls == ["full"]
    scene.disk.go.set()
    await scene.until_told(200)

    assert scene.calls == ["full", "room"]
    assert scene.told == list(range(200))


async def test_answers_count_for_the_bound_also_when_they_come_without_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "QUEUE_BYTES_MAX", 100_000)

    scene = Scene()
    scene.disk.go.clear()
    scene.put(0)
    for number in range(1, 200):
        scene.writer.put(ConsolidatorTurn(Now(0.0, number), replies=[(b"peer", Unknown("w", 0))]), [])
    assert scene.calls == ["full"]
    scene.disk.go.set()
    await scene.until_told(200)


async def test_a_job_runs_between_two_writes() -> None:
    scene = Scene()
    scene.disk.go.clear()
    scene.put(0)
    job = asyncio.ensure_future(scene.writer.between_writes(lambda: scene.disk.next_offset))
    await asyncio.sleep(0)
    scene.put(1)
    scene.disk.go.set()

    assert await job == 1
    await scene.until_told(2)


async def test_the_end_stores_what_waits_and_gives_a_failing_disk_one_more_try() -> None:
    good = Scene()
    good.put(0)
    good.put(1)
    await good.writer.finish()
    assert good.disk.next_offset == 2

    bad = Scene()
    bad.disk.failures = 10**6
    bad.put(0)
    await asyncio.sleep(0.02)
    await asyncio.wait_for(bad.writer.finish(), 120)
    assert (bad.told, bad.disk.next_offset) == ([], 0)


async def test_a_writer_that_fails_is_logged_and_starts_again_alone(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    next_write = scene.writer._next_write
    failures = [KeyError("a bug of ours")]

    def failing() -> tuple[int, list[bytes], int]:
        if failures:
            raise failures.pop()
        return next_write()

    scene.writer._next_write = failing  # type: ignore[method-assign]
    scene.put(1)
    await asyncio.sleep(0)
    scene.put(2)  # while the writer pauses
    await scene.until_told(2)
    await scene.writer.finish()

    assert (scene.told, scene.disk.writes) == ([1, 2], [2])

    assert "task 'journal writer' failed: it starts again" in caplog.text
    assert "a bug of ours" in caplog.text
