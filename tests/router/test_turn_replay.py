"""The last minutes are replayed with admission and without it, and admission rests where it shortens no times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.routing.working_set import WorkingSet
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import PrefillCompleted
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.server.router.admission_review import (
    REST_BELOW,
    REVIEWS,
    WORK_FROM,
    AdmissionReview,
    ReviewFinding,
)
from poolgrid.server.router.turn_replay import (
    TURNS_PLAYED,
    WORKERS_PLAYED,
    CacheModel,
    EngineSize,
    PastTurn,
    ReplayTotals,
    TurnLog,
    TurnReplay,
)
from tests.examples import examples
from tests.router.test_shared_working_set import Pool

A = WorkerKey(WorkerId("a"))
SIZE = EngineSize("m", 1000, 10.0, 16)
"""A worker that computes its whole cache in 10 s."""


def past(session: int, number: int, blocks: int = 150, model: str = "m", family: int = 0) -> PastTurn:
    """Return a turn of one of many agents, which begin one after the other, and call a second after each answer."""
    asked_ms, own = 5000.0 * session + 1800.0 * number, blocks + number
    return PastTurn(
        (0, f"s{session}"), None, model, 0, own, 0, 0, family, asked_ms, asked_ms, asked_ms + 50, asked_ms + 800, own + 1
    )


def agents(sessions: int) -> list[PastTurn]:
    return [past(session, number) for session in range(sessions) for number in range(60)]


def totals(turns: list[PastTurn], places: WorkingSet | None, workers: int = 1) -> ReplayTotals:
    sizes = {WorkerKey(WorkerId(f"{number:03}")): SIZE for number in range(workers)}
    replay = TurnReplay(turns, sizes, places)
    for _ in replay.play():
        pass
    return replay.totals


def test_agents_that_evict_each_other_gain_and_those_that_fit_do_not() -> None:
    many, few = agents(10), agents(3)

    without, admitted = totals(many, None), totals(many, WorkingSet())
    assert admitted.computed_tokens < 0.5 * without.computed_tokens
    assert admitted.ttft_ms < 0.8 * without.ttft_ms
    assert admitted.waited > 0
    assert without.waited == 0
    assert totals(few, None) == totals(few, WorkingSet())


def test_turns_that_come_later_wait_for_the_answer_before() -> None:
    slow = totals([past(0, number, 900) for number in range(10)], None)
    fresh = [past(session, 0, 900) for session in range(10)]

    assert slow.ttft_ms < 1000, "each has the cache of the one before"
    assert totals(fresh, None).ttft_ms > 20_000, "each waits for those before"


def test_of_a_large_pool_a_part_is_played_with_as_many_sessions_for_each_worker() -> None:
    turns = [past(session, number, family=session) for number in range(10) for session in range(8 * WORKERS_PLAYED)]

    part, all_of_them = totals(turns, None, 4 * WORKERS_PLAYED), totals(turns, None, WORKERS_PLAYED)
    assert part.turns == pytest.approx(all_of_them.turns / 4, rel=0.05)
    assert totals([past(0, 0, model="another")], None).turns == 0


def test_the_latest_turns_are_played() -> None:
    turns = [past(0, number, 1) for number in range(TURNS_PLAYED + 100)]
    replay = TurnReplay(turns, {A: SIZE}, None)

    assert len(replay._turns) == TURNS_PLAYED
    assert replay._turns[-1] is turns[-1]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400), st.booleans()), max_size=40))
def test_a_worker_holds_what_was_used_last_and_never_more_than_its_cache(given_turns: list[tuple[int, int, bool]]) -> None:
    worker = CacheModel(A, SIZE)
    order: list[tuple[int, int]] = []
    """A naive cache: sessions and blocks, the latest at the end."""
    for session, blocks, shares in given_turns:
        prefix, common = (7, 50) if shares else (0, 0)
        name = (0, f"{session} {shares}")
        turn = PastTurn(name, None, "m", 0, blocks + common, common, prefix, 0, 0.0, 0.0, 1.0, 2.0, blocks + common)
        assert worker.fits(turn)
        assert worker.held(turn) <= turn.blocks
        worker.begin(turn)
        worker.end(turn)
        assert worker.held(turn) == turn.blocks, "it was used last"
        held = worker._idle
        assert sum(held.values()) == worker._used <= SIZE.capacity
        order = [each for each in order if each[0] != (session, shares)]  # type: ignore[comparison-overlap]
        order.append(((session, shares), blocks))  # type: ignore[arg-type]
        assert next(reversed(held)) in (name, 7)
    assert not worker._running


def test_logs_of_two_routers_are_equal_when_both_have_read_the_same() -> None:
    pool = Pool()
    logs = [TurnLog(state.sessions.working_set) for state in pool.routers]
    for state, log in zip(pool.routers, logs, strict=True):
        state.projection.attach(log)
    for number in range(6):
        assert pool.ask(number % 2, number % 3, 20 + number, waited_ms=3.0 * number)
        [request_id] = pool.open
        pool.say(pool.open[request_id][1], PrefillCompleted(request_id))
        pool.now_ms += 5.0
        pool.end(request_id)
        pool.settle()

    one, other = (log.since(0.0) for log in logs)
    assert len(one) == 6

    def told(turn: PastTurn) -> tuple[object, ...]:
        return (turn.session, turn.parent, turn.blocks, turn.common, turn.asked_ms, turn.family, turn.end_blocks)

    # A router learns of turns of others, and of first tokens, with the next records.
    assert {turn.session for turn in one} == {(0, "s0"), (0, "s1"), (0, "s2")}
    assert [told(turn)[:4] for turn in one] == [told(turn)[:4] for turn in other]
    assert all(abs(a.asked_ms - b.asked_ms) <= 5.0 for a, b in zip(one, other, strict=True))


def finding(gain: float) -> ReviewFinding:
    return ReviewFinding(0.0, ReplayTotals(100, 1000.0), ReplayTotals(100, 1000.0 * (1.0 - gain)))


def test_admission_rests_after_reviews_without_gain_and_works_after_some_with() -> None:
    review = AdmissionReview(WorkingSet())
    assert not review.rests, "until something is known"

    between = (REST_BELOW + WORK_FROM) / 2
    for gain in (0.0, between, 0.0):
        review._decide(finding(gain))
        assert not review.rests, "a single review may be chance"
    for _ in range(REVIEWS - 1):
        review._decide(finding(0.0))
    assert review.rests

    for gain in (WORK_FROM, between, WORK_FROM):
        review._decide(finding(gain))
        assert review.rests
    review._decide(finding(WORK_FROM))
    assert not review.rests


def test_a_review_needs_turns_and_says_what_it_found() -> None:
    review = AdmissionReview(WorkingSet())
    card = WorkerCard("m", Role.AGGREGATED, 16, WorkerLimits(64, 1024, 1000, 100_000), "inproc://a")
    turns = agents(10)
    review.log._past.extend(turns[:20])
    list(review.review({A: card}, 200_000.0))
    assert review.row(200_000.0).gain is None
    assert "not reviewed yet" in review.row(200_000.0).reason

    review.log._past.extend(turns[20:])
    review.log.places.know(A, 1000, 10_000)
    list(review.review({A: card}, 200_000.0))
    row = review.row(201_000.0)
    assert (row.state, row.reviewed_ms_ago) == ("works", 1000)
    assert row.gain is not None
    assert row.gain > WORK_FROM
    assert row.without_ttft_ms is not None
    assert row.ttft_ms is not None
    assert row.gain == 1 - row.ttft_ms / row.without_ttft_ms
    assert f"{row.computed_tokens:,} and {row.without_computed_tokens:,}" in row.reason
