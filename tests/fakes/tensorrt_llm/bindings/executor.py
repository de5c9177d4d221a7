"""KV cache retention, as the executor's bindings have it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise


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
    duration_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError(f"priority must be in 0..100, got {self.priority}")


@dataclass
class KvCacheRetentionConfig:
    """How long blocks of a request stay."""

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: float | None = None
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


KvCacheRetentionConfig.TokenRangeRetentionConfig = TokenRangeRetentionConfig  # type: ignore[attr-defined]
