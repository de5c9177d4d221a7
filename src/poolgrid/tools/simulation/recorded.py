"""Recorded traffic as the simulator needs it: when requests came, how long they were, which blocks they shared.

Of a recorded prompt only the sequence hashes of its whole blocks are known, which is all that routing and caching see.
Its tokens are stand-ins, different for each request, so that nothing beyond the recorded hashes is ever shared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from poolgrid.tools.simulation.workload import SimulatedRequest, Workload
from poolgrid.wire.requests import Generate, Sampling


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of recorded traffic."""

    arrival_ms: float
    """Since the first one."""
    isl: int
    osl: int
    path: Sequence[int]
    """Sequence hashes of the prompt's whole blocks."""


def recorded_workload(recorded: Sequence[RecordedRequest], block_size: int, speed: float = 1.0) -> Workload:
    """Return recorded requests as a workload that comes ``speed`` times as fast; times must not go backwards."""
    if speed <= 0:
        raise ValueError(f"building a workload: speed is {speed}, allowed are values above 0")
    seen: set[int] = set()
    requests: list[SimulatedRequest] = []
    ideal = prompt_tokens = total = longest = 0
    for number, each in enumerate(recorded):
        if len(each.path) != each.isl // block_size:
            raise ValueError(
                f"building a workload: request {number} has {len(each.path)} hashes, {each.isl} tokens in blocks of "
                f"{block_size} need {each.isl // block_size}"
            )
        osl = max(1, each.osl)
        generate = Generate(
            f"recorded-{number}",
            struct.pack("<I", number) * each.isl,
            Sampling(max_tokens=osl, ignore_eos=True),
        )
        requests.append(SimulatedRequest(each.arrival_ms / speed, each.isl, osl, list(each.path), generate))
        lead = next((at for at, block in enumerate(each.path) if block not in seen), len(each.path))
        ideal += lead * block_size
        seen.update(each.path)
        prompt_tokens += each.isl
        total += each.isl + osl
        longest = max(longest, each.isl + osl)
    return Workload(requests, block_size, ideal / prompt_tokens if prompt_tokens else 0.0, total, longest)


def part_of(workload: Workload, first: int, last: int) -> Workload:
    """Return the requests from ``first`` to before ``last`` as a workload of their own, beginning at time 0."""
    chosen = workload.requests[first:last]
    begin = chosen[0].arrival_ms if chosen else 0.0
    moved = [SimulatedRequest(each.arrival_ms - begin, each.isl, each.osl, each.path, each.generate) for each in chosen]
    seen: set[int] = set()
    ideal = 0
    for each in moved:
        lead = next((at for at, block in enumerate(each.path) if block not in seen), len(each.path))
        ideal += lead * workload.block_size
        seen.update(each.path)
    prompt_tokens = sum(each.isl for each in moved)
    return Workload(
        moved,
        workload.block_size,
        ideal / prompt_tokens if prompt_tokens else 0.0,
        sum(each.isl + each.osl for each in moved),
        max((each.isl + each.osl for each in moved), default=0),
    )
