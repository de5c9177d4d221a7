"""Counts of requests that engines report, and the part of them that no router reported."""

from __future__ import annotations

import time

import pytest

from poolgrid.server.workers.engines.registry import server_kinds
from poolgrid.server.workers.engines.server.core.engine_figures import ForeignLoad

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


NAME = b"vllm:num_requests_running"
LINE = NAME + b" 3\n"
HOSTILE = {
    "the name alone, many times": (NAME * 500_000, None),
    "the line, many times": (LINE * 500_000, [3]),
    "a long line before it": (NAME + b"{" + b"a" * 5_000_000 + b"} 9\n" + LINE, [3]),
    "long lines": ((NAME + b"{" + b"a" * 5000 + b"} 9\n") * 3000 + LINE, [3]),
    "blanks without end": (LINE + NAME + b" " * 14_000_000, [3]),
    "zero bytes": (LINE + b"\0" * 14_000_000, [3]),
    "digits without end": (NAME + b" " + b"9" * 14_000_000, None),
    "no line end": (NAME + b" 3", [3]),
}


@pytest.mark.parametrize(("page", "found"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_page_of_any_content_costs_no_more_than_one_of_its_size(page: bytes, found: list[int] | None) -> None:
    """A search to the line's end for each name in it took hours; this takes some 20 ms, on a busy machine ten times
    that."""
    figures = server_kinds()["vllm"].figures
    assert figures is not None
    began = time.process_time()

    assert figures.read(page, 1) == found

    assert time.process_time() - began < 1.0


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
