"""Disks that are slow, files that somebody deletes or damages, syncs that fail: the pool goes on, and says so."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.feed import Replay, TooOld
from poolgrid.server.consolidator import journal_keeper, journal_writer
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.process.clock import SystemClock
from tests.consolidator.pusher import Pusher, pusher_at
from tests.consolidator.test_service import Reader, random_work, run, truth
from tests.consolidator.tuned import tuned
from tests.router.fleet_builder import stored


class HeldDisk(PosixDisk):
    """A real directory whose writes wait while ``free`` is not set, and whose syncs fail while told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.free = threading.Event()
        self.free.set()
        self.sync_fails = False

    def append(self, name: str, data: bytes) -> None:
        self.free.wait(20)
        super().append(name, data)

    def sync(self, name: str) -> None:
        if self.sync_fails:
            raise OSError(5, "Input/output error")
        super().sync(name)


def make(directory: Path, **changes: Any) -> tuple[ConsolidatorService, list[HeldDisk]]:
    settings, tuning = tuned(data_dir=directory, segment_bytes=65_536, **changes)
    disks: list[HeldDisk] = []

    def open_journal() -> FileJournal:
        disks.append(HeldDisk(directory))
        return FileJournal(disks[0], JournalSettings(tuning.segment_bytes))

    return ConsolidatorService(settings, CollectorRegistry(), SystemClock(), open_journal, tuning=tuning), disks


async def fill_segments(pusher: Pusher) -> None:
    """Write more than one segment: what waits together is written together, so it must not wait together."""
    source = random.Random(3)
    for _ in range(6):
        random_work(pusher, source, 300)
        await pusher.settle()


CUT_AT = 100


def spoil(directory: Path, cut: bool) -> int:
    """Cut or delete every segment; return how many have lost something: one that has just begun has nothing to cut."""
    segments = sorted(directory.glob("*.segment"))
    spoiled = 0
    for segment in segments:
        data = segment.read_bytes()
        spoiled += not cut or len(data) > CUT_AT
        if cut:
            segment.write_bytes(data[:CUT_AT])
        else:
            segment.unlink()
    return spoiled


def damage_oldest(directory: Path) -> None:
    """Flip a byte in the middle of the oldest segment."""
    oldest = min(directory.glob("*.segment"))
    data = bytearray(oldest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    oldest.write_bytes(data)


async def reached(what: str, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - counters tell nobody
            await asyncio.sleep(0.005)
    assert condition(), what


async def test_a_write_that_lasts_for_many_leases_expels_nobody_and_stops_nothing_but_acknowledgements(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: zmq.asyncio.Context,
) -> None:
    monkeypatch.setattr(journal_writer, "SLOW_MS", 100.0)

    consolidator, disks = make(tmp_path, lease_ms=150)
    await consolidator.start()
    reader = Reader()
    consolidator.subscribe(reader)
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    joined = reader.offset
    disks[0].free.clear()
    random_work(pusher, random.Random(1), 20)
    turns = 0
    for _ in range(40):  # four leases and more
        pusher.heartbeat()
        await asyncio.sleep(0.02)
        turns += 1
    assert turns == 40, "the loop runs"
    assert (pusher.acknowledged, reader.offset) == (0, joined), "nothing is told before it is in the journal"
    assert consolidator.trouble.startswith("disk slow: ")
    assert consolidator.ready

    disks[0].free.set()
    await pusher.settle()
    assert consolidator.core.tally.lease_expiries == 0
    assert reader.view == truth(pusher)
    await consolidator.stop()


async def test_a_worker_that_is_really_silent_leaves_while_the_disk_is_slow(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    consolidator, disks = make(tmp_path, lease_ms=100)
    await consolidator.start()
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    disks[0].free.clear()
    pusher.push([stored([1])])
    await reached("it has left", lambda: consolidator.core.tally.lease_expiries == 1)
    disks[0].free.set()
    await consolidator.stop()


async def test_while_nothing_is_taken_in_nobody_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: zmq.asyncio.Context
) -> None:
    """The queue for the disk is full: signs of life wait in the socket, and the lease with them."""
    monkeypatch.setattr(journal_writer, "QUEUE_BYTES_MAX", 2_000)

    consolidator, disks = make(tmp_path, lease_ms=100)
    await consolidator.start()
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    disks[0].free.clear()
    random_work(pusher, random.Random(2), 50)
    await reached("it is full", lambda: consolidator._ingest.paused)
    for _ in range(25):
        pusher.heartbeat()
        await asyncio.sleep(0.02)
    assert consolidator.core.tally.lease_expiries == 0
    disks[0].free.set()
    await pusher.settle()
    assert consolidator.core.tally.lease_expiries == 0
    await consolidator.stop()


@pytest.mark.parametrize("cut", [False, True], ids=["deleted", "cut"])
async def test_segments_that_somebody_deletes_or_cuts_are_noticed_and_a_restart_finds_the_state(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: bool,
    context: zmq.asyncio.Context,
) -> None:
    monkeypatch.setattr(journal_keeper, "FILES_LOOK_MS", 20.0)

    consolidator, _ = make(tmp_path, lease_ms=60_000)
    await consolidator.start()
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    await fill_segments(pusher)
    lost = spoil(tmp_path, cut)
    assert lost > 1
    counts = consolidator._parts.counts
    await reached("it is noticed", lambda: counts["journal_lost_segments"] == lost)
    await reached("it is healed", lambda: not consolidator.trouble and not consolidator._keeper.snapshotting)
    random_work(pusher, random.Random(4), 20)
    await pusher.settle()
    offset = consolidator.offset
    await consolidator.stop()

    again, _ = make(tmp_path, lease_ms=60_000)
    await again.start()
    reader = Reader()
    again.subscribe(reader)
    assert again.offset == offset
    assert reader.view == truth(pusher)
    await again.stop()


async def test_a_replay_over_a_damaged_segment_is_answered_and_a_snapshot_stands_in_for_it(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    consolidator, _ = make(tmp_path, lease_ms=60_000)
    await consolidator.start()
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    await fill_segments(pusher)
    # Recovery looks at all segments behind the newest snapshot; older ones are looked at when asked for.
    consolidator._keeper.snapshot_now()
    await reached("a snapshot is there", lambda: bool(list(tmp_path.glob("*.snapshot"))))
    await consolidator.stop()
    damage_oldest(tmp_path)

    again, _ = make(tmp_path, lease_ms=60_000)
    await again.start()
    router = context.socket(zmq.DEALER)
    router.connect(again.query_endpoint)
    await router.send(codec.to_feed.encode(Replay(7, 0, 10)))
    answer = codec.from_feed.decode((await router.recv_multipart())[0])
    assert isinstance(answer, TooOld)
    assert (answer.request, answer.oldest_offset) == (7, again.offset)
    assert again._parts.counts["journal_read_errors"] == 1
    await reached("a snapshot stands in for it", lambda: not again.trouble)
    router.close(linger=0)
    await again.stop()


def test_syncs_that_fail_are_said_once_a_period_and_in_the_health(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        consolidator, disks = make(tmp_path, fsync_interval_ms=5, lease_ms=60_000)
        await consolidator.start()
        pusher = await pusher_at(context, consolidator.ingest_endpoint)
        disks[0].sync_fails = True
        pusher.push([stored([1])])
        await reached("it failed often", lambda: consolidator._parts.counts["journal_append_errors"] >= 20)
        assert "may not survive a power failure" in consolidator.trouble
        disks[0].sync_fails = False
        await reached("it is well again", lambda: not consolidator.trouble)
        await consolidator.stop()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert len([line for line in caplog.messages if "durable failed" in line]) == 1


async def test_a_journal_in_memory_waits_for_nobody(context: zmq.asyncio.Context) -> None:
    consolidator = create(ConsolidatorSettings(lease_ms=60_000), CollectorRegistry(), SystemClock())
    await consolidator.start()
    pusher = await pusher_at(context, consolidator.ingest_endpoint)
    random_work(pusher, random.Random(6), 50)
    await pusher.settle()
    assert consolidator._parts.threads._threads == set() or len(consolidator._parts.threads._threads) == 1, (
        "only the opening"
    )
    await consolidator.stop()
