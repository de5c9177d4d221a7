"""A grid of pools as a gateway's ``pool-selector`` has it."""

from __future__ import annotations

from typing import Any

SELECTOR: dict[str, Any] = {
    "poolLabel": "example.com/pool",
    "poolLabels": ["tp1", "tp2", "tp4"],
    "sizeMin": 0,
    "sizeMax": 3000.0,
    "sizeResolution": 3,
    "latencyMinMs": 0.0,
    "latencyMaxMs": 300,
    "latencyResolution": 3,
    "mapping": [[0, 0, 0], [2, 1, 0], [2, 2, 1]],
}
