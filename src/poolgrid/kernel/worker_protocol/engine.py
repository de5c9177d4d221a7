"""What a worker needs of an engine.

An engine has one or more data-parallel *ranks*, numbered from 0. Each has a KV cache of its own and is a routing target
of its own; they share the process, its request plane and its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, LoadReported
from poolgrid.kernel.wire.requests import ForwardBegan, Generate, KvOffered, TokenDelta
from poolgrid.kernel.worker_protocol.cache_facts import RestatedEvent
from poolgrid.kernel.worker_protocol.kv_fetches import KvArrival, KvWanted
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor

UntilKnown = Callable[[], Coroutine[Any, Any, None]]
"""Waits, not without end, until an engine's ``restate`` has what it held before this process."""


class RankReport(msgspec.Struct):
    """What became visible of one rank."""

    events: list[AnyEvent]
    """Cache and request events for the rank's stream, in order."""
    load: LoadReported


class EngineReport(msgspec.Struct):
    """What one engine step made visible (one wake-up, if the engine steps elsewhere), delivered once, in order."""

    deltas: list[TokenDelta]
    """New tokens by request, of all ranks. The delta that has a finish reason is the request's last; after
    ``prefilled`` or ``encoded`` the engine keeps the request's blocks or embeddings until ``released`` names it or it
    is cancelled."""
    ranks: dict[int, RankReport]
    """By rank; one without news may be absent."""
    steps: int = 1
    duration_ms: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    queue_waits_ms: list[float] = []
    arrivals: list[KvArrival] = []
    """KV that arrived from prefill workers."""
    released: list[str] = []
    """Prefilled requests whose blocks are no longer kept."""
    expired: int = 0
    """How many of those were never fetched."""
    kept_transfers: int = 0
    """Prefilled requests whose blocks are kept now."""
    keeps_encoded: bool = False
    """Whether the engine keeps embeddings for its peers after ``encoded`` and reports their release; without it
    such a request has ended."""


class Engine(Protocol):
    """An engine with all its ranks. Every method is called on the worker's event loop, and returns at once: what may
    block, an engine does in a thread of its own (``poolgrid.server.workers.engines.lifecycle.engine_thread``)."""

    @property
    def dp_size(self) -> int: ...

    @property
    def unhealthy_reason(self) -> str:
        """Why it does not do its work though it has not broken; empty = it is well."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be expected of it any more, though it may come back. It has an ``unhealthy_reason`` then,
        and has ended its requests as broken in a report of its own."""
        ...

    def observe_health(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` from now on when ``unhealthy_reason`` begins or ends, or ``is_silent`` changes."""
        ...

    def describe(self) -> dict[str, object]:
        """Return what people should know of this engine and of no other, as JSON values."""
        ...

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Work until cancelled, handing over one report per step; raises when the engine is broken."""
        ...

    def submit(self, request: Generate) -> None:
        """Take a request, or raise ``poolgrid.kernel.worker_protocol.refusal.RefusedError`` and change nothing."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request soon; a last delta with finish reason ``cancelled`` follows unless it ended anyway."""
        ...

    def load(self, dp_rank: int) -> LoadReported: ...

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        """Return what a rank's cache really holds now, asked of the engine itself.

        Raises ``NotImplementedError`` when the engine cannot list it.
        """
        ...

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        """Return everything in a rank's cache, as reported up to now, parents before children."""
        ...


class ForwardBooks(Protocol):
    """Books of the requests that routers send straight to the engine's own server."""

    def began(self, began: ForwardBegan) -> None: ...

    def computed(self, request_id: str) -> None:
        """Note that the prompt of a request is computed; one that is not known is ignored, here and below."""
        ...

    def ended(self, request_id: str, reason: str, cached_tokens: int | None) -> None: ...


class EmbeddingTaker(Protocol):
    """What an engine that computes prompts needs to be, to have embeddings fetched for it by its worker."""

    def submit_embedded(self, request: Generate, tensors: Sequence[Tensor]) -> None:
        """Take a request with the embeddings of its images, in order, or raise ``RefusedError``."""
        ...


class KvHandover(Protocol):
    """What an engine needs of its worker to hand KV over; an engine that talks to its peers by itself has none."""

    def wanted(self, request: Generate) -> KvWanted:
        """Return where to ask before a request of the decode stage can run, or raise ``RefusedError``."""
        ...

    def submit_offered(self, request: Generate, offer: KvOffered) -> None:
        """Take a request of the decode stage with its source's answer, or raise ``RefusedError`` and change nothing."""
        ...

    def offer(self, transfer_id: str) -> KvOffered:
        """Return what is kept for a transfer, and keep it for the time-out from now on."""
        ...

    def release(self, transfer_id: str) -> None: ...


class AlwaysWell:
    """As much of ``poolgrid.kernel.worker_protocol.engine.Engine`` as is about its health."""

    @property
    def unhealthy_reason(self) -> str:
        return ""

    @property
    def is_silent(self) -> bool:
        return False

    def observe_health(self, changed: Callable[[], None]) -> None:
        """Nothing ever changes."""
