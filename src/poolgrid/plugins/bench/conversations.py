"""Conversations to send: users who ask several times, each time with all that was said before, and system prompts that
many of them share.

A conversation is planned as one request per turn; what the assistant said is known only when it has been said, so the
runner puts it between them. Ids of blocks come from the seed: the same seed sends the same words.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.bench.prompt import PlannedRequest

PAUSE_MAX = 5.0
"""Longest think time, as a multiple of the mean: an exponential one is longer in 0.7 % of all cases."""


class ConversationShape(msgspec.Struct, frozen=True):
    """What all conversations of a run have in common; lengths in tokens."""

    turns: int
    isl: int
    """Of each message of the user."""
    osl: int
    shared_prefix: int = 0
    """Of the system prompt, which all share; 0 = there is none."""
    think_time_s: float = 0.0
    """Mean of the exponential pauses before a user asks again."""


class PlannedConversation(msgspec.Struct, frozen=True):
    """One conversation: its turns, and how long the user thinks before each of them."""

    turns: tuple[PlannedRequest, ...]
    pauses_ms: tuple[float, ...]
    """Before each turn; 0 before the first."""


def plan_conversations(shape: ConversationShape, seed: int) -> Iterator[PlannedConversation]:
    """Yield conversations without end, which share the system prompt and nothing else."""
    for number in itertools.count():
        chance = random.Random(f"{seed}/{number}")
        system: tuple[int, ...] = ()
        if shape.shared_prefix:
            system = (stable_u64(f"{seed}/system"),)
        turns = tuple(
            _turn(number * shape.turns + turn, system if turn == 0 else (), shape, seed) for turn in range(shape.turns)
        )
        pauses = tuple(_pause_ms(chance, shape.think_time_s) if turn else 0.0 for turn in range(shape.turns))
        yield PlannedConversation(turns, pauses)


def _turn(index: int, system: tuple[int, ...], shape: ConversationShape, seed: int) -> PlannedRequest:
    own = stable_u64(f"{seed}/{index}")
    if not system:
        return PlannedRequest(index, None, (own,), shape.isl, shape.isl, shape.osl)
    isl = shape.shared_prefix + shape.isl
    return PlannedRequest(index, None, (*system, own), shape.shared_prefix, isl, shape.osl, len(system))


def _pause_ms(chance: random.Random, mean_s: float) -> float:
    return min(PAUSE_MAX * mean_s, chance.expovariate(1.0 / mean_s)) * 1000.0 if mean_s else 0.0


def synthetic(*, isl: int, osl: int, seed: int) -> Iterator[PlannedRequest]:
    """Yield requests without end that share nothing: each prompt is one block whose id comes from seed and index."""
    for index in itertools.count():
        yield PlannedRequest(index, None, (stable_u64(f"{seed}/{index}"),), isl, isl, osl)
