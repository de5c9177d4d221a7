"""``DisaggregatedParams``: nine fields in 1.2.1, more in the 1.3 line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._fake.profile import PROFILE

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(slots=True)
class _Params:
    """What a context request leaves for the generation request."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"Unknown request type: {self.request_type}. Must be context_only, generation_only or "
                    "context_and_generation"
                )
        handles, hashes = self.multimodal_embedding_handles, self.multimodal_hashes
        if handles is not None and hashes is not None:
            if len(handles) != len(hashes):
                raise ValueError("multimodal_embedding_handles and multimodal_hashes must have the same length")
            if any(len(each) != 8 for each in hashes):
                raise ValueError("multimodal_hashes must have 8 integers each")


@dataclass(slots=True)
class _LaterParams(_Params):
    """The same in the 1.3 line."""

    first_gen_log_probs: list[Any] | None = None
    """A dict of ``Logprob`` objects by token for each first token: not plain values."""
    first_gen_logits: list[Any] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: Any = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None


for _each in (_Params, _LaterParams):
    _each.__name__ = _each.__qualname__ = "DisaggregatedParams"

if TYPE_CHECKING:
    DisaggregatedParams = _LaterParams
else:
    DisaggregatedParams = _LaterParams if PROFILE.later_disaggregation else _Params
