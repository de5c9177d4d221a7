"""Reservations: they count from the choice on, and end by the worker's word, a release, or their lease."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.projection.load_ledger import FOREIGN_MAX, FOREIGN_TOKENS, LATE_STARTS_MAX, LoadEntry, LoadLedger
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.wire.events import LoadReported
from poolgrid.kernel.wire.feed import WorkerState
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, load_snapshot, make_card, worker_key

W = worker_key("w")


def ledger_with(*leases_ms: float) -> LoadLedger:
    ledger = LoadLedger(reservation_ttl_ms=1000)
    for number, lease_ms in enumerate(leases_ms):
        ledger.reserve(W, 0, f"r{number}", 100, 4, now_ms=0, lease_ms=lease_ms)
    return ledger


def left(ledger: LoadLedger) -> list[str]:
    return [request_id for _, request_id in ledger.entries()]


def test_a_workers_word_about_what_others_sent_it_counts_for_a_moment() -> None:
    ledger = ledger_with(0)
    ledger.crowded(W, 0, "d", booked_tokens=900, now_ms=0)
    assert int(ledger.prefill_tokens[0]) == 900
    ledger.crowded(W, 0, "e", booked_tokens=500, now_ms=0)
    assert int(ledger.prefill_tokens[0]) == 900, "more is known than the worker has booked"
    ledger.expire(50)
    assert left(ledger) == ["r0"]
    assert int(ledger.prefill_tokens[0]) == 100


def test_a_word_for_others_that_runs_out_is_no_missing_event() -> None:
    ledger = ledger_with(0)

    ledger.crowded(W, 0, "d", booked_tokens=900, now_ms=0)
    ledger.expire(999)
    assert left(ledger) == ["r0"]
    assert ledger.expired_reservations == 0
    ledger.expire(1000)
    assert ledger.expired_reservations == 1


def test_the_share_of_others_is_that_of_requests_which_were_not_reserved_here() -> None:
    ledger = ledger_with()

    def begin(number: int, others: bool) -> None:
        if not others:
            ledger.reserve(W, 0, f"r{number}", 10, 1, 0.0)
        ledger.started(W, 0, f"r{number}", 10, 1, 0.0)

    begin(0, others=True)
    assert ledger.others_share < 0.05, "one may be a request whose client left"
    for number in range(1, 200):
        begin(number, others=number % 2 == 0)
    assert 0.4 < ledger.others_share < 0.6
    for number in range(200, 400):
        begin(number, others=False)
    assert ledger.others_share < 0.02


def test_a_start_that_is_told_after_the_release_is_of_no_other_router() -> None:
    ledger = ledger_with()
    for number in range(100):
        name = f"r{number}"
        ledger.reserve(W, 0, name, 10, 1, 0.0)
        assert ledger.finished(W, name, is_released=True) == 1, "block"
        ledger.started(W, 0, name, 10, 1, 0.0)
        assert not len(ledger), "the request is over for its router"
        assert ledger.finished(W, name) is None
    assert ledger.others_share == 0
    assert not ledger.late_starts

    ledger.started(W, 0, "r0", 10, 1, 0.0)
    assert left(ledger) == ["r0"], "one start was late, a second is of somebody else"


def test_late_starts_are_as_few_as_there_may_be() -> None:
    ledger = ledger_with()
    for number in range(LATE_STARTS_MAX + 1):
        ledger.reserve(W, 0, f"r{number}", 10, 1, 0.0)
        ledger.finished(W, f"r{number}", is_released=True)
    assert len(ledger.late_starts) == LATE_STARTS_MAX
    ledger.started(W, 0, "r0", 10, 1, 0.0)
    assert left(ledger) == ["r0"], "the oldest is forgotten"

    ledger.reserve(W, 0, "confirmed", 10, 1, 0.0)
    ledger.started(W, 0, "confirmed", 10, 1, 0.0)
    ledger.finished(W, "confirmed", is_released=True)
    assert (W, "confirmed") not in ledger.late_starts, "its start is here"


def test_leases_of_requests_that_are_over_take_no_memory_until_they_would_have_ended() -> None:
    ledger = LoadLedger(reservation_ttl_ms=30_000)

    def serve(first: int, requests: int) -> None:
        for number in range(first, first + requests):
            now_ms = float(number)
            ledger.reserve(W, 0, f"request-{number}", 64, 4, now_ms)
            ledger.started(W, 0, f"request-{number}", 64, 4, now_ms)
            ledger.finished(W, f"request-{number}")

    serve(0, 100)
    tracemalloc.start()
    try:
        serve(100, 5000)
        grown = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*load_ledger.py")]).traces
    finally:
        tracemalloc.stop()
    assert (grown_bytes := sum(each.size for each in grown)) < 20_000, f"{grown_bytes} bytes stayed of 5,000 requests"


@dataclass
class Known:
    """What a ledger should know of a request, in the plainest form."""

    confirmed: bool
    due_ms: float


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("reserve", "renew", "start", "finish", "wait", "expire")),
        st.integers(0, 4),
        st.sampled_from((0, 10, 300, 999, 5000)),
    ),
    max_size=60,
)


@given(STEPS, st.sets(st.integers(0, 4)))
def test_expiry_is_that_of_a_ledger_that_looks_at_every_entry(
    steps: list[tuple[str, int, int]], held: set[int]
) -> None:
    ledger = LoadLedger(reservation_ttl_ms=1000)
    model: dict[str, Known] = {}
    now_ms = 0.0
    for what, number, ms in steps:
        name = f"r{number}"
        known = model.get(name)
        if what == "reserve":
            ledger.reserve(W, 0, name, 100, 4, now_ms, ms)
            model[name] = Known(False, now_ms + (min(ms, 1000) or 1000))
        elif what == "renew":
            waits = known is not None and not known.confirmed
            assert ledger.renew(W, name, now_ms) == waits
            if known is not None and waits:
                known.due_ms = now_ms + 1000
        elif what == "start":
            ledger.started(W, 0, name, 100, 4, now_ms)
            model[name] = Known(True, now_ms)
        elif what == "finish":
            assert (ledger.finished(W, name) is None) == (model.pop(name, None) is None)
        elif what == "wait":
            now_ms += ms
        else:
            due = {each for each, known in model.items() if not known.confirmed and known.due_ms <= now_ms}
            kept = {each for each in due if int(each[1:]) in held}
            expired, renewed = ledger.expire(now_ms, {f"r{each}" for each in held})
            assert (expired, set(renewed)) == (len(due - kept), kept)
            for each in kept:
                model[each].due_ms = now_ms + 1000
            for each in due - kept:
                del model[each]
        assert set(left(ledger)) == set(model)
        assert int(ledger.requests[0]) == len(model)


def sums(ledger: LoadLedger, slot: int = 0) -> tuple[int, int, int]:
    return int(ledger.requests[slot]), int(ledger.prefill_tokens[slot]), int(ledger.active_blocks[slot])


def test_requests_that_pass_all_routers_count_as_usual_ones_that_run_until_fewer_are_reported() -> None:
    ledger = ledger_with(0)
    own = sums(ledger)
    blocks = FOREIGN_TOKENS // 16
    for reported in (3, 5, 2):
        ledger.foreign(W, 0, reported, 16, now_ms=0)
        assert sums(ledger) == (own[0] + reported, own[1], own[2] + reported * blocks)
    ledger.expire(10_000)
    assert sums(ledger) == (2, 0, 2 * blocks), "no lease ends them"
    ledger.foreign(W, 0, 0, 16, now_ms=0)
    assert (sums(ledger), left(ledger)) == ((0, 0, 0), [])


def test_a_worker_that_leaves_or_moves_takes_them_with_it_and_another_ledger_goes_on_from_them() -> None:
    ledger = LoadLedger()
    ledger.foreign(W, 0, 2, 16, now_ms=0)
    ledger.move(W, 1)
    assert (sums(ledger), sums(ledger, 1)[0]) == ((0, 0, 0), 2)
    other = LoadLedger()
    other.restore(
        (worker, request_id, LoadEntry(0, each.prefill_tokens, each.active_blocks, each.confirmed, each.due_ms))
        for (worker, request_id), each in ledger.entries().items()
    )
    other.foreign(W, 0, 1, 16, now_ms=0)
    assert sums(other)[0] == 1
    ledger.drop(W)
    assert sums(ledger, 1) == (0, 0, 0)
    ledger.foreign(W, 0, 1, 16, now_ms=0)
    assert sums(ledger)[0] == 1


def test_no_number_of_them_fills_the_ledger() -> None:
    ledger = LoadLedger()
    ledger.foreign(W, 0, 2**32 - 1, 16, now_ms=0)
    assert sums(ledger)[0] == len(ledger) == FOREIGN_MAX


def test_a_worker_that_others_load_is_chosen_less_and_a_router_that_attaches_later_knows_it() -> None:
    busy = LoadReported(0, 0, 0, 0, 0, 100, foreign_requests=40)
    pool, late = Pool(), Pool()
    a, b = pool.join("a", "b")
    pool.say(a, busy)
    states = [WorkerState(name, 0, 1, 0, make_card(), False, [], load) for name, load in (("a", busy), ("b", None))]
    load_snapshot(late.projection, 0, states, [], 0.0)
    for projection in (pool.projection, late.projection):
        slots = [projection.index.slot(key) for key in (a, b)]
        assert [int(projection.ledger.requests[slot]) for slot in slots] == [40, 0]
    for each in (pool, late):
        for number in range(8):
            wanted = WorkerWanted(RoutingRequest(f"r{number}", "m", 64, BLOCK_SIZE, 4), [1, 2, 3, 4], 0.0, 0)
            assert decided(each.selector(KvAware()).select(wanted)).worker == b
    pool.say(a, LoadReported(0, 0, 0, 0, 0, 100))
    assert int(pool.projection.ledger.requests[pool.projection.index.slot(a)]) == 0
