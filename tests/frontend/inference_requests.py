"""Requests that differ in a few fields from another."""

from __future__ import annotations

from typing import Any

import msgspec

from poolgrid.kernel.requests.inference import InferenceRequest

like = msgspec.structs.replace


def fields_of(request: InferenceRequest) -> dict[str, Any]:
    """Return all of a request, by name."""
    return {name: getattr(request, name) for name in request.__struct_fields__}
