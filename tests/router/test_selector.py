"""A decision follows from the projection, the policy and the request, and says why."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.decision.policy import LOAD_BOUND, Candidates, MediaAffinity, Policy, RoutingRequest
from poolgrid.kernel.routing import worker_groups
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import NoWorker
from poolgrid.kernel.wire.card import MediaSpec
from poolgrid.kernel.wire.events import (
    CacheCleared,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    WorkerDraining,
    WorkerLeft,
)
from poolgrid.kernel.wire.identifiers import Stage, Tier, WorkerId, WorkerKey
from poolgrid.plugins.policies.baselines import LeastLoaded, Lmetric, Random, RoundRobin
from poolgrid.plugins.policies.weighted_cost import FieldCost
from poolgrid.server.router.choosing import ttft_target_ms
from poolgrid.server.router.policy_loading import make_policy
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, make_card, stored


def request(request_id: str = "r", blocks: int = 10, model: str = "m") -> RoutingRequest:
    return RoutingRequest(request_id, model, blocks * BLOCK_SIZE, BLOCK_SIZE, blocks)


def decide(pool: Pool, policy: Policy, path: list[int], request_id: str = "r", blocks: int = 10) -> Decision:
    return decided(pool.selector(policy).select(WorkerWanted(request(request_id, blocks), path, now_ms=0.0, time_ms=0)))


PATH = list(range(100, 110))


def test_the_published_example_of_the_cost_formula_holds() -> None:
    pool = Pool()
    a, b, c = pool.join("a", "b", "c")
    for worker, held, decode in ((a, 2, 0), (b, 5, -5), (c, 8, -1)):
        pool.say(worker, stored(PATH[:held]))
        # Decode blocks 10, 5, 9 in the example include this request's own 10: the rest is what runs already.
        pool.say(worker, RequestStarted(f"old-{worker}", 0, 0, 10 + decode))

    decision = decide(pool, FieldCost(), PATH)

    assert decision.choice.costs is not None
    own = 10
    assert [cost - own for cost in decision.choice.costs] == [18.0, 10.0, 11.0]
    assert decision.worker == b
    assert decision.choice.reason == "cheapest"
    assert decision.margin() == 1.0


def test_the_overlap_wins_unless_its_holder_is_busy() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH[:8]))
    assert decide(pool, KvAware(), PATH).worker == a

    pool.say(a, RequestStarted("long", 100 * BLOCK_SIZE, 0, 100))  # a quarter of its 100 blocks outweighs 8
    assert decide(pool, KvAware(), PATH).worker == b

    pool.say(a, RequestFinished("long", "length"))
    assert decide(pool, KvAware(), PATH).worker == a


def test_lower_tiers_count_less_than_device() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH[:8], tier=Tier.HOST))
    pool.say(b, stored(PATH[:7]))

    decision = decide(pool, FieldCost(), PATH)

    assert decide(pool, KvAware(), PATH).worker == b
    assert decision.worker == b
    assert list(decision.choice.terms["overlap_credit"]) == [6.0, 7.0]


def test_ties_depend_on_the_request_alone_and_spread_over_the_workers() -> None:
    pool = Pool()
    pool.join("a", "b", "c", "d")

    chosen = [decide(pool, KvAware(), PATH, f"r{number}") for number in range(400)]

    assert [decide(pool, KvAware(), PATH, f"r{number}").worker for number in range(400)] == [d.worker for d in chosen]
    counts = Counter(decision.worker for decision in chosen)
    assert len(counts) == 4
    assert min(counts.values()) > 60
    assert {decision.choice.reason for decision in chosen} == {"tie"}


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    pool = Pool()
    a, b, c = pool.join("a", "b", "c")
    pool.say(a, stored(PATH[:8]), RequestStarted("x", 3 * BLOCK_SIZE, 0, 3))
    pool.say(b, stored(PATH[:4]))

    decision = decide(pool, Lmetric(), PATH)

    assert decision.choice.costs is not None
    # a: 2 blocks of its own behind 3, for two; b: 6 for one; c: 10 for one.
    assert [cost / BLOCK_SIZE for cost in decision.choice.costs] == [10.0, 6.0, 10.0]
    assert (decision.worker, decision.reason) == (b, "cheapest")
    assert list(decision.choice.terms["batch"]) == [2.0, 1.0, 1.0]
    assert c in decision.candidates.workers


def test_round_robin_takes_turns_and_least_loaded_takes_the_idle_one() -> None:
    pool = Pool()
    a, b, c = pool.join("a", "b", "c")
    turns = pool.selector(RoundRobin())
    assert [decided(turns.select(WorkerWanted(request(), [], 0.0, 0))).worker for _ in range(4)] == [a, b, c, a]

    pool.say(a, RequestStarted("x", 16, 0, 1))
    pool.say(c, RequestStarted("y", 16, 0, 1))
    assert decide(pool, LeastLoaded(), PATH).worker == b
    assert decide(pool, Random(), PATH, "r1").worker == decide(pool, Random(), PATH, "r1").worker


def test_draining_gone_excluded_and_full_workers_are_filtered_with_a_reason() -> None:
    pool = Pool()
    a, b, c, d = pool.join("a", "b", "c", "d", card=make_card(max_batch_size=1))
    pool.say(a, WorkerDraining())
    pool.say(b, WorkerLeft("lease expired"))
    for number in range(2):
        pool.say(c, RequestStarted(f"c{number}", 16, 0, 1))
    selector = pool.selector(KvAware())

    decision = decided(selector.select(WorkerWanted(request(), PATH, 0.0, 0)))
    assert decision.worker == d
    assert decision.filtered == {a: "draining", c: worker_groups.BUSY}

    none = selector.select(WorkerWanted(request(), PATH, 0.0, 0, unavailable={d: "already failed this request"}))
    assert isinstance(none, NoWorker)
    assert (set(none.busy), set(none.draining)) == ({c}, {a})
    assert none.reasons[d] == "already failed this request"


def test_a_prompt_that_fits_nowhere_is_refused_with_the_room_there_is() -> None:
    pool = Pool()
    (a,) = pool.join("a", card=make_card(max_sequence_length=160))
    none = pool.selector(KvAware()).select(WorkerWanted(request(), PATH, 0.0, 0))
    assert isinstance(none, NoWorker)
    assert "prompt of 160 tokens, room for 159" in str(none)
    assert not none.busy
    assert list(none.reasons) == [a]


def test_an_unknown_model_has_no_worker() -> None:
    pool = Pool()
    pool.join("a")
    none = pool.selector(KvAware()).select(WorkerWanted(request(model="other"), PATH, 0.0, 0))
    assert str(none) == "choosing a worker for model 'other': no worker serves this model"


def test_a_booked_decision_counts_until_the_worker_speaks() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH[:4]))
    selector = pool.selector(KvAware())
    ledger = pool.projection.ledger
    decision = decided(selector.select(WorkerWanted(request("r"), PATH, 0.0, 0)))
    selector.book(decision, PATH, 0.0)
    slot = pool.projection.index.slot(a)

    assert decision.worker == a
    assert ledger.prefill_tokens[slot] == 6 * BLOCK_SIZE
    assert ledger.active_blocks[slot] == 10
    assert decided(selector.select(WorkerWanted(request("r2"), [1], 0.0, 0))).worker == b

    pool.say(a, RequestStarted("r", 160, 3 * BLOCK_SIZE, 10))
    assert ledger.prefill_tokens[slot] == 7 * BLOCK_SIZE
    pool.say(a, RequestProgressed("r", 12))
    assert ledger.active_blocks[slot] == 12
    pool.say(a, RequestFinished("r", "length"))
    assert (ledger.prefill_tokens[slot], ledger.active_blocks[slot], ledger.requests[slot]) == (0, 0, 0)
    assert len(ledger) == 0


def test_an_unconfirmed_reservation_expires_but_not_while_its_stream_is_open() -> None:
    pool = Pool()
    pool.join("a")
    selector = pool.selector(KvAware())
    for name in ("lost", "open"):
        selector.book(decided(selector.select(WorkerWanted(request(name), PATH, 0.0, 0))), PATH, 0.0)
    ledger = pool.projection.ledger

    ledger.expire(29_999.0, held={"open"})
    assert len(ledger) == 2
    ledger.expire(30_001.0, held={"open"})

    assert [key[1] for key in ledger.entries()] == ["open"]
    assert ledger.expired_reservations == 1


def test_the_end_of_a_worker_takes_its_requests_and_blocks_with_it() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH), RequestStarted("x", 160, 0, 10))
    pool.say(a, WorkerLeft("lease expired"))

    assert len(pool.projection.ledger) == 0
    assert decide(pool, KvAware(), PATH).worker == b


@pytest.mark.parametrize("cleared", [CacheCleared(), SnapshotBegan()], ids=lambda event: type(event).__name__)
def test_a_worker_whose_cache_was_cleared_or_is_restated_is_seen_with_its_load_and_its_new_blocks(
    cleared: CacheCleared | SnapshotBegan,
) -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    selector = pool.selector(KvAware())
    booked = decided(selector.select(WorkerWanted(request("booked"), PATH, 0.0, 0, {b: "down"})))
    selector.book(booked, PATH, 0.0)
    pool.say(a, stored(PATH[:8]), RequestStarted("running", 64, 0, 7))

    pool.say(a, cleared, stored(PATH[:3]))
    pool.say(a, RequestStarted("later", 32, 0, 5))

    row = decided(selector.select(WorkerWanted(request("asked"), PATH, 0.0, 0))).explanation().rows[0]
    assert (row.worker, row.requests, row.device_overlap_blocks) == ("a", 3, 3)
    assert (row.active_prefill_tokens, row.active_blocks) == (10 * BLOCK_SIZE + 64 + 32, 10 + 7 + 5)
    for request_id in ("running", "later"):
        pool.say(a, RequestFinished(request_id, "stop"))
    pool.projection.ledger.finished(a, "booked")
    pool.join("c")  # it may be given the bit that was a's
    rows = decided(selector.select(WorkerWanted(request("again"), PATH, 0.0, 0))).explanation().rows
    assert [(row.requests, row.device_overlap_blocks) for row in rows] == [(0, 3), (0, 0), (0, 0)]


def test_a_new_life_starts_empty() -> None:
    pool = Pool()
    (a,) = pool.join("a")
    pool.say(a, stored(PATH), RequestStarted("x", 160, 0, 10))
    pool.join("a")

    decision = decide(pool, KvAware(), PATH)
    assert decision.overlap_blocks == 0
    assert len(pool.projection.ledger) == 0


def test_the_explanation_holds_every_candidate_and_every_term() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored(PATH[:3]))
    decision = decide(pool, make_policy("kv"), PATH)

    explanation = decision.explanation()

    assert [row.worker for row in explanation.rows] == ["a", "b"]
    assert explanation.rows[0].device_overlap_blocks == 3
    assert [row.terms["uncached_tokens"] for row in explanation.rows] == [7.0 * BLOCK_SIZE, 10.0 * BLOCK_SIZE]
    assert explanation.rows[1].terms["again_ms"] > explanation.rows[0].terms["again_ms"] == 0.0
    cheaper, dearer = (row.cost for row in explanation.rows)
    assert cheaper is not None
    assert dearer is not None
    assert explanation.margin == dearer - cheaper > 0.0
    assert explanation.worker == str(a)
    assert b in decision.candidates.workers


def test_the_decision_log_keeps_the_newest_and_all_attempts_of_a_request() -> None:
    pool = Pool()
    pool.join("a")
    log = DecisionLog(3)
    for number in range(5):
        log.add(decide(pool, KvAware(), PATH, f"r{number}"))

    assert [d.request.request_id for d in log.newest(10)] == ["r4", "r3", "r2"]
    assert log.of_request("r0") == []
    assert log.of_dispatch("r4") is log.newest(1)[0]


def test_the_decision_log_finds_the_latest_request_of_a_name_and_every_one_by_its_id() -> None:
    pool = Pool()
    pool.join("a")
    log = DecisionLog(2)
    for request_id in ("mine~r1", "mine~r2"):
        log.add(decide(pool, KvAware(), PATH, request_id))

    assert [each.request.request_id for each in log.of_request("mine")] == ["mine~r2"]
    assert [each.request.request_id for each in log.of_request("mine~r1")] == ["mine~r1"]
    assert log.of_dispatch("mine~r1") is log.of_request("mine~r1")[0]
    for request_id in ("other~r3", "third~r4"):
        log.add(decide(pool, KvAware(), PATH, request_id))
    assert log.of_request("mine") == [], "what is forgotten is not found by its name either"
    assert set(log._latest) == {"other", "third"}


NAMES_AGAIN = st.tuples(st.sampled_from(["a", "b", "mine~1", "mine~2"]), st.integers(0, 2))


@settings(max_examples=100, deadline=None)
@given(st.lists(NAMES_AGAIN, max_size=40), st.integers(1, 4))
def test_the_decision_log_is_a_list_whose_older_entry_of_a_name_goes(
    added: list[tuple[str, int]], capacity: int
) -> None:
    pool = Pool()
    pool.join("a")
    log, naive = DecisionLog(capacity), dict[tuple[str, int], Decision]()
    for request_id, attempt in added:
        decision = decide(pool, KvAware(), PATH, request_id)
        decision.attempt = attempt
        log.add(decision)
        naive.pop((request_id, attempt), None)
        naive[request_id, attempt] = decision
        while len(naive) > capacity:
            del naive[next(iter(naive))]

    assert len(log) == len(naive)
    assert log.newest(100) == list(naive.values())[::-1]
    assert log.size_bytes == sum(decision.size_bytes() for decision in naive.values())
    assert log.added == len(added)
    assert set(log._latest) <= {"mine"}


@pytest.mark.parametrize("seed", range(6))
def test_many_holders_of_a_path_are_filled_in_at_once_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the holders left, drain or serve another model; whatever the way, each candidate has its own depth."""
    source = random.Random(seed)
    pool = Pool()
    path = [source.getrandbits(64) for _ in range(40)]
    depths: dict[WorkerKey, int] = {}
    for number in range(source.choice([17, 64, 150])):
        [worker] = pool.join(f"w{number:03}", card=make_card("other" if source.random() < 0.1 else "m"))
        depths[worker] = source.choice([0, 1, 7, 7, 39, source.randrange(41)])
        pool.say(worker, stored(path[: depths[worker]]))
    for worker in source.sample(sorted(depths), len(depths) // 5):
        pool.say(worker, WorkerLeft("gone") if source.random() < 0.5 else WorkerDraining())

    for few in (0, 10_000):
        monkeypatch.setattr(worker_groups, "FEW_HOLDERS", few)
        candidates = decide(pool, KvAware(), path).candidates
        assert [depths[worker] for worker in candidates.workers] == list(candidates.device_overlap)
        assert not any(candidates.host_overlap)
        assert not any(candidates.disk_overlap)


HEADER = "x-ttft-target-ms"


@pytest.mark.parametrize(
    ("hints", "target_ms"),
    [
        ({}, 0.0),
        ({"headers": {HEADER: "250.5"}}, 250.5),
        ({"nvext": {"router": {"ttft_target": 300}}}, 300.0),
        ({"nvext": {"router": {"ttft_target": 300}}, "headers": {HEADER: "250"}}, 300.0),
        ({"nvext": {"router": {"ttft_target": None}}, "headers": {HEADER: "250"}}, 250.0),
        ({"nvext": {"router": None}, "headers": {"x-itl-target-ms": "5"}}, 0.0),
        ({"headers": {HEADER: "soon"}}, 0.0),
        ({"headers": {HEADER: "nan"}}, 0.0),
        ({"headers": {HEADER: "-3"}}, 0.0),
        ({"headers": {HEADER: "9" * 1000}}, 0.0),
        ({"nvext": {"router": {"ttft_target": True}}}, 0.0),
        ({"nvext": {"router": {"ttft_target": 10**400}}}, 0.0),
        ({"nvext": {"router": [1]}}, 0.0),
    ],
)
def test_a_target_is_read_from_body_or_header_and_what_is_none_asks_for_nothing(
    hints: dict[str, Any], target_ms: float
) -> None:
    assert ttft_target_ms(hints) == target_ms


MEDIA = range(400)


def _request(media: int, request_id: str = "r") -> RoutingRequest:
    return RoutingRequest(request_id, "m", 64, 16, 4, stage=Stage.ENCODE, media=(media,), media_kinds=("image",))


def _candidates(loads: dict[str, int]) -> Candidates:
    zero = np.zeros(len(loads))
    workers = tuple(WorkerKey(WorkerId(name)) for name in loads)
    return Candidates(workers, zero, zero, np.array(list(loads.values()), np.float64), zero, zero, zero)


def _chosen(media: int, loads: dict[str, int], request_id: str = "r") -> str:
    candidates = _candidates(loads)
    return str(candidates.workers[MediaAffinity().choose(_request(media, request_id), candidates).row])


def test_a_medium_goes_to_the_same_worker_whoever_asks_and_media_spread_over_all() -> None:
    idle = dict.fromkeys("abcd", 0)
    homes = [_chosen(media, idle) for media in MEDIA]

    assert homes == [_chosen(media, idle, f"other {media}") for media in MEDIA]
    assert min(homes.count(name) for name in idle) > len(MEDIA) / 4 * 0.6


def test_one_popular_medium_is_spread_when_its_worker_is_above_its_share() -> None:
    loads = dict.fromkeys("abcd", 0)
    for _ in range(100):
        loads[_chosen(7, loads)] += 1

    assert max(loads.values()) <= LOAD_BOUND * 25 + 2
    assert _chosen(7, dict.fromkeys("abcd", 0)) == max(loads, key=lambda name: loads[name])


def test_among_equal_workers_equal_media_meet_though_their_requests_differ() -> None:
    pool = Pool()
    selector = pool.selector(KvAware())
    pool.join(*"abcd", card=make_card(media=MediaSpec(("image",))))

    homes: list[str] = []
    for media in range(20):
        chosen = set()
        for number in range(5):
            request = RoutingRequest(f"r{number}", "m", 64, 16, 4, media=(media,), media_kinds=("image",))
            chosen.add(str(decided(selector.select(WorkerWanted(request, [], 0.0, 0))).worker))
        homes.extend(chosen)
    assert len(homes) == 20
    assert set(homes) == set("abcd")
