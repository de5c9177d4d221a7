"""The queue between the executor's thread and its readers, with the real one's edges."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any


class AsyncQueue:
    """Filled by any thread; read with or without an event loop, but not both ways."""

    class MixedSyncAsyncAPIError(Exception):
        """A synchronous read came before an asynchronous one."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._tainted = False
        self.late_notifications = 0
        """So many reads that find nothing raise ``IndexError``: they were told of an item that is gone."""

    def bind(self) -> None:
        """Remember the event loop that runs now, if any."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    @property
    def has_loop(self) -> bool:
        return self._loop is not None

    def put(self, item: Any) -> int:
        """Add an item; return how many there are."""
        count = self.put_nowait(item)
        self.notify()
        return count

    def put_nowait(self, item: Any) -> int:
        """Add an item without telling anyone; return how many there are."""
        with self._changed:
            self._items.append(item)
            return len(self._items)

    def notify(self) -> None:
        """Wake who waits: once for all items of an iteration."""
        with self._changed:
            self._changed.notify_all()
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits

    def drop_oldest(self) -> None:
        with self._changed:
            if self._items:
                self._items.popleft()

    def get_nowait(self) -> Any:
        """Return an item or raise ``asyncio.QueueEmpty``."""
        with self._changed:
            if not self._items:
                if self.late_notifications:
                    self.late_notifications -= 1
                    raise IndexError("pop from an empty deque")
                raise asyncio.QueueEmpty
            return self._items.popleft()

    def take_all(self) -> list[Any]:
        """Return what there is now, for another process that asks for it."""
        with self._changed:
            items, self._items = self._items, deque()
            return list(items)

    def get_sync(self, timeout: float | None = None) -> Any:
        """Wait for an item; raise ``TimeoutError`` on expiry. Taints the queue for asynchronous reads."""
        self._tainted = True
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout):
                raise TimeoutError
            return self._items.popleft()

    async def get(self, timeout: float | None = None) -> Any:
        """Wait for an item; with a timeout of 0 or less raise ``asyncio.QueueEmpty`` instead of waiting."""
        if self._tainted:
            raise AsyncQueue.MixedSyncAsyncAPIError
        assert self.has_loop, "The asyncio event loop was not present during initialization"
        if timeout is not None and timeout <= 0:
            return self.get_nowait()
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return self.get_nowait()
                except asyncio.QueueEmpty:
                    self._wake.clear()
                    with self._changed:
                        missed = bool(self._items)
                    if not missed:
                        await self._wake.wait()
