"""For which cell's closed loop a request's latencies count, and on which pool they were had.

Rules
    1. The TTFT counts where the prompt was computed first, the mean ITL where tokens were generated: for the cell that
       selection found in that stage, on the pool that served it, whether the request was meant to go there, spilled or
       fell back.
    2. What a loss or a move delayed says nothing of a pool: the TTFT of a request whose first computation was in vain
       and the ITL of one that moved count nowhere.
    3. After a priority override nothing counts: nobody asked the cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from poolgrid.global_router.core.choice.closed_loop import CellKey
from poolgrid.global_router.core.choice.destination import Destination
from poolgrid.wire.identifiers import Stage


@dataclass(frozen=True, slots=True)
class Served:
    """A cell and the pool that served a request of it."""

    cell: CellKey
    pool: str


@dataclass(slots=True)
class Attribution:
    """What one request's latencies count for; ``None`` where for nothing."""

    ttft: Served | None = None
    itl: Served | None = None

    def placed(self, there: Destination, pool: str, work: Stage, is_first: bool, has_moved: bool) -> None:
        """Note a dispatch to ``pool``; ``is_first`` tells whether no other but encode legs came before it."""
        if work is Stage.ENCODE:
            return
        cell = there.cell
        served = None if cell is None else Served(cell, pool)
        if work is not Stage.DECODE:
            self.ttft = served if is_first else None
        if work is not Stage.PREFILL:
            self.itl = None if has_moved else served
