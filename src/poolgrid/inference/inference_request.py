"""One sequence to generate, as the front end asks a router for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from poolgrid.process.log_lines import Field, about
from poolgrid.process.tracing.record import TraceRecord
from poolgrid.wire.multimodal import MultimodalInput
from poolgrid.wire.requests import KvRetention, Sampling
from poolgrid.wire.sessions import SessionTurn
from poolgrid.wire.tasks import Task


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
    tenant_weight: float = 1.0
    cache_shares: CacheShares | None = WHOLE
    """Among whom the process's caches are divided; ``None`` = the request leaves nothing in them."""
    retention: KvRetention | None = None
    """How long its KV blocks stay cached; every range has an end."""
    task: Task | None = None
    """What is asked for in place of tokens; then there are no ``token_ids``."""
    hints: Mapping[str, Any] = msgspec.field(default_factory=lambda: NO_HINTS)
    """What the client asked of routing, as it came: ``nvext`` (the parts ``router`` and ``agent_hints``) and
    ``headers`` (those of ``HINT_HEADERS``, by name in lower case). Either may be absent."""
    session: SessionHint = NO_HINT
    """The client's hint about its session."""
    kept_tokens_max: int = 0
    """Prompt tokens that its tenant may have kept at a time where ``session`` asks for that."""
    turn: SessionTurn | None = None
    """The turn of a session that it is, once its router has looked."""
    trace: TraceRecord | None = None
    """What happens to the client's request, for one whose trace is kept; shared by all its sequences."""

    def named(self, **more: Field) -> dict[str, Any]:
        """Return the ``extra`` of a log line about this request, and what else the line is about."""
        if self.turn is not None:
            more["session"] = self.turn.session
        return about(request_id=self.request_id, trace_id="" if self.trace is None else self.trace.trace_id, **more)
