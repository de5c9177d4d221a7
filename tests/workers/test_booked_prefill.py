"""The books of a worker that several routers send requests to."""

from __future__ import annotations

from poolgrid.wire.events import PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.workers.core.booked_prefill import CROWDING_TOLERANCE_TOKENS, BookedPrefill


def test_a_request_counts_from_its_acceptance_until_its_prompt_is_computed() -> None:
    books = BookedPrefill()
    books.accept("a", 5000)
    books.accept("b", 100)
    assert books.total == 5100
    books.observe([RequestStarted("a", 6000, 2000, 10)])
    assert books.total == 4100, "the engine knows how much is really cached"
    books.observe([PrefillCompleted("a"), RequestFinished("a", "stop")])
    assert books.total == 100
    books.observe([RequestFinished("b", "cancelled")])
    assert books.total == 0


def test_what_was_never_accepted_or_has_nothing_to_compute_counts_nothing() -> None:
    books = BookedPrefill()
    books.accept("cached", 0)
    books.observe([RequestStarted("stranger", 6000, 0, 10)])
    books.remove("stranger")
    assert books.total == 0


def test_a_router_that_is_far_from_the_truth_is_told_it_and_one_that_states_no_belief_is_not() -> None:
    books = BookedPrefill()
    books.accept("a", CROWDING_TOLERANCE_TOKENS + 1)
    assert books.crowding(0) == CROWDING_TOLERANCE_TOKENS + 1
    assert books.crowding(1) is None
    assert books.crowding(None) is None
    assert books.crowding(10**9) is None
