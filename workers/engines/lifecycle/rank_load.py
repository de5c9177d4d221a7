"""One rank's load by the worker's own books, for ranks of which the engine reports no statistics. Pure.

An engine may have statistics of some ranks only, and none while it is idle. What the worker itself gave the engine is
known at any time: requests, prompt tokens that have no first token yet, and the blocks their tokens fill. Blocks that
requests share are counted once per request, so ``active_blocks`` is an upper bound, cut at what there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from poolgrid.kernel.wire.events import AnyEvent, LoadReported
from poolgrid.kernel.worker_protocol.engine import EngineReport, RankReport
from poolgrid.server.process.clock import shared_moment_s


@dataclass(slots=True)
class _Entry:
    prompt_tokens: int
    blocks: int
    computes: bool
    """Whether its prompt is computed here."""
    begun: bool = False
    kept: bool = False


class RankLoad:
    """The books of one rank."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[str, _Entry] = {}
        self._begun = self._kept = self._prefill_tokens = self._blocks = 0
        self._total_blocks = 0
        self._engine: LoadReported | None = None
        self._steps = 0

    @property
    def requests(self) -> int:
        return len(self._entries) - self._kept

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def entered(self, request_id: str, prompt_tokens: int, computes: bool) -> None:
        if not self._entries:
            self._engine = None  # of the last step before it rested
        self._entries[request_id] = _Entry(prompt_tokens, 0, computes)
        if computes:
            self._prefill_tokens += prompt_tokens

    def grew(self, request_id: str, tokens: int) -> tuple[bool, int | None]:
        """Book a sequence's length, prompt and output; return whether it began now, and its blocks if they changed."""
        entry = self._entries[request_id]
        began = not entry.begun
        if began:
            entry.begun = True
            self._begun += 1
            if entry.computes:
                self._prefill_tokens -= entry.prompt_tokens
        # The last token's own KV is computed by the step after it.
        blocks = self.blocks_for(tokens - 1)
        if blocks == entry.blocks:
            return began, None
        self._blocks += blocks - entry.blocks
        entry.blocks = blocks
        return began, blocks

    def keep(self, request_id: str) -> None:
        """Book a prefilled request whose blocks stay for a decode worker."""
        self._entries[request_id].kept = True
        self._kept += 1

    def left(self, request_id: str) -> None:
        """Take a request off the books."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._blocks -= entry.blocks
        self._begun -= entry.begun
        self._kept -= entry.kept
        if entry.computes and not entry.begun:
            self._prefill_tokens -= entry.prompt_tokens

    def reported(self, load: LoadReported) -> None:
        """Take in the engine's own statistics; what it cannot know of, cached blocks and prompts, is the worker's."""
        self._engine = load
        self._steps = max(self._steps, load.steps)
        self._total_blocks = load.total_blocks or self._total_blocks

    def assume_total_blocks(self, total_blocks: int) -> None:
        """Take a number of device blocks for a rank whose statistics do not come."""
        self._total_blocks = self._total_blocks or total_blocks

    @property
    def total_blocks(self) -> int:
        return self._total_blocks

    def report(self, cached_blocks: int) -> LoadReported:
        """Return the rank's load now.

        The engine's statistics count only while it works, and from its first step on: they are those of its last step,
        and an idle engine makes none. ``cached_blocks`` is the number by the cache events.
        """
        if self._engine is not None and self._entries:
            return msgspec.structs.replace(
                self._engine, cached_blocks=cached_blocks, prefill_tokens=self._prefill_tokens
            )
        begun = self._begun - self._kept
        return LoadReported(
            running_requests=begun,
            waiting_requests=len(self._entries) - self._kept - begun,
            prefill_tokens=self._prefill_tokens,
            active_blocks=min(self._blocks, self._total_blocks) if self._total_blocks else self._blocks,
            cached_blocks=cached_blocks,
            total_blocks=self._total_blocks,
            steps=self._steps,
        )


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
        """Report after this time at the latest, together with others that wait for as long."""
        if self._flushing is None and self._deliver is not None:
            self._flushing = self._loop.call_at(shared_moment_s(self._loop.time(), seconds), self.flush)
            self._is_timed = True

    def flush(self) -> None:
        """Report now, where there is something to report and a worker that takes it."""
        if self._flushing is not None:
            self.close()
        report, events = self.pending, self._events
        if self._deliver is None or not (report.deltas or events or report.released):
            return
        self.pending, self._events = EngineReport([], {}, self._steps), {}
        try:
            for rank, each in events.items():
                report.ranks[rank] = RankReport(each, self._load(rank))
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
