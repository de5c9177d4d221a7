"""The block pool does what a naive pool with an explicit tree does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.plugins.simulated.core.block_pool import BlockPool, Match
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder, Link
from tests.examples import examples
from tests.workers.builders import fold

BLOCK_SIZE = 4


def name(path: tuple[int, ...]) -> int:
    """Give a path of block contents a readable number: (1, 2) is 12."""
    return int("".join(str(content) for content in path))


def names(path: tuple[int, ...]) -> list[int]:
    return [name(path[: depth + 1]) for depth in range(len(path))]


def no_tokens(_first: int, _end: int) -> bytes:
    return b""


def kept(pool: BlockPool, path: tuple[int, ...], *retention: tuple[int | None, int | None]) -> None:
    """Let a request with a retention fill a path, and end."""
    pool.release(begun(pool, path, retention), 0)


def begun(pool: BlockPool, path: tuple[int, ...], retention: Sequence[tuple[int | None, int | None]]) -> list[int]:
    """Let a request with a retention fill a path, and return what it holds."""
    held = names(path)
    match = pool.match(held, len(held))
    reused = match.device + match.host
    assert pool.take(held, match, len(held) - match.device, retention[:reused])
    pool.store(held, reused, len(held), no_tokens, 0, None, retention[reused:])
    return held


def test_the_host_evicts_by_priority_and_what_hangs_off_such_a_block_goes_on_both_tiers() -> None:
    recorder = CacheRecorder()
    pool = BlockPool(4, 2, BLOCK_SIZE, recorder)
    told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    kept(pool, (1, 2), (31, None), (90, None))
    kept(pool, (3,), (50, 5))
    kept(pool, (4,), (40, None))
    assert pool.take([], Match(0, 0, 0), 1)
    held = names((1, 2))
    assert pool.match(held, 2) == Match(1, 1, 1), "what hangs off a block on the host is found"
    assert dict(pool.resident(Tier.DEVICE)) == {12: 1, 3: None, 4: None}
    pool.now_ms = 4.0

    assert pool.take([], Match(0, 0, 0), 1)
    fold(recorder.take(), told)
    assert (told[Tier.DEVICE], told[Tier.HOST]) == ({12, 3}, {1, 4})

    assert pool.take([], Match(0, 0, 0), 1)
    fold(recorder.take(), told)
    assert (told[Tier.DEVICE], told[Tier.HOST]) == (set(), {4, 3})
    pool.now_ms = 1000.0
    assert not pool.take(names((3,)), pool.match(names((3,)), 1), 3)
    assert pool.take(names((3,)), pool.match(names((3,)), 1), 1)
    pool.release(names((3,)), 0)
    assert pool.available_blocks == 1


def test_an_evicted_block_of_a_priority_below_30_is_gone_and_its_parent_moves_to_the_host() -> None:
    recorder = CacheRecorder()
    pool = BlockPool(3, 3, BLOCK_SIZE, recorder)
    told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    kept(pool, (1, 2, 3), (30, None), (29, None), (10, None))

    assert pool.take([], Match(0, 0, 0), 3)

    fold(recorder.take(), told)
    assert told[Tier.DEVICE] == set()
    assert told[Tier.HOST] == {1}
    assert pool.match(names((1, 2, 3)), 3) == Match(0, 0, 1)


RETENTION = st.lists(
    st.tuples(st.sampled_from((None, 0, 20, 29, 30, 35, 60, 90)), st.sampled_from((None, 3, 9))), min_size=5, max_size=5
)


@settings(max_examples=examples(20))
@given(
    work=st.lists(
        st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.none() | RETENTION, st.integers(0, 4)),
        max_size=16,
    ),
    host=st.sampled_from((0, 3)),
)
def test_whatever_requests_ask_for_no_block_is_without_those_before_it(
    work: list[tuple[list[int], list[tuple[int | None, int | None]] | None, int]], host: int
) -> None:
    recorder = CacheRecorder()
    pool = BlockPool(7, host, BLOCK_SIZE, recorder)
    told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    held: list[list[int]] = []
    for path, retention, passed in work:
        pool.now_ms += passed
        hashes = names(tuple(path))
        match = pool.match(hashes, len(hashes))
        reused = match.device + match.host
        asked = None if retention is None else retention[: len(hashes)]
        if pool.take(hashes, match, len(hashes) - match.device, None if asked is None else asked[:reused]):
            pool.store(hashes, reused, len(hashes), no_tokens, 0, None, None if asked is None else asked[reused:])
            held.append(hashes)
        if held and passed % 2 == 0:
            pool.release(held.pop(0), 0)
        device, onboard = dict(pool.resident(Tier.DEVICE)), dict(pool.resident(Tier.HOST))
        there = device.keys() | onboard.keys()
        assert all(parent is None or parent in there for parent in (device | onboard).values())
        assert host or all(parent is None or parent in device for parent in device.values())
        for links in (list(device.items()), list(onboard.items())):
            placed: set[int] = set()
            for block, parent in links:
                assert parent not in dict(links) or parent in placed, "a child came before its parent"
                placed.add(block)
        in_use = {block for hashes in held for block in hashes}
        assert in_use <= device.keys()
        assert len(device) <= 7
        assert len(onboard) <= host
        assert pool.active_blocks == len(in_use)
        assert pool.available_blocks == 7 - len(in_use)
        assert pool.cached_blocks == len(device)
        fold(recorder.take(), told)
        assert told[Tier.DEVICE] == set(device)
        assert told[Tier.HOST] == set(onboard)


@pytest.mark.parametrize(
    ("sizes", "named"), [((0, 0, 4), "total_blocks is 0"), ((1, -1, 4), "host_blocks is -1"), ((1, 0, 0), "block_size")]
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BlockPool(*sizes, CacheRecorder())


@dataclass
class Holder:
    path: tuple[int, ...]
    shared: int
    private: int


@dataclass
class NaivePool:
    """Says what must be true with an explicit tree, in time nobody cares about."""

    total: int
    host_total: int
    refs: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int | None] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    private: int = 0

    def evict_one(self) -> None:
        victim = next(block for block in self.idle if not any(self.parent[other] == block for other in self.refs))
        self.idle.remove(victim)
        del self.refs[victim]
        if self.host_total:
            self.host.append(victim)

    def trim_host(self) -> None:
        while len(self.host) > self.host_total:
            self.host.pop(0)

    def hold(self, block: int) -> None:
        self.refs[block] = self.refs.get(block, 0) + 1
        if block in self.idle:
            self.idle.remove(block)

    def make_room(self, blocks: int) -> None:
        while self.total - len(self.refs) - self.private < blocks:
            self.evict_one()
        self.trim_host()

    def available(self) -> int:
        return self.total - len(self.refs) + len(self.idle) - self.private


class BlockPoolAgreesWithTheNaiveOne(RuleBasedStateMachine):
    paths = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.recorder = CacheRecorder()
        self.pool = BlockPool(9, 4, BLOCK_SIZE, self.recorder)
        self.naive = NaivePool(9, 4)
        self.holders: list[Holder] = []
        self.told: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    @rule(path=paths, extra=st.integers(0, 2))
    def begin(self, path: tuple[int, ...], extra: int) -> None:
        naive, hashes = self.naive, names(path)
        device = 0
        while device < len(path) and hashes[device] in naive.refs:
            device += 1
        host = 0
        while device + host < len(path) and hashes[device + host] in naive.host:
            host += 1
        idle = sum(block in naive.idle for block in hashes[:device])
        new = len(path) - device + extra

        match = self.pool.match(hashes, len(hashes))
        assert match == Match(device, idle, host)
        fits = naive.available() - idle >= new
        assert self.pool.take(hashes, match, new) is fits
        if not fits:
            return
        for block in hashes[:device]:
            naive.hold(block)
        returning = hashes[device : device + host]
        naive.host = [block for block in naive.host if block not in returning]
        naive.make_room(new)
        for block in returning:
            naive.hold(block)
        naive.private += new - host
        self.holders.append(Holder(path, device + host, new - host))

    @precondition(lambda self: any(holder.private for holder in self.holders))
    @rule(which=st.integers(0, 99), count=st.integers(1, 5))
    def fill(self, which: int, count: int) -> None:
        able = [holder for holder in self.holders if holder.private and holder.shared < len(holder.path)]
        if not able:
            return
        holder = able[which % len(able)]
        naive, hashes = self.naive, names(holder.path)
        end = min(len(holder.path), holder.shared + min(count, holder.private))
        self.pool.store(hashes, holder.shared, end, no_tokens, 0)
        for depth in range(holder.shared, end):
            block = hashes[depth]
            if block in naive.host:
                naive.host.remove(block)
            naive.parent[block] = hashes[depth - 1] if depth else None
            naive.hold(block)
            naive.private -= 1
        holder.private -= end - holder.shared
        holder.shared = end

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def reserve(self, which: int) -> None:
        possible = self.naive.available() >= 1
        assert self.pool.reserve() is possible
        if possible:
            self.naive.make_room(1)
            self.naive.private += 1
            self.holders[which % len(self.holders)].private += 1

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        held = names(holder.path)[: holder.shared]
        self.pool.release(held, holder.private)
        self.naive.private -= holder.private
        for block in reversed(held):
            self.naive.refs[block] -= 1
            if not self.naive.refs[block]:
                self.naive.idle.append(block)

    @invariant()
    def they_agree(self) -> None:
        pool, naive = self.pool, self.naive
        device: list[Link] = pool.resident(Tier.DEVICE)
        host: list[Link] = pool.resident(Tier.HOST)
        assert dict(device) == {block: naive.parent[block] for block in naive.refs}
        assert [block for block, _ in reversed(host)] == naive.host
        assert pool.available_blocks == naive.available()
        assert pool.active_blocks == sum(refs > 0 for refs in naive.refs.values()) + naive.private
        assert pool.cached_blocks == len(naive.refs)
        assert pool.total_blocks >= len(naive.refs) + naive.private
        for links in (device, host):
            seen: set[int] = set()
            everything = {block for block, _ in links}
            for block, parent in links:
                assert parent not in everything or parent in seen, "a child came before its parent"
                seen.add(block)

    @invariant()
    def what_was_told_is_what_is_there(self) -> None:
        fold(self.recorder.take(), self.told)
        assert self.told[Tier.DEVICE] == set(self.naive.refs)
        assert self.told[Tier.HOST] == set(self.naive.host)


TestBlockPoolAgreesWithTheNaiveOne = BlockPoolAgreesWithTheNaiveOne.TestCase
TestBlockPoolAgreesWithTheNaiveOne.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
