"""What a verdict is made of: the last requests of one worker, what was promised and reported, and its event stream."""

from __future__ import annotations

from typing import Final

import msgspec

WINDOW: Final = 100
"""Requests of one worker that count: a fault must be named within so many."""


class Observation(msgspec.Struct, gc=False):
    """One request: what the router promised that its worker would reuse, and what the worker reported."""

    request_id: str
    time_ms: int
    isl: int
    """Prompt tokens that the router hashed."""
    reported_isl: int | None
    """Prompt tokens that the engine reported."""
    promised_tokens: int
    reported_tokens: int
    seen_tokens: int
    """Leading tokens that the pool had been sent before, by any request of this router."""
    domain: str
    """``salt``, ``adapter`` or ``media`` where the prompt is hashed with one; empty for plain text."""
    prefix: int
    """Sequence hash of the last promised block; 0 without any."""
    announced: float | None = None
    """Share of an earlier prompt of the worker that the index holds by now; looked up when numbers disagree."""


class WorkerEvidence(msgspec.Struct):
    """What is known of one worker."""

    worker: str
    block_size: int
    observations: list[Observation]
    """Oldest first, at most ``WINDOW``."""
    stream: str = "live"
    stream_reason: str = ""
    was_live: bool = True
    """Whether its stream has been live at some time."""
    held_blocks: int = 0
    """Blocks that it holds according to the index."""
    epochs: int = 1
    """Registrations seen."""
    steps_fell: bool = False
    """Whether its engine counts its steps from 0 again in one epoch."""
    agreed_requests: int = 0
    """Requests with reuse that agreed, those before the window included."""
    own_requests: int = 0
    foreign_requests: int = 0
    """Requests that it started and this router did not send."""
    has_windows: bool = False
    """Whether the index knows of attention windows or checkpoints of the engine."""
    was_cleared: bool = False
    """Whether the worker took back all that it had reported, in the last requests."""


class UncachedSplit(msgspec.Struct, frozen=True):
    """Why the tokens of a prompt were computed; the parts add up to all that were."""

    cold: int
    """Never sent to the pool before."""
    routing: int
    """Held by another worker than the chosen one."""
    eviction: int
    """Sent before, and held by no worker (any more, or not computed yet)."""
    mismatch: int
    """Promised by the chosen worker, and not reused."""


def split_uncached(isl: int, seen: int, best: int, promised: int, reported: int) -> UncachedSplit:
    """Split the tokens of a prompt that were computed, all numbers being leading tokens of it.

    ``best`` is the most that any candidate held, ``promised`` what the chosen worker held.
    """
    isl = max(isl, reported)
    promised = min(isl, max(reported, promised))
    best = min(isl, max(promised, best))
    seen = min(isl, max(best, seen))
    return UncachedSplit(isl - seen, best - promised, seen - best, promised - reported)
