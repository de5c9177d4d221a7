"""Requests that differ in a few fields from another."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from poolgrid.inference.inference_request import InferenceRequest

like = replace


def fields_of(request: InferenceRequest) -> dict[str, Any]:
    """Return all of a request, by name."""
    return {field.name: getattr(request, field.name) for field in fields(request)}
