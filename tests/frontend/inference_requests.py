"""Requests that differ in a few fields from another."""

from __future__ import annotations

from typing import Any

from poolgrid.inference.inference_request import InferenceRequest

_FIELDS = (
    "request_id",
    "model",
    "token_ids",
    "sampling",
    "stop_token_ids",
    "priority",
    "lora_name",
    "cache_salt",
    "expected_output_tokens",
    "multimodal",
    "read_whole",
    "tenant",
    "tenant_weight",
    "cache_shares",
    "retention",
    "hints",
    "trace",
)


def fields_of(request: InferenceRequest) -> dict[str, Any]:
    """Return all of a request, by name."""
    return {name: getattr(request, name) for name in _FIELDS}


def like(request: InferenceRequest, **changed: Any) -> InferenceRequest:
    """Return another request, the same but for what is changed."""
    return InferenceRequest(**(fields_of(request) | changed))
