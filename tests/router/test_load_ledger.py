"""Reservations: they count from the choice on, and end by the worker's word, a release, or their lease."""

from __future__ import annotations

from poolgrid.router.core.load_ledger import LoadLedger
from tests.router.fleet_builder import worker_key

W = worker_key("w")


def ledger_with(*leases_ms: float) -> LoadLedger:
    ledger = LoadLedger(reservation_ttl_ms=1000)
    for number, lease_ms in enumerate(leases_ms):
        ledger.reserve(W, 0, f"r{number}", 100, 4, now_ms=0, lease_ms=lease_ms)
    return ledger


def left(ledger: LoadLedger) -> list[str]:
    return [request_id for _, request_id in ledger.entries()]


def test_each_reservation_has_its_own_lease_and_none_is_longer_than_the_configured_one() -> None:
    ledger = ledger_with(0, 300, 5000)

    ledger.expire(299)
    assert left(ledger) == ["r0", "r1", "r2"]
    ledger.expire(300)
    assert left(ledger) == ["r0", "r2"]
    ledger.expire(1000)
    assert left(ledger) == []
    assert (ledger.requests[0], ledger.prefill_tokens[0], ledger.expired_reservations) == (0, 0, 3)


def test_a_renewed_reservation_begins_anew() -> None:
    ledger = ledger_with(300)

    assert ledger.renew(W, "r0", now_ms=200)
    ledger.expire(1199)
    assert left(ledger) == ["r0"]
    ledger.expire(1200)
    assert left(ledger) == []
    assert not ledger.renew(W, "r0", now_ms=1200)


def test_a_worker_that_has_started_a_request_needs_no_renewal() -> None:
    ledger = ledger_with(300)
    ledger.started(W, 0, "r0", 80, 5, now_ms=100)

    assert not ledger.renew(W, "r0", now_ms=200)
    ledger.expire(10_000)
    assert left(ledger) == ["r0"]


def test_what_somebody_holds_does_not_expire() -> None:
    ledger = ledger_with(0, 0)

    ledger.expire(1000, held={"r1"})
    assert left(ledger) == ["r1"]
    ledger.expire(1999)
    assert left(ledger) == ["r1"]
    ledger.expire(2000)
    assert left(ledger) == []


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
