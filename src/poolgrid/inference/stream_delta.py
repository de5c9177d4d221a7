"""New tokens of one request, as a router hands them to the front end."""

from __future__ import annotations

from typing import Any, final

from poolgrid.wire.requests import TokenLogprobs
from poolgrid.wire.value import Value


@final
class StreamDelta(Value):
    """New tokens of one request; ``finish_reason`` is set on the last one."""

    __slots__ = (
        "cached_tokens",
        "error",
        "finish_reason",
        "logprobs",
        "poison",
        "prompt_logprobs",
        "retry_after_s",
        "shutdown",
        "token_ids",
        "unknown_model",
        "unsupported",
    )

    def __init__(
        self,
        token_ids: bytes,
        finish_reason: str | None = None,
        cached_tokens: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        error: str | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        unsupported: bool = False,
        poison: bool = False,
        shutdown: bool = False,
        retry_after_s: float | None = None,
        unknown_model: bool = False,
    ) -> None:
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        """``stop``, ``length``, ``cancelled`` or ``error``."""
        self.cached_tokens = cached_tokens
        self.logprobs = logprobs
        self.error = error
        self.prompt_logprobs = prompt_logprobs
        """Of the prompt's tokens from the second on; once, with the first delta, when asked for."""
        self.unsupported = unsupported
        """With an error: no worker can do what the request asks for, which is the client's to mend."""
        self.poison = poison
        """With an error: workers were lost with the request on them, and it is not tried on another."""
        self.shutdown = shutdown
        """With an error: the router ends, and has nothing against the request."""

        self.retry_after_s = retry_after_s
        """With an error: no worker had room in time, and the client should come back after this."""
        self.unknown_model = unknown_model
        """With an error: no worker serves the model or adapter any more."""

    def parts(self) -> tuple[Any, ...]:
        """Return all of it, in the order in which it is given."""
        return (
            self.token_ids,
            self.finish_reason,
            self.cached_tokens,
            self.logprobs,
            self.error,
            self.prompt_logprobs,
            self.unsupported,
            self.poison,
            self.shutdown,
            self.retry_after_s,
            self.unknown_model,
        )
