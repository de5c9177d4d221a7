"""Seeded traffic of conversations, the same for every router: histories hold canned answers, so prompts are equal.

Two levels send what was generated: whole, as most clients do, or the second half, as clients without the reasoning do.

Rules
    1. Sessions arrive as a Poisson process; each asks its turns one after the other and thinks between them.
    2. Sessions share system prompts; few of these are frequent (Zipf), as in a deployment of some applications.
    3. ``scale`` makes every text shorter, for a rehearsal; times and numbers of turns stay.

The distributions are those of the run on four H200 in ``docs/benchmarks.md``: lengths are lognormal, with medians that
published traces of chat and of agents have.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import NamedTuple

import msgspec

from lab.benchmarks.chat_text import ChatText

PROMPT_TOKENS_MAX = 31_000
"""A conversation ends before its prompt is longer: engines of the comparison serve 36,864 tokens."""


class Turn(msgspec.Struct):
    """One request of a session."""

    user: str
    answer: str
    """What later turns send as the answer to it."""
    answer_tokens: int
    """How many tokens are asked for; exactly so many come."""
    think_s: float
    """Pause before it; unused in a first turn."""


class Session(msgspec.Struct):
    """One conversation."""

    at_s: float
    system: str
    turns: list[Turn]


CANNED, GENERATED, HALVES = "canned", "generated", "halves"


class Level(NamedTuple):
    """What a load is like."""

    sessions_per_s: float
    """For each engine."""
    agents: float
    """Share of sessions that are agents: long prompts, tool outputs, short pauses. The rest are chats."""
    kv_share: float = 1.0
    """Share of the engine's KV cache that there is."""
    sends: str = CANNED
    """What histories hold as answers."""
    sends_ids: bool = False
    """Whether requests name their session in a header, for routers that keep sessions by it."""
    kind: str = ""
    """Of all sessions, where they are not chats and agents: ``coding``, or ``long``, single long prompts of which none
    repeats another, as in the run of two legs on four H200."""


# At `full` the open sessions need what all servers of a model like Qwen3-1.7B with 22 GB of KV cache have, at `crowd`
# 1.3 times as much.
LEVELS = {
    "light": Level(0.45, 0.4),
    "heavy": Level(1.375, 0.4),
    "peak": Level(2.25, 0.4),
    "eviction": Level(1.375, 0.4, kv_share=0.3),
    "agents": Level(0.9, 1.0),
    "full": Level(0.5, 1.0, kv_share=0.3),
    "full-ids": Level(0.5, 1.0, kv_share=0.3, sends_ids=True),
    "full-generated": Level(0.5, 1.0, kv_share=0.3, sends=GENERATED),
    "full-halves": Level(0.5, 1.0, kv_share=0.3, sends=HALVES),
    "crowd": Level(0.9, 1.0, kv_share=0.3),
    "crowd-ids": Level(0.9, 1.0, kv_share=0.3, sends_ids=True),
    "tight": Level(0.3, 0.0, kv_share=0.25, sends_ids=True, kind="coding"),
    "long": Level(1.25, 0.0, kind="long"),
}


class Kind(NamedTuple):
    """Medians and spreads (sigma of the lognormal) of a kind of session, in tokens and seconds."""

    system: tuple[float, float, int, int]
    systems: int
    first: tuple[float, float, int, int]
    later: tuple[float, float, int, int]
    answer: tuple[float, float, int, int]
    turns_mean: float
    turns_range: tuple[int, int]
    think_s: float


CHAT = Kind((900, 0.5, 300, 2500), 5, (150, 0.8, 20, 2000), (60, 0.9, 8, 800), (180, 0.6, 24, 600), 5, (1, 12), 6.0)
AGENT = Kind(
    (2600, 0.3, 1500, 4500), 4, (1500, 0.7, 200, 6000), (500, 0.8, 40, 3000), (80, 0.6, 16, 300), 8, (3, 16), 1.5
)
CODING = Kind(
    (6000, 0.2, 4000, 9000), 4, (5000, 0.6, 2000, 12_000), (330, 1.0, 20, 3000), (120, 0.6, 16, 400), 20, (8, 40), 0.5
)
"""Calls that follow each other as in published traces of coding agents (``poolgrid.plugins.simulation.agents``), with
prompts of a third of theirs, so that sessions end within a run."""

LONG = Kind((16, 0.0, 16, 16), 1, (8600, 0.35, 3000, 20_000), (1, 0.0, 1, 1), (200, 0.0, 200, 200), 1, (1, 1), 1.0)
KINDS = {"coding": CODING, "long": LONG}


class Traffic:
    """Draws the sessions of one seed."""

    def __init__(self, text: ChatText, scale: float = 1.0) -> None:
        self._text = text
        self._scale = scale

    def sessions(self, level: str, seed: int, seconds: float, engines: int) -> list[Session]:
        """Return the sessions that arrive within ``seconds``, in order."""
        shape = LEVELS[level]
        level = level.partition("-")[0]  # the same sessions, sent otherwise
        draw = random.Random(f"{level}/{seed}")
        systems = {
            kind: [self._words(f"{level}/{seed}/system/{name}/{at}", draw, kind.system) for at in range(kind.systems)]
            for name, kind in ([(shape.kind, KINDS[shape.kind])] if shape.kind else [("chat", CHAT), ("agent", AGENT)])
        }
        found: list[Session] = []
        at_s = draw.expovariate(shape.sessions_per_s * engines)
        while at_s < seconds:
            kind = KINDS[shape.kind] if shape.kind else AGENT if draw.random() < shape.agents else CHAT
            own = systems[kind]
            weights = list(accumulate(1 / rank for rank in range(1, len(own) + 1)))
            system, tokens = draw.choices(own, cum_weights=weights)[0]
            least, most = kind.turns_range
            turns: list[Turn] = []
            for number in range(min(most, max(least, int(draw.expovariate(1 / kind.turns_mean)) + 1))):
                name = f"{level}/{seed}/{len(found)}/{number}"
                user, user_tokens = self._words(f"{name}/user", draw, kind.later if number else kind.first)
                answer_tokens = self._length(draw, kind.answer)
                tokens += user_tokens + answer_tokens
                if turns and tokens > PROMPT_TOKENS_MAX * self._scale:
                    break
                answer = self._text.text(f"{name}/answer", answer_tokens)
                turns.append(Turn(user, answer, answer_tokens, draw.expovariate(1 / kind.think_s)))
            found.append(Session(at_s, system, turns))
            at_s += draw.expovariate(shape.sessions_per_s * engines)
        return found

    def _words(self, name: str, draw: random.Random, length: tuple[float, float, int, int]) -> tuple[str, int]:
        tokens = self._length(draw, length)
        return self._text.text(name, tokens), tokens

    def _length(self, draw: random.Random, length: tuple[float, float, int, int]) -> int:
        median, sigma, least, most = length
        tokens = min(most, max(least, draw.lognormvariate(math.log(median), sigma)))
        return max(2, int(tokens * self._scale))
