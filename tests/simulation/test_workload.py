"""A workload's prompts share blocks exactly as the trace's rows share ids."""

from __future__ import annotations

from itertools import combinations, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.wire.hashing import block_hashes, sequence_hashes
from poolgrid.plugins.bench.trace import TRACE_BLOCK_TOKENS, TraceRow, ideal_cached_token_ratio, plan_trace, read_trace
from poolgrid.plugins.simulation.pool import SimulatedPool
from poolgrid.plugins.simulation.workload import RecordedRequest, build_workload, recorded_workload
from poolgrid.server.router.policy_loading import make_policy
from tests.simulation.builders import CONVERSATION, limits, row, traces


def common_lead(a: list[int] | tuple[int, ...], b: list[int] | tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@given(traces(), st.sampled_from([16, 64, 512]))
@settings(max_examples=60, deadline=None)
def test_two_prompts_share_the_whole_blocks_of_their_common_leading_ids(rows: list[TraceRow], block_size: int) -> None:
    requests = build_workload(rows, 1.0, block_size).requests

    for a, b in combinations(range(len(rows)), 2):
        shared_tokens = min(
            common_lead(rows[a].hash_ids, rows[b].hash_ids) * TRACE_BLOCK_TOKENS,
            rows[a].input_length,
            rows[b].input_length,
        )
        assert common_lead(requests[a].path, requests[b].path) == shared_tokens // block_size


@given(traces(), st.sampled_from([16, 48, 64, 512, 1024]))
@settings(max_examples=60, deadline=None)
def test_a_path_is_what_hashing_the_prompt_gives(rows: list[TraceRow], block_size: int) -> None:
    for request, trace_row in zip(build_workload(rows, 1.0, block_size).requests, rows, strict=True):
        assert len(request.generate.token_ids) == 4 * trace_row.input_length
        assert request.path == sequence_hashes(block_hashes(request.generate.token_ids, block_size))


@given(traces(), st.sampled_from([0.5, 1.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_arrivals_are_divided_by_the_speed_and_everything_else_stays(rows: list[TraceRow], speed: float) -> None:
    workload = build_workload(rows, speed, 64)

    assert [request.arrival_ms for request in workload.requests] == [each.timestamp / speed for each in rows]
    assert [request.isl for request in workload.requests] == [each.input_length for each in rows]
    assert [request.osl for request in workload.requests] == [max(1, each.output_length) for each in rows]
    assert workload.total_tokens == sum(request.isl + request.osl for request in workload.requests)
    assert workload.longest == max(request.isl + request.osl for request in workload.requests)
    assert len({request.request_id for request in workload.requests}) == len(rows)


@given(traces())
@settings(max_examples=60, deadline=None)
def test_the_ideal_is_the_load_generators(rows: list[TraceRow]) -> None:
    assert build_workload(rows, 1.0, 64).ideal_cached_token_ratio == ideal_cached_token_ratio(plan_trace(rows))


def test_the_ideal_of_the_conversation_trace_is_the_published_one() -> None:
    workload = build_workload(read_trace(CONVERSATION), 1.0, 64)

    assert workload.ideal_cached_token_ratio == pytest.approx(0.2157, abs=5e-5)


@pytest.mark.parametrize("speed", [0.0, -1.0])
def test_a_speed_that_is_not_above_0_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match=f"speed is {speed}, allowed are values above 0"):
        build_workload([row(1)], speed, 64)


def recorded(count: int) -> list[RecordedRequest]:
    """Two conversations that grow by a block with each request."""
    requests = []
    for number in range(count):
        conversation, turn = number % 2, number // 2 + 1
        path = [1000 * conversation + at for at in range(turn)]
        requests.append(RecordedRequest(100.0 * number, 16 * turn + 3, 5, path))
    return requests


def test_recorded_requests_share_what_their_hashes_share_and_nothing_else() -> None:
    workload = recorded_workload(recorded(10), 16)
    done = SimulatedPool(workload, make_policy("kv"), 1, limits(workload)).run()

    assert done.requests == 10
    assert done.cached_tokens / done.prompt_tokens == pytest.approx(workload.ideal_cached_token_ratio)


def test_a_speed_brings_arrivals_of_recorded_requests_together() -> None:
    assert recorded_workload(recorded(10), 16, speed=2.0).requests[9].arrival_ms == 450.0


def test_hashes_that_do_not_fit_the_recorded_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="request 0 has 1 hashes"):
        recorded_workload([RecordedRequest(0.0, 40, 1, [1])], 16)
