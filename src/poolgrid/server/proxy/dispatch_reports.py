"""What is reported to a router of a request that it has booked: how each of its dispatches begins and ends."""

from __future__ import annotations

from typing import Final

from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.server.proxy.ports import ForwardBackend
from poolgrid.server.proxy.server_connection import HeaderList

FIRST_OUTPUT: Final = b"\0\0\0\0"
"""Stands for the first token of an answer, which the router does not read."""


class DispatchReports:
    """Reports of one request. All but those of a prefill leg are about the last dispatch that was begun."""

    __slots__ = ("_backend", "_position", "_request_id", "dispatch_id")

    def __init__(self, backend: ForwardBackend, request_id: str) -> None:
        self._backend = backend
        self._request_id = request_id
        self.dispatch_id = ""
        self._position = 0
        """Tokens of the dispatch that were reported: the first stands for all."""

    def begin(self, dispatch_id: str) -> None:
        """Take note of another dispatch."""
        self.dispatch_id, self._position = dispatch_id, 0

    def prefilled(self, dispatch_id: str, params: bytes, cached_tokens: int | None) -> None:
        """Report that the decode leg of a request may begin with these parameters."""
        self._report(
            TokenDelta(dispatch_id, 0, b"", FinishReason.PREFILLED, cached_tokens, disaggregated_params=params)
        )

    def prefill_broken(self, dispatch_id: str, why: str) -> None:
        """Report that a prefill leg has failed whose decode leg has begun."""
        self._backend.on_carried_broken(self._request_id, dispatch_id, why)

    def answered(self, status: int, headers: HeaderList) -> None:
        """Report the head of an answer from the router of a pool."""
        self._backend.on_answered(self._request_id, status, headers)

    def first_output(self) -> None:
        """Report the first token of a stream."""
        self._position = 1
        self._report(TokenDelta(self.dispatch_id, 0, FIRST_OUTPUT))

    def refused(self, kind: RefusalKind, why: str, retry_after_ms: int | None = None) -> None:
        """Report that a server has not answered, so that the router chooses another."""
        self._report(
            TokenDelta(
                self.dispatch_id,
                0,
                b"",
                FinishReason.ERROR,
                error=why,
                refusal=kind,
                retry_after_ms=retry_after_ms,
            )
        )

    def ended(self, reason: FinishReason, cached_tokens: int | None, error: str) -> None:
        """Report the end of the answer."""
        self._report(TokenDelta(self.dispatch_id, self._position, b"", reason, cached_tokens, error=error or None))

    def _report(self, delta: TokenDelta) -> None:
        self._backend.on_carried(self._request_id, delta)
