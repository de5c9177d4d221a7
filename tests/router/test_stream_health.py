"""Whose overlap is believed: streams that break, streams that never fill, and what stands in for them."""

from __future__ import annotations

import random

import pytest

from poolgrid.kernel.projection.stream_health import LEAST_REQUESTS, WINDOW, OverlapCheck
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.events import RequestFinished, RequestStarted, StreamStateChanged, WorkerJoined, WorkerLeft
from poolgrid.kernel.wire.feed import SourceStream, WorkerState
from poolgrid.kernel.wire.identifiers import StreamState
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, load_snapshot, stored
from tests.router.test_selector import PATH, request

STALE = StreamStateChanged("worker", StreamState.STALE, "batches from 7 are missing")
LIVE = StreamStateChanged("worker", StreamState.LIVE)


def serve(pool: Pool, selector: Selector, request_id: str, path: list[int], cached_blocks: int, now_ms: float) -> str:
    """Route a request, and have its worker report that it reused so many blocks; return the reason code."""
    decision = decided(selector.select(WorkerWanted(request(request_id), path, now_ms, 0)))
    selector.book(decision, path, now_ms)
    pool.say(decision.worker, RequestStarted(request_id, 10 * BLOCK_SIZE, cached_blocks * BLOCK_SIZE, 10))
    pool.say(decision.worker, RequestFinished(request_id, "length"))
    return decision.reason


def test_the_overlap_of_a_stale_worker_is_not_believed() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH[:8]))
    pool.say(b, stored(PATH[:2]))
    selector = pool.selector(KvAware())
    assert decided(selector.select(WorkerWanted(request("r1"), PATH, 0.0, 0))).worker == a

    pool.say(a, STALE)
    decision = decided(selector.select(WorkerWanted(request("r2"), PATH, 0.0, 0)))

    assert decision.worker == b
    assert decision.untrusted == {a: "stale: batches from 7 are missing"}
    assert decision.explanation().untrusted == {"a": "stale: batches from 7 are missing"}
    assert [row.device_overlap_blocks for row in decision.explanation().rows] == [0, 2]
    assert decision.reason == "cheapest", "the chosen worker itself is trusted"


def test_the_routers_own_choices_stand_in_until_the_stream_heals() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    pool.say(a, STALE)
    selector = pool.selector(KvAware())

    first = decided(selector.select(WorkerWanted(request("r1"), PATH, 0.0, 0)))
    assert first.overlap_blocks == 0
    selector.book(first, PATH, 0.0)
    second = decided(selector.select(WorkerWanted(request("r2"), PATH, 1.0, 0)))
    assert second.overlap_blocks == 10
    assert second.reason == "only-predicted"
    assert decided(selector.select(WorkerWanted(request("r3"), PATH, 200_000.0, 0))).overlap_blocks == 0, (
        "a prediction does not last"
    )

    pool.say(a, LIVE)
    healed = decided(selector.select(WorkerWanted(request("r4"), PATH, 2.0, 0)))
    assert (healed.overlap_blocks, healed.reason, healed.untrusted) == (0, "only", {})


def test_a_stream_that_never_fills_is_found_out_by_what_the_worker_reuses() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    selector = pool.selector(KvAware())
    trust = pool.projection.trust

    reasons = [serve(pool, selector, f"r{n}", PATH, 9 if n else 0, float(n)) for n in range(LEAST_REQUESTS + 1)]

    assert set(reasons) == {"only"}
    assert "suspect" in trust.untrusted[a]
    assert (
        f"over {LEAST_REQUESTS} requests the index predicted 0 cached tokens and the worker reused"
        in trust.untrusted[a]
    )
    assert trust.verdicts == 1
    assert serve(pool, selector, "one", PATH, 9, 50.0) == "only-predicted"
    assert decided(selector.select(WorkerWanted(request("two"), PATH, 51.0, 0))).overlap_blocks == 10, (
        "the prediction comes near the truth"
    )


def test_an_index_that_claims_what_is_gone_is_found_out_too_and_trusted_again_when_it_agrees() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    pool.say(a, stored(PATH))
    selector = pool.selector(KvAware())
    for number in range(LEAST_REQUESTS):
        serve(pool, selector, f"bad-{number}", PATH, 0, float(number))
    assert a in pool.projection.trust.untrusted

    for number in range(WINDOW):
        serve(pool, selector, f"good-{number}", PATH, 10, float(number))
    assert a not in pool.projection.trust.untrusted


@pytest.mark.parametrize(("reused", "is_suspect"), [(9, False), (0, True)])
def test_an_engine_that_says_at_the_end_what_it_reused_is_judged_then(reused: int, is_suspect: bool) -> None:
    """The estimate at the start is the router's own prediction, which would never disagree."""
    pool = Pool()
    (a,) = pool.join("a")
    pool.say(a, stored(PATH))
    selector = pool.selector(KvAware())
    for number in range(LEAST_REQUESTS + 1):
        decision = decided(selector.select(WorkerWanted(request(f"r{number}"), PATH, float(number), 0)))
        selector.book(decision, PATH, float(number))
        pool.say(a, RequestStarted(f"r{number}", 10 * BLOCK_SIZE, 10 * BLOCK_SIZE, 10, cached_later=True))
        assert a not in pool.projection.trust.checks or len(pool.projection.trust.checks[a]) == number
        pool.say(a, RequestFinished(f"r{number}", "stop", reused * BLOCK_SIZE))
    assert (a in pool.projection.trust.untrusted) is is_suspect


def test_a_new_life_of_a_worker_is_judged_anew_and_one_that_left_is_forgotten() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    pool.say(a, STALE)
    card = pool.projection.fleet.workers[a].card
    pool.say(a, WorkerJoined(card), epoch=2)
    assert pool.projection.trust.untrusted == {}
    pool.say(a, STALE)
    pool.say(a, WorkerLeft("gone"))
    assert pool.projection.trust.untrusted == {}


def test_a_snapshot_brings_the_health_of_the_streams() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    card = pool.projection.fleet.workers[a].card
    state = WorkerState(
        "a", 0, 3, 0, card, False, [], streams=[SourceStream("worker", StreamState.STALE, "batches from 7 are missing")]
    )
    load_snapshot(pool.projection, 9, [state], [], 0.0)
    assert pool.projection.trust.untrusted == {a: "stale: batches from 7 are missing"}
    assert pool.projection.trust.stream(a)[0] is StreamState.STALE


def test_the_sums_of_a_check_are_those_of_its_window() -> None:
    source = random.Random(7)
    check = OverlapCheck()
    entered: list[tuple[int, int]] = []
    for _ in range(3 * WINDOW):
        pair = (source.randrange(0, 400), source.randrange(0, 400))
        check.add(*pair, BLOCK_SIZE)
        if pair != (0, 0):
            entered.append(pair)
        window = entered[-WINDOW:]
        wrong = sum(abs(p - r) for p, r in window if abs(p - r) > BLOCK_SIZE)
        assert check.predicted_tokens == sum(p for p, _ in window)
        assert check.realised_tokens == sum(r for _, r in window)
        assert check.disagreement == wrong / max(1, sum(max(pair) for pair in window))
