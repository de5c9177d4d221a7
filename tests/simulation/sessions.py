"""Conversations of chats and agents that share a few system prompts, as they were sent to four GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from random import Random

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.simulation.workload import RecordedRequest, Workload, recorded_workload

BLOCK_SIZE = 16
ISL_MAX = 30_000


@dataclass(frozen=True)
class Turn:
    """One request, and the conversation that it belongs to."""

    recorded: RecordedRequest
    session: int
    number: int


@dataclass(frozen=True)
class Kind:
    """How conversations of one kind go: median tokens and milliseconds."""

    system_prompts: tuple[int, ...]
    first: int
    later: int
    answer: int
    turns: int
    think_ms: float


CHAT = Kind((900, 600, 1500, 1200, 500), 150, 60, 180, 5, 6000.0)
AGENT = Kind((2600, 2000, 3400, 1800), 1500, 500, 80, 8, 1500.0)


def sessions(seed: int, rate_per_s: float, duration_s: float) -> list[Turn]:
    """Return requests in order of arrival; sessions arrive by a Poisson process, 40 % of them are agents."""
    draw = Random(f"{seed} {rate_per_s}")
    turns: list[Turn] = []
    begun_ms = 0.0
    for session in count():
        begun_ms += 1000 * draw.expovariate(rate_per_s)
        if begun_ms >= 1000 * duration_s:
            break
        kind = AGENT if draw.random() < 0.4 else CHAT
        places = range(len(kind.system_prompts))
        prompt = draw.choices(places, [1 / (place + 1) for place in places])[0]
        isl = system_tokens = kind.system_prompts[prompt]
        at_ms = begun_ms
        for number in range(1 + min(15, int(draw.expovariate(1 / kind.turns)))):
            isl += int(draw.lognormvariate(math.log(kind.later if number else kind.first), 0.8))
            osl = min(600, max(16, int(draw.lognormvariate(math.log(kind.answer), 0.6))))
            if isl > ISL_MAX or at_ms >= 1000 * duration_s:
                break
            path = [
                stable_u64(f"{kind.turns} {prompt} {block}")
                if block < system_tokens // BLOCK_SIZE
                else stable_u64(f"{seed} {session} {block}")
                for block in range(isl // BLOCK_SIZE)
            ]
            turns.append(Turn(RecordedRequest(at_ms, isl, osl, path), session, number))
            isl += osl
            at_ms += 80 + 7 * osl + draw.expovariate(1 / kind.think_ms)
    return sorted(turns, key=lambda turn: turn.recorded.arrival_ms)


def workload_of(turns: list[Turn]) -> Workload:
    return recorded_workload([turn.recorded for turn in turns], BLOCK_SIZE)
