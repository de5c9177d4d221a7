"""Iteration statistics of TensorRT-LLM (``LLM.get_stats_async``), without the engine.

One dict per executed iteration. Keys are camel case, differ a little between versions, and whole parts may be null or
absent: what is not known is ignored, what is not there is 0 or ``None``. Source: the facts of 1.2.1, and of the 1.3
line for ``attentionDpRank`` and the queue's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import LoadReported
from poolgrid.kernel.wire.limits import U32_MAX, U64_MAX

COUNT_MAX = 2**53
"""Most that a statistic may be, either way: what a float, as counters and gauges are, still has exactly."""

Count = Annotated[int, msgspec.Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=float(COUNT_MAX))]


class KvCacheStatistics(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The paged KV cache of the rank."""

    max_num_blocks: Count = 0
    used_num_blocks: Count = 0
    tokens_per_block: Count = 0
    reused_blocks: Count = 0
    cache_hit_rate: float | None = None
    """Since the engine began, its warm-up included (up to 1.2)."""


class BatchStatistics(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What ran in the iteration (in-flight batching)."""

    num_paused_requests: Count = 0
    num_ctx_tokens: Count = 0
    num_queued_ctx_tokens: Count | None = None
    """Prompt tokens that wait; from 1.3 on."""


class EngineStatistics(msgspec.Struct, frozen=True, gc=False):
    """One iteration of one rank."""

    iteration: Count = msgspec.field(name="iter", default=0)
    iteration_latency_ms: Milliseconds = msgspec.field(name="iterLatencyMS", default=0.0)
    active_requests: Count = msgspec.field(name="numActiveRequests", default=0)
    queued_requests: Count = msgspec.field(name="numQueuedRequests", default=0)
    rank: Count = msgspec.field(name="attentionDpRank", default=0)
    """1.2 reports rank 0 only and does not say so."""
    kv_cache: KvCacheStatistics | None = msgspec.field(name="kvCacheStats", default=None)
    batch: BatchStatistics | None = msgspec.field(name="inflightBatchingStats", default=None)

    @property
    def paused_requests(self) -> int:
        return self.batch.num_paused_requests if self.batch is not None else 0


def parse_statistics(item: Mapping[str, Any]) -> EngineStatistics:
    """Return the statistics of one iteration; raise ``DecodeError`` naming the key when one has a wrong type.

    Unknown keys are ignored. A null counts as absent everywhere.
    """
    try:
        return msgspec.convert(item, EngineStatistics)
    except (msgspec.ValidationError, OverflowError):
        pass
    # Rare: nulls in the place of numbers.
    try:
        return msgspec.convert(_without_nulls(item), EngineStatistics)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise DecodeError("iteration statistics of the engine", str(error)) from None


def load_of(statistics: EngineStatistics, cached_blocks: int, prefill_tokens: int | None = None) -> LoadReported:
    """Return what the event stream says of these statistics.

    ``cached_blocks`` is what the cache events say (the statistics count reusable blocks as free); ``prefill_tokens``
    are prompt tokens accepted and not yet computed, as the worker counts them; without them the engine's own numbers
    are taken, of which 1.2 has only those of the iteration. Running = active without paused; waiting = queued and
    paused. Values are cut to the wire's range.
    """
    cache = statistics.kv_cache or _NO_CACHE
    batch = statistics.batch or _NO_BATCH
    if prefill_tokens is None:
        prefill_tokens = batch.num_ctx_tokens + (batch.num_queued_ctx_tokens or 0)
    paused = batch.num_paused_requests
    return LoadReported(
        running_requests=_u32(statistics.active_requests - paused),
        waiting_requests=_u32(statistics.queued_requests + paused),
        prefill_tokens=_u32(prefill_tokens),
        active_blocks=_u32(cache.used_num_blocks),
        cached_blocks=_u32(cached_blocks),
        total_blocks=_u32(cache.max_num_blocks),
        steps=min(max(statistics.iteration, 0), U64_MAX),
    )


_NO_CACHE = KvCacheStatistics()
_NO_BATCH = BatchStatistics()


def _u32(value: int) -> int:
    return min(max(value, 0), U32_MAX)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
