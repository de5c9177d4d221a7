"""The last minutes are replayed with admission and without it, and admission rests where it shortens no times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from poolgrid.kernel.routing.working_set import WorkingSet
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import PrefillCompleted
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.server.router.admission_review import (
    REST_AFTER,
    REST_BELOW,
    WORK_AFTER,
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
SIZE = EngineSize("m", 1000, 5.0, 16)
"""A worker that computes its whole cache in 5 s."""


def past(session: int, asked_ms: float, blocks: int, model: str = "m", family: int = 0) -> PastTurn:
    """Return a turn of half a second."""
    first_ms, name = asked_ms + 50.0, (0, f"s{session}")
    return PastTurn(
        name, None, model, 0, blocks, 0, 0, blocks, family, asked_ms, asked_ms, first_ms, first_ms + 500.0, blocks + 3
    )


def agents(sessions: int) -> list[PastTurn]:
    """Return the turns of agents that begin one after the other; each tenth pause is one of ten seconds."""
    turns: list[PastTurn] = []
    for session in range(sessions):
        asked_ms = 5000.0 * session
        for number in range(40):
            turns.append(past(session, asked_ms, 150 + 3 * number))
            asked_ms = turns[-1].ended_ms + (10_000.0 if number % 10 == 9 else 300.0)
    return sorted(turns, key=lambda each: each.ended_ms)


def totals(turns: list[PastTurn], places: WorkingSet | None, workers: int = 1) -> ReplayTotals:
    sizes = {WorkerKey(WorkerId(f"{number:03}")): SIZE for number in range(workers)}
    replay = TurnReplay(turns, sizes, places)
    for _ in replay.play():
        pass
    return replay.totals


def test_agents_that_evict_each_other_gain_and_those_that_fit_do_not() -> None:
    many, few = agents(8), agents(3)

    without, admitted = totals(many, None), totals(many, WorkingSet())
    assert admitted.computed_tokens < 0.5 * without.computed_tokens
    assert admitted.ttft_ms < 0.8 * without.ttft_ms
    assert admitted.waited > 0
    assert without.waited == 0
    assert totals(few, None) == totals(few, WorkingSet())


def test_turns_that_come_later_wait_for_the_answer_before() -> None:
    follow = [past(0, 1000.0 * number, 900) for number in range(10)]
    at_once = [past(number // 2, 0.1 * number, 900) for number in range(10)]

    assert totals(follow, None).ttft_ms < 100, "each has the cache of the one before"
    assert totals(at_once, None).ttft_ms > 10_000, "each waits for those before"


def test_of_a_large_pool_a_part_is_played_with_as_many_sessions_for_each_worker() -> None:
    turns = [
        past(session, 1000.0 * number, 100, family=session)
        for number in range(10)
        for session in range(8 * WORKERS_PLAYED)
    ]

    part, all_of_them = totals(turns, None, 4 * WORKERS_PLAYED), totals(turns, None, WORKERS_PLAYED)
    assert part.turns == pytest.approx(all_of_them.turns / 4, rel=0.05)
    assert totals([past(0, 0.0, 100, model="another")], None).turns == 0


def test_the_latest_turns_are_played() -> None:
    turns = [past(0, 1000.0 * number, 1) for number in range(TURNS_PLAYED + 100)]
    replay = TurnReplay(turns, {A: SIZE}, None)
    list(replay.play())

    assert len(replay._turns) == TURNS_PLAYED
    assert replay._turns[-1] is turns[-1]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 400), st.booleans()), max_size=40))
def test_a_worker_holds_what_was_used_last_and_never_more_than_its_cache(
    given_turns: list[tuple[int, int, bool]],
) -> None:
    worker, naive = CacheModel(A, SIZE), list[tuple[object, int]]()
    """The naive cache has keys and blocks, the latest at the end."""
    for session, blocks, shares in given_turns:
        name, prefix, common = (0, f"{session} {shares}"), 7 if shares else 0, 50 if shares else 0
        end = common + blocks
        turn = PastTurn(name, None, "m", 0, end, common, prefix, 0, 0, 0.0, 0.0, 1.0, 2.0, end)
        had = dict(naive)
        shared = min(common, had.get(prefix, 0))
        assert worker.held(turn) == (shared if shared < common else min(end, common + had.get(name, 0)))
        worker.begin(turn)
        worker.end(turn)
        used: dict[object, int] = {name: max(blocks, had.get(name, 0))}
        if shares:
            used[prefix] = common
        naive = [each for each in naive if each[0] not in used] + list(used.items())
        while (over := sum(size for _, size in naive) - SIZE.capacity) > 0:
            key, size = naive.pop(0)
            if size > over:
                naive.insert(0, (key, size - over))
        assert list(worker._idle.items()) == naive


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

    assert {turn.session for turn in one} == {(0, "s0"), (0, "s1"), (0, "s2")}
    for mine, yours in zip(one, other, strict=True):
        assert abs(mine.sent_ms - yours.sent_ms) <= 5.0, "a router reads of turns of others"
        yours.sent_ms, yours.asked_ms = mine.sent_ms, mine.asked_ms
        assert structs.astuple(mine) == structs.astuple(yours)


def finding(gain: float) -> ReviewFinding:
    return ReviewFinding(0.0, ReplayTotals(100, 1000.0), ReplayTotals(100, 1000.0 * (1.0 - gain)))


def test_admission_rests_after_reviews_without_gain_and_works_after_some_with() -> None:
    review = AdmissionReview(WorkingSet())
    assert not review.rests, "until something is known"

    little, much, between = REST_BELOW - 0.01, WORK_FROM + 0.01, (REST_BELOW + WORK_FROM) / 2
    for gain in (*[little] * (REST_AFTER - 1), between, *[little] * (REST_AFTER - 1)):
        review._decide(finding(gain))
        assert not review.rests, "a few reviews may be chance"
    review._decide(finding(little))
    assert review.rests

    for gain in (*[much] * (WORK_AFTER - 1), between, *[much] * (WORK_AFTER - 1)):
        review._decide(finding(gain))
        assert review.rests
    review._decide(finding(much))
    assert not review.rests


def test_a_review_needs_turns_and_says_what_it_found() -> None:
    review = AdmissionReview(WorkingSet())
    card = WorkerCard("m", Role.AGGREGATED, 16, WorkerLimits(64, 1024, 1000, 100_000), "inproc://a")
    turns = agents(8)
    review.log._past.extend(turns[:20])
    list(review.review({A: card}, 200_000.0))
    assert review.row(200_000.0).gain is None
    assert "not reviewed yet" in review.row(200_000.0).reason

    review.log._past.extend(turns[20:])
    review.log.places.know(A, 1000, 5_000)
    list(review.review({A: card}, 200_000.0))
    row = review.row(201_000.0)
    assert (row.state, row.reviewed_ms_ago) == ("works", 1000)
    assert row.gain is not None
    assert row.gain > WORK_FROM
    assert row.without_ttft_ms is not None
    assert row.ttft_ms is not None
    assert row.gain == 1 - row.ttft_ms / row.without_ttft_ms
    assert f"{row.computed_tokens:,} and {row.without_computed_tokens:,}" in row.reason
