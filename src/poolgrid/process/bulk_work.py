"""Work in bulk on an event loop: a slice in each of its turns, for all who ask.

A token waits for up to two turns of the loop: until its frame is read, and until the task runs that writes it. What is
else is done (taking in workers' blocks, publishing them, snapshots, freeing memory) comes in slices of about a
millisecond. Where several such jobs were running, each did a slice in every turn, and tokens waited for all of
them. Here they have the turns one after the other.

Rules
    1. The first task that asks has the first slice; one that asks again has it after all others.
    2. Slices are done in one turn of the loop until ``SLICE_MS`` are over, by a clock, and one at least: what takes a
       moment does not need a turn for itself.
    3. A task has a turn for itself, as its length is unknown here.
    4. ``busy`` is true when a task asked in this turn or waits. When none does, a task with little to do may do it at
       once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from poolgrid.process.clock import Clock

SLICE_MS = 1.0
"""As long as slices are; a token comes every 5 to 30 milliseconds from an engine."""


MESSAGES_PER_TURN = 64
"""Messages handed over before the loop gets its turn again: a flood of one server costs others some milliseconds."""

TURN_S = 0.001
"""Time after which the loop gets its turn, however few messages that were: a frame of a worker may hold the tokens of
hundreds of requests."""

WITHOUT_A_CLOCK = 2
"""So few messages are handed over without asking for the time; mostly there are no more."""


class BulkWork:
    """The turns of one event loop, for all that can wait."""

    def __init__(self, clock: Clock) -> None:
        self.busy = False
        self._clock = clock
        self._waiting: deque[Callable[[], object] | asyncio.Future[None]] = deque()

    def soon(self, slice_: Callable[[], object]) -> None:
        """Have a slice done in one of the next turns; what it raises is for the loop to tell."""
        self._waiting.append(slice_)
        self._begin()

    async def turn(self) -> None:
        """Wait for a turn of one's own, which lasts to the next wait."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._begin()
        await mine

    def _begin(self) -> None:
        if not self.busy:
            self.busy = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        waiting = self._waiting
        if not waiting:
            self.busy = False
            return
        loop = asyncio.get_running_loop()
        monotonic_ms = self._clock.monotonic_ms
        ends_ms = monotonic_ms() + SLICE_MS
        try:
            for _ in range(len(waiting)):
                next_one = waiting.popleft()
                if isinstance(next_one, asyncio.Future):
                    if next_one.done():
                        continue  # its task was cancelled
                    next_one.set_result(None)
                    # The task runs in the next turn; the one after that is another's.
                    loop.call_soon(loop.call_soon, self._run)
                    return
                next_one()
                if monotonic_ms() >= ends_ms:
                    break
        except BaseException:
            loop.call_soon(self._run)
            raise
        loop.call_soon(self._run)
