"""Which TTFT each request of a workload must meet, and whether its router knows.

Targets are drawn by the request's id, so every policy faces the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from poolgrid.wire.hashing import stable_u64

TARGET_FORM = "a finite number of milliseconds above 0"


class TargetError(ValueError):
    """A description of targets cannot be used."""


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """Targets in milliseconds, each as likely as the others."""

    values_ms: tuple[float, ...]
    told: bool = True
    """Whether requests say their target to the router."""

    @classmethod
    def parse(cls, text: str, told: bool) -> TtftTargets | None:
        """Return the targets of ``500,2000``, ``None`` for an empty text; raises ``TargetError``."""
        if not text.strip():
            return None
        values = []
        for at, each in enumerate(text.split(",")):
            try:
                value = float(each)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and value > 0.0):
                raise TargetError(f"ttft_targets_ms[{at}] is {each!r}, allowed is {TARGET_FORM}")
            values.append(value)
        return cls(tuple(values), told)

    def of(self, request_id: str) -> float:
        return self.values_ms[stable_u64(f"ttft target of {request_id}") % len(self.values_ms)]
