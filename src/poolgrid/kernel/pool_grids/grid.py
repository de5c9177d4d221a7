"""From a request to a pool: the cell of its lengths and targets, then the priority overrides.

Rules
    1. The cell's index on each axis is ``clamp(int((x − min)/((max − min)/resolution)), 0, resolution − 1)``.
    2. A target is the request's own, else the document's default, else the middle of the axis's range. 0 is a target.
    3. The prompt length on the isl axis is all of it, or with ``isl_basis`` "uncached" what a pool has not cached.
       Every pool then has a length of its own. A pool is *adequate* when it is at least as fast as the pool that the
       grid names for that length; the slowest adequate pool is chosen; among equally fast ones first the pool that
       its own cell names, then the least work, then the order of the document. Without any cached token this is the
       cell's pool.
    4. The context length is prompt plus expected output.
    5. Priority overrides are looked at last, first match wins, and replace the pool of the cell.

Nothing here knows whether a pool is alive: see ``fallback``.

Which pools are tried, and in what order, when the chosen one cannot be used.

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
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from poolgrid.kernel.pool_grids.axis import TARGETS, Axis, StageName
from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridStage, PriorityOverride
from poolgrid.kernel.pool_grids.request_hints import NO_HINTS, ExpectedOutput, RequestHints, Target

DEFAULT_SOURCE = "default of the document"
MIDDLE_SOURCE = "middle of the range"


@dataclass(frozen=True, slots=True)
class GridRequest:
    """What selection must know of a request."""

    isl: int
    """Tokens of the prompt."""
    hints: RequestHints = NO_HINTS
    output: ExpectedOutput = ExpectedOutput(0, "unknown")
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt that each pool has cached, by pool name; a pool that is not named has none."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a request lies on one axis."""

    axis: Axis
    value: float
    source: str
    index: int

    @property
    def clamped(self) -> bool:
        return not self.axis.minimum <= self.value <= self.axis.maximum

    def explanation(self) -> dict[str, Any]:
        low, high = self.axis.bounds(self.index)
        return {
            "axis": self.axis.name,
            "unit": self.axis.unit,
            "value": self.value,
            "source": self.source,
            "index": self.index,
            "cell_from": low,
            "cell_to": high,
            "clamped": self.clamped,
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pool a request gets in one stage, and why."""

    stage: StageName
    readings: tuple[Reading, ...]
    cell: tuple[int, ...]
    grid_pool: str
    """The pool of the cell (with ``isl_basis`` uncached: the pool that rule 3 chose)."""
    pool: str
    """The pool after overrides."""
    override_index: int | None
    override: PriorityOverride | None
    isl_basis: str | None
    """``total`` or ``uncached`` when the stage has an isl axis."""
    cached_tokens: int
    """What the chosen pool has cached of the prompt, as far as selection knew."""

    def reason(self) -> str:
        where = ", ".join(f"{reading.axis.name} {reading.value:g} {reading.axis.unit}" for reading in self.readings)
        cell = "".join(f"[{index}]" for index in self.cell)
        text = f"{where}: cell {cell} is {self.grid_pool}"
        if self.override is None:
            return text
        low, high = self.override.min_priority, self.override.max_priority
        return f"{text}; override {self.override_index} (priorities {low} to {high}) sends it to {self.pool}"

    def explanation(self) -> dict[str, Any]:
        """Return the whole selection as plain JSON."""
        override = None
        if self.override is not None:
            override = {"index": self.override_index, **self.override.model_dump(mode="json")}
        return {
            "stage": self.stage,
            "pool": self.pool,
            "grid_pool": self.grid_pool,
            "cell": list(self.cell),
            "axes": [reading.explanation() for reading in self.readings],
            "override": override,
            "isl_basis": self.isl_basis,
            "cached_tokens": self.cached_tokens,
            "reason": self.reason(),
        }


class StageGrid:
    """One stage of a document, ready to be asked."""

    def __init__(self, name: StageName, stage: GridStage, document: GridDocument) -> None:
        self.name = name
        self.stage = stage
        self.axes = stage.axes
        self.ranks = stage.speed_ranks()
        self._order = {pool: index for index, pool in enumerate(self.ranks)}
        self._basis = document.isl_basis if any(axis.name == "isl" for axis in self.axes) else None
        self._defaults: dict[str, float | None] = {
            kind.name: getattr(document.defaults, kind.default_key) for kind in TARGETS
        }

    def select(self, request: GridRequest) -> Selection:
        """Return the pool for a request; a pure function of the document and the request."""
        cached: dict[str, int] = {}
        if request.cached_tokens:
            known = request.cached_tokens
            cached = {pool: min(request.isl, max(0, known.get(pool, 0))) for pool in self.ranks}
        if self._basis == "uncached" and any(cached.values()):
            readings, pool = self._by_uncached(request, cached)
        else:
            readings = tuple(self._read(axis, request, request.isl) for axis in self.axes)
            pool = self.stage.pool_at(tuple(reading.index for reading in readings))
        index, override = self._override(request.hints.priority)
        chosen = pool if override is None else override.target_pool
        return Selection(
            self.name,
            readings,
            tuple(reading.index for reading in readings),
            pool,
            chosen,
            index,
            override,
            self._basis,
            cached.get(chosen, 0),
        )

    def _by_uncached(self, request: GridRequest, cached: Mapping[str, int]) -> tuple[tuple[Reading, ...], str]:
        best: tuple[tuple[int, bool, int, int], tuple[Reading, ...], str] | None = None
        for pool, rank in self.ranks.items():
            work = request.isl - cached[pool]
            readings = tuple(self._read(axis, request, work) for axis in self.axes)
            named = self.stage.pool_at(tuple(reading.index for reading in readings))
            if rank > self.ranks[named]:
                continue
            key = (-rank, named != pool, work, self._order[pool])
            if best is None or key < best[0]:
                best = (key, readings, pool)
        assert best is not None, "the fastest pool is always adequate"
        return best[1], best[2]

    def _read(self, axis: Axis, request: GridRequest, isl: int) -> Reading:
        value: float
        match axis.name:
            case "isl":
                value, source = isl, "prompt" if isl == request.isl else "prompt without what the pool has cached"
            case "context_length":
                value = request.isl + request.output.tokens
                source = f"prompt + expected output ({request.output.source})"
            case "ttft" | "itl":
                target = self.target(axis, request.hints)
                value, source = target.value_ms, target.source
            case other:
                assert_never(other)
        return Reading(axis, value, source, axis.index(value))

    def target(self, axis: Axis, hints: RequestHints) -> Target:
        """Return the target on an axis that is one: the request's, else the default, else the middle of the range."""
        asked = hints.targets.get(axis.name)
        if asked is not None:
            return asked
        default = self._defaults[axis.name]
        return Target(axis.middle, MIDDLE_SOURCE) if default is None else Target(default, DEFAULT_SOURCE)

    def _override(self, priority: int | None) -> tuple[int | None, PriorityOverride | None]:
        if priority is not None:
            for index, override in enumerate(self.stage.priority_overrides):
                if override.min_priority <= priority <= override.max_priority:
                    return index, override
        return None, None


class Grid:
    """A whole document, ready to be asked; immutable, so that a reload swaps one reference."""

    def __init__(self, document: GridDocument) -> None:
        self.document = document
        self.stages: dict[StageName, StageGrid] = {
            name: StageGrid(name, stage, document) for name, stage in document.stages.items()
        }

    def select(self, stage: StageName, request: GridRequest) -> Selection:
        """Return the pool of one stage; raise ``KeyError`` for a stage that the mode does not have."""
        return self.stages[stage].select(request)


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
