"""Time awake: what a process does not live through it does not hold against anybody."""

from __future__ import annotations

import asyncio
import select
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.process.clock import AwakeClock, AwakeTime, SystemClock, within
from tests.clock import HandClock

GAP_MS = 100.0

passed_ms = st.floats(0.0, 60_000.0)


@given(st.lists(st.tuples(passed_ms, st.booleans())))
def test_time_awake_never_goes_back_and_never_runs_ahead(gaps: list[tuple[float, bool]]) -> None:
    now = awake = beat = 5_000.0
    time_awake = AwakeTime(GAP_MS, now)
    for gap, beats in gaps:
        now += gap
        if beats:
            time_awake.beat(now)
            beat = now
        read = time_awake.at(now)
        assert awake - 1e-6 <= read <= awake + min(gap, GAP_MS) + 1e-6
        awake = read
    assert time_awake.at(beat) + time_awake.left_out_ms == pytest.approx(beat)


@given(st.lists(st.floats(0.0, GAP_MS), max_size=50))
def test_who_beats_often_enough_sees_every_millisecond(gaps: list[float]) -> None:
    time_awake = AwakeTime(GAP_MS, 0.0)
    now = 0.0
    for gap in gaps:
        now += gap
        assert time_awake.at(now) == pytest.approx(now)
        assert time_awake.beat(now) == pytest.approx(0.0, abs=1e-6)

    assert time_awake.left_out_ms == pytest.approx(0.0, abs=1e-6)


@given(st.floats(GAP_MS, 1e9), st.integers(4, 64))
def test_a_pause_of_any_length_expires_no_timeout_of_several_gaps(pause_ms: float, gaps: int) -> None:
    """Somebody is heard at a beat; after the pause he is heard again before his timeout has passed."""
    time_awake = AwakeTime(GAP_MS, 0.0)
    heard_ms = time_awake.at(0.0)
    at_wake_up_ms = time_awake.at(pause_ms)
    time_awake.beat(pause_ms)

    assert at_wake_up_ms - heard_ms <= GAP_MS < gaps * GAP_MS
    assert time_awake.at(pause_ms) == pytest.approx(at_wake_up_ms, abs=1e-6)


async def test_a_blocked_loop_ages_nobody_and_an_idle_one_goes_by_the_clock() -> None:
    clock = AwakeClock(SystemClock(), 400.0).start()  # a gap of 100 ms
    try:
        began_ms = clock.monotonic_ms()
        select.select([], [], [], 0.7)
        assert clock.monotonic_ms() - began_ms <= GAP_MS
        await asyncio.sleep(0.1)
        assert clock._time.left_out_ms >= 600.0 - 1.0

        # Both clocks are read around each other: a busy machine may let time pass between two readings.
        first_s, idle_from_ms, then_s = time.monotonic(), clock.monotonic_ms(), time.monotonic()
        stood_still_ms = clock._time.left_out_ms
        await asyncio.sleep(0.5)
        lost_ms = clock._time.left_out_ms - stood_still_ms
        before_s, idle_ms, last_s = time.monotonic(), clock.monotonic_ms() - idle_from_ms, time.monotonic()
        assert 1000 * (before_s - then_s) - 1 <= idle_ms + lost_ms <= 1000 * (last_s - first_s) + 1
    finally:
        clock.stop()


async def test_a_wait_that_the_process_slept_through_is_not_over() -> None:
    clock = HandClock()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(20.0, clock, answer))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "the loop's time has passed, time awake has not"

    answer.set_result("here")
    assert await waiting == "here"


async def test_a_wait_ends_when_its_time_has_passed_awake() -> None:
    clock = HandClock()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(20.0, clock, answer))
    await asyncio.sleep(0)
    clock.now_ms += 20.0
    with pytest.raises(TimeoutError):
        await waiting
