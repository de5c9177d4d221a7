"""Where prompts are rendered and tokenized: short ones on the event loop, long ones in a few threads.

The tokenizer releases the GIL while it works, so a 60k-token prompt in a thread does not stall the streams of others.
Waiting for a thread is bounded; what does not fit is answered 429.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from poolgrid.frontend.errors import RequestError

T = TypeVar("T")

QUEUE_MAX: Final = 256
"""Long prompts that may wait for a thread: of 8k tokens they are a few seconds of work for two threads."""

INLINE_BYTES: Final = 4096
"""Up to so many bytes of new text are tokenized on the event loop, in about 1 ms; handing a prompt to a thread costs
about 0.15 ms."""

RETRY_AFTER_S: Final = 1
"""Two threads drain a full queue of 8k-token prompts in seconds; a client that comes back after one finds room."""


FAST_FACTOR: Final = 16
"""How much longer a prompt may be for a fast tokenizer to be done at once: 64 KiB of text take it 0.05 ms, a third of
what handing them to a thread costs, and a run of letters without a blank, the worst there is, takes 3.5 ms: no longer
than a step of an engine."""


class TokenizationPool:
    """A bounded pool of threads with a bounded queue, owned by the event loop that calls ``run``."""

    def __init__(self, threads: int, queue_limit: int = QUEUE_MAX, inline_bytes: int = INLINE_BYTES) -> None:
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenizer")
        self._limit = threads + queue_limit
        self._queue_limit = queue_limit
        self._inline_bytes = inline_bytes
        self._lock = threading.Lock()
        self.pending = 0
        """Long prompts in the threads or waiting for one."""

    def is_short(self, size_bytes: int, fast: bool = False) -> bool:
        """Return whether work of this size is done on the event loop; ``fast``: by a fast tokenizer."""
        return size_bytes <= (self._inline_bytes * FAST_FACTOR if fast else self._inline_bytes)

    async def run(self, size_bytes: int, work: Callable[[], T], fast: bool = False) -> T:
        """Do ``work`` here when it is short, else in a thread; raises ``RequestError`` 429 when that is full."""
        return work() if self.is_short(size_bytes, fast) else await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], T], is_due: bool = False) -> T:
        """Do ``work`` in a thread; raises ``RequestError`` 429 when too much waits for one, unless the work ``is_due``:
        that of an answer which has been generated is never refused, and bounded by the requests there are."""
        if self.pending >= self._limit and not is_due:
            raise RequestError(
                429,
                "tokenizer_busy",
                f"tokenizing a long prompt: {self._queue_limit} are waiting already, the limit; try again later",
                headers=((b"retry-after", str(RETRY_AFTER_S).encode()),),
            )
        with self._lock:
            self.pending += 1
        future = self._executor.submit(work)
        # Counted until the thread is done, also when the client has gone: that is what occupies the thread.
        future.add_done_callback(self._done)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # What the work raised refers to this frame, and the future to what it raised: without this, whatever the
            # request holds (a body of 32 MB) would wait for the collector, which runs seldom.
            del future

    def close(self) -> None:
        """Let running work end and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: object) -> None:
        # Called in the tokenizer thread, or on the event loop for work that was cancelled before it began.
        with self._lock:
            self.pending -= 1
