"""Iteration statistics: the documented example, what may be missing or null, and what the stream says of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.events import LoadReported
from poolgrid.workers.engines.trtllm.core.statistics import load_of, parse_statistics
from tests.trtllm.facts import facts

EXAMPLE: dict[str, Any] = facts()["iteration_stats_example"]


def example(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(EXAMPLE), **changes}


def test_the_documented_example_is_read() -> None:
    read = parse_statistics(EXAMPLE)

    assert (read.iteration, read.active_requests, read.queued_requests, read.rank) == (154, 1, 0, 0)
    assert read.iteration_latency_ms == pytest.approx(7.00688)
    assert read.kv_cache is not None
    assert (read.kv_cache.max_num_blocks, read.kv_cache.used_num_blocks) == (101256, 3)
    assert read.kv_cache.cache_hit_rate == pytest.approx(0.00128)
    assert load_of(read, cached_blocks=40) == LoadReported(1, 0, 0, 3, 40, 101256, 154)


def test_later_versions_name_the_rank_and_the_tokens_that_wait() -> None:
    batch = {**EXAMPLE["inflightBatchingStats"], "numPausedRequests": 1, "numCtxTokens": 7, "numQueuedCtxTokens": 100}
    read = parse_statistics(
        example(attentionDpRank=3, numActiveRequests=4, numQueuedRequests=2, inflightBatchingStats=batch)
    )

    load = load_of(read, 0)

    assert read.rank == 3
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens) == (3, 3, 107)
    assert load_of(read, 0, prefill_tokens=9).prefill_tokens == 9


@pytest.mark.parametrize(("key", "value"), [("iter", "x"), ("kvCacheStats", [1]), ("iterLatencyMS", {})])
def test_a_wrong_type_is_a_decode_error_that_names_the_key(key: str, value: object) -> None:
    with pytest.raises(DecodeError, match=key):
        parse_statistics(example(**{key: value}))
