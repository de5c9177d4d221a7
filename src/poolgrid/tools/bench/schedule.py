"""When requests are due: arrival schedules in milliseconds since the start, from a rate and a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

from poolgrid.tools.bench.prompt import PlannedRequest
from poolgrid.wire.hashing import stable_u64


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process, ``rate`` a second on average."""
    generator = random.Random(seed)
    now_ms = 0.0
    while True:
        now_ms += generator.expovariate(rate) * 1000.0
        yield now_ms


def until(times_ms: Iterable[float], duration_ms: float) -> Iterator[float]:
    """Yield the times before ``duration_ms``."""
    return itertools.takewhile(lambda at_ms: at_ms < duration_ms, times_ms)


def synthetic(times_ms: Iterable[float | None], *, isl: int, osl: int, seed: int) -> Iterator[PlannedRequest]:
    """Yield requests that share nothing: each prompt is one block whose id comes from the seed and the index."""
    for index, at_ms in enumerate(times_ms):
        yield PlannedRequest(index, at_ms, (stable_u64(f"{seed}/{index}"),), isl, isl, osl)
