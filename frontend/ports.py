"""What the OpenAI surface needs from the router behind it.

A router implements ``InferenceBackend``; the front end turns HTTP into ``InferenceRequest`` and ``TokenStream`` back
into HTTP. Tokens cross this line as packed u32 little-endian bytes; text never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from poolgrid.runtime.log_lines import Field, about
from poolgrid.runtime.tenant_caches import WHOLE, CacheShares
from poolgrid.runtime.tracing.record import TraceRecord
from poolgrid.wire.card import NO_CHAT_SPEC, ChatSpec, MediaSpec
from poolgrid.wire.multimodal import MultimodalInput
from poolgrid.wire.requests import KvRetention, Sampling, TokenLogprobs

HINT_HEADERS = ("x-ttft-target-ms", "x-itl-target-ms")
"""Request headers that are handed to the router; a router that has no use for them ignores them."""

NO_HINTS: Mapping[str, Any] = {}


class InferenceRequest(msgspec.Struct, frozen=True):
    """One sequence to generate, tokenized. A body with ``n`` choices becomes ``n`` of these."""

    request_id: str
    model: str
    token_ids: bytes
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    lora_name: str = ""
    cache_salt: str = ""
    expected_output_tokens: int | None = None
    multimodal: MultimodalInput | None = None
    """Its media, with their places among ``token_ids``."""
    read_whole: bool = False
    """Whether nobody reads the answer before its end: its tokens may come in larger pieces."""
    tenant: str = ""
    """Whose request it is; requests of one tenant share a queue's turns. Empty without API keys."""
    tenant_weight: float = 1.0
    cache_shares: CacheShares | None = WHOLE
    """Among whom the process's caches are divided; ``None`` = the request leaves nothing in them."""
    retention: KvRetention | None = None
    """How long its KV blocks stay cached; every range has an end."""
    hints: Mapping[str, Any] = {}
    """What the client asked of routing, as it came: ``nvext`` (the parts ``router`` and ``agent_hints``) and
    ``headers`` (those of ``HINT_HEADERS``, by name in lower case). Either may be absent."""
    trace: TraceRecord | None = None
    """What happens to the client's request, for one whose trace is kept; shared by all its sequences."""

    def named(self, **more: Field) -> dict[str, Any]:
        """Return the ``extra`` of a log line about this request, and what else the line is about."""
        return about(request_id=self.request_id, trace_id="" if self.trace is None else self.trace.trace_id, **more)


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
    """With an error: no worker can do what the request asks for, which is the client's to mend."""
    poison: bool = False
    """With an error: workers were lost with the request on them, and it is not tried on another."""
    shutdown: bool = False
    """With an error: the router ends, and has nothing against the request."""


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
    def pool(self) -> str:
        """Return the pools that serve, for the response header; empty where there is only one pool."""
        ...

    @property
    def unread_tokens(self) -> int:
        """Return how many output tokens have arrived that ``next`` has not returned."""
        ...

    async def next(self, until_end: bool = False) -> list[StreamDelta]:
        """Wait until something is new and return all of it; after the finishing delta, an empty list.

        With ``until_end`` tokens alone are nothing new: they are kept for the delta that finishes, or that says more.
        The waiting may be cancelled (the client left); ``cancel`` follows.
        """
        ...

    def cancel(self) -> None:
        """Give the request up: its worker is told at once. Safe at any time, also after the end."""
        ...


class Refused(Exception):
    """The router will not serve the request now. ``status`` is the HTTP status that says so."""

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
    """Media that it takes beside text."""
    chat: ChatSpec = NO_CHAT_SPEC
    """How its chats are written and read, as far as its workers were told."""


class InferenceBackend(Protocol):
    """A router, as the front end sees it."""

    async def submit(self, request: InferenceRequest) -> TokenStream:
        """Choose a worker and dispatch; waits in the admission queue if it must. Raises ``Refused``.

        Cancelled while it waits (the client left), it gives its place up and leaves nothing dispatched.
        """
        ...

    def models(self) -> Sequence[ServedModel]:
        """Return the models that can be asked for now."""
        ...
