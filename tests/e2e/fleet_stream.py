"""What the fleet page of a router is sent, read as the page reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

WAIT_S = 60.0

Seen = Callable[[dict[str, Any], dict[str, list[Any]]], bool]
"""Takes the values, and the rows of requests by key."""


def follow_until(url: str, headers: Mapping[str, str], what: str, seen: Seen) -> None:
    """Look at a page until it shows what is waited for."""
    values: dict[str, Any] = {}
    requests: dict[str, list[Any]] = {}
    until_s = time.monotonic() + WAIT_S
    with httpx.stream("GET", f"{url}/v1/fleet/stream", headers=headers, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                told = json.loads(line.removeprefix("data: "))
                values |= told["values"]
                requests |= {row[0]: row for row in told["tables"].get("requests", {}).get("rows", ())}
                if seen(values, requests):
                    return
            # Something comes every few seconds, whatever happens.
            assert time.monotonic() < until_s, f"the page did not show {what}: {values}, {sorted(requests)}"
    raise AssertionError(f"the page ended before it showed {what}")
