"""One sequence to generate, as the front end asks a router for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from poolgrid.process.log_lines import Field, about
from poolgrid.process.tenant_caches import WHOLE, CacheShares
from poolgrid.process.tracing.record import TraceRecord
from poolgrid.wire.multimodal import MultimodalInput
from poolgrid.wire.requests import KvRetention, Sampling

NO_HINTS: Final[Mapping[str, Any]] = {}


@final
class InferenceRequest:
    """One sequence to generate, tokenized. A body with ``n`` choices becomes ``n`` of these."""

    # Not a struct: what is asked for so often is a plain place in memory where it is compiled.
    __slots__ = (
        "cache_salt",
        "cache_shares",
        "expected_output_tokens",
        "hints",
        "lora_name",
        "model",
        "multimodal",
        "priority",
        "read_whole",
        "request_id",
        "retention",
        "sampling",
        "stop_token_ids",
        "tenant",
        "tenant_weight",
        "token_ids",
        "trace",
    )

    def __init__(
        self,
        request_id: str,
        model: str,
        token_ids: bytes,
        sampling: Sampling,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        lora_name: str = "",
        cache_salt: str = "",
        expected_output_tokens: int | None = None,
        multimodal: MultimodalInput | None = None,
        read_whole: bool = False,
        tenant: str = "",
        tenant_weight: float = 1.0,
        cache_shares: CacheShares | None = WHOLE,
        retention: KvRetention | None = None,
        hints: Mapping[str, Any] = NO_HINTS,
        trace: TraceRecord | None = None,
    ) -> None:
        """Take what a body asks for; whose it is, and where its trace is kept, may be set until a router has it."""
        self.request_id = request_id
        self.model = model
        self.token_ids = token_ids
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.expected_output_tokens = expected_output_tokens
        self.multimodal = multimodal
        """Its media, with their places among ``token_ids``."""
        self.read_whole = read_whole
        """Whether nobody reads the answer before its end: its tokens may come in larger pieces."""
        self.tenant = tenant
        """Whose request it is; requests of one tenant share a queue's turns. Empty without API keys."""
        self.tenant_weight = tenant_weight
        self.cache_shares = cache_shares
        """Among whom the process's caches are divided; ``None`` = the request leaves nothing in them."""
        self.retention = retention
        """How long its KV blocks stay cached; every range has an end."""
        self.hints = hints
        """What the client asked of routing, as it came: ``nvext`` (the parts ``router`` and ``agent_hints``) and
        ``headers`` (those of ``HINT_HEADERS``, by name in lower case). Either may be absent."""
        self.trace = trace
        """What happens to the client's request, for one whose trace is kept; shared by all its sequences."""

    def named(self, **more: Field) -> dict[str, Any]:
        """Return the ``extra`` of a log line about this request, and what else the line is about."""
        return about(request_id=self.request_id, trace_id="" if self.trace is None else self.trace.trace_id, **more)
