"""What SGLang 0.5.16 published on an H200, replayed as a worker follows it (``tests/data/engine_streams``)."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.kv_events.follower import PubFollower
from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, EventBatch
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks
from poolgrid.server.workers.publisher import can_wait
from tests.workers.server.running import index_of

RECORDING = Path(__file__).parents[2] / "data" / "engine_streams" / "sglang-0.5.16.msgpack.xz"
FRAMES: list[tuple[str, int, bytes]] = msgspec.msgpack.decode(
    lzma.decompress(RECORDING.read_bytes()), type=list[tuple[str, int, bytes]]
)
"""Of three servers, in the order in which they came: whose, its sequence number, its payload."""

PAGES = {"page 16": 16, "page 1": 1, "prefill": 16}


class Naive:
    """A cache as events name it, block by block."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.names: dict[int, int] = {}
        self.copies: Counter[int] = Counter()
        self.stored = self.removed = self.twice = 0

    def take(self, payload: bytes) -> None:
        for kind, hashes, *more in msgspec.msgpack.decode(payload)[1]:
            if kind == "BlockRemoved":
                self.removed += len(hashes)
                self.copies.subtract(hashes)
                continue
            parent, tokens, size = more[:3]
            assert (kind, len(hashes), size, len(tokens)) == ("BlockStored", 1, self.page, self.page)
            before = None if parent is None else self.names[parent]
            [self.names[hashes[0]]] = sequence_hashes(block_hashes(pack_tokens(tokens), size), before)
            self.stored += 1
            self.copies[hashes[0]] += 1
            self.twice += self.copies[hashes[0]] > 1

    def held(self) -> set[int]:
        return {self.names[each] for each, copies in self.copies.items() if copies > 0}


class Followed:
    """The same, as a worker's events describe it."""

    def __init__(self, name: str) -> None:
        self._follower = PubFollower(WorkerKey(WorkerId(name), 0), PAGES[name], 100_000, False, 1_000, 10_000)
        self.told = ReportedBlocks()
        self.events: list[AnyEvent] = []

    def take(self, sequence: int, payload: bytes) -> list[AnyEvent]:
        fresh = list(self._fresh(sequence, payload))
        self.told.apply(fresh)
        self.events += fresh
        return fresh

    def _fresh(self, sequence: int, payload: bytes) -> Iterator[AnyEvent]:
        for effect in self._follower.live(sequence, payload, 0.0, 0):
            if isinstance(effect, EventBatch):
                yield from effect.events

    @property
    def counts(self) -> dict[str, int]:
        return self._follower.counts


def replayed() -> dict[str, tuple[Naive, Followed]]:
    servers = {name: (Naive(page), Followed(name)) for name, page in PAGES.items()}
    for name, sequence, payload in FRAMES:
        naive, followed = servers[name]
        naive.take(payload)
        followed.take(sequence, payload)
        assert index_of(followed.events) == naive.held()
    return servers


@pytest.mark.parametrize(
    ("name", "stored", "removed", "held", "twice"),
    [("page 16", 481, 382, 99, 5), ("page 1", 1602, 1100, 502, 8), ("prefill", 108, 0, 108, 0)],
)
def test_the_index_is_what_the_server_holds_after_every_frame(
    name: str, stored: int, removed: int, held: int, twice: int
) -> None:
    naive, followed = replayed()[name]

    assert (naive.stored, naive.removed, len(naive.held()), naive.twice) == (stored, removed, held, twice)
    assert not any(followed.counts.values()), "nothing was lost or left out"
    assert index_of(followed.told.restate()) == naive.held()


def test_a_prompts_blocks_are_one_event_that_leaves_at_once() -> None:
    """SGLang has an event for each block: as many events of a block each would be held with what decode fills."""
    followed = Followed("page 1")
    longest: list[AnyEvent] = []
    events = 0
    for name, sequence, payload in FRAMES:
        if name == "page 1":
            fresh = followed.take(sequence, payload)
            events += len(fresh)
            longest = max(longest, fresh, key=lambda told: sum(map(size_of, told)))

    assert events == 47, "of 1,602 blocks that were stored and 1,100 that left"
    assert not can_wait(longest)


def size_of(event: Any) -> int:
    return len(event.sequence_hashes) if isinstance(event, BlocksStored | BlocksRemoved) else 0
