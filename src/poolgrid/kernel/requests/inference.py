"""A sequence to generate as the front end asks a router for it, what answers it, and the ports of the front end.

A router implements ``InferenceBackend``; the front end turns HTTP into ``InferenceRequest`` and ``TokenStream`` back
into HTTP. Tokens cross this line as packed u32 little-endian bytes; text never does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from poolgrid.kernel.requests.log_fields import Field, about
from poolgrid.kernel.requests.trace_record import TraceRecord
from poolgrid.kernel.wire.card import NO_CHAT_SPEC, ChatSpec, Inability, MediaSpec
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey
from poolgrid.kernel.wire.multimodal import MultimodalInput
from poolgrid.kernel.wire.requests import KvRetention, Sampling, TokenLogprobs
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.kernel.wire.tasks import Task, TaskResult
from poolgrid.kernel.wire.trace_context import TraceContext


class SessionHint(NamedTuple):
    """Names that the client chose, and what its prompt answers."""

    name: str = ""
    """The session; empty = the client names none."""
    parent: str = ""
    """The session that it was begun by."""
    after_tool: bool = False
    """Whether the prompt has the result of a tool behind the last answer in it."""
    answer: int = 0
    """``answer_key`` of the response that it continues by its id; 0 = none is named."""
    keep_ms: int = 0
    """How long to keep its prompt's KV, as far as ``InferenceRequest.kept_tokens_max`` allows; 0 = nothing is asked."""


NO_HINT: Final = SessionHint()


class CacheShares(NamedTuple):
    """Among how many tenants caches are divided."""

    tenants: int
    edition: int
    """Grows with every change of the tenants."""


class CacheDomain(NamedTuple):
    """Requests that may find a request's blocks in a cache: those of the same tenant with the same salt."""

    tenant: str
    salt: str
    """As the client wrote it. Salts of one tenant share its part of a cache."""
    shares: CacheShares


WHOLE: Final = CacheShares(1, 0)
"""Without API keys all clients are one tenant."""

EVERYBODY: Final = CacheDomain("", "", WHOLE)


NO_HINTS: Final[Mapping[str, Any]] = {}


class Carrier(Protocol):
    """Takes a request to engine servers itself, as its client wrote it, in place of the request plane."""

    is_streamed: bool
    """Whether the first byte of its answer shows when its first token came."""
    finish_reason: str
    """How the current dispatch ended, as ``poolgrid.kernel.wire.requests.FinishReason``."""
    cached_tokens: int | None
    """Prompt tokens that the server reported as reused."""
    is_prefilled: bool
    """Whether the prefill server of two legs has answered; some are asked together with the decode server."""

    @property
    def output_tokens(self) -> int | None:
        """Return the tokens of the answer as the server counted them; ``None`` where it did not."""
        ...

    @property
    def prompt_tokens(self) -> int | None:
        """Return the length of the prompt as the server reported it; ``None`` where that is not comparable."""
        ...

    def can_be_split(self, kind: str) -> bool:
        """Return whether one server of a kind may compute the prompt and another answer."""
        ...

    def send(self, dispatch_id: str, worker: WorkerKey, stage: Stage, params: bytes) -> None:
        """Send the request to a worker's server; what comes of it is reported later, never from within this call.

        ``params`` are those that the prefill leg has left for a decode leg.
        """
        ...

    def withdraw(self, dispatch_id: str) -> None:
        """Close the exchange of a dispatch whose answer is not wanted any more; one that is over is ignored."""
        ...

    def ended(self, last: StreamDelta) -> None:
        """Take note that the request is over for its router."""
        ...


class InferenceRequest(msgspec.Struct, eq=False):
    """One sequence to generate, tokenized. A body with ``n`` choices becomes ``n`` of these.

    What follows ``read_whole`` may be set until a router has it.
    """

    request_id: str
    model: str
    token_ids: bytes
    """u32 little-endian."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    lora_name: str = ""
    cache_salt: str = ""
    expected_output_tokens: int | None = None
    multimodal: MultimodalInput | None = None
    """Its media, with their places among ``token_ids``."""
    read_whole: bool = False
    """Whether the answer is not read before its end: its tokens may come in larger pieces."""
    tenant: str = ""
    """Whose request it is; requests of one tenant share a queue's turns. Empty without API keys."""
    address: str = ""
    """Address of a client without an API key."""
    tenant_weight: float = 1.0
    cache_shares: CacheShares | None = WHOLE
    """Among whom the process's caches are divided; ``None`` = the request leaves nothing in them."""
    retention: KvRetention | None = None
    """How long its KV blocks stay cached; every range has an end."""
    task: Task | None = None
    """What is asked for in place of tokens; then there are no ``token_ids``."""
    hints: Mapping[str, Any] = msgspec.field(default_factory=lambda: NO_HINTS)
    """What the client asked of routing, as it came: ``nvext`` (the parts ``router`` and ``agent_hints``) and
    ``headers`` (those of ``HINT_HEADERS``, by name in lower case); of a forwarded request ``OUTPUT_LIMIT`` too. Each
    may be absent."""
    session: SessionHint = NO_HINT
    """The client's hint about its session."""
    kept_tokens_max: int = 0
    """Prompt tokens that its tenant may have kept at a time where ``session`` asks for that."""
    turn: SessionTurn | None = None
    """The turn of a session that it is, once its router has looked."""
    trace: TraceRecord | None = None
    """What happens to the client's request, for one whose trace is kept; shared by all its sequences."""
    carrier: Carrier | None = None
    """What takes it to an engine server; ``None`` = it goes over the request plane."""
    only_worker: str = ""
    """The one worker that can serve it, whose engine server made what it continues; empty = any may."""
    by_text: bool = False
    """Whether ``token_ids`` are bytes of the prompt's text, whose tokens are not known: four stand for a token."""
    may_wait: bool = True
    """Whether it waits here while no worker has room; otherwise it is refused as busy, and waits at its sender."""
    trace_context: TraceContext | None = None
    """Where the client's request stands in a trace of its own; workers get it if no record is kept here."""

    @property
    def payer(self) -> str:
        """Return whose turn in a queue it takes: its tenant's, or without API keys that of its client's address."""
        return self.tenant or self.address

    def named(self, **more: Field) -> dict[str, Any]:
        """Return the ``extra`` of a log line about this request, and what else the line is about."""
        if self.turn is not None:
            more["session"] = self.turn.session
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


PRIORITY_HEADER = "x-dynamo-request-priority"
"""The priority of a request in Dynamo's header, which wins over ``nvext.agent_hints.priority``."""

HINT_HEADERS = ("x-ttft-target-ms", "x-itl-target-ms", PRIORITY_HEADER)
"""Request headers that are handed to the router; a router that has no use for them ignores them."""


def header_priority(headers: Mapping[str, str] | None) -> int | None:
    """Return the priority that a request's headers ask for; ``None`` where they ask for none or for no 32-bit number,
    which Dynamo ignores too."""
    text = headers.get(PRIORITY_HEADER, "") if headers else ""
    if not _PRIORITY.fullmatch(text):
        return None
    return value if -(2**31) <= (value := int(text)) < 2**31 else None


_PRIORITY = re.compile(r"[+-]?[0-9]{1,10}")


OUTPUT_LIMIT = "output_limit"
"""The most tokens that the client lets the answer have: the ``sampling`` of a forwarded request has no limit."""


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
