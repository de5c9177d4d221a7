"""Whether an engine does its work: not only that it lives, but that its requests make progress. Pure.

An engine whose KV transfers are stuck answers every question and finishes nothing. It is *stalled* when

1. requests have been in it for ``timeout_ms``, and nothing of any of them has moved, or
2. a decode request has waited that long for its KV while a later one has begun: engines admit in order, so its transfer
   hangs, and the blocks that wait for it are lost to others.

Output is movement, and so is an end that the engine came to by itself. A request that was given up, by its client or by
this worker, has not moved: where all clients lose patience before ``timeout_ms``, one after the other, time adds up.
Only time counts in which there was a request; an engine without any owes nothing.

A request that waits because the batch is full is no stall: others move, and none overtakes it. Progress heals at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stall:
    """What does not move, and since when."""

    reason: str
    silent_ms: float
    total: bool
    """Whether nothing moves at all."""
    certain: bool = True
    """``False`` where only the time adds up of requests that were given up: each may have been given up at once."""


@dataclass(slots=True)
class _Entry:
    serial: int
    since_ms: float
    transfers: bool
    """Whether it waits for KV from another worker."""


class ProgressMonitor:
    """Watches the requests of one rank; time comes in as arguments, in milliseconds."""

    def __init__(self, timeout_ms: float) -> None:
        self._timeout_ms = timeout_ms
        self._waiting: dict[str, _Entry] = {}
        """Requests without output, in order of arrival."""
        self._running: set[str] = set()
        self._owed_ms = 0.0
        """Time with requests and without movement, up to ``_since_ms``."""
        self._since_ms = 0.0
        """Since when there are requests without movement, not counting what is owed from before."""
        self._serial = 0
        self._begun = -1
        """Serial of the youngest request that has begun."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def entered(self, request_id: str, transfers: bool, now_ms: float) -> None:
        if not len(self):
            self._since_ms = now_ms
        self._waiting[request_id] = _Entry(self._serial, now_ms, transfers)
        self._serial += 1

    def moved(self, request_id: str, now_ms: float) -> None:
        self.proved(now_ms)
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._begun = max(self._begun, entry.serial)
            self._running.add(request_id)

    def proved(self, now_ms: float) -> None:
        """Note that the engine has done something, for whomever."""
        self._owed_ms = 0.0
        self._since_ms = now_ms

    def ended(self, request_id: str, now_ms: float) -> None:
        self.proved(now_ms)
        self._remove(request_id)

    def given_up(self, request_id: str, now_ms: float) -> None:
        """Note that a request is over because it was cancelled, or because it failed."""
        self._remove(request_id)
        if not len(self):
            self._owed_ms += max(0.0, now_ms - self._since_ms)
            self._since_ms = now_ms

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long nothing has moved; 0 while there is nothing to move."""
        return self._owed_ms + max(0.0, now_ms - self._since_ms) if len(self) else 0.0

    def stall(self, now_ms: float) -> Stall | None:
        silent_ms = self.silent_ms(now_ms)
        if silent_ms > self._timeout_ms:
            transfers = sum(entry.transfers for entry in self._waiting.values())
            waiting = f", {transfers} of them for KV from another worker" if transfers else ""
            return Stall(
                f"{len(self)} requests are in the engine{waiting}, nothing has moved for {silent_ms:.0f} ms, "
                f"allowed are {self._timeout_ms:.0f}",
                silent_ms,
                total=True,
                certain=silent_ms - self._owed_ms > self._timeout_ms,
            )
        for request_id, entry in self._waiting.items():
            waited_ms = now_ms - entry.since_ms
            if waited_ms <= self._timeout_ms:
                break  # the others came later
            if entry.transfers and entry.serial < self._begun:
                return Stall(
                    f"request {request_id!r} has waited {waited_ms:.0f} ms for its KV while later ones began, "
                    f"allowed are {self._timeout_ms:.0f}",
                    waited_ms,
                    total=False,
                )
        return None

    def _remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)
