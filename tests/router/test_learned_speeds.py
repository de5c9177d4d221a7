"""A worker's pace follows from its first tokens, and a worker that stays silent looks slow."""

from __future__ import annotations

import msgspec
import pytest

from poolgrid.kernel.routing import learned_speeds as paces_module
from poolgrid.kernel.routing.learned_speeds import CERTAIN, INFLUENCE_MAX, LearnedSpeeds
from poolgrid.kernel.wire.identifiers import WorkerKey
from tests.router.fleet_builder import worker_key

A, B, C = (worker_key(name) for name in "abc")


def pace(paces: LearnedSpeeds, worker: object, now_ms: float) -> float:
    [(found, *_)] = paces.believed([worker], now_ms)  # type: ignore[list-item]
    return found


def serve(
    paces: LearnedSpeeds, worker: WorkerKey, slowness: float, start_ms: float, requests: int, gap_ms: float
) -> float:
    """Requests of 200 ms, one after the other; return the time after the last."""
    now_ms = start_ms
    for number in range(requests):
        request_id = f"{worker}-{start_ms}-{number}"
        paces.expect(worker, request_id, 200.0, 200.0, 1.0, now_ms)
        paces.on_first_token(worker, request_id, now_ms + 200.0 * slowness)
        now_ms += gap_ms
    return now_ms


def test_a_slow_worker_is_known_after_two_minutes_of_traffic_beside_fast_ones() -> None:
    paces = LearnedSpeeds()
    for tick in range(40):
        serve(paces, A, 1.0, 3000.0 * tick, 1, 0.0)
        if tick % 2 == 0:
            serve(paces, B, 3.0, 3000.0 * tick, 1, 0.0)

    assert pace(paces, A, 120_000.0) == pytest.approx(1.0, rel=0.1)
    assert pace(paces, B, 120_000.0) > 2.0


def test_a_pace_follows_when_a_worker_slows_down_and_recovers() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 60, 1000.0)
    now_ms = serve(paces, A, 4.0, now_ms, 30, 1000.0)
    assert pace(paces, A, now_ms) == pytest.approx(4.0, rel=0.2)
    now_ms = serve(paces, A, 1.0, now_ms, 60, 1000.0)
    assert pace(paces, A, now_ms) == pytest.approx(1.0, rel=0.2)


def test_a_worker_that_does_not_answer_looks_slower_the_longer_it_is_silent() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 20, 1000.0)
    paces.expect(A, "silent", 200.0, 200.0, 1.0, now_ms)

    assert pace(paces, A, now_ms + 600.0) < 1.1
    assert pace(paces, A, now_ms + 4500.0) == pytest.approx(10.0)
    paces.on_released(A, "silent", None)
    assert pace(paces, A, now_ms + 2050.0) < 1.1, "nobody had said how late it was"


def test_what_was_given_up_after_a_long_wait_is_remembered() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 20, 1000.0)
    paces.expect(A, "silent", 200.0, 200.0, 1.0, now_ms)
    serve(paces, B, 1.0, now_ms + 9_000.0, 1, 0.0)
    paces.on_released(A, "silent", None)

    assert pace(paces, A, now_ms + 9_000.0) >= CERTAIN * 0.99


def idle_pace(paces: LearnedSpeeds, worker: WorkerKey, now_ms: float) -> float:
    [(*_, found)] = paces.believed([worker], now_ms)
    return found


def test_first_tokens_of_an_overload_do_not_slow_the_idle_worker() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 10, 1000.0)
    for number in range(30):
        paces.expect(A, f"queued-{number}", 400.0, 200.0, 1.0, now_ms)
        now_ms += 4_000.0
        paces.on_first_token(A, f"queued-{number}", now_ms)

    assert pace(paces, A, now_ms) > 5.0
    assert idle_pace(paces, A, now_ms) == pytest.approx(1.0, rel=0.01)


def test_idle_worker_that_is_slow_is_known_as_slow() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, B, 1.0, 0.0, 20, 1000.0)
    serve(paces, A, 4.0, 0.0, 20, 1000.0)

    assert idle_pace(paces, A, now_ms) > 2.5
    assert idle_pace(paces, B, now_ms) < 1.2


def test_overdue_first_token_counts_for_the_idle_pace_until_it_arrives() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 20, 1000.0)
    paces.expect(A, "silent", 200.0, 200.0, 1.0, now_ms)

    assert idle_pace(paces, A, now_ms + 4_500.0) == pytest.approx(10.0)


def test_the_work_that_the_engine_has_done_already_shortens_its_queue() -> None:
    paces = LearnedSpeeds()
    paces.expect(A, "first", 400.0, 400.0, 1.0, 0.0)
    paces.expect(A, "second", 700.0, 300.0, 1.0, 10.0)

    assert paces.believed([A], 100.0)[0][1] == 100.0
    assert paces.believed([A], 440.0)[0][1] == 400.0, "no more than there was"
    paces.on_first_token(A, "first", 400.0)
    assert paces.believed([A], 500.0)[0][1] == pytest.approx(100.0, rel=0.01)


def test_the_rate_of_requests_and_what_a_prompt_takes_are_averages() -> None:
    paces = LearnedSpeeds()
    assert paces.arrivals(0.0) == (0.0, 0.0)
    now_ms = serve(paces, A, 1.0, 0.0, 300, 1000.0)

    rate, typical_ms = paces.arrivals(now_ms)
    assert rate == pytest.approx(0.001, rel=0.1)
    assert typical_ms == pytest.approx(200.0)


def test_only_so_many_are_awaited_and_a_forgotten_worker_frees_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces_module, "AWAITED_MAX", 2)
    paces = LearnedSpeeds()
    for number in range(3):
        paces.expect(A, f"r{number}", 100.0, 100.0, 1.0, 0.0)
    [_, known] = paces.checkpoint().workers
    assert [dispatch_id for dispatch_id, _ in known.awaited] == ["r0", "r1"]

    paces.on_left(A)
    paces.expect(B, "r3", 100.0, 100.0, 1.0, 0.0)
    [_, known] = paces.checkpoint().workers
    assert [dispatch_id for dispatch_id, _ in known.awaited] == ["r3"]


def test_what_was_expected_is_told_with_what_it_was() -> None:
    paces = LearnedSpeeds()
    told: list[tuple[str, float, float]] = []
    paces.report_ttft = lambda *each: told.append(each)
    paces.expect(A, "r", 100.0, 80.0, 1.5, 1000.0)

    paces.on_first_token(A, "another", 1_050.0)
    paces.on_first_token(A, "r", 1_180.0)

    assert told == [("r", 150.0, 180.0)]


def test_a_restored_state_believes_the_same_to_the_bit() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 2.7, 0.0, 20, 777.7)
    serve(paces, B, 0.9, 500.0, 7, 1234.5)
    paces.expect(A, "open", 123.4, 100.0, 1.1, now_ms)
    again = LearnedSpeeds()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(paces.checkpoint())))

    for later_ms in (0.0, 99.9, 5_000.0):
        assert again.believed([A, B, C], now_ms + later_ms) == paces.believed([A, B, C], now_ms + later_ms)
    for each in (paces, again):
        each.on_first_token(A, "open", now_ms + 400.0)
    assert again.checkpoint() == paces.checkpoint()
    assert again.arrivals(now_ms) == paces.arrivals(now_ms)


@pytest.mark.parametrize(("took_ms", "factor"), [(60_000.0, INFLUENCE_MAX), (0.0, 1 / INFLUENCE_MAX)])
def test_one_first_token_however_late_or_early_changes_a_pace_by_a_bounded_factor(
    took_ms: float, factor: float
) -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 20, 1000.0)
    before = pace(paces, A, now_ms)
    paces.expect(A, "odd", 20_000.0, 200.0, 1.0, now_ms - took_ms)
    paces.on_first_token(A, "odd", now_ms)

    assert min(before, before * factor) * 0.99 <= pace(paces, A, now_ms) <= max(before, before * factor) * 1.01
    assert pace(paces, A, now_ms) != before


def test_a_first_token_without_a_time_teaches_nothing_and_is_awaited_no_more() -> None:
    paces = LearnedSpeeds()
    now_ms = serve(paces, A, 1.0, 0.0, 20, 1000.0)
    before = pace(paces, A, now_ms)
    paces.expect(A, "behind", 200.0, 200.0, 1.0, now_ms - 60_000.0)
    paces.on_untimed_token(A, "behind")

    assert pace(paces, A, now_ms) == before
    assert [each.awaited for each in paces.checkpoint().workers] == [[], []]
