"""What is known of one worker: requests with their promised and reported reuse, and where their blocks were announced.

Everything here is what was seen; ``poolgrid.server.diagnosis.rules`` concludes from it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from poolgrid.server.diagnosis.causes import Cause

WINDOW: Final = 100
"""Requests of one worker that count: a fault must be named within so many."""

NEVER: Final = -1
"""In place of a request's number: no request is known."""


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
    chosen_tokens: int = 0
    """Promised at the choice; ``promised_tokens`` has what events brought until the start, or the report."""
    number: int = 0
    """Its place among the worker's requests."""
    settled: int = 0
    """Number below which all requests had ended when it began."""
    sent_tokens: int = 0
    """Leading tokens that this worker had been sent before."""
    reused_since: int = NEVER
    """Number of the request that last brought the worker the end of what it reused; ``NEVER`` = not known."""
    lost_since: int = NEVER
    """Number of the request that last brought the worker the first promised block that it did not reuse."""
    has_strangers: bool = False
    """Whether the engine had requests that no router of the pool reported."""


class Announcement(msgspec.Struct, gc=False):
    """In whose KV events the blocks of one prompt came, which no request had brought to the pool before."""

    own: bool
    """In those of the worker that the prompt was sent to."""
    others: tuple[str, ...] = ()
    """In those of workers that this prompt was not sent to."""
    delay_ms: int = 0
    """How long after the prompt was computed they were not there yet; 0 = they were at the first look."""
    domain: str = ""
    number: int = 0
    """Place of its request among the worker's."""
    stored_blocks: int = 0
    """Blocks that the worker's events had stored when the prompt was computed."""


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
    is_renewed: bool = False
    """Whether it registered again, and hardly a request agreed since."""
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
    """Whether the worker took back all that it had reported, and hardly a request agreed since."""
    events_fault: str = ""
    """In what its engine's events do not fit it, as it says itself."""
    announcements: list[Announcement] = []
    """Oldest first; of prompts too young to judge none."""
    missing_prompts: int = 0
    """Those too young: they were computed, and nothing of them came yet."""
    borrowed: dict[str, int] = {}
    """By other workers: of how many of their prompts the blocks came in this worker's events."""
    stored_blocks: int = 0
    """Blocks that its events stored in this epoch."""
    silent_ms: int = 0
    """For how long it has reused its cache while no event had stored a block."""
    unreported_requests: int = 0
    """Requests that ended without a report of how many tokens were reused."""
    proofs: list[tuple[Cause, str]] = []
    """What the engine's own messages prove alone, as an engine check reads them: causes before what follows."""
    needed: int = 4
    """Requests that must show the same: one is enough where nothing else is sent, as in an engine check."""


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
