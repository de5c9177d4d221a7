"""Counts of requests that engines report, and the part of them that no router reported."""

from __future__ import annotations

import pytest

from poolgrid.workers.engines.registry import server_kinds
from poolgrid.workers.engines.server.core.engine_figures import ForeignLoad

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 900.0
"""

SGLANG = """sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0
"""

TRTLLM = "trtllm_num_requests_running 2.0\ntrtllm_num_requests_waiting 7.0"


@pytest.mark.parametrize(
    ("kind", "page", "ranks", "found"),
    [
        ("vllm", VLLM, 2, [5, 5]),
        ("vllm", VLLM, 1, [5]),
        ("vllm", VLLM, 3, [5, 5, 0]),
        ("sglang", SGLANG, 1, [5]),
        ("sglang", 'sglang:num_running_reqs{dp_rank="1",model_name="m"} 2', 2, [0, 2]),
        ("trtllm-serve", TRTLLM, 1, [9]),
        ("vllm", "", 1, None),
        ("vllm", SGLANG, 1, None),
        ("vllm", "# vllm:num_requests_running 3", 1, None),
        ("vllm", "vllm:num_requests_running NaN", 1, None),
        ("vllm", "vllm:num_requests_running -1", 1, None),
        ("vllm", "vllm:num_requests_running 1e300", 1, None),
        ("vllm", "vllm:num_requests_running", 1, None),
        ("vllm", "vllm:num_requests_running 4294967295\nvllm:num_requests_waiting 9", 1, [4294967295]),
    ],
)
def test_a_page_gives_the_requests_of_each_rank(kind: str, page: str, ranks: int, found: list[int] | None) -> None:
    figures = server_kinds()[kind].figures
    assert figures is not None
    assert figures.read(page.encode(), ranks) == found


def test_a_server_of_no_known_kind_gives_none() -> None:
    assert server_kinds()["openai"].figures is None


def test_what_is_beyond_the_books_in_two_looks_is_foreign() -> None:
    foreign = ForeignLoad()
    assert not foreign.observe(5, [2, 3])
    assert foreign.count == 0, "routers may not have reported it yet"
    assert foreign.observe(6, [2, 2])
    assert foreign.count == 2, "the less of both"
    assert not foreign.observe(7, [1, 5])
    assert foreign.count == 2
    assert foreign.observe(0, [0, 0])
    assert foreign.count == 0


def test_what_the_engine_does_not_say_any_more_is_no_load() -> None:
    foreign = ForeignLoad()
    foreign.observe(9, [0, 0])
    foreign.observe(9, [0, 0])
    assert foreign.forget()
    assert foreign.count == 0
    assert not foreign.forget()
