"""New tokens of one request, as a router hands them to the front end."""

from __future__ import annotations

import msgspec

from poolgrid.wire.requests import TokenLogprobs
from poolgrid.wire.tasks import TaskResult


class StreamDelta(msgspec.Struct):
    """New tokens of one request; ``finish_reason`` is set on the last one."""

    token_ids: bytes
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``error``."""
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's tokens from the second on; once, with the first delta, when asked for."""
    unsupported: bool = False
    """With an error: no worker can do what the request asks for, which is the client's to change."""
    poison: bool = False
    """With an error: workers were lost with the request on them, and it is not tried on another."""
    shutdown: bool = False
    """With an error: the router ends, and has nothing against the request."""
    no_worker: bool = False
    """With an error: the workers that there are now cannot continue the request."""
    retry_after_s: float | None = None
    """With an error: no worker had room in time, and the client should come back after this."""
    unknown_model: bool = False
    """With an error: no worker serves the model or adapter any more."""
    progress: int | None = None
    """Of a task: how much of it is done, in percent."""
    result: TaskResult | None = None
    """Of a task, with the last delta."""
