"""A prompt whose first token was seen is at its worker, before any event says so."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.projection.stream_health import PROMPTS_MAX, SAME_BEGINNING_MAX, ComputedPrompts
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.events import (
    CacheCleared,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
    StreamStateChanged,
    WorkerLeft,
)
from poolgrid.kernel.wire.hashing import sequence_hashes
from poolgrid.kernel.wire.identifiers import Role, StreamState, WorkerKey
from poolgrid.server.router.policy_loading import make_policy
from tests.examples import examples
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, stored, worker_key
from tests.router.test_selector import PATH, request

A, B, C = worker_key("a"), worker_key("b"), worker_key("c")


def path_of(blocks: list[int]) -> array[int]:
    """Sequence hashes of blocks, which name all before them."""
    return array("Q", sequence_hashes(blocks))


def shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), prompts), max_size=20), prompts, st.sets(st.integers(0, 19)))
@settings(max_examples=examples(60))
def test_how_much_of_a_prompt_is_there_is_what_comparing_block_by_block_says(
    told: list[tuple[WorkerKey, list[int]]], asked: list[int], dropped: set[int]
) -> None:
    computed = ComputedPrompts()
    for number, (worker, blocks) in enumerate(told):
        assert computed.add(worker, f"r{number}", path_of(blocks))
        assert not computed.add(worker, f"r{number}", path_of(blocks))
    for number in dropped:
        for worker in (A, B, C):
            computed.drop(worker, f"r{number}")
    left = [each for number, each in enumerate(told) if number not in dropped]

    expected = sorted((worker, shared(blocks, asked)) for worker, blocks in left if blocks[0] == asked[0])
    assert sorted(computed.overlaps(path_of(asked))) == expected
    assert len(computed) == len(left)


def test_only_the_newest_are_kept_and_of_one_beginning_the_newest_are_compared() -> None:
    computed = ComputedPrompts()
    for number in range(PROMPTS_MAX + 10):
        computed.add(A, f"r{number}", path_of([1, number]))

    assert len(computed) == PROMPTS_MAX
    assert (A, "r9") not in computed
    assert (A, "r10") in computed
    assert len(computed.overlaps(path_of([1, 7000]))) == SAME_BEGINNING_MAX
    assert (A, 2) in computed.overlaps(path_of([1, PROMPTS_MAX + 9]))

    computed.drop_all_of(A)
    assert len(computed) == 0
    assert computed.overlaps(path_of([1])) == []


def chosen(pool: Pool, selector: Selector, name: str, path: list[int]) -> WorkerKey:
    """Route a request and book it; return its worker."""
    decision = decided(selector.select(WorkerWanted(request(name, len(path)), path, 0.0, 0)))
    selector.book(decision, path, 0.0)
    return decision.worker


@pytest.mark.parametrize("few", [pytest.param(True, id="plain numbers"), pytest.param(False, id="arrays")])
def test_who_asks_again_before_any_event_goes_where_the_prompt_was_computed(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not few:
        monkeypatch.setattr("poolgrid.kernel.routing.worker_groups.FEW_CANDIDATES", 0)
    pool = Pool()
    pool.join("a", "b", "c", "d")
    selector, trust = pool.selector(KvAware()), pool.projection.trust
    first = chosen(pool, selector, "first", PATH)
    pool.projection.ledger.finished(first, "first")

    before = decided(selector.select(WorkerWanted(request("again"), PATH, 0.0, 0)))
    assert trust.prompt_computed(first, "first")
    assert not trust.prompt_computed(first, "first"), "no news"
    again = decided(selector.select(WorkerWanted(request("again"), PATH, 0.0, 0)))
    other = decided(selector.select(WorkerWanted(request("other"), [*PATH[:6], 77, 78, 79], 0.0, 0)))

    assert before.overlap_blocks == 0
    assert (again.worker, again.overlap_blocks) == (first, len(PATH))
    assert (other.worker, other.overlap_blocks) == (first, 6)
    assert selector.best_overlap_blocks("m", (Role.AGGREGATED,), PATH) == len(PATH)


def test_once_its_stream_tells_of_the_request_the_index_alone_says_what_a_worker_holds() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    selector, trust = pool.selector(KvAware()), pool.projection.trust

    def believed() -> int:
        return decided(selector.select(WorkerWanted(request("who asks"), PATH, 0.0, 0))).overlap_blocks

    chosen(pool, selector, "r1", PATH)
    trust.prompt_computed(a, "r1")
    assert believed() == len(PATH)
    pool.say(a, RequestStarted("r1", 10 * BLOCK_SIZE, 0, 10), stored(PATH[:4]), PrefillCompleted("r1"))
    assert believed() == 4, "the others were evicted at once, or never kept"
    assert not trust.prompt_computed(a, "r1"), "a first token that comes later says nothing new"

    chosen(pool, selector, "r2", PATH)
    trust.prompt_computed(a, "r2")
    pool.say(a, RequestFinished("r2", "length"))
    assert believed() == 4, "its start was never told"
    assert not trust.prompt_computed(a, "unheard of")


def test_a_worker_that_leaves_or_empties_its_cache_or_whose_stream_breaks_is_believed_nothing_of_it() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    selector, trust = pool.selector(KvAware()), pool.projection.trust
    for worker in (a, b):
        trust.chosen(worker, "r", PATH, BLOCK_SIZE, 0.0)
        trust.prompt_computed(worker, "r")
    assert len(trust.computed) == 2

    pool.say(a, CacheCleared())
    assert list(trust.computed) == [(b, "r")]
    pool.say(b, StreamStateChanged("worker", StreamState.STALE, "batches are missing"))
    decision = decided(selector.select(WorkerWanted(request("again"), PATH, 0.0, 0)))
    assert [row.device_overlap_blocks for row in decision.explanation().rows] == [0, 0]
    pool.say(b, WorkerLeft("lease"))
    assert len(trust.computed) == 0


def test_in_approximate_mode_choices_are_believed_anyway_and_nothing_is_kept_twice() -> None:
    index = PrefixIndex()
    projection = Projection(index, LoadLedger())
    projection.attach(ApproximateIndex(index, 1000.0))
    pool = Pool()
    pool.projection = projection
    (a,) = pool.join("a")
    selector = pool.selector(make_policy("kv"))
    chosen(pool, selector, "r", PATH)

    assert not projection.trust.prompt_computed(a, "r")
    assert decided(selector.select(WorkerWanted(request("again"), PATH, 0.0, 0))).overlap_blocks == len(PATH)
