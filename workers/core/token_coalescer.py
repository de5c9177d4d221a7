"""Output of several engine steps that is sent together, for requests whose answer is not read before its end.

Every message costs its router more than the tokens in it, so a router sets for each request how many tokens may come
together (``Routing.tokens_together``).

Rules
    1. What has more than tokens (the first delta, an end, log probabilities) is never kept back, and takes what was
       kept before it along: order and positions are those of the engine.
    2. At most ``tokens_together`` tokens are kept of a request, 4 bytes each; then they go.
    3. What is kept is lost with the worker, and computed again by the next one: that, and no more, is its price.
"""

from __future__ import annotations

import msgspec

from poolgrid.wire.requests import FinishReason, Generate, TokenDelta

ENDS_WITH_TOKENS = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that a router takes as the last of the output; after another one it asks another worker for what is missing."""


class _Kept:
    """Tokens of one request that were not sent yet."""

    __slots__ = ("bytes_max", "position", "tokens")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.position = 0
        self.tokens = b""


class TokenCoalescer:
    """What is kept back of one worker's requests."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """Return how many requests are known whose tokens may come together."""
        return len(self._kept)

    def begin(self, request: Generate) -> None:
        """Note an accepted request; log probabilities belong to their step's tokens, so they are never joined."""
        together = request.routing.tokens_together
        if together > 1 and request.sampling.logprobs is None:
            self._kept[request.request_id] = _Kept(4 * together)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def add(self, delta: TokenDelta, ready: list[TokenDelta]) -> None:
        """Keep a delta, or put it among those that are ready, behind what was kept before it."""
        kept = self._kept.get(delta.request_id)
        if kept is None:
            ready.append(delta)
            return
        if delta.finish_reason is None and delta.cached_tokens is None and delta.prompt_logprobs is None:
            if not kept.tokens:
                kept.position = delta.position
            kept.tokens += delta.token_ids
            if len(kept.tokens) >= kept.bytes_max:
                ready.append(TokenDelta(delta.request_id, kept.position, kept.tokens))
                kept.tokens = b""
            return
        if kept.tokens:
            if delta.finish_reason in ENDS_WITH_TOKENS:
                delta = msgspec.structs.replace(delta, position=kept.position, token_ids=kept.tokens + delta.token_ids)
            else:
                ready.append(TokenDelta(delta.request_id, kept.position, kept.tokens))
            kept.tokens = b""
        ready.append(delta)
