"""Entries as stores keep them."""

from __future__ import annotations

from typing import Any

from poolgrid.kernel.wire.registration import Registration, encode_registration
from poolgrid.server.discovery.registry import Seen


def registration(number: int = 1, **fields: Any) -> Registration:
    given: dict[str, Any] = {
        "namespace": "blue",
        "component": "router",
        "instance": f"router-{number}",
        "life": f"{number:024x}",
        "endpoints": {"http": f"http://10.0.0.{number}:8000", "select": f"tcp://10.0.0.{number}:9000"},
        "lease_ms": 10_000,
    }
    return Registration(**{**given, **fields})


def seen(number: int = 1, mark: int = 0, age_ms: float = 0.0, **fields: Any) -> Seen:
    made = registration(number, **fields)
    return Seen(made.key, encode_registration(made), mark, age_ms)
