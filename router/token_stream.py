"""One request's tokens on their way to the client: in order, without holes, over any number of migrations.

Rules
    1. What was delivered is never delivered again. A dispatch numbers its output from 0; ``position`` must be exactly
       what this dispatch has delivered so far, or the delta is dropped as a fault of the stream.
    2. All output is kept (4 bytes a token) while the request lives, because a migration continues from prompt + output.
    3. ``next`` hands over everything since the last call: one wake-up per engine step, however many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from frontend.ports import InferenceRequest, StreamDelta
from wire.identifiers import WorkerKey
from wire.requests import Generate, Routing, Sampling, TokenDelta

FINISHED_REASONS = ("stop", "length", "cancelled", "error")


class ActiveRequest:
    """A request from its first dispatch to its end; also the ``TokenStream`` that the front end reads."""

    def __init__(self, request: InferenceRequest, path: list[int], on_cancel: Callable[[ActiveRequest], None]) -> None:
        self.request = request
        self.path = path
        self.attempt = -1
        """Number of the current dispatch; -1 before the first."""
        self.worker_key: WorkerKey | None = None
        self.endpoint = ""
        """Request-plane endpoint of the current worker."""
        self.tried: dict[WorkerKey, str] = {}
        """Workers that failed this request, and how."""
        self.reason = ""
        self.output = bytearray()
        self.finished = False
        self._position = 0
        self._deltas: list[StreamDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._cached_tokens: int | None = None
        self._on_cancel = on_cancel

    # -- what the front end sees -----------------------------------------------------------------------------------

    @property
    def worker(self) -> str:
        """Return the worker that serves (or served last)."""
        return "" if self.worker_key is None else str(self.worker_key)

    @property
    def decision_reason(self) -> str:
        """Return the short reason code of the last decision."""
        return self.reason

    async def next(self) -> list[StreamDelta]:
        """Wait until something is new and return all of it; an empty list after the end."""
        if not self._deltas:
            if self.finished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return deltas

    def cancel(self) -> None:
        """Give the request up."""
        if not self.finished:
            self._on_cancel(self)
            self.finish(StreamDelta(b"", finish_reason="cancelled"))

    # -- what the router does --------------------------------------------------------------------------------------

    @property
    def emitted_tokens(self) -> int:
        """Return how many tokens the client was given."""
        return len(self.output) // 4

    def dispatch_id(self) -> str:
        """Return the id of the current dispatch; each migration has one of its own."""
        return self.request.request_id if self.attempt == 0 else f"{self.request.request_id}~{self.attempt}"

    def begin_dispatch(self, worker: WorkerKey, reason: str) -> Generate:
        """Start the next attempt on a worker and return the message for it: prompt plus what was already generated."""
        self.attempt += 1
        self.worker_key = worker
        self.reason = reason
        self._position = 0
        request = self.request
        emitted = self.emitted_tokens
        return Generate(
            self.dispatch_id(),
            request.token_ids + bytes(self.output) if emitted else request.token_ids,
            _remaining(request.sampling, emitted),
            request.stop_token_ids,
            Routing(worker.dp_rank, request.priority, request.lora_name, request.cache_salt, emitted),
        )

    def accept(self, delta: TokenDelta) -> bool:
        """Take what the worker sent; return False when it does not continue what came before."""
        if delta.position != self._position:
            return False
        count = len(delta.token_ids) // 4
        self._position += count
        self.output += delta.token_ids
        cached = None
        if self._cached_tokens is None and delta.cached_tokens is not None:
            cached = self._cached_tokens = delta.cached_tokens
        ended = StreamDelta(delta.token_ids, delta.finish_reason, cached, delta.logprobs, delta.error)
        if delta.finish_reason is not None:
            self.finish(ended)
        else:
            self._deltas.append(ended)
            self._wake()
        return True

    def finish(self, delta: StreamDelta) -> None:
        """Deliver the last delta."""
        self.finished = True
        self._deltas.append(delta)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _remaining(sampling: Sampling, emitted: int) -> Sampling:
    """Return the sampling of a continuation after ``emitted`` tokens."""
    if not emitted:
        return sampling
    return msgspec.structs.replace(
        sampling, max_tokens=sampling.max_tokens - emitted, min_tokens=max(0, sampling.min_tokens - emitted)
    )
