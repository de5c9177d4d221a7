"""How many prompt tokens the clients of each tenant have kept at a time, as sums over the session table.

A session counts with the longest of its prompts that is still to be kept: a later one repeats the earlier.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

DUE_SPARE: Final = 64
"""Entries of the heap beyond two for each session, after which it is rebuilt."""


class _Kept(msgspec.Struct, eq=False):
    """What one tenant has kept."""

    tokens: int = 0
    sessions: dict[str, tuple[int, int]] = {}
    """By name: tokens, and until when."""


class KeptPrompts:
    """Sums by tenant. An entry that has ended is removed at the next read, by the reader's time."""

    def __init__(self) -> None:
        self._of: dict[int, _Kept] = {}
        self._due: list[tuple[int, int, str]] = []
        """A heap of ends; one that its session has moved on from counts for nothing."""
        self._sessions = 0

    def keep(self, tenant: int, session: str, tokens: int, until_ms: int) -> None:
        """Take note of what a session has kept from now on."""
        kept = self._of.get(tenant)
        if kept is None:
            kept = self._of[tenant] = _Kept()
        before = kept.sessions.get(session)
        self._sessions += before is None
        kept.tokens += tokens - (0 if before is None else before[0])
        kept.sessions[session] = (tokens, until_ms)
        heappush(self._due, (until_ms, tenant, session))
        if len(self._due) > 2 * self._sessions + DUE_SPARE:
            self._due = [
                (each[1], of, name) for of, all_of in self._of.items() for name, each in all_of.sessions.items()
            ]
            heapify(self._due)

    def drop(self, tenant: int, session: str) -> None:
        """Forget what a session has kept, if it has anything."""
        kept = self._of.get(tenant)
        before = None if kept is None else kept.sessions.pop(session, None)
        if kept is None or before is None:
            return
        self._sessions -= 1
        kept.tokens -= before[0]
        if not kept.sessions:
            del self._of[tenant]

    def others(self, tenant: int, session: str, now_ms: int) -> int:
        """Return the tokens that the tenant's other sessions have kept at a time (Unix)."""
        due = self._due
        while due and due[0][0] <= now_ms:
            until_ms, of, name = heappop(due)
            kept = self._of.get(of)
            if kept is not None and kept.sessions.get(name, (0, 0))[1] == until_ms:
                self.drop(of, name)
        kept = self._of.get(tenant)
        return 0 if kept is None else kept.tokens - kept.sessions.get(session, (0, 0))[0]
