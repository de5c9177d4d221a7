"""What became visible of an engine since the last report to its worker: one report for all that a moment brings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from poolgrid.wire.events import AnyEvent, LoadReported
from poolgrid.workers.engines.protocol import EngineReport, RankReport

log = logging.getLogger(__name__)


class ReportBuffer:
    """Filled within a turn of the event loop or some time, handed over in the next turn; made on that loop."""

    def __init__(self, load: Callable[[int], LoadReported], lose: Callable[[Exception], None], steps: int = 0) -> None:
        """``load`` returns a rank's statistics; ``lose`` is called with what a report was lost by.

        ``steps`` is how many steps a report stands for, where the engine does not report it.
        """
        self._steps = steps
        self._load = load
        self._lose = lose
        self._loop = asyncio.get_running_loop()
        self._flushing: asyncio.Handle | None = None
        self._is_timed = False
        """Whether ``_flushing`` is a timer's."""
        self._deliver: Callable[[EngineReport], None] | None = None
        self._events: dict[int, list[AnyEvent]] = {}
        self.pending = EngineReport([], {}, steps)
        """The next report, whose ranks are filled in when it is handed over."""
        self.kept_transfers = 0
        self.keeps_encoded = False

    def open(self, deliver: Callable[[EngineReport], None]) -> None:
        self._deliver = deliver
        self.flush()

    def rank(self, rank: int) -> list[AnyEvent]:
        return self._events.setdefault(rank, [])

    def flush_soon(self) -> None:
        """Report in the next turn: whatever else this turn brings is in the same report."""
        if self._deliver is None or (self._flushing is not None and not self._is_timed):
            return
        self.close()
        self._flushing = self._loop.call_soon(self.flush)

    def flush_within(self, seconds: float) -> None:
        """Report after this time, unless something else reports before."""
        if self._flushing is None and self._deliver is not None:
            self._flushing = self._loop.call_later(seconds, self.flush)
            self._is_timed = True

    def flush(self) -> None:
        """Report now, where there is something to report and a worker that takes it."""
        self.close()
        report, events = self.pending, self._events
        if self._deliver is None or not (report.deltas or events or report.released):
            return
        self.pending, self._events = EngineReport([], {}, self._steps), {}
        try:
            report.ranks = {rank: RankReport(each, self._load(rank)) for rank, each in events.items()}
            report.kept_transfers = self.kept_transfers
            report.keeps_encoded = self.keeps_encoded
            self._deliver(report)
        except Exception as error:
            # No process has what is lost with it, and the caller, a loop or a socket, continues without it.
            log.error("a report of the engine is lost: this is a bug", exc_info=error)
            self._lose(error)

    def close(self) -> None:
        """Cancel what ``flush_soon`` and ``flush_within`` have asked for."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
            self._is_timed = False
