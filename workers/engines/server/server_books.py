"""The books of an engine server: each rank's load, from what routers report of the requests that they sent to it.

The worker carries none of these requests. Its events about them let every router of the pool count the load of all, and
compare the prompt tokens that the server reused with what was expected. What others send to the server is found by
comparing the books with the engine's own figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from poolgrid.kernel.wire.events import AnyEvent, LoadReported, PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.kernel.wire.requests import ForwardBegan
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.engines.lifecycle.rank_load import RankLoad, ReportBuffer
from poolgrid.server.workers.engines.server.core.engine_figures import ForeignLoad

REPORT_WITHIN_S = 0.02
"""Time that events wait for others: routers report together what came in a twentieth of a second anyway."""


class ServerBooks:
    """``poolgrid.kernel.worker_protocol.engine.ForwardBooks`` of all ranks."""

    def __init__(
        self,
        dp_size: int,
        block_size: int,
        total_blocks: int,
        progress_timeout_ms: float,
        cached_blocks: Callable[[int], int],
        is_behind: Callable[[int], bool],
        clock: Clock,
        lose: Callable[[Exception], None],
        note_salt: Callable[[str], None] = lambda cache_salt: None,
    ) -> None:
        """``cached_blocks`` returns what a rank's cache holds, ``is_behind`` whether its reports may stand behind a
        replay; ``lose`` gets what a report was lost by, ``note_salt`` the salt of each request."""
        self.report = ReportBuffer(self.load, lose, steps=1)
        self._timeout_ms = progress_timeout_ms
        self._cached_blocks = cached_blocks
        self._note_salt = note_salt
        self._is_behind = is_behind
        self._clock = clock
        self.loads = [RankLoad(block_size) for _ in range(dp_size)]
        for load in self.loads:
            load.assume_total_blocks(total_blocks)
        self._foreign = [ForeignLoad() for _ in range(dp_size)]
        self._open: dict[str, tuple[int, int]] = {}
        """Rank and prompt tokens, by request."""
        self._moved_ms = 0.0
        """When a request made progress last, or the first of several began."""
        self._cache_ms = 0.0
        """When the last cache event came; 0 = none ever came."""

    def __len__(self) -> int:
        return len(self._open)

    # -- requests ------------------------------------------------------------------------------------------------------

    def began(self, began: ForwardBegan) -> None:
        request_id, rank, isl = began.request_id, began.dp_rank, began.isl
        if not self._open:
            self._moved_ms = self._clock.monotonic_ms()
        self._open[request_id] = rank, isl
        load = self.loads[rank]
        load.entered(request_id, isl, began.computes)
        self._note_salt(began.cache_salt)
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
            self._moved_ms = self._clock.monotonic_ms()
            self._grow(request_id, isl, rank)

    def ended(self, request_id: str, reason: str, cached_tokens: int | None) -> None:
        known = self._open.pop(request_id, None)
        if known is not None:
            rank, _ = known
            self._moved_ms = self._clock.monotonic_ms()
            self.loads[rank].left(request_id)
            self._add(rank, RequestFinished(request_id, reason, cached_tokens))

    def _grow(self, request_id: str, isl: int, rank: int, untimed: bool = False) -> None:
        self.loads[rank].grew(request_id, isl + 1)
        self._add(rank, PrefillCompleted(request_id, untimed or self._is_behind(rank)))

    def _add(self, rank: int, event: RequestStarted | PrefillCompleted | RequestFinished) -> None:
        self.report.rank(rank).append(event)
        self.report.flush_within(REPORT_WITHIN_S)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def cache_changed(self, dp_rank: int, events: Sequence[AnyEvent]) -> None:
        self._cache_ms = self._clock.monotonic_ms()
        self.report.rank(dp_rank).extend(events)

    def load(self, dp_rank: int) -> LoadReported:
        load = self.loads[dp_rank].report(self._cached_blocks(dp_rank))
        foreign = self._foreign[dp_rank].count
        return structs.replace(load, foreign_requests=foreign) if foreign else load

    def booked(self) -> list[int]:
        """Return how many requests of each rank are on the books."""
        return [load.requests for load in self.loads]

    def compare(self, figures: Sequence[int] | None, *booked: Sequence[int]) -> None:
        """Compare what the engine has, by rank, with what was on the books around that; ``None`` = it is not known."""
        for rank, foreign in enumerate(self._foreign):
            changed = (
                foreign.forget() if figures is None else foreign.observe(figures[rank], [each[rank] for each in booked])
            )
            if changed:
                self.report.rank(rank)
                self.report.flush_soon()

    # -- progress ------------------------------------------------------------------------------------------------------

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long requests are open without progress; 0 without any, and for a server whose cache events
        would not show it."""
        return now_ms - max(self._moved_ms, self._cache_ms) if self._open and self._cache_ms else 0.0

    def stall(self, silent_ms: float) -> str:
        """Return what has not moved for too long; empty = nothing."""
        if silent_ms <= self._timeout_ms:
            return ""
        return f"{len(self._open)} requests have made no progress for {silent_ms / 1e3:.0f} s"

    def lives_since(self, since_ms: float) -> bool:
        """Return whether anything came from the server after a time: of an answer, or of its cache."""
        return max(self._moved_ms, self._cache_ms) > since_ms
