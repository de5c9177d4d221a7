"""Books of the requests that routers send straight to an engine server, from what the routers report of them.

The worker carries none of these requests. Its events about them let every router of the pool count the load of all, and
compare the prompt tokens that the server reused with what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.wire.events import PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.wire.requests import ForwardBegan
from poolgrid.workers.engines.lifecycle.rank_load import RankLoad, ReportBuffer

REPORT_WITHIN_S = 0.02
"""Time that events wait for others: routers report together what came in a twentieth of a second anyway."""


class ServerForwardBooks:
    """``poolgrid.workers.engines.protocol.ForwardBooks`` on the loads and the report of an engine server."""

    def __init__(self, loads: Sequence[RankLoad], report: ReportBuffer) -> None:
        self._loads = loads
        self._report = report
        self._open: dict[str, tuple[int, int]] = {}
        """Rank and prompt tokens, by request."""

    def __len__(self) -> int:
        return len(self._open)

    def began(self, began: ForwardBegan) -> None:
        request_id, rank, isl = began.request_id, began.dp_rank, began.isl
        self._open[request_id] = rank, isl
        load = self._loads[rank]
        load.entered(request_id, isl, began.computes)
        cached = min(began.overlap_tokens, isl)
        # What the router expects stands in for what the end of the answer tells.
        event = RequestStarted(request_id, isl, cached, load.blocks_for(isl), cached_later=True)
        self._add(rank, event)
        if not began.computes:
            self._grow(request_id, isl, rank, untimed=True)

    def computed(self, request_id: str) -> None:
        """Count the prompt as computed; a request that is not known is ignored, here and below."""
        known = self._open.get(request_id)
        if known is not None:
            rank, isl = known
            self._grow(request_id, isl, rank)

    def _grow(self, request_id: str, isl: int, rank: int, untimed: bool = False) -> None:
        self._loads[rank].grew(request_id, isl + 1)
        self._add(rank, PrefillCompleted(request_id, untimed))

    def ended(self, request_id: str, reason: str, cached_tokens: int | None) -> None:
        known = self._open.pop(request_id, None)
        if known is not None:
            rank, _ = known
            self._loads[rank].left(request_id)
            self._add(rank, RequestFinished(request_id, reason, cached_tokens))

    def _add(self, rank: int, event: RequestStarted | PrefillCompleted | RequestFinished) -> None:
        self._report.rank(rank).append(event)
        self._report.flush_within(REPORT_WITHIN_S)
