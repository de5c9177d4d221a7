"""The breaker as a dialogue, and against its rules."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from poolgrid.kernel.pool_grids.circuit_breaker import BreakerState, BreakerStep, CircuitBreaker, Ticket
from poolgrid.kernel.pool_grids.grid_document import CircuitBreakerSettings
from tests.examples import examples


def state(breaker: CircuitBreaker) -> str:
    return breaker.state.value


SETTINGS = CircuitBreakerSettings(
    failures_to_open=3,
    failure_share=0.5,
    window_ms=1000,
    open_ms=100,
    open_max_ms=350,
    probes=2,
    probe_timeout_ms=50,
    successes_to_close=2,
)


def admitted(breaker: CircuitBreaker, now_ms: float) -> Ticket:
    ticket, _ = breaker.admit(now_ms)
    assert ticket is not None
    return ticket


def opened(now_ms: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(SETTINGS)
    for _ in range(3):
        breaker.failed(admitted(breaker, now_ms), now_ms)
    assert state(breaker) == "open"
    return breaker


def test_enough_failures_open_it_and_the_step_says_so() -> None:
    breaker = CircuitBreaker(SETTINGS)

    assert breaker.failed(admitted(breaker, 1), 1) == []
    assert breaker.failed(admitted(breaker, 2), 2) == []
    steps = breaker.failed(admitted(breaker, 3), 3)

    assert steps == [BreakerStep(3, BreakerState.CLOSED, BreakerState.OPEN, "3 of 3 requests failed in 1000 ms")]
    assert breaker.admit(4) == (None, [])
    assert breaker.retry_after_ms(53) == 50


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_the_limit() -> None:
    breaker = opened()
    now = 100.0
    for expected_ms in (200, 350, 350):
        breaker.failed(admitted(breaker, now), now)
        assert breaker.retry_after_ms(now) == expected_ms
        now += expected_ms


def test_results_from_before_the_opening_change_nothing() -> None:
    breaker = CircuitBreaker(SETTINGS)
    old = [admitted(breaker, 0) for _ in range(6)]
    for ticket in old[:3]:
        breaker.failed(ticket, 0)
    breaker.advance(100)

    breaker.failed(old[3], 100)
    breaker.succeeded(old[4], 100)
    breaker.succeeded(old[5], 100)

    assert state(breaker) == "half-open"


def closed_again(breaker: CircuitBreaker, now_ms: float) -> CircuitBreaker:
    for _ in range(SETTINGS.successes_to_close):
        breaker.succeeded(admitted(breaker, now_ms), now_ms)
    assert state(breaker) == "closed"
    return breaker


def test_late_failures_open_neither_a_half_open_nor_a_closed_breaker() -> None:
    breaker = CircuitBreaker(SETTINGS)
    old = [admitted(breaker, 0) for _ in range(9)]
    for ticket in old[:3]:
        breaker.failed(ticket, 0)
    breaker.advance(100)

    for ticket in old[3:6]:
        assert breaker.failed(ticket, 100) == []
    closed_again(breaker, 100)
    for ticket in old[6:]:
        assert breaker.failed(ticket, 101) == []

    assert state(breaker) == "closed"


OTHER = SETTINGS.model_copy(update={"failures_to_open": 2, "open_max_ms": 200, "window_ms": 500})


def test_a_result_of_before_other_settings_came_counts_once_and_under_them() -> None:
    breaker = CircuitBreaker(SETTINGS)
    before, other = admitted(breaker, 0), admitted(breaker, 0)
    breaker.failed(before, 1)

    breaker.use(OTHER)
    steps = breaker.failed(other, 2)

    assert [step.reason for step in steps] == ["2 of 2 requests failed in 500 ms"]


class BreakerRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(SETTINGS)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.probes: set[int] = set()
        self.state = BreakerState.CLOSED

    def follow(self, steps: list[BreakerStep]) -> None:
        allowed = {("closed", "open"), ("open", "half-open"), ("half-open", "open"), ("half-open", "closed")}
        for step in steps:
            assert step.before is self.state
            assert (step.before.value, step.after.value) in allowed
            self.state = step.after
            self.probes.clear()

    @rule(ms=st.sampled_from([0, 1, 10, 49, 50, 100, 200, 350, 1000]))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule()
    def admit(self) -> None:
        expected = self.breaker.would_admit(self.now)
        ticket, steps = self.breaker.admit(self.now)
        assert (ticket is not None) == expected
        self.follow(steps)
        if ticket is not None:
            assert ticket.probe == (self.state is BreakerState.HALF_OPEN)
            self.tickets.append(ticket)
            if ticket.probe:
                self.probes.add(ticket.number)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "failed", "abandoned"]), again=st.booleans())
    def finish(self, data: st.DataObject, outcome: str, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.tickets) - 1))
        ticket = self.tickets[index] if again else self.tickets.pop(index)
        self.follow(getattr(self.breaker, outcome)(ticket, self.now))
        self.probes.discard(ticket.number)

    @invariant()
    def steps_tell_the_whole_story(self) -> None:
        assert self.breaker.state is self.state
        assert len(self.probes) <= SETTINGS.probes
        assert 0 <= self.breaker.retry_after_ms(self.now) <= SETTINGS.open_max_ms

    @invariant()
    def it_never_stays_shut_for_good(self) -> None:
        assert self.breaker.would_admit(self.now + SETTINGS.open_max_ms) or self.state is BreakerState.HALF_OPEN


TestBreakerRules = BreakerRules.TestCase
TestBreakerRules.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("later", [0.0, -50.0])
def test_a_clock_that_goes_backwards_is_taken_as_standing_still(later: float) -> None:
    breaker = opened(1000)

    assert breaker.admit(later) == (None, [])
    assert breaker.retry_after_ms(later) == 100
