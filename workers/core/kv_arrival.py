"""What is told of one completed KV transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvArrival:
    """The KV of one decode request is here."""

    request_id: str
    moved_blocks: int
    present_blocks: int
    """Blocks of the prompt that were here already."""
    moved_bytes: int
    duration_ms: float
