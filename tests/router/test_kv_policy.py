"""The policy ``kv`` counts in milliseconds, and learns what they are."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import EXPECTED_MS, OWN_MS, PACE, RoutingRequest
from poolgrid.kernel.routing import worker_groups
from poolgrid.kernel.routing.engine_times import PUBLISHED, StepCurve
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.learned_speeds import KEPT, PRIOR_MS, LearnedSpeeds
from poolgrid.kernel.routing.selector import Planner, Selector
from poolgrid.kernel.wire.card import StepTimes
from poolgrid.kernel.wire.events import PrefillCompleted, RequestStarted, StreamStateChanged, WorkerJoined
from poolgrid.kernel.wire.identifiers import Role, Stage, StreamState, WorkerKey
from poolgrid.server.workers.timing import PolynomialTiming, step_times_of
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, make_card, stored, worker_key

PATH = list(range(100, 350))
LONG = RoutingRequest("long", "m", 250 * BLOCK_SIZE, BLOCK_SIZE, 250)


def make_pool(*names: str) -> tuple[Pool, Selector]:
    pool = Pool()
    selector = pool.selector(KvAware())
    pool.join(*names, card=make_card(max_sequence_length=100_000))
    return pool, selector


def planner_of(selector: Selector) -> Planner:
    assert selector.planner is not None
    return selector.planner


def speeds_of(pool: Pool) -> LearnedSpeeds:
    speeds: LearnedSpeeds = pool.projection.observer("paces")
    return speeds


def like(request: RoutingRequest, **changed: Any) -> RoutingRequest:
    """Return another request, the same but for what is changed."""
    names = ("request_id", "model", "isl", "block_size", "blocks", "priority", "stage", "media", "media_kinds")
    kept = {name: getattr(request, name) for name in (*names, "ttft_target_ms")}
    return RoutingRequest(**(kept | changed))


def choose(selector: Selector, now_ms: float, request_id: str = "r", request: RoutingRequest = LONG) -> Decision:
    asked = like(request, request_id=request_id)
    return decided(selector.select(WorkerWanted(asked, PATH, now_ms, 0)))


def serve(pool: Pool, selector: Selector, worker: WorkerKey, took_ms: float, now_ms: float, request_id: str) -> None:
    """Have a worker be chosen, since the others cannot be reached, and answer after a time."""
    others = {key: "unreachable" for key in pool.projection.fleet.workers if key != worker}
    asked = like(LONG, request_id=request_id)
    decision = decided(selector.select(WorkerWanted(asked, [], now_ms, 0, others)))
    selector.book(decision, [], now_ms)
    speeds_of(pool).on_first_token(worker, request_id, now_ms + took_ms)
    pool.projection.ledger.finished(worker, request_id)


def test_expected_is_the_time_of_what_is_queued_and_not_cached() -> None:
    pool, selector = make_pool("a", "b")
    pool.say(worker_key("a"), stored(PATH[:200]), RequestStarted("x", 10_000, 0, 0))

    decision = choose(selector, 0.0)
    terms = decision.choice.terms

    engine = PolynomialTiming()
    a = engine.prefill_ms(8192) + engine.prefill_ms(10_000 + 50 * BLOCK_SIZE - 8192) + 2 * engine.decode_ms(0.0)
    assert terms[EXPECTED_MS][0] == pytest.approx(a, rel=0.02)
    assert terms[EXPECTED_MS][1] == pytest.approx(engine.prefill_ms(250 * BLOCK_SIZE), rel=0.02)
    assert terms[OWN_MS][0] == pytest.approx(engine.prefill_ms(50 * BLOCK_SIZE), rel=0.02)
    assert list(terms["uncached_tokens"]) == [800.0, 4000.0]
    assert decision.worker == worker_key("b")
    assert decision.expected_ttft_ms() == terms[EXPECTED_MS][1]


def test_a_worker_that_took_three_times_as_long_is_avoided_although_it_holds_more() -> None:
    pool, selector = make_pool("a", "b")
    a, b = worker_key("a"), worker_key("b")
    pool.say(a, stored(PATH[:100]))
    assert choose(selector, 0.0).worker == a

    for number in range(20):
        serve(pool, selector, a, 260.0, 1000.0 * number, f"a{number}")
        serve(pool, selector, b, 87.0, 1000.0 * number + 500, f"b{number}")

    decision = choose(selector, 20_000.0)
    assert decision.worker == b
    assert decision.choice.terms[PACE][0] == pytest.approx(3.0, rel=0.25)
    assert decision.choice.terms[PACE][1] == pytest.approx(1.0, rel=0.25)


def test_step_times_of_a_card_are_begun_with() -> None:
    pool = Pool()
    selector = pool.selector(KvAware())
    slow = StepTimes(((1, 100.0), (1000, 300.0)), ((0.0, 50.0),))
    pool.say(worker_key("a"), WorkerJoined(make_card()))
    pool.say(worker_key("b"), WorkerJoined(msgspec.structs.replace(make_card(), step_times=slow)))

    short = RoutingRequest("r", "m", 1000, BLOCK_SIZE, 63)
    decision = decided(selector.select(WorkerWanted(short, [], 0.0, 0)))

    assert decision.worker == worker_key("a")
    assert decision.choice.terms[EXPECTED_MS][1] == pytest.approx(300.0)


def test_a_decode_worker_is_chosen_by_its_steps() -> None:
    pool = Pool()
    selector = pool.selector(KvAware())
    pool.join("a", "b", card=make_card(role=Role.DECODE))
    pool.say(worker_key("a"), RequestStarted("x", 100, 100, 400))

    request = RoutingRequest("r", "m", 1000, BLOCK_SIZE, 63, stage=Stage.DECODE)
    decision = decided(selector.select(WorkerWanted(request, PATH, 0.0, 0, roles=(Role.DECODE,))))

    assert decision.worker == worker_key("b")
    selector.book(decision, PATH, 0.0)
    assert speeds_of(pool).checkpoint().workers[1:] == [], "no first token is awaited of it"


def test_events_teach_and_a_dry_run_leaves_no_trace() -> None:
    pool, selector = make_pool("a")
    paces = speeds_of(pool)
    decision = choose(selector, 0.0)
    before = paces.checkpoint()
    selector.select(WorkerWanted(LONG, PATH, 0.0, 0), dry_run=True)
    assert paces.checkpoint() == before

    selector.book(decision, PATH, -300.0)
    pool.say(worker_key("a"), RequestStarted("r", LONG.isl, 0, 250), PrefillCompleted("r"))  # at 0.0

    [_, known] = paces.checkpoint().workers
    # Beside what it began with, of which an observation takes its part.
    assert known.worker_id == "a"
    assert known.observed_ms == pytest.approx(300.0 + KEPT * PRIOR_MS)
    assert known.unit_ms == pytest.approx(decision.choice.terms[EXPECTED_MS][0] + KEPT * PRIOR_MS)


@pytest.mark.parametrize("why", ["it is behind a replay", "its stream restates"])
def test_a_first_token_that_is_read_behind_other_reports_teaches_nothing(why: str) -> None:
    pool, selector = make_pool("a")
    paces, a = speeds_of(pool), worker_key("a")
    decision = choose(selector, 0.0)
    selector.book(decision, PATH, -5_000.0)
    behind_a_replay = why == "it is behind a replay"
    if not behind_a_replay:
        pool.say(a, StreamStateChanged("worker", StreamState.SNAPSHOTTING))
    pool.say(a, RequestStarted("r", LONG.isl, 0, 250), PrefillCompleted("r", untimed=behind_a_replay))

    [_, known] = paces.checkpoint().workers
    assert (known.observed_ms, known.unit_ms, known.awaited) == (PRIOR_MS, PRIOR_MS, [])


def test_a_long_prompt_does_not_take_the_last_free_worker_where_requests_come_fast() -> None:
    pool, selector = make_pool("a", "b")
    a, b = worker_key("a"), worker_key("b")
    long = like(LONG, isl=60_000, blocks=3750)
    pool.say(a, RequestStarted("x", 16_000, 0, 0))
    assert decided(selector.select(WorkerWanted(long, [], 0.0, 0))).worker == b

    for number in range(300):  # a hundred a second
        serve(pool, selector, b, 87.0, 10.0 * number, f"b{number}")

    assert decided(selector.select(WorkerWanted(long, [], 3000.0, 0))).worker == a
    assert decided(selector.select(WorkerWanted(LONG, [], 3000.0, 0))).worker == b, "a shorter one is soon done"


def test_the_published_curve_is_near_the_published_polynomials() -> None:
    engine = PolynomialTiming()
    tokens = np.array([1.0, 100.0, 700.0, 3000.0, 8000.0, 20_000.0])

    steps = PUBLISHED.step_ms(tokens)

    assert list(steps) == [pytest.approx(engine.prefill_ms(int(each)), rel=0.05) for each in tokens]
    assert PUBLISHED.step_ms(np.zeros(1))[0] == 0.0
    shares = np.array([0.0, 0.3, 1.0])
    assert list(PUBLISHED.decode_ms(shares)) == [pytest.approx(engine.decode_ms(each), rel=0.02) for each in shares]


def test_prompts_are_computed_in_steps_and_a_cards_curve_is_the_engines() -> None:
    times = step_times_of(PolynomialTiming())
    curve = StepCurve(times.prefill, times.decode)
    engine = PolynomialTiming()

    found = curve.prompt_ms(np.array([20_000.0]), np.array([8192.0]))

    assert found[0] == pytest.approx(2 * engine.prefill_ms(8192) + engine.prefill_ms(20_000 - 2 * 8192), rel=0.01)


def test_a_long_prompt_keeps_away_from_a_short_one_whose_step_it_would_join() -> None:
    _, selector = make_pool("a", "b")
    a, b = worker_key("a"), worker_key("b")
    short = RoutingRequest("short", "m", 100, BLOCK_SIZE, 7)
    booked = decided(selector.select(WorkerWanted(short, [], 0.0, 0, {b: "unreachable"})))
    selector.book(booked, [], 0.0)

    decision = choose(selector, 0.0)

    assert decision.worker == b
    joined = decision.choice.terms["joined_ms"]
    engine = PolynomialTiming()
    assert joined[0] == pytest.approx(engine.prefill_ms(100 + LONG.isl) - engine.prefill_ms(100), rel=0.05)
    assert joined[1] == 0.0
    assert a in decision.candidates.workers


def test_who_has_time_goes_where_others_lose_least_and_who_has_none_where_it_is_soonest() -> None:
    pool, selector = make_pool("a", "b")
    a, b = worker_key("a"), worker_key("b")
    pool.say(a, stored(PATH[:100]), RequestStarted("x", 8192, 0, 0))

    def chosen(target_ms: float) -> WorkerKey:
        asked = like(LONG, ttft_target_ms=target_ms)
        return decided(selector.select(WorkerWanted(asked, PATH, 0.0, 0))).worker

    assert chosen(0.0) == b
    assert chosen(100.0) == b
    assert chosen(5000.0) == a, "there is less to compute, and time to wait for it"


def test_first_turns_spread_where_a_worker_is_free_and_later_ones_stay() -> None:
    pool, selector = make_pool("a", "b")
    a, b = worker_key("a"), worker_key("b")
    pool.say(a, stored(PATH[:50]))  # a system prompt
    for number in range(10):
        serve(pool, selector, a, 87.0, 1000.0 * number, f"a{number}")

    def chosen(*, is_later: bool | None) -> WorkerKey:
        return decided(selector.select(WorkerWanted(like(LONG, is_later=is_later), PATH, 10_000.0, 0))).worker

    assert (chosen(is_later=False), chosen(is_later=True), chosen(is_later=None)) == (b, a, b)
    pool.say(a, stored(PATH[:240]))
    assert (chosen(is_later=False), chosen(is_later=None)) == (b, a), "most of it is there, so it may be a later turn"
    pool.say(b, RequestStarted("x", 100, 0, 0))
    assert chosen(is_later=False) == a, "it would wait there"


def wanted(request_id: str, path: list[int], blocks: int = 250) -> WorkerWanted:
    request = RoutingRequest(request_id, "m", blocks * BLOCK_SIZE, BLOCK_SIZE, blocks)
    return WorkerWanted(request, path, 0.0, 0)


def test_a_plan_waits_for_the_worker_that_holds_the_prompt_and_says_who_comes_behind() -> None:
    pool, selector = make_pool("a", "b")
    a = worker_key("a")
    path = list(range(1000, 2500))
    pool.say(a, stored(path[:1200]), RequestStarted("x", 1000, 0, 0))

    both = [wanted("longer", path[:1100], 1500), wanted("r", path, 1500)]
    assert planner_of(selector).plan(both) == [], "the other one would compute all of it"
    assert planner_of(selector).plan(both[1:]) == [(0, {})], "alone it goes at once"

    pool.say(a, PrefillCompleted("x"))
    assert planner_of(selector).plan(both) == [(1, {a: 1})]


@pytest.mark.parametrize("is_few", [True, False])
def test_a_new_request_goes_without_a_plan_where_it_is_small_and_fits_into_the_step_of_others(
    is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_few:
        monkeypatch.setattr(worker_groups, "FEW_CANDIDATES", 0)
    pool, selector = make_pool("a")
    small, long = wanted("small", [], 2), wanted("long", [], 250)

    def holds(question: WorkerWanted) -> bool:
        return planner_of(selector).holds(decided(selector.select(question)))

    assert holds(long), "a shorter one may come in the same turn"
    assert not holds(small)
    pool.say(worker_key("a"), RequestStarted("x", 1000, 0, 0))
    assert not holds(small), "it is computed in the step of the other one"
    pool.say(worker_key("a"), RequestStarted("y", 7180, 0, 0))
    assert holds(small), "there is no room in that step"


def test_a_plan_begins_with_one_whom_nobody_can_serve_now() -> None:
    _, selector = make_pool("a")
    a = worker_key("a")
    too_long = msgspec.structs.replace(wanted("r", []), unavailable={a: "unreachable"})

    assert planner_of(selector).plan([wanted("s", PATH), too_long]) == [(1, {}), (0, {})]
    assert not planner_of(selector).can_plan(too_long)
    assert planner_of(Pool().selector(KvAware())).plan([too_long]) == [(0, {})]


@pytest.mark.parametrize("seed", range(20))
def test_few_workers_cost_the_same_bits_as_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    pool = Pool()
    selector = pool.selector(KvAware())
    workers = pool.join(*"abcd"[: source.randrange(1, 5)], card=make_card(max_sequence_length=100_000))
    for number in range(30):
        isl = source.randrange(16, 20_000)
        asked = RoutingRequest(
            f"r{number}", "m", isl, 16, -(-isl // 16), stage=source.choice([Stage.WHOLE, Stage.WHOLE, Stage.DECODE]),
            ttft_target_ms=source.choice([0.0, 0.0, 100.0]), is_later=source.choice([None, False, True]),
        )  # fmt: skip
        behind = {worker: source.randrange(3) for worker in workers if source.random() < 0.2}
        path = [source.randrange(3) * 10_000 + block for block in range(isl // 16)]
        down = {each: "down" for each in workers[1:] if source.random() < 0.1}
        ask = WorkerWanted(asked, path, 40.0 * number, 0, down, behind=behind)
        few = selector.select(ask)
        if not isinstance(few, Decision):
            continue  # they are busy
        with monkeypatch.context() as patch:
            patch.setattr(selector, "_compares_numbers", False)
            many = decided(selector.select(ask))
        assert few.explanation() == many.explanation()
        assert list(few.choice.terms) == list(many.choice.terms)
        selector.book(few, path, 40.0 * number)
        if source.random() < 0.7:
            pool.say(few.worker, RequestStarted(f"r{number}", isl, 0, 5), stored(path))
        if source.random() < 0.5:
            pool.say(few.worker, PrefillCompleted(f"r{number}"))
