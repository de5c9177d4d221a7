"""``SchedulingParams``, as in files of the 1.0 to 1.3rc era."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """Where a request runs under attention data parallelism."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
