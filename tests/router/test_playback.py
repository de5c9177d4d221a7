"""A pool's past is the fold of its journal: every frame, from disk or from memory, by a process of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from poolgrid.consolidator.core.pool_state import BLOCKS_PER_WORKER_MAX, PoolState
from poolgrid.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.consolidator.journal.posix_disk import PosixDisk
from poolgrid.fleet_page.playback.player import Player
from poolgrid.fleet_page.playback.reel import WORKER_COLUMNS, Leg, Reel, ReelFrame, fill, held_depth, make_reel, moments
from poolgrid.frontend.errors import RequestError
from poolgrid.wire import codec
from poolgrid.wire.events import (
    AnyEvent,
    BlocksRemoved,
    CacheCleared,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.wire.hashing import pack_hashes
from tests.router.fleet_builder import make_card, stored

NAMES = ("a", "b", "c")
PATH = (1, 2, 3, 4, 5, 6)
BEGIN_MS = 1_000_000


def random_records(seed: int, count: int) -> list[JournalRecord]:
    """Workers come and go, hold and lose parts of a path, and serve requests; one record each 10 ms or so."""
    draw = random.Random(seed)
    records: list[JournalRecord] = []
    seqs = dict.fromkeys(NAMES, 0)
    there: set[str] = set()
    running: dict[str, list[str]] = {name: [] for name in NAMES}
    time_ms = BEGIN_MS
    for offset in range(count):
        name = draw.choice(NAMES)
        event: AnyEvent
        if name not in there:
            event = WorkerJoined(make_card())
            there.add(name)
            running[name] = []
        else:
            kind = draw.randrange(12)
            if kind < 4:
                event = stored(PATH[: draw.randint(1, len(PATH))])
            elif kind < 6:
                event = BlocksRemoved(pack_hashes(PATH[draw.randrange(len(PATH)) :]))
            elif kind < 9:
                running[name].append(f"r{offset}")
                event = RequestStarted(f"r{offset}", 96, 32, 3)
            elif kind < 10 and running[name]:
                event = RequestFinished(running[name].pop(0), "stop")
            elif kind == 10:
                event = draw.choice((CacheCleared(), WorkerDraining()))
            else:
                event = WorkerLeft("its lease ended")
                there.discard(name)
        records.append(JournalRecord(offset, name, 0, 1, seqs[name], time_ms, time_ms + 1, [event]))
        seqs[name] += 1
        time_ms += draw.choice((0, 5, 20))
    return records


def fold(records: list[JournalRecord]) -> PoolState:
    pool = PoolState()
    for record in records:
        pool.apply(record)
    return pool


class Shown:
    """What a viewer has after so many frames."""

    def __init__(self, reel: Reel) -> None:
        self.workers: dict[str, tuple[object, ...]] = {}
        self.holders: dict[str, dict[str, int]] = {}
        self.active = {each[0] for each in reel.active}

    def see(self, frame: ReelFrame) -> None:
        self.workers.update(frame.workers)
        for name in frame.gone:
            del self.workers[name]
        self.holders.update({name: dict(holders) for name, holders in frame.holders.items()})
        self.active |= {each[0] for each in frame.began}
        self.active -= {each[0] for each in frame.ended}


HELD = WORKER_COLUMNS.index("held")
REQUESTS = WORKER_COLUMNS.index("requests")


@pytest.mark.parametrize("seed", range(8))
def test_every_frame_shows_the_fold_of_the_records_before_it(seed: int) -> None:
    records = random_records(seed, 300)
    start = seed * 20
    from_ms, to_ms = records[start].recorded_ms - 1, records[-1].recorded_ms + 50
    begun = next(at for at, record in enumerate(records) if record.recorded_ms > from_ms)

    reel = make_reel(fold(records[:begun]), records[begun:], from_ms, to_ms, 20, [("c1", PATH, 16)])

    shown = Shown(reel)
    assert [frame.time_ms for frame in reel.frames] == moments(from_ms, to_ms, 20, len(NAMES))
    for frame in reel.frames:
        shown.see(frame)
        pool = fold([record for record in records if record.recorded_ms <= frame.time_ms])
        assert frame.offset == pool.offset
        assert set(shown.workers) == {str(key) for key in pool.workers}
        for key, worker in pool.workers.items():
            row = shown.workers[str(key)]
            assert row[HELD] == len(worker.presence)
            assert row[REQUESTS] == len(worker.requests)
            assert shown.holders.get("c1", {}).get(str(key), 0) == held_depth(worker, PATH)


def test_a_reel_of_a_large_pool_has_fewer_frames() -> None:
    assert len(moments(0, 60_000, 240, 4)) == 240
    assert len(moments(0, 60_000, 240, 1000)) == 60
    assert moments(0, 60_000, 240, 10**6) == [60_000]


def test_folding_that_takes_too_long_ends_where_it_is_and_says_so() -> None:
    records = random_records(1, 1000)

    reel = make_reel(PoolState(), records, BEGIN_MS - 1, records[-1].recorded_ms, 50, [], lambda: True)

    assert "takes too long" in reel.cut
    assert reel.records < 1000
    assert reel.frames[-1].offset == reel.records


def test_the_times_of_legs_are_those_of_the_workers_events() -> None:
    events: list[list[AnyEvent]] = [
        [RequestStarted("r", 96, 32, 3)],
        [RequestStarted("other", 96, 0, 3)],
        [PrefillCompleted("r")],
        [RequestFinished("r", "stop")],
    ]
    records = [JournalRecord(at, "a", 0, 1, at, 100 + at, 200 + at, each) for at, each in enumerate(events)]
    leg, never = Leg("r", "a", "whole", 99), Leg("never", "a", "whole", 99)

    fill([leg, never], records)

    assert (leg.started_ms, leg.prefilled_ms, leg.ended_ms, leg.end, leg.cached_tokens) == (100, 102, 103, "stop", 32)
    assert leg.status == "stop"
    assert (never.started_ms, never.status) == (None, "placed")


RECORDS = random_records(3, 400)
FROM_MS, TO_MS = RECORDS[200].recorded_ms - 1, RECORDS[-1].recorded_ms


def reel_of(player: Player) -> Reel:
    return msgspec.json.decode(asyncio.run(player.reel(FROM_MS, TO_MS, 10, [("c1", pack_hashes(PATH), 16)])), type=Reel)


def expected() -> Reel:
    begun = next(at for at, record in enumerate(RECORDS) if record.recorded_ms > FROM_MS)
    return make_reel(fold(RECORDS[:begun]), RECORDS[begun:], FROM_MS, TO_MS, 10, [("c1", PATH, 16)])


def test_a_journal_on_disk_is_played_back_by_a_process_of_its_own(tmp_path: Path) -> None:
    disk = PosixDisk(tmp_path)
    journal = FileJournal(disk, JournalSettings(segment_bytes=1 << 20))
    journal.append([codec.journal_record.encode(record) for record in RECORDS], now_ms=BEGIN_MS)
    player = Player(tmp_path, None, BLOCKS_PER_WORKER_MAX)

    assert reel_of(player) == expected(), "while its consolidator has it open"
    assert player.started == 1

    legs = [Leg("r0", "a", "whole", 0)]
    asyncio.run(player.fill(legs, 0))
    assert legs[0].started_ms is None, "no such request is in the journal"
    journal.close()


def test_a_journal_in_memory_is_played_back_as_long_as_it_has_its_beginning() -> None:
    payloads = [codec.journal_record.encode(record) for record in RECORDS]

    oldest = 0

    def kept(from_offset: int, limit: int, bytes_max: int) -> tuple[int, list[bytes]]:
        first = max(from_offset, oldest)
        return first, payloads[first : first + 7]

    player = Player(None, kept, BLOCKS_PER_WORKER_MAX)
    assert reel_of(player) == expected()

    oldest = 5
    with pytest.raises(RequestError, match="begins at record 5 by now") as refused:
        reel_of(player)
    assert (refused.value.status, refused.value.code) == (409, "not_kept")


def test_an_answer_that_is_longer_than_a_pipe_comes_while_records_are_still_told() -> None:
    names = [f"a-worker-with-a-long-name-{number}" for number in range(200)]
    joined: list[tuple[str, AnyEvent]] = [(name, WorkerJoined(make_card())) for name in names]
    held: list[tuple[str, AnyEvent]] = [
        (name, stored([1000 * turn + at for at in range(8)])) for turn in range(1, 21) for name in names
    ]
    payloads = [
        codec.journal_record.encode(JournalRecord(at, name, 0, 1, at, BEGIN_MS + at, BEGIN_MS + at, [event]))
        for at, (name, event) in enumerate([*joined, *held])
    ]

    def kept(from_offset: int, limit: int, bytes_max: int) -> tuple[int, list[bytes]]:
        return from_offset, payloads[from_offset : from_offset + limit]

    player = Player(None, kept, BLOCKS_PER_WORKER_MAX)
    body = asyncio.run(player.reel(BEGIN_MS, BEGIN_MS + 2400, 240, []))

    assert len(body) > 2 * 65_536
    assert sum(map(len, payloads[2401:])) > 2 * 65_536, "so much is left to be told when it answers"
    assert msgspec.json.decode(body, type=Reel).frames[-1].offset == 2401


def test_without_a_journal_it_is_said_what_to_do(tmp_path: Path) -> None:
    nowhere = Player(None, None, BLOCKS_PER_WORKER_MAX)
    assert "--data-dir" in nowhere.unavailable
    for player in (nowhere, Player(tmp_path, None, BLOCKS_PER_WORKER_MAX)):
        with pytest.raises(RequestError) as refused:
            reel_of(player)
        assert (refused.value.status, refused.value.code) == (409, "no_journal")
