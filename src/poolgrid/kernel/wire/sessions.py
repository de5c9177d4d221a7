"""Sessions: the turns of one client program, as requests, events and snapshots name them.

A session belongs to one tenant and has a name, which the client chose or the router made. A turn is one request of it.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.identifiers import I32, U32, U64, Identifier
from poolgrid.kernel.wire.limits import (
    SESSION_ECHOES_MAX,
    SESSION_FOOTPRINTS_MAX,
    SESSION_TAILS_MAX,
    SESSIONS_DISPLACED_MAX,
)

Echoes = Annotated[tuple[U64, ...], Meta(max_length=SESSION_ECHOES_MAX)]
"""Hashes of places in an answer (``poolgrid.kernel.projection.echoes``)."""

TENANTS_KEPT = 4096
"""Tenants whose keys are kept ready."""


@lru_cache(TENANTS_KEPT)
def tenant_key(tenant: str) -> int:
    """Return a tenant's half of the keys of its sessions: 0 without API keys."""
    return stable_u64(tenant) if tenant else 0


class TurnEnding(StrEnum):
    """How the turn before a gap ended."""

    TOOL = "tool"
    """In a tool call: a program answers."""
    STOP = "stop"
    """In an answer: a person reads it, or a program that is done."""
    LENGTH = "length"
    """At the limit of its tokens."""


class TurnPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a dispatch that computes a prompt takes of the pool's working set, as its router decided."""

    common: U32 = 0
    """Leading blocks of the prompt that the worker held."""
    prefix: U64 = 0
    """Sequence hash of the last of them."""
    priority: I32 = 0
    waited_ms: U32 = 0
    """How long it waited at the router."""
    refill_ms: U32 = 0
    """What the worker takes to compute a cache full, as its router has learned it."""
    displaced: Annotated[tuple[tuple[U64, Identifier], ...], Meta(max_length=SESSIONS_DISPLACED_MAX)] = ()
    """Tenants and names of sessions that lost their places to it."""


class SessionTurn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One turn of a session, as its router knows it when it dispatches it."""

    session: Identifier
    tenant: U64 = 0
    """``tenant_key`` of the tenant: sessions of tenants are apart, whatever names they choose."""
    parent: Identifier = ""
    """The session that it forked from, as far as prompts show it."""
    after_tool: bool = False
    """Whether its prompt ends in the result of a tool."""
    tail: U64 = 0
    """Sequence hash of the prompt's last whole block; 0 where there is none."""
    anchor: U64 = 0
    """Sequence hash of a block at or before ``tail``, by which ``poolgrid.kernel.projection.lineage`` finds it; 0 where
    the client names its sessions."""
    residual: U64 = 0
    """XXH3-64 of the prompt's tokens behind the last whole block."""
    return_ms: U32 = 0
    """For engines that keep blocks by it: how long after this turn to keep its blocks for the next one, at a priority
    above others; 0 = nothing is asked."""
    keep_ms: U32 = 0
    """The same as the client asks for it, for the first ``keep_tokens`` of the prompt."""
    keep_tokens: U32 = 0
    """As many as its tenant's budget has room for; 0 = none are kept."""
    repeats: U64 = 0
    """``tail`` of a kept prompt of the tenant that this one begins with: both count once; 0 = none."""
    sibling: Identifier = ""
    """A request of ``parent`` that runs and continues the same turn: both are its children."""
    place: TurnPlace | None = None
    """``None`` for a dispatch that computes no prompt, which takes none."""
    stem: U64 = 0
    """As ``residual``, without the last two tokens, which are the seed: some templates begin the answer with them, and
    leave them out of later prompts."""

    @property
    def conversation(self) -> str:
        """Name for an engine, which knows no tenants: they may choose the same names."""
        return f"{self.tenant:016x}-{self.session}"


class TurnAnswer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The complete answer of a turn, as its router saw it."""

    request_id: Identifier
    tenant: U64
    session: Identifier
    total: U32
    """Tokens of prompt and answer."""
    digest: U64
    """XXH3-64 of the tokens behind the last whole block of the prompt."""
    echoes: Echoes = ()


class Tail(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a later prompt must repeat to continue a turn: its prompt, and its answer once that is complete."""

    request_id: Identifier
    tail: U64
    anchor: U64
    isl: U32
    residual: U64
    total: U32 = 0
    """Tokens of prompt and answer; 0 while the answer is not complete."""
    digest: U64 = 0
    """XXH3-64 of the tokens behind the block ``tail`` up to ``total``."""
    echoes: Echoes = ()
    """Of the session's latest answer alone."""
    stem: U64 = 0


class Footprint(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks that a session's turns left on one worker rank."""

    worker_id: Identifier
    dp_rank: U32
    blocks: U32
    tail: U64
    """The last prompt's last whole block: a worker that has lost it has lost the footprint's end at least."""
    common: U32 = 0
    """Of the blocks, those that were there before the session's first turn on the worker."""
    prefix: U64 = 0
    """Sequence hash of the last of them."""


class Gap(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Time from the end of a turn to the next one, smoothed like round-trip times (RFC 6298, in whole milliseconds)."""

    count: U32 = 0
    mean_ms: U64 = 0
    deviation_ms: U64 = 0

    def after(self, gap_ms: int) -> Gap:
        if not self.count:
            return Gap(1, gap_ms, gap_ms // 2)
        off = gap_ms - self.mean_ms
        deviation = self.deviation_ms + (abs(off) - self.deviation_ms) // 4
        return Gap(self.count + 1, self.mean_ms + off // 8, deviation)

    @property
    def limit_ms(self) -> int:
        """Within this time nearly all next turns come: RFC 6298's timeout; 0 = no gap is known."""
        return self.mean_ms + 4 * self.deviation_ms


NO_GAP = Gap()
NO_GAPS = (NO_GAP, NO_GAP, NO_GAP)
"""One for each ``TurnEnding``, in its order."""


class SessionRecord(msgspec.Struct, array_like=True, gc=False):
    """One session, as the pool's journal knows it. Its table alone changes it, and none that a snapshot has."""

    name: Identifier
    tenant: U64
    parent: Identifier
    began_ms: U64
    last_ms: U64
    """When something last happened to it, by the consolidator's wall clock, like all its times."""
    turns: U32 = 0
    running: U32 = 0
    """Turns that are dispatched and not over."""
    request_id: Identifier = ""
    """The latest turn's."""
    isl: U32 = 0
    """Prompt tokens of the latest turn."""
    cached_tokens: U32 = 0
    """Of these reused."""
    ended_ms: U64 = 0
    """When its last running turn ended; 0 before."""
    ending: str = ""
    """The finish reason then; empty where no gap follows (cancelled, lost)."""
    habit: TurnEnding = TurnEnding.STOP
    """The kind of the latest gap: what a stop will have been."""
    gaps: tuple[Gap, Gap, Gap] = NO_GAPS
    footprints: Annotated[tuple[Footprint, ...], Meta(max_length=SESSION_FOOTPRINTS_MAX)] = ()
    """The worker of the latest turn first."""
    tails: Annotated[tuple[Tail, ...], Meta(max_length=SESSION_TAILS_MAX)] = ()
    """Of its latest turns, the latest last."""
    priority: I32 = 0
    """Of the latest turn."""
    is_displaced: bool = False
    """Whether it has lost its place in the working set since then."""
    pause_ms: U64 = 0
    """Before the latest turn, without its wait at the router."""


class Turn(msgspec.Struct, array_like=True, gc=False):
    """One running turn, on the worker that it was last dispatched to."""

    request_id: Identifier
    """Of the dispatch."""
    tenant: U64
    session: Identifier
    worker_id: Identifier
    dp_rank: U32
    tail: U64
    blocks: U32 = 0
    """That it occupies now; 0 while it waits in the engine."""
    cached_tokens: U32 = 0
    common: U32 = 0
    """As in ``Footprint``."""
    prefix: U64 = 0


class KeptPrompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prompt that a client has kept."""

    tenant: U64
    session: Identifier
    """That kept it last."""
    tail: U64
    """Its last whole block, which stands for all before."""
    tokens: U32
    until_ms: U64


class SessionsSnapshot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All sessions of a pool, in the order in which they were last used, and what was learned beyond them."""

    sessions: list[SessionRecord] = []
    turns: list[Turn] = []
    gaps: tuple[Gap, Gap, Gap] = NO_GAPS
    """Of all sessions together."""
    kept: list[KeptPrompt] = []


NO_SESSIONS = SessionsSnapshot()
