"""How many requests an engine server has, by its own metrics: what no router reported is load of others. Pure.

A page of metrics has some 200 KB and is read every second, so only the lines of the two series are looked at.

Rules
    1. What a server reports is never trusted to be a page of metrics: an endless line, or a series' name many times
       over, costs no more than a page of that size.
    2. A series may have a line for each rank, and several lines of one rank (of tensor-parallel processes, which all
       say the same): the largest counts.
    3. Routers report what they sent a moment later. A request is therefore foreign only when the engine has more than
       was ever on the books around the look, and in two looks one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from poolgrid.kernel.wire.limits import U32_MAX

LABELS_OF_RANKS = re.compile(rb'[{,](?:engine|dp_rank)="(\d{1,4})"')
"""Where a line says which rank it is of."""


LINE_BYTES_MAX = 4096
"""Longest line that is read; engines write some 200 bytes."""

LINES_MAX = 8192
"""Of one series that are read: eight processes of each of 1,024 ranks."""


def lines_of(page: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the lines of a page of metrics that begin with a name, ``LINES_MAX`` at most, without those too long."""
    begin = 0 if page.startswith(name) else _line_from(page, name, 0)
    for _ in range(LINES_MAX):
        if begin < 0:
            return
        end = page.find(b"\n", begin, begin + LINE_BYTES_MAX + 1)
        if end < 0 and len(page) - begin <= LINE_BYTES_MAX:
            end = len(page)
        if end >= 0:
            yield page[begin:end]
        begin = _line_from(page, name, begin)


def _line_from(page: bytes, name: bytes, start: int) -> int:
    found = page.find(b"\n" + name, start)
    return found + 1 if found >= 0 else -1


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Where servers of one kind say how many requests they have."""

    path: str
    running: bytes
    """Name of a series, here and below."""
    waiting: bytes

    def read(self, page: bytes, ranks: int) -> list[int] | None:
        """Return how many requests each rank has, waiting ones included; ``None`` where the page does not say it."""
        running, waiting = _of_ranks(page, self.running), _of_ranks(page, self.waiting)
        if not running:
            return None
        return [min(running.get(rank, 0) + waiting.get(rank, 0), U32_MAX) for rank in range(ranks)]


def _of_ranks(page: bytes, name: bytes) -> dict[int, int]:
    """Return the values of a series by rank, those without a label as the first one's."""
    found: dict[int, int] = {}
    for line in lines_of(page, name):
        if line[len(name) : len(name) + 1] not in (b"{", b" "):
            continue
        label = LABELS_OF_RANKS.search(line)
        value = _count(line.rpartition(b"}")[2] if b"}" in line else line[len(name) :])
        if value is not None:
            rank = int(label[1]) if label else 0
            found[rank] = max(found.get(rank, 0), value)
    return found


def _count(text: bytes) -> int | None:
    words = text.split()
    try:
        value = float(words[0]) if words else -1.0
    except ValueError:
        return None
    return int(value) if 0 <= value <= U32_MAX else None


@dataclass(slots=True)
class ForeignLoad:
    """Requests of one rank that no router reported."""

    count: int = 0
    _surplus: int = field(default=0)

    def observe(self, of_engine: int, booked: Sequence[int]) -> bool:
        """Take in what the engine has and what was on the books around that; return whether ``count`` has changed."""
        surplus = max(0, of_engine - max(booked))
        before, self.count, self._surplus = self.count, min(surplus, self._surplus), surplus
        return self.count != before

    def forget(self) -> bool:
        """Know nothing of the engine any more; return whether ``count`` has changed."""
        before, self.count, self._surplus = self.count, 0, 0
        return before != 0
