"""Prompt tokens that a worker rank has promised to compute: what routers that do not know of each other may rely on.

Several routers can choose the same idle worker in the same millisecond: each sees the others' choices only in the
worker's events, a step later. So a router states with each request how much, by its count, the worker still has to
compute for others, and the worker, whose count is exact, refuses a request that was chosen on a count too far from it
(``crowding``). The refusal carries the exact count; the router chooses again with it, and may choose the same worker.

Rules
    1. An accepted request counts with the tokens that its router did not expect to be cached, until the engine reports
       how many really are; it counts nothing once its prompt is computed or it has ended.
    2. A request without a count is not refused: a router's last attempt always gets through, so a request is refused a
       bounded number of times.
"""

from __future__ import annotations

from collections.abc import Iterable

from poolgrid.kernel.wire.events import AnyEvent, PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.kernel.worker_protocol.cache_facts import CACHE_EVENTS

CROWDING_TOLERANCE_TOKENS = 1024
"""How far a belief may be from the truth: an eighth of a usual engine step, less than choosing again can gain."""


class BookedPrefill:
    """The books of one rank."""

    __slots__ = ("_tokens", "total")

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self.total = 0

    def accept(self, request_id: str, tokens: int) -> None:
        self.remove(request_id)
        if tokens > 0:
            self._tokens[request_id] = tokens
            self.total += tokens

    def remove(self, request_id: str) -> None:
        self.total -= self._tokens.pop(request_id, 0)

    def observe(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            if type(event) in CACHE_EVENTS:
                continue
            if isinstance(event, RequestStarted):
                if event.request_id in self._tokens:
                    self.accept(event.request_id, event.isl - event.cached_tokens)
            elif isinstance(event, PrefillCompleted | RequestFinished):
                self.remove(event.request_id)

    def crowding(self, expected_tokens: int | None) -> int | None:
        """Return the tokens that are booked when a router that expects ``expected_tokens`` should think again."""
        if expected_tokens is None or self.total <= expected_tokens + CROWDING_TOLERANCE_TOKENS:
            return None
        return self.total
