"""Which pools are tried, and in what order, when the chosen one cannot be used.

Rules
    1. The chosen pool comes first. A pool named in the stage's ``fallback.order`` is followed by exactly the pools
       given there.
    2. Any other is followed, by ``fallback.rule``: *faster-then-slower* (the default): the faster pools from the
       nearest in speed to the fastest, because they still meet the target; equally fast ones before them; then the
       slower ones from the nearest to the slowest, because a late answer is better than none. *faster-only*: without
       the slower ones. *none*: nothing.
    3. Equal speed is decided by the order of the document.
    4. A pool that is down, draining, saturated, not connected yet or behind an open circuit breaker is passed over, and
       the record has the reason.

Priority retry is another list: strictly faster pools from the slowest to the fastest (``retry_order``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from poolgrid.global_router.core.document.grid_document import GridStage


class PoolStanding(StrEnum):
    """Whether a pool takes a new request, and why not."""

    AVAILABLE = "available"
    SATURATED = "saturated"
    CONNECTING = "connecting"
    """A document in force names it, and its router has neither answered nor failed to."""
    DRAINING = "draining"
    BREAKER_OPEN = "breaker-open"
    LOADING = "loading"
    """It has workers that load, and none that could serve."""
    DOWN = "down"


PASSING = frozenset({PoolStanding.SATURATED, PoolStanding.CONNECTING})
"""States that end by themselves, in the time that a request may wait."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool in the order of trying, and why it stands there."""

    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fallen:
    """A pool that was passed over, and the state that was the reason."""

    pool: str
    state: PoolStanding


@dataclass(frozen=True, slots=True)
class FallbackChoice:
    """The pool that is used; ``pool`` is ``None`` when none can be."""

    chosen: str
    """What selection wanted."""
    pool: str | None
    reason: str
    passed_over: tuple[Fallen, ...]

    @property
    def may_have_room_later(self) -> bool:
        """Return whether waiting may help: no pool can be used, and some state will pass by itself (429, not 503)."""
        return self.pool is None and any(fallen.state in PASSING for fallen in self.passed_over)

    def explanation(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "pool": self.pool,
            "reason": self.reason,
            "passed_over": [{"pool": fallen.pool, "state": fallen.state.value} for fallen in self.passed_over],
        }


def fallback_order(stage: GridStage, chosen: str) -> tuple[Candidate, ...]:
    """Return the pools to try, the chosen one first; raise ``KeyError`` if it is no pool of the stage."""
    ranks = stage.speed_ranks()
    rank = ranks[chosen]
    first = Candidate(chosen, "chosen")
    explicit = stage.fallback.order.get(chosen)
    if explicit is not None:
        return (first, *(Candidate(pool, f"fallback.order of {chosen}") for pool in explicit))
    if stage.fallback.rule == "none":
        return (first,)
    others = [pool for pool in ranks if pool != chosen]
    # sorted is stable: pools of equal speed stay in the order of the document
    faster = sorted((pool for pool in others if ranks[pool] <= rank), key=lambda pool: -ranks[pool])
    candidates = [Candidate(pool, "equally fast" if ranks[pool] == rank else "faster") for pool in faster]
    if stage.fallback.rule == "faster-then-slower":
        slower = sorted((pool for pool in others if ranks[pool] > rank), key=lambda pool: ranks[pool])
        candidates += [Candidate(pool, "slower") for pool in slower]
    return (first, *candidates)


def retry_order(stage: GridStage, used: str) -> tuple[str, ...]:
    """Return the pools for a priority retry after ``used`` failed: strictly faster, from the slowest to the fastest."""
    ranks = stage.speed_ranks()
    faster = [pool for pool in ranks if ranks[pool] < ranks[used]]
    return tuple(sorted(faster, key=lambda pool: -ranks[pool]))


def choose_available(order: tuple[Candidate, ...], states: Mapping[str, PoolStanding]) -> FallbackChoice:
    """Return the first pool of ``order`` that is available; a pool without a state is down."""
    passed: list[Fallen] = []
    for candidate in order:
        state = states.get(candidate.pool, PoolStanding.DOWN)
        if state is PoolStanding.AVAILABLE:
            return FallbackChoice(order[0].pool, candidate.pool, candidate.reason, tuple(passed))
        passed.append(Fallen(candidate.pool, state))
    return FallbackChoice(order[0].pool, None, "no pool can be used", tuple(passed))
