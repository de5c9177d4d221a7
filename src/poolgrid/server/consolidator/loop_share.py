"""How much of the event loop each sender takes, and which takes more than its share.

Rules
    1. What a sender costs flows off at ``SHARE`` of the time. One that is ever more than ``BURST_MS`` ahead of that is
       muted for ``MUTE_MS``: what it sends is dropped unread, as if it had been lost, and is asked for afterwards.
    2. A cost is the time that it took here, or the time that it may take the readers, if that is more.
    3. At most ``SENDERS_MAX`` are known; those that sent nothing for the longest time are forgotten first.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.5
"""Of the time. An engine that reports a thousand events a second costs a hundredth."""

BURST_MS: Final = 10_000.0
"""A worker with four million blocks that restates its cache costs half of it."""

MUTE_MS: Final = 10_000.0
"""Twice as long as it takes to become free of debt: one that floods is heard half of the time at most."""

SENDERS_MAX: Final = 8192
"""Twice the ranks of the largest pool."""


class LoopShare:
    """What the senders of one socket cost."""

    def __init__(self) -> None:
        self._ahead: dict[bytes, tuple[float, float]] = {}
        """By sender: by how much it is ahead, and when that was."""
        self.muted: dict[bytes, float] = {}
        """Until when."""

    def spend(self, sender: bytes, cost_ms: float, now_ms: float) -> bool:
        """Take note of a cost; return whether the sender is muted for it."""
        ahead_ms, at_ms = self._ahead.pop(sender, (0.0, now_ms))
        ahead_ms = max(0.0, ahead_ms - SHARE * (now_ms - at_ms)) + cost_ms
        if ahead_ms > BURST_MS:
            self.muted = {each: until_ms for each, until_ms in self.muted.items() if now_ms < until_ms}
            self.muted[sender] = now_ms + MUTE_MS
            return True
        self._ahead[sender] = (ahead_ms, now_ms)
        if len(self._ahead) > SENDERS_MAX:
            del self._ahead[next(iter(self._ahead))]
        return False

    def hears(self, sender: bytes, now_ms: float) -> bool:
        """Return whether what a sender sends is read."""
        until_ms = self.muted.get(sender)
        if until_ms is None or now_ms < until_ms:
            return until_ms is None
        del self.muted[sender]
        return True
