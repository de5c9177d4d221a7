"""Where a request wants to go in one stage, and where it may go instead: one answer for all who ask.

Rules
    1. *Wanted* is the pool that the closed loop spills the request to, else the pool that selection chose.
    2. The *order* of trying is: ``first``, the pools that a request which lost its worker tries before all others;
       the wanted pool with its fallbacks; for a spilled request then the pool that it was spilled from with its
       fallbacks. A spill never takes a pool away from a request. A pool stands in the order once, where it comes first.
    3. Requests of one model that may go to the same pools wait in one *lane*.

The global router (first placement, moves, the question whether waiting helps), its waiting room, its preview and the
simulator ask here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from poolgrid.kernel.pool_grids.closed_loop import CellKey, ClosedLoop, Spill
from poolgrid.kernel.pool_grids.grid import (
    Candidate,
    FallbackChoice,
    GridRequest,
    PoolStanding,
    Selection,
    StageGrid,
    choose_available,
    fallback_order,
    retry_order,
)
from poolgrid.kernel.pool_grids.grid_document import GridStage
from poolgrid.kernel.wire.identifiers import Stage as Work

How = Literal["grid", "override", "spill", "fallback", "retry", "same-pool"]
"""Why a request went to its pool, in a word: the label of metrics and the beginning of ``x-poolgrid-reason``."""

PRIORITY_RETRY = "priority retry"
SAME_POOL = "same pool, another worker"
SPILLED_FROM = "spilled from"


@dataclass(frozen=True)
class Destination:
    """Where one request may go in one stage of a document."""

    stage: GridStage
    selection: Selection
    spill: Spill | None = None
    first: tuple[Candidate, ...] = ()

    @property
    def wanted(self) -> str:
        return self.selection.pool if self.spill is None else self.spill.pool

    @property
    def cell(self) -> CellKey | None:
        """Return the cell whose closed loop the request's latencies count for; ``None`` after an override."""
        return CellKey.of(self.selection)

    @cached_property
    def order(self) -> tuple[Candidate, ...]:
        """Return the pools to try, each once."""
        candidates = [*self.first, *fallback_order(self.stage, self.wanted)]
        if self.spill is not None:
            own, *others = fallback_order(self.stage, self.selection.pool)
            candidates += [Candidate(own.pool, SPILLED_FROM), *others]
        kept: dict[str, Candidate] = {}
        for candidate in candidates:
            kept.setdefault(candidate.pool, candidate)
        return tuple(kept.values())

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(candidate.pool for candidate in self.order)

    def choose(self, states: Mapping[str, PoolStanding]) -> FallbackChoice:
        """Return the first pool that is available; one without a state is down."""
        return choose_available(self.order, states)

    def lane(self, model: str) -> str:
        """Return with whom the request waits: those of its model that may go to the same pools."""
        # Clients choose names of models: two lanes are never written alike, for any characters in them.
        return repr((model, *sorted(self.pools)))

    def after_loss(self, pool: str, faster_first: bool) -> Destination:
        """Return where to go after ``pool`` lost the request: another worker there, then as before.

        ``faster_first``: the faster pools before it, from the slowest to the fastest (priority retry).
        """
        faster = retry_order(self.stage, pool) if faster_first else ()
        return replace(self, first=(*(Candidate(name, PRIORITY_RETRY) for name in faster), Candidate(pool, SAME_POOL)))

    def how(self, pool: str) -> How:
        """Return in a word why the request goes to ``pool``, one of ``pools``."""
        for candidate in self.first:
            if candidate.pool == pool:
                return "retry" if candidate.reason == PRIORITY_RETRY else "same-pool"
        if pool != self.wanted:
            return "fallback"
        if self.spill is not None:
            return "spill"
        return "grid" if self.selection.override is None else "override"


def destination(grid: StageGrid, loop: ClosedLoop, request: GridRequest, draw: float) -> Destination:
    """Return where a request goes: its cell's pool, or where the loop spills it; ``draw`` is uniform in [0, 1)."""
    selection = grid.select(request)
    key = CellKey.of(selection)
    return Destination(grid.stage, selection, None if key is None else loop.spill(key, draw))


@dataclass(frozen=True, slots=True)
class Served:
    """A cell and the pool that served a request of it."""

    cell: CellKey
    pool: str


@dataclass(slots=True)
class Attribution:
    """For which cell's closed loop a request's latencies count, and on which pool they were had.

    Rules
        1. The TTFT counts where the prompt was computed first, the mean ITL where tokens were generated: for the cell
           that selection found in that stage, on the pool that served it, whether the request was meant to go there,
           spilled or fell back.
        2. A time that includes a loss or a move is no measurement of a pool: the TTFT of a request whose first
           computation was in vain and the ITL of one that moved count nowhere.
        3. After a priority override nothing counts: the cell was not used.
    """

    ttft: Served | None = None
    itl: Served | None = None

    def placed(self, there: Destination, pool: str, work: Work, is_first: bool, has_moved: bool) -> None:
        """Note a dispatch to ``pool``; ``is_first`` tells whether no other but encode legs came before it."""
        if work is Work.ENCODE:
            return
        cell = there.cell
        served = None if cell is None else Served(cell, pool)
        if work is not Work.DECODE:
            self.ttft = served if is_first else None
        if work is not Work.PREFILL:
            self.itl = None if has_moved else served
