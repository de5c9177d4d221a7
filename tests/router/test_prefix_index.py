"""The prefix index is exact: whatever is stored, removed or lost, in whatever order."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from poolgrid.kernel.index import run_forest, run_map
from poolgrid.kernel.index.lower_tiers import TierOverlap
from poolgrid.kernel.index.prefix_index import (
    BYTES_PER_BLOCK,
    HASHES_END,
    Holdings,
    PrefixIndex,
    slots_of,
)
from poolgrid.kernel.index.run_forest import Run, RunForest
from poolgrid.kernel.index.run_map import NEAR, RUN_BLOCKS_MAX
from poolgrid.kernel.wire.hashing import stable_u64, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from tests.examples import examples
from tests.router.index_structure import assert_sound, dump, holdings
from tests.router.naive_index import NaiveIndex

A, B, C = (WorkerKey(WorkerId(name)) for name in "abc")

# A fixed forest of paths: node = (tuple of branch choices). Prefixes share nodes, as hashes do.
BRANCHES = 2
DEPTH = 6


def _paths() -> list[tuple[int, ...]]:
    """Every root-to-leaf path of a small forest, as sequence hashes that are spread over all of u64."""
    randomness = random.Random(1)
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for leaf in range(BRANCHES**DEPTH):
        choices = tuple(leaf // BRANCHES**level % BRANCHES for level in range(DEPTH))
        path = tuple(numbers.setdefault(choices[: at + 1], randomness.getrandbits(64)) for at in range(DEPTH))
        paths.append(path)
    return paths


PATHS = _paths()
workers = st.sampled_from([A, B, C, WorkerKey(WorkerId("a"), 1)])
paths = st.sampled_from(PATHS)
tiers = st.sampled_from(list(Tier))


class IndexAgainstModel(RuleBasedStateMachine):
    """The same operations on the index and on the naive model; every overlap must agree at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.model = NaiveIndex()

    def new_index(self) -> PrefixIndex:
        """Return the index under test."""
        return PrefixIndex(shard_entries=8, first_depth=1)

    @rule(worker=workers, path=paths, start=st.integers(0, DEPTH - 1), length=st.integers(1, DEPTH), tier=tiers)
    def store_a_chain(self, worker: WorkerKey, path: tuple[int, ...], start: int, length: int, tier: Tier) -> None:
        chain = path[start : start + length]
        self.index.store(worker, path[start - 1] if start else None, chain, tier)
        self.model.store(worker, chain, tier)

    @rule(worker=workers, path=paths, length=st.integers(1, DEPTH))
    def store_a_prefix(self, worker: WorkerKey, path: tuple[int, ...], length: int) -> None:
        self.index.store(worker, None, path[:length])
        self.model.store(worker, path[:length])

    @rule(worker=workers, path=paths, chosen=st.sets(st.integers(0, DEPTH - 1)), data=st.data(), tier=tiers)
    def remove_some(
        self, worker: WorkerKey, path: tuple[int, ...], chosen: set[int], data: st.DataObject, tier: Tier
    ) -> None:
        blocks = data.draw(st.permutations([path[at] for at in sorted(chosen)]))
        self.index.remove(worker, blocks, tier)
        self.model.remove(worker, blocks, tier)

    @rule(worker=workers)
    def drop_a_worker(self, worker: WorkerKey) -> None:
        self.index.drop(worker)
        self.model.drop(worker)

    @rule(worker=workers)
    def clear_a_worker(self, worker: WorkerKey) -> None:
        self.index.clear(worker)
        self.model.drop(worker)

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @rule()
    def take_the_place_of_another(self) -> None:
        """What a snapshot does: the same is loaded beside it, exchanged, and the old one freed piece by piece."""
        other = self.index.empty()
        for worker in self.index.workers:
            other.slot(worker)
            for chain in dump(self.index, worker):
                other.store(worker, chain.parent, unpack_hashes(chain.sequence_hashes), chain.tier)
        self.index.exchange(other)
        pieces = 0
        while other.discard(3):
            pieces += 1
        assert len(other) == other._reach.forest.ages.entries == 0
        assert pieces < 2000

    @rule()
    def lose_and_reload_every_worker(self) -> None:
        """What a fresh snapshot of the pool does to the index."""
        chains = [(worker, dump(self.index, worker)) for worker in self.index.workers]
        for worker, _ in chains:
            self.index.drop(worker)
        for worker, dumped in chains:
            self.index.slot(worker)
            for chain in dumped:
                self.index.store(worker, chain.parent, unpack_hashes(chain.sequence_hashes), chain.tier)

    @invariant()
    def nothing_is_contradicted(self) -> None:
        assert self.index.counters.contradictions == 0

    @invariant()
    def every_overlap_agrees(self) -> None:
        for path in PATHS:
            for worker in (A, B, C, WorkerKey(WorkerId("a"), 1)):
                found = self.index.overlap(path, worker)
                assert (found.device, found.host, found.disk) == self.model.overlap(path, worker)

    @invariant()
    def holdings_agree(self) -> None:
        for worker in self.index.workers:
            expected = self.model.held.get(worker, {tier: set() for tier in Tier})
            assert holdings(self.index, worker)[Tier.HOST] == expected[Tier.HOST]
            assert holdings(self.index, worker)[Tier.DISK] == expected[Tier.DISK]
            assert holdings(self.index, worker)[Tier.DEVICE] == expected[Tier.DEVICE]
            assert self.index.held_blocks(worker) == len(set().union(*expected.values()))
            found = walked(self.index, worker)
            assert found == sorted(
                ((block, tier) for tier in Tier for block in expected[tier]), key=lambda held: (held[0], held[1].name)
            )

    @invariant()
    def it_is_sound(self) -> None:
        assert_sound(self.index)

    @invariant()
    def groups_are_disjoint_and_deepest_first(self) -> None:
        for path in PATHS[::7]:
            groups = self.index.find(path)
            assert [depth for depth, _ in groups] == sorted({depth for depth, _ in groups}, reverse=True)
            seen = 0
            for _, mask in groups:
                assert mask
                assert not mask & seen
                seen |= mask

    def teardown(self) -> None:
        for worker in list(self.index.workers):
            self.index.drop(worker)
        self.index.sweep()
        assert len(self.index) == 0, "blocks outlived their last holder"
        assert_sound(self.index)
        assert not self.index.lower.in_use
        assert not self.index.lower.off_device.entries


def walked(index: PrefixIndex, worker: WorkerKey, entries: int = 1) -> list[tuple[int, Tier]]:
    """Return all that a worker holds as a walk of small steps finds it."""
    found: list[tuple[int, Tier]] = []
    first = 0
    while first < HASHES_END:
        some, following = index.holdings_from(worker, first, entries)
        assert all(first <= block < following for block, _ in some)
        found += some
        first = following
    return found


def test_a_walk_through_what_a_worker_holds_looks_at_so_much_a_step_and_meets_all_that_stays() -> None:
    source = random.Random(4)
    index = PrefixIndex(shard_entries=64, first_depth=0)
    stays = [source.getrandbits(64) for _ in range(3000)]
    index.store(A, None, stays)
    far = [source.getrandbits(64) for _ in range(500)]
    index.store(A, 12345, far)  # out of reach
    index.store(B, None, [source.getrandbits(64) for _ in range(3000)])
    found: list[int] = []
    first, steps = 0, 0
    while first < HASHES_END:
        some, first = index.holdings_from(A, first, 100)
        assert len(some) < 100 + 2 * 8 * 64
        found += [block for block, _ in some]
        steps += 1
        if steps < 100:  # what is stored meanwhile splits shards, and may be met or not
            index.store(C, None, [source.getrandbits(64) for _ in range(300)])
            index.store(A, far[0], [source.getrandbits(64) for _ in range(3)])

    assert steps > 20
    assert found == sorted(found)
    assert len(found) == len(set(found))
    assert set(found) >= {*stays, *far}
    assert index.holdings_from(WorkerKey(WorkerId("nobody")), 0) == ([], HASHES_END)


INDEX_EXAMPLES = examples(20)
"""Programs of rules per run, and half as many of each variant; `make soak` takes thousands."""

INDEX_SETTINGS = settings(
    max_examples=INDEX_EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    # Shrinking a long program of rules takes minutes; the explicit phases find, and a seed reproduces.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


class IndexSweptInSmallSlices(IndexAgainstModel):
    """The same, while dropped workers are forgotten one entry at a time and maps are split all the time."""

    def new_index(self) -> PrefixIndex:
        return PrefixIndex(sweep_slice_entries=1, shard_entries=2, first_depth=0)


class IndexByLeadingBytes(IndexAgainstModel):
    """The same with shards by the leading byte, as routers have them, or by two bytes once one is split."""

    def new_index(self) -> PrefixIndex:
        return PrefixIndex(shard_entries=1)


IndexByLeadingBytes.TestCase.settings = settings(INDEX_SETTINGS, max_examples=INDEX_EXAMPLES // 4)
TestIndexByLeadingBytes = IndexByLeadingBytes.TestCase

IndexSweptInSmallSlices.TestCase.settings = settings(INDEX_SETTINGS, max_examples=INDEX_EXAMPLES // 2)
TestIndexSweptInSmallSlices = IndexSweptInSmallSlices.TestCase

IndexAgainstModel.TestCase.settings = INDEX_SETTINGS
TestIndexAgainstModel = IndexAgainstModel.TestCase


class IndexOverBudget(IndexAgainstModel):
    """The same with room for a few blocks: it may forget, but what it says agrees with itself and is never invented."""

    BUDGET_BLOCKS = 9

    def new_index(self) -> PrefixIndex:
        return PrefixIndex(self.BUDGET_BLOCKS * BYTES_PER_BLOCK, sweep_slice_entries=2, shard_entries=2, first_depth=0)

    @invariant()
    def every_overlap_agrees(self) -> None:
        assert len(self.index) <= self.BUDGET_BLOCKS
        for worker in self.index.workers:
            kept = NaiveIndex()
            for tier, blocks in holdings(self.index, worker).items():
                kept.store(worker, sorted(blocks), tier)
            for path in PATHS:
                found = self.index.overlap(path, worker)
                assert (found.device, found.host, found.disk) == kept.overlap(path, worker)

    @invariant()
    def holdings_agree(self) -> None:
        for worker in self.index.workers:
            held = holdings(self.index, worker)
            told = self.model.held.get(worker, {tier: set() for tier in Tier})
            anywhere = set().union(*told.values())
            assert held[Tier.HOST] <= told[Tier.HOST]
            assert held[Tier.DISK] <= told[Tier.DISK]
            assert held[Tier.DEVICE] <= anywhere
            assert self.index.held_blocks(worker) == len(set().union(*held.values()))


IndexOverBudget.TestCase.settings = settings(INDEX_SETTINGS, max_examples=INDEX_EXAMPLES // 2)
TestIndexOverBudget = IndexOverBudget.TestCase


def test_a_prefix_shared_by_all_is_one_group() -> None:
    index = PrefixIndex()
    for worker in (A, B, C):
        index.store(worker, None, [1, 2, 3])

    assert index.find([1, 2, 3]) == [(3, 0b111)]
    assert index.find([1, 2, 9]) == [(2, 0b111)]
    assert index.find([9]) == []
    assert index.find([]) == []


def test_a_dropped_worker_is_gone_at_once_and_its_bit_is_not_reused_before_the_sweep() -> None:
    index = PrefixIndex()
    index.store(A, None, [1, 2])
    old_slot = index.slot(A)

    index.drop(A)
    assert index.find([1, 2]) == []
    index.store(A, None, [1])

    assert index.slot(A) != old_slot
    assert index.overlap([1, 2], A) == TierOverlap(1)
    index.sweep()
    assert len(index) == 1


def test_a_repeated_store_and_an_unknown_remove_change_nothing() -> None:
    index = PrefixIndex()
    index.store(A, None, [1, 2])

    index.store(A, None, [1, 2])
    index.remove(A, [7])
    index.remove(B, [1])

    assert index.overlap([1, 2], A) == TierOverlap(2)
    assert (len(index), index.held_blocks(A)) == (2, 2)


@pytest.mark.parametrize(
    ("parent", "chain"),
    [
        (None, [3, 4]),  # resident under 2, claimed as a root
        (9, [10, 10]),  # a block twice in one chain
        (None, [10, 2]),  # a resident block below a new one
        (2, [1]),  # a cycle
    ],
)
def test_events_that_contradict_the_index_never_harm_other_workers(parent: int | None, chain: list[int]) -> None:
    index = PrefixIndex()
    index.store(A, None, [1, 2, 3, 4])
    index.store(B, None, [9])

    index.store(B, parent, chain)
    index.store(B, parent, chain)

    assert index.overlap([1, 2, 3, 4], A) == TierOverlap(4)
    index.drop(B)
    index.drop(A)
    index.sweep()
    assert len(index) == 0


@pytest.mark.parametrize("seed", range(examples(15)))
def test_what_a_worker_says_against_the_inside_of_a_run_is_believed_of_that_worker_alone(seed: int) -> None:
    """One worker names blocks of others, and its own, as it likes; nobody checks what lies inside of runs."""
    randomness = random.Random(seed)
    index, model = PrefixIndex(shard_entries=randomness.choice([2, 8, 64]), first_depth=1), NaiveIndex()
    honest = [A, C, WorkerKey(WorkerId("d"))]
    roots = [[randomness.getrandbits(64) for _ in range(12)] for _ in range(2)]
    paths = list(roots)
    for root in roots:
        paths += [root[:at] + [randomness.getrandbits(64) for _ in range(6)] for at in (1, 3, 6, 6, 11)]
    known = [block for path in paths for block in path]
    exact = True
    for _ in range(150):
        contradictions = index.counters.contradictions
        worker, path = randomness.choice(honest), randomness.choice(paths)
        begin = randomness.randrange(len(path))
        part = path[begin : begin + randomness.randrange(1, 9)]
        match randomness.randrange(19) // 2:
            case 0 | 1 | 2:
                index.store(worker, None, path[: begin + 1])
                model.store(worker, path[: begin + 1])
            case 3 | 4 | 5:
                index.store(worker, path[begin - 1] if begin else None, part)
                model.store(worker, part)
            case 6 | 7:
                gone = part[::-1] if randomness.randrange(2) else part
                index.remove(worker, gone)
                model.remove(worker, gone)
            case 8:
                chain = randomness.choices([*known, randomness.getrandbits(64)], k=randomness.randrange(1, 6))
                index.store(B, randomness.choice([None, *known]), chain)
                contradictions = index.counters.contradictions
            case _:
                # What goes is kept apart block by block, below the parent that this worker gave it.
                index.remove(B, randomness.choices(known, k=3))
                exact = False
        # Where it named a block first, what others say of the same block may be refused, as ever.
        exact = exact and index.counters.contradictions == contradictions
        for each in honest:
            for asked in paths:
                found, held = index.overlap(asked, each).blocks, sum(model.overlap(asked, each))
                assert not exact or found == held

    for worker in (B, *honest):
        index.drop(worker)
    index.sweep()
    assert (len(index), index._reach.edges.entries, index._reach.forest.ages.entries) == (0, 0, 0)
    assert not list(index._reach.places.items())


@pytest.mark.parametrize("seed", range(5))
def test_the_byte_budget_holds_and_paths_are_cut_from_their_ends(seed: int) -> None:
    budget_blocks = 500
    index = PrefixIndex(budget_blocks * BYTES_PER_BLOCK)
    randomness = random.Random(seed)
    next_hash = iter(range(1, 10**9))
    known: list[list[int]] = []
    for _ in range(400):
        path = (
            list(randomness.choice(known))[: randomness.randrange(1, 20)] if known and randomness.randrange(2) else []
        )
        parent = path[-1] if path else None
        fresh = [next(next_hash) for _ in range(randomness.randrange(1, 30))]
        index.store(randomness.choice([A, B, C]), parent, fresh)
        known.append(path + fresh)
        assert len(index) <= budget_blocks

    assert index.counters.evicted_blocks > 0
    for worker in (A, B, C):
        assert index.held_blocks(worker) == len(set().union(*holdings(index, worker).values()))


def test_leaves_go_oldest_first_from_their_ends_and_what_is_in_use_later() -> None:
    index = PrefixIndex(12 * BYTES_PER_BLOCK)
    index.store(A, None, [1, 2, 3, 4])
    index.store(A, None, [11, 12, 13, 14])
    index.store(A, 4, [5])  # the oldest grows: it is in use

    index.store(A, None, [21, 22, 23, 24, 25])

    assert index.overlap([1, 2, 3, 4, 5], A) == TierOverlap(5)
    assert index.overlap([11, 12, 13, 14], A) == TierOverlap(2)
    assert index.overlap([21, 22, 23, 24, 25], A) == TierOverlap(5)


def test_a_prefix_that_everybody_continues_stays_while_its_continuations_are_forgotten() -> None:
    index = PrefixIndex(100 * BYTES_PER_BLOCK)
    index.store(A, None, [1, 2, 3])
    for number in range(200):
        index.store(A, 3, [1000 + number])

    assert index.overlap([1, 2, 3, 1199], A) == TierOverlap(4)
    assert index.overlap([1, 2, 3, 1000], A) == TierOverlap(3)


@pytest.fixture
def living_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what tells how many runs are alive of those made from here on; the garbage collector does not know."""
    blocks: list[weakref.ref[array[int]]] = []

    def make(*arguments: Any) -> Run:
        run = Run(*arguments)
        blocks.append(weakref.ref(run.blocks))  # its own, and as alive as it is
        return run

    monkeypatch.setattr(run_map, "Run", make)
    monkeypatch.setattr(run_forest, "Run", make)
    return lambda: sum(each() is not None for each in blocks)


def test_the_garbage_collector_looks_at_no_run_and_no_map_of_an_index() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.store(A, None, [number << 48, number << 48 | 1])
        index.store(B, number, [number << 48 | 2])

    maps = (index._reach.edges, index._reach.waiting)
    held = [*index._reach.forest.ages, *(shard for each in maps for shard in each.each_shard())]
    assert not any(map(gc.is_tracked, held))


def test_an_index_that_nobody_names_any_more_is_freed_with_all_it_held(living_runs: Callable[[], int]) -> None:
    index = PrefixIndex()
    for number in range(100):
        index.store(A, None, [number, 1000 + number, 2000 + number])
        index.store(A, 1000 + number, [3000 + number])
        index.store(B, number, [4000 + number])
        index.store(B, number, [5000 + number])
    assert living_runs() > 500

    del index

    assert living_runs() == 0


def test_a_prefix_that_stays_keeps_nothing_alive_of_what_came_and_went_beside_it(
    living_runs: Callable[[], int],
) -> None:
    index = PrefixIndex()
    index.store(A, None, [1, 2, 3])
    index.store(A, None, [11, 12])
    index.store(A, 3, [4])  # the first is no leaf any more: its neighbour among the leaves was the second
    index.store(B, 100, [101])
    for number in range(1000, 1100):
        index.store(A, None, [number])
        index.store(B, number, [10 * number])
        index.store(A, 3, [20 * number])
        if number % 2:
            index.remove(A, [12, 11])
            index.store(A, None, [11, 12])
        index.remove(A, [number, 20 * number])
        index.remove(B, [10 * number])

    assert len(index) == 7
    # Three prefixes, a block without the one before it, and the end of the leaves, which looks like a run.
    assert living_runs() == 5
    assert_sound(index)


@pytest.mark.parametrize("step", [RUN_BLOCKS_MAX // 3, 5 * RUN_BLOCKS_MAX])
def test_a_path_longer_than_a_run_is_found_cut_and_removed_like_any_other(step: int) -> None:
    index = PrefixIndex()
    randomness = random.Random(5)
    path = [randomness.getrandbits(64) for _ in range(5 * RUN_BLOCKS_MAX - 7)]
    for at in range(0, len(path), step):
        index.store(A, path[at - 1] if at else None, path[at : at + step])
    index.store(B, None, path[:2000])

    assert_sound(index)
    assert index.overlap(path, A) == TierOverlap(len(path))
    assert index.overlap(path, B) == TierOverlap(2000)
    index.remove(A, [path[1500]])
    assert index.overlap(path, A) == TierOverlap(1500)
    index.store(A, path[1499], [path[1500]])
    assert index.overlap(path, A) == TierOverlap(len(path))
    index.remove(A, path[::-1])
    index.remove(B, path[:2000])
    assert len(index) == 0
    assert_sound(index)


def branching_paths(randomness: random.Random) -> list[list[int]]:
    """Paths that leave a trunk at its beginning, twice within it, and at its end."""
    trunk = [randomness.getrandbits(64) for _ in range(40)]
    return [trunk[:at] + [randomness.getrandbits(64) for _ in range(20)] for at in (0, 10, 25, 40)]


def disturb(gone: list[int], paths: list[list[int]], times: int, randomness: random.Random) -> None:
    """Put blocks among those that go which are out of place there, unknown, or there twice."""
    for _ in range(times):
        other = randomness.choice([randomness.getrandbits(64), *paths[-1][:40], *gone])
        gone.insert(randomness.randrange(len(gone) + 1), other)


@pytest.mark.parametrize("seed", range(examples(10)))
def test_what_goes_from_the_end_of_paths_backwards_goes_at_once_and_only_as_far_as_it_is_said(seed: int) -> None:
    randomness = random.Random(seed)
    index, model = PrefixIndex(), NaiveIndex()
    paths = branching_paths(randomness)
    for worker, path in [(A, path) for path in paths] + [(B, paths[1])] * randomness.randrange(2):
        index.store(worker, None, path)
        model.store(worker, path)
    for _ in range(12):
        gone = randomness.choice(paths)[randomness.randrange(50) : randomness.randrange(61)][::-1]
        disturb(gone, paths, randomness.randrange(3), randomness)
        index.remove(A, gone)
        model.remove(A, gone)
        assert_sound(index)
        for path in paths:
            for worker in (A, B):
                assert index.overlap(path, worker).blocks == sum(model.overlap(path, worker))


@pytest.mark.parametrize("seed", range(examples(15)))
def test_what_several_hold_goes_from_the_end_of_paths_backwards_for_each_of_them_alone(seed: int) -> None:
    randomness = random.Random(seed)
    index, model = PrefixIndex(), NaiveIndex()
    paths = branching_paths(randomness)
    for _ in range(30):
        worker, path = randomness.choice([A, B, C]), randomness.choice(paths)
        end = randomness.randrange(1, len(path) + 1)
        if randomness.randrange(2):
            index.store(worker, None, path[:end])
            model.store(worker, path[:end])
        gone = path[randomness.randrange(end) : end][::-1]
        disturb(gone, paths, randomness.randrange(2), randomness)
        index.remove(worker, gone)
        model.remove(worker, gone)
        assert_sound(index)
        for each in paths:
            for holder in (A, B, C):
                assert index.overlap(each, holder).blocks == sum(model.overlap(each, holder))


def test_what_a_worker_evicts_of_a_path_that_others_hold_costs_as_much_as_there_are_borders_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 0
    remove_reached = Holdings.remove_reached

    def counted(*arguments: Any) -> int:
        nonlocal steps
        steps += 1
        return remove_reached(*arguments)

    monkeypatch.setattr(Holdings, "remove_reached", counted)
    index = PrefixIndex()
    path = [stable_u64("path", position) for position in range(900)]
    for worker, depth in ((A, 900), (B, 700), (C, 300)):
        index.store(worker, None, path[:depth])

    index.remove(A, path[:499:-1])  # first what A alone holds, then what B does too
    index.remove(C, path[299:99:-1])
    index.remove(B, path[699::-1])

    assert steps <= 6
    assert index.find(path) == [(500, 0b001), (100, 0b100)]
    assert_sound(index)


@pytest.mark.parametrize("seed", range(examples(8)))
def test_many_depths_on_a_long_path_are_each_found(seed: int) -> None:
    """Paths that leave the index anywhere, with holders that end anywhere: bisecting and walking give the same."""
    randomness = random.Random(seed)
    index, model = PrefixIndex(), NaiveIndex()
    names = [WorkerKey(WorkerId(f"w{number:02}")) for number in range(24)]
    trunk = [randomness.getrandbits(64) for _ in range(200)]
    for worker in names:
        fork = randomness.randrange(1, 200)
        path = trunk[:fork] + [randomness.getrandbits(64) for _ in range(randomness.randrange(20))]
        at = 0
        while at < len(path):
            step = randomness.randrange(1, 60)
            index.store(worker, path[at - 1] if at else None, path[at : at + step])
            at += step
        model.store(worker, path)
        gone = randomness.sample(path, randomness.choice([0, 0, 3]) if len(path) > 3 else 0)
        index.remove(worker, gone)
        model.remove(worker, gone)

    for _ in range(40):
        length = randomness.randrange(1, 201)
        asked = trunk[:length] + [randomness.getrandbits(64) for _ in range(randomness.choice([0, 5, 300]))]
        found = {slot: depth for depth, mask in index.find(asked) for slot in range(24) if mask >> slot & 1}
        expected = {index.slot(worker): model.overlap(asked, worker)[0] for worker in names}
        assert found == {slot: depth for slot, depth in expected.items() if depth}
        depths = [depth for depth, _ in index.find(asked)]
        assert depths == sorted(set(depths), reverse=True)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_a_path_of_many_short_runs_is_leapt_over_to_where_somebody_ends(seed: int) -> None:
    """Side branches cut the path into runs that the same workers hold; some of these workers end here and there."""
    randomness = random.Random(seed)
    index, model = PrefixIndex(), NaiveIndex()
    trunk = [randomness.getrandbits(64) for _ in range(300)]
    names = [WorkerKey(WorkerId(f"w{number:02}")) for number in range(randomness.choice([1, 2, 8]))]
    for worker in names:
        held = trunk[: randomness.randrange(1, 301)]
        index.store(worker, None, held)
        model.store(worker, held)
        for before in range(randomness.randrange(1, 4), len(held), randomness.choice([1, 2, 7])):
            index.store(worker, held[before - 1], [randomness.getrandbits(64)])

    for length in [1, 2, 300, *(randomness.randrange(1, 301) for _ in range(40))]:
        asked = trunk[:length] + [randomness.getrandbits(64) for _ in range(randomness.choice([0, 1, 90]))]
        found = {slot: depth for depth, mask in index.find(asked) for slot in slots_of(mask)}
        assert found == {index.slot(worker): model.overlap(asked, worker)[0] for worker in names}
        assert_sound(index)


def test_finding_looks_up_no_more_where_a_path_is_cut_into_ever_more_runs() -> None:
    looked_up = []
    for blocks in (200, 1000, 5000):
        index = PrefixIndex()
        path = [stable_u64("path", position) for position in range(2 * blocks)]
        index.store(A, None, path[:blocks])
        index.store(B, None, path[: blocks // 2])
        for before in range(1, blocks, 2):
            index.store(A, path[before], [stable_u64("side", before)])
        counting = CountingPath(path)

        assert index.find(counting) == [(blocks, 0b1), (blocks // 2, 0b10)]
        looked_up.append(counting.asked)

    assert looked_up[-1] < 150
    assert looked_up[2] - looked_up[1] <= 4 * NEAR


def test_a_path_that_a_second_worker_stores_piece_by_piece_is_cut_by_moving_the_pieces_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = 0
    cut_front, cut_tail = RunForest.cut_front, RunForest.cut_tail

    def counted(cut: Run) -> Run:
        nonlocal moved
        moved += len(cut.blocks)
        return cut

    monkeypatch.setattr(RunForest, "cut_front", lambda *arguments: counted(cut_front(*arguments)))
    monkeypatch.setattr(RunForest, "cut_tail", lambda *arguments: counted(cut_tail(*arguments)))
    index = PrefixIndex()
    path = [stable_u64("path", position) for position in range(1000)]
    index.store(A, None, path)
    for at in range(0, len(path), 10):
        index.store(B, path[at - 1] if at else None, path[at : at + 10])

    assert 0 < moved <= len(path)
    assert index.find(path) == [(1000, 0b11)]
    index.remove(A, path[:-1:2])
    assert index.find(path) == [(1000, 0b10)]
    assert_sound(index)


class CountingPath(list[int]):
    """A path that counts how often one of its blocks is asked for."""

    asked = 0

    def __getitem__(self, at: Any) -> Any:
        self.asked += 1
        return super().__getitem__(at)
