"""What the OpenAI surface needs from the router behind it.

A router implements ``InferenceBackend``; the front end turns HTTP into ``InferenceRequest`` and ``TokenStream`` back
into HTTP. Tokens cross this line as packed u32 little-endian bytes; text never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.wire.card import NO_CHAT_SPEC, ChatSpec, Inability, MediaSpec
from poolgrid.wire.identifiers import Stage
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


HINT_HEADERS = ("x-ttft-target-ms", "x-itl-target-ms")
"""Request headers that are handed to the router; a router that has no use for them ignores them."""


class TokenStream(Protocol):
    """The tokens of one request, in order and without holes, over any number of migrations."""

    @property
    def worker(self) -> str:
        """Return the worker that serves (or served last), for the response header."""
        ...

    @property
    def decision_reason(self) -> str:
        """Return the short reason code of the routing decision, for the response header."""
        ...

    @property
    def promised_tokens(self) -> int:
        """Return the prompt tokens that the last decision promised as reused, for the receipt."""
        ...

    @property
    def pool(self) -> str:
        """Return the pools that serve, for the response header; empty where there is only one pool."""
        ...

    @property
    def unread_tokens(self) -> int:
        """Return how many output tokens have arrived that ``next`` has not returned."""
        ...

    @property
    def waits_for_room(self) -> bool:
        """Return whether it waits in the queue once more, because the workers that were asked had no room."""
        ...

    async def next(self, until_end: bool = False) -> list[StreamDelta]:
        """Wait until something is new and return all of it; after the finishing delta, an empty list.

        With ``until_end`` tokens alone are nothing new: they are kept for the delta that finishes, or that has more.
        The waiting may be cancelled (the client left); ``cancel`` follows.
        """
        ...

    def cancel(self) -> None:
        """Give the request up: its worker gets the cancellation at once. Safe at any time, also after the end."""
        ...


class Refused(Exception):
    """The router will not serve the request now. ``status`` is the HTTP status for it."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        self.status = status
        self.code = code
        """Machine-readable reason, e.g. ``busy``, ``no_worker``, ``prompt_too_long``."""
        self.retry_after_s = retry_after_s
        self.param = param
        """The request's field that is wrong, when it is the client's fault."""
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it."""

    name: str
    created: int
    max_sequence_length: int
    loras: tuple[str, ...] = field(default=())
    media: MediaSpec = MediaSpec()
    """Media that it takes in addition to text."""
    chat: ChatSpec = NO_CHAT_SPEC
    """How its chats are written and read, as far as its workers were configured."""
    aliases: tuple[str, ...] = ()
    """Further names of it."""
    inabilities: tuple[Inability, ...] = ()
    """What none of its workers can do."""
    generates: bool = True
    """Whether some worker generates tokens with it."""
    tasks: tuple[Stage, ...] = ()
    """Kinds of tasks that its workers serve."""


class InferenceBackend(Protocol):
    """A router, as the front end sees it."""

    async def submit(self, request: InferenceRequest) -> TokenStream:
        """Choose a worker and dispatch; waits in the admission queue if it must. Raises ``Refused``.

        Cancelled while it waits (the client left), it gives its place up and leaves nothing dispatched.
        """
        ...

    def models(self) -> Sequence[ServedModel]: ...
