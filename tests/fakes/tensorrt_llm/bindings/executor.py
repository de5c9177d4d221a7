"""KV cache retention, as the executor's bindings have it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise

from poolgrid.kernel.wire.requests import KvRetention, RetainedTokens


class KvCacheTransferMode(IntEnum):
    """How offloaded blocks move."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass
class TokenRangeRetentionConfig:
    """Priority of a range of prompt tokens, end exclusive."""

    token_start: int
    token_end: int | None = None
    priority: int = 35
    duration_ms: timedelta | float | None = None

    def __post_init__(self) -> None:
        if self.token_end is not None and self.token_end <= self.token_start:
            raise ValueError(f"token_end must be above token_start, got {self.token_start} to {self.token_end}")
        if not 0 <= self.priority <= 100:
            raise ValueError(f"priority must be in 0..100, got {self.priority}")


@dataclass
class KvCacheRetentionConfig:
    """How long blocks of a request stay."""

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | float | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decode_retention_priority <= 100:
            raise ValueError(f"decode_retention_priority must be in 0..100, got {self.decode_retention_priority}")
        ranges = sorted(self.token_range_retention_configs, key=lambda each: each.token_start)
        for before, after in pairwise(ranges):
            if before.token_end is None or before.token_end > after.token_start:
                raise ValueError("token ranges overlap")
        if self.transfer_mode is not KvCacheTransferMode.DRAM and self.directory is None:
            warnings.warn("a transfer mode without a directory falls back to DRAM", stacklevel=2)
            self.transfer_mode = KvCacheTransferMode.DRAM

    def as_request(self) -> KvRetention:
        """What the engine behind the fake is told."""
        return KvRetention(
            tuple(
                RetainedTokens(each.token_start, each.token_end, each.priority, _milliseconds(each.duration_ms))
                for each in sorted(self.token_range_retention_configs, key=lambda each: each.token_start)
            ),
            self.decode_retention_priority,
            _milliseconds(self.decode_duration_ms),
        )


def _milliseconds(duration: timedelta | float | None) -> int | None:
    """The bindings read a bare number as seconds, whatever the field is called."""
    if duration is None:
        return None
    return round(1000 * (duration.total_seconds() if isinstance(duration, timedelta) else duration))


KvCacheRetentionConfig.TokenRangeRetentionConfig = TokenRangeRetentionConfig  # type: ignore[attr-defined]
