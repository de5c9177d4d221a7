"""Conversations to send: users who ask several times, each time with all that was said before, and system prompts that
many of them share.

A conversation is planned as one request per turn; what the assistant said is known only when it has been said, so the
runner puts it between them. Ids of blocks come from the seed: the same seed sends the same words.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import msgspec

from poolgrid.tools.bench.agents import AgentDraws
from poolgrid.tools.bench.prompt import PlannedRequest
from poolgrid.wire.hashing import stable_u64

PAUSE_MAX = 5.0
"""Longest think time, as a multiple of the mean: an exponential one is longer in 0.7 % of all cases."""


class ConversationShape(msgspec.Struct, frozen=True):
    """What all conversations of a run have in common; lengths in tokens."""

    turns: int
    isl: int
    """Of each message of the user."""
    osl: int
    shared_prefix: int = 0
    """Of the system prompt; 0 = there is none."""
    shared_prefixes: int = 1
    """Different system prompts; each conversation has one of them."""
    think_time_s: float = 0.0
    """Mean of the exponential pauses before a user asks again."""


class PlannedConversation(msgspec.Struct, frozen=True):
    """One conversation: when it begins, its turns, and how long the user thinks before each of them."""

    at_ms: float | None
    """Scheduled time since the start of the run; ``None`` in a closed loop."""
    turns: tuple[PlannedRequest, ...]
    pauses_ms: tuple[float, ...]
    """Before each turn; 0 before the first."""


def plan_conversations(
    times_ms: Iterable[float | None], shape: ConversationShape, seed: int
) -> Iterator[PlannedConversation]:
    """Yield conversations that share system prompts and nothing else."""
    for number, at_ms in enumerate(times_ms):
        chance = random.Random(f"{seed}/{number}")
        system: tuple[int, ...] = ()
        if shape.shared_prefix:
            system = (stable_u64(f"{seed}/system/{chance.randrange(shape.shared_prefixes)}"),)
        turns = tuple(
            _turn(number * shape.turns + turn, at_ms if turn == 0 else None, system if turn == 0 else (), shape, seed)
            for turn in range(shape.turns)
        )
        pauses = tuple(_pause_ms(chance, shape.think_time_s) if turn else 0.0 for turn in range(shape.turns))
        yield PlannedConversation(at_ms, turns, pauses)


AGENT_TENANTS = 4
"""Tenants whose agents share a system prompt and tools."""


def plan_agents(seed: int, length_scale: float) -> Iterator[PlannedConversation]:
    """Yield agent sessions without end; a subagent is a session of its own at the same time.

    Its prompt begins with its tenant's system prompt: no endpoint lets a client continue another's answer.
    """
    draws = AgentDraws(seed, AGENT_TENANTS, length_scale)
    prefix = draws.prefix_tokens
    index = 0
    for number in itertools.count():
        for session in draws.session(number).family():
            system = stable_u64(f"{seed}/system/{session.tenant}")
            turns: list[PlannedRequest] = []
            for place, call in enumerate(session.calls):
                own, tokens = stable_u64(f"{seed}/{index}"), call.new_tokens
                if place:
                    turns.append(PlannedRequest(index, None, (own,), tokens, tokens, call.output_tokens))
                else:
                    tokens = min(tokens, prefix)  # blocks of one request have one length
                    turns.append(
                        PlannedRequest(index, None, (system, own), prefix, prefix + tokens, call.output_tokens, 1)
                    )
                index += 1
            pauses = (0.0, *(call.pause_ms for call in session.calls[:-1]))
            yield PlannedConversation(None, tuple(turns), pauses)


def _turn(
    index: int, at_ms: float | None, system: tuple[int, ...], shape: ConversationShape, seed: int
) -> PlannedRequest:
    own = stable_u64(f"{seed}/{index}")
    if not system:
        return PlannedRequest(index, at_ms, (own,), shape.isl, shape.isl, shape.osl)
    isl = shape.shared_prefix + shape.isl
    return PlannedRequest(index, at_ms, (*system, own), shape.shared_prefix, isl, shape.osl, len(system))


def _pause_ms(chance: random.Random, mean_s: float) -> float:
    return min(PAUSE_MAX * mean_s, chance.expovariate(1.0 / mean_s)) * 1000.0 if mean_s else 0.0


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
