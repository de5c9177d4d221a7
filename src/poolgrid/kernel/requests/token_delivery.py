"""One request's tokens on their way to the client: in order, without holes, from any number of workers.

Rules
    1. What was delivered is never delivered again: ``output`` only grows, and each part of it is handed over once.
    2. All output is kept (4 bytes a token) while the request lives, because a migration continues from prompt + output.
    3. ``next`` hands over everything since the last call: one wake-up per engine step, however many tokens; none for
       tokens alone when the whole answer is waited for.
    4. The last delta has a finish reason; nothing comes after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.kernel.requests.inference import StreamDelta
from poolgrid.kernel.wire.requests import FinishReason


class TokenDelivery:
    """What the front end reads of one request (``poolgrid.kernel.requests.inference.TokenStream``)."""

    # Most of it stays as it is here until a worker has the request.
    worker = ""
    """The worker that serves, or served last."""
    decision_reason = ""
    """Short reason code of the last decision."""
    promised_tokens = 0
    """Prompt tokens that the worker held according to the router."""
    pool = ""
    """The pools that serve it, where there are several."""
    finished = False
    waits_for_room = False
    """Whether no worker has it, because those that were asked had no room."""
    _waiter: asyncio.Future[None] | None = None
    _until_end = False
    """Whether ``next`` waits for more than tokens: they are in ``output`` only, from ``_read_bytes`` on."""
    _read_bytes = 0
    """Output that ``next`` has returned."""

    def __init__(
        self,
        request_id: str,
        on_cancel: Callable[[TokenDelivery], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """``on_cancel`` is called when the client gives the request up before its end.

        ``loop`` is the running one, passed in by a caller that has it: until Python 3.12 each look-up of it is a system
        call.
        """
        self.request_id = request_id
        self.output = bytearray()
        """Packed tokens, all of them."""
        self._deltas: list[StreamDelta] = []
        self._on_cancel = on_cancel
        self._loop = loop

    @property
    def unread_tokens(self) -> int:
        """Return how many output tokens have arrived that ``next`` has not returned."""
        return (len(self.output) - self._read_bytes) // 4

    @property
    def tokens(self) -> int:
        return len(self.output) // 4

    async def next(self, until_end: bool = False) -> list[StreamDelta]:
        """Wait until something is new and return all of it; an empty list after the end.

        With ``until_end`` tokens alone are nothing new: they are kept for the delta that finishes, or that has more.
        """
        if not self._deltas:
            if self.finished:
                return []
            self._until_end = until_end
            self._waiter = (self._loop or asyncio.get_running_loop()).create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        self._read_bytes = len(self.output)
        return deltas

    def cancel(self) -> None:
        if not self.finished:
            self._on_cancel(self)
            if not self.finished:
                self.finish(StreamDelta(b"", FinishReason.CANCELLED))

    def append(self, tokens: bytes) -> None:
        """Take tokens and nothing else: what nearly every delta is. They join what the client has not fetched yet."""
        self.output += tokens
        if self._until_end:
            return
        waiting = self._deltas
        if waiting and waiting[-1].logprobs is None and waiting[-1].finish_reason is None:
            waiting[-1].token_ids += tokens
        else:
            waiting.append(StreamDelta(tokens))
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def deliver(self, delta: StreamDelta) -> None:
        """Take a delta that has more than tokens."""
        if self._until_end:
            self._until_end = False
            held = self.output[self._read_bytes :]
            if held:
                self._deltas.append(StreamDelta(bytes(held)))
        self.output += delta.token_ids
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self, delta: StreamDelta) -> None:
        self.finished = True
        self.deliver(delta)


class CarriedDelivery(TokenDelivery):
    """Of a request whose answer does not come through its router: only that it has begun, and that it is over."""

    def __init__(
        self,
        request_id: str,
        on_cancel: Callable[[TokenDelivery], None],
        on_end: Callable[[StreamDelta], None],
    ) -> None:
        super().__init__(request_id, on_cancel)
        self._on_end = on_end

    def append(self, tokens: bytes) -> None:
        self.output += tokens

    def deliver(self, delta: StreamDelta) -> None:
        self.output += delta.token_ids
        if self.finished:
            self._on_end(delta)
