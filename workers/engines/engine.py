"""What a worker needs of an engine, simulated or real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from wire.events import AnyEvent, BlocksStored, LoadReported
from wire.requests import Generate, TokenDelta


@dataclass(slots=True)
class EngineReport:
    """What one engine step made visible, delivered once, in order."""

    deltas: list[TokenDelta]
    """New tokens by request. The delta that has a finish reason is the request's last."""
    events: list[AnyEvent]
    """Cache and request events for the stream, in order."""
    load: LoadReported
    steps: int = 1
    duration_ms: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    queue_waits_ms: list[float] = field(default_factory=list)


class Engine(Protocol):
    """An engine rank on the worker's event loop."""

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        """Work until cancelled, handing over one report per step; raises when the engine is broken."""
        ...

    def submit(self, request: Generate) -> None:
        """Take a request, or raise ``workers.core.refusal.RefusedError`` and change nothing."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request soon; a last delta with finish reason ``cancelled`` follows unless it ended anyway."""
        ...

    def load(self) -> LoadReported:
        """Return the engine's statistics now."""
        ...

    def resident_blocks(self) -> list[BlocksStored]:
        """Return what the cache really holds now, asked of the engine itself.

        Raises ``NotImplementedError`` when the engine cannot tell.
        """
        ...

    def restate(self) -> list[BlocksStored]:
        """Return everything in the cache, as reports have told it up to now, parents before children."""
        ...
