"""What a prompt costs on one worker, in milliseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.router.core.delay import PromptCost, WorkerDelay, decode_step_ms
from poolgrid.router.core.delay import prompt_cost as cost_of
from poolgrid.router.core.engine_times import PUBLISHED, StepCurve

LINE = StepCurve(((1.0, 10.0), (1001.0, 110.0)), ((0.0, 5.0), (1.0, 25.0)))
"""A prompt token takes 0.1 ms, a step without any 10 ms."""


def worker(**changes: float) -> WorkerDelay:
    idle = WorkerDelay(LINE, 8192.0, 1000.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    values: dict[str, Any] = dict(changes)
    return idle._replace(**values)


def prompt_cost(worker: WorkerDelay, tokens: float) -> PromptCost:
    return cost_of(worker, tokens, worker.curve.one_prompt_ms(tokens, worker.step_tokens))


def test_idle_worker_costs_the_computation_for_the_request_and_for_the_next_one() -> None:
    cost = prompt_cost(worker(), 501.0)
    assert cost == (60.0, 60.0, 0.0, 0.0, 0.0)
    assert cost.total_ms == 120.0


def test_streams_of_a_busy_worker_are_delayed_by_what_the_prompt_adds_to_their_steps() -> None:
    busy = prompt_cost(worker(requests=5.0, active_blocks=100.0), 501.0)
    assert busy.expected_ms == 60.0 + 7.0, "a decode step comes between"
    assert busy.decoding_ms == pytest.approx(0.01 * 5 * 50.0)
    assert prompt_cost(worker(requests=5.0), 1.0).decoding_ms == 0.0, "one token fits into a decode step"


def test_requests_that_wait_for_their_first_token_are_no_streams() -> None:
    assert prompt_cost(worker(requests=3.0, waiting=3.0, queued_tokens=300.0), 501.0).decoding_ms == 0.0


def test_queue_is_as_much_shorter_as_the_engine_has_done() -> None:
    queued = worker(queued_tokens=500.0, requests=1.0, waiting=1.0)
    assert prompt_cost(queued, 501.0).expected_ms - prompt_cost(queued._replace(done_ms=30.0), 501.0).expected_ms == 30


def test_slow_worker_costs_more_for_the_request_and_not_for_the_next_one() -> None:
    slow = prompt_cost(worker(pace=3.0), 501.0)
    assert slow == (180.0, 60.0, 0.0, 0.0, 0.0)


def test_decode_worker_costs_the_length_of_its_steps() -> None:
    assert decode_step_ms(worker(active_blocks=100.0, pace=2.0), 50.0) == 2 * (5.0 + 0.15 * 20.0)


@given(st.floats(1.0, 300_000.0), st.integers(1, 20_000))
def test_one_prompt_takes_what_it_takes_among_many(tokens: float, step_tokens: int) -> None:
    for curve in (LINE, PUBLISHED):
        many = curve.prompt_ms(np.array([tokens]), np.array([float(step_tokens)]))
        assert curve.one_prompt_ms(tokens, float(step_tokens)) == float(many[0])


@given(st.floats(0.0, 2.0))
def test_one_decode_step_takes_what_it_takes_among_many(share: float) -> None:
    for curve in (LINE, PUBLISHED):
        assert curve.one_decode_ms(share) == float(curve.decode_ms(np.array([share]))[0])
