"""Verdicts on guides that were tried before: one tenant's, at most so many, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict


class GuideVerdicts:
    """Why a guide is refused, or nothing, by what it is."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def get(self, key: bytes) -> str | None:
        """Return the verdict on a guide, ``None`` when it is not known."""
        found = self._verdicts.get(key)
        if found is not None:
            self._verdicts.move_to_end(key)
        return found

    def keep(self, key: bytes, verdict: str) -> None:
        """Remember a verdict."""
        self._verdicts[key] = verdict
        while len(self._verdicts) > self._entries_max:
            self._verdicts.popitem(last=False)
