"""What a prompt costs on one worker, in milliseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.routing.engine_times import PUBLISHED, EngineKind, StepCurve
from poolgrid.kernel.routing.kv_policy import PromptCost, prompt_cost

LINE = StepCurve(((1.0, 10.0), (1001.0, 110.0)), ((0.0, 5.0), (1.0, 25.0)))
"""A prompt token takes 0.1 ms, a step without any 10 ms."""


KIND = EngineKind(LINE, 8192.0, 1000.0)


def cost(
    tokens: float,
    pace: float = 1.0,
    done_ms: float = 0.0,
    waiting: float = 0.0,
    queued: float = 0.0,
    active_blocks: float = 0.0,
    requests: float = 0.0,
    idle_pace: float | None = None,
) -> PromptCost:
    own = LINE.one_prompt_ms(tokens, KIND.step_tokens)
    return prompt_cost(
        KIND,
        (pace, done_ms, waiting, 0.0, pace if idle_pace is None else idle_pace),
        queued,
        active_blocks,
        requests,
        tokens,
        own,
    )


def test_idle_worker_costs_the_computation_for_the_request_and_for_the_next_one() -> None:
    assert cost(501.0) == PromptCost(60.0, 60.0, 1.0, 501.0)


def test_idle_worker_has_its_own_pace() -> None:
    assert cost(501.0, pace=10.0, idle_pace=1.0).expected_ms == 60.0
    assert cost(501.0, pace=10.0, idle_pace=1.0, requests=1.0).expected_ms > 600.0


def test_streams_of_a_busy_worker_are_delayed_by_what_the_prompt_adds_to_their_steps() -> None:
    busy = cost(501.0, requests=5.0, active_blocks=100.0)
    assert busy.expected_ms == 60.0 + 7.0, "a decode step comes between"
    assert busy.decoding_ms == pytest.approx(0.01 * 5 * 50.0)
    assert cost(1.0, requests=5.0).decoding_ms == 0.0, "one token fits into a decode step"


def test_requests_that_wait_for_their_first_token_are_no_streams() -> None:
    assert cost(501.0, requests=3.0, waiting=3.0, queued=300.0).decoding_ms == 0.0


def test_queue_is_as_much_shorter_as_the_engine_has_done() -> None:
    begun, new = (cost(501.0, done_ms=done, queued=500.0, requests=1.0, waiting=1.0) for done in (30.0, 0.0))
    assert new.expected_ms - begun.expected_ms == 30
    assert new.before_ms - begun.before_ms == 30


def test_slow_worker_costs_more_for_the_request_and_not_for_the_next_one() -> None:
    slow = cost(501.0, pace=3.0)
    assert (slow.expected_ms, slow.own_ms) == (180.0, 60.0)


@given(st.floats(1.0, 300_000.0), st.integers(1, 20_000))
def test_one_prompt_takes_what_it_takes_among_many(tokens: float, step_tokens: int) -> None:
    for curve in (LINE, PUBLISHED):
        many = curve.prompt_ms(np.array([tokens]), np.array([float(step_tokens)]))
        assert curve.one_prompt_ms(tokens, float(step_tokens)) == float(many[0])


@given(st.floats(0.0, 2.0))
def test_one_decode_step_takes_what_it_takes_among_many(share: float) -> None:
    for curve in (LINE, PUBLISHED):
        assert curve.one_decode_ms(share) == float(curve.decode_ms(np.array([share]))[0])
