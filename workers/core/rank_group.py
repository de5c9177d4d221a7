"""The ranks of an engine that spans processes, as its leader knows them.

Rules:

1. Every rank beats, the leader's own too. The group is *whole* once each has been heard.
2. A rank is lost when it says that its part of the engine has ended, when it is silent for the lease, or when another
   process beats in its place. What is lost stays lost: the others wait for it in a collective call that never returns,
   and none of them can take it back.
3. The first loss is the reason, and the group has failed with it. What is lost later changes nothing: it is mostly a
   consequence.
4. At the orderly end ranks go one after the other, and none of that is a loss.
5. A beat of another group is answered with a failure: its sender is left over from an earlier start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolgrid.workers.core.rank_messages import REASON_CHARS_MAX, Beat, GroupState, Word

NAMED_MAX = 20
"""Ranks named in one line; of more their number is told."""


@dataclass(slots=True)
class _Rank:
    host: str
    life: int
    heard_ms: float


class RankGroup:
    """The ranks of one start of an engine."""

    def __init__(self, group: str, size: int, lease_ms: float) -> None:
        self.size = size
        self._group = group
        self._lease_ms = lease_ms
        self._ranks: dict[int, _Rank] = {}
        self._lost: dict[int, str] = {}
        self._state = GroupState.STARTING
        self._reason = ""
        self._is_ending = False
        self.stops = False
        """Whether a rank was told to end: then all are to."""

    @property
    def word(self) -> Word:
        return Word(self._state, self._reason)

    @property
    def failure(self) -> str:
        """Why the group has failed; empty = it has not."""
        return self._reason if self._state is GroupState.FAILED else ""

    @property
    def missing(self) -> list[int]:
        """Ranks that were never heard, and ranks that are lost."""
        return [rank for rank in range(self.size) if rank not in self._ranks or rank in self._lost]

    @property
    def is_whole(self) -> bool:
        return not self.missing

    def heard(self, beat: Beat, now_ms: float) -> Word:
        """Take a beat; return the answer to it."""
        if beat.group != self._group:
            return Word(GroupState.FAILED, f"group {beat.group!r} is over: this is group {self._group!r}")
        if beat.rank >= self.size:
            return Word(GroupState.FAILED, f"the rank is {beat.rank}, this group has 0 to {self.size - 1}")
        known = self._ranks.get(beat.rank)
        if known is None:
            known = self._ranks[beat.rank] = _Rank(beat.host, beat.life, now_ms)
        elif known.life != beat.life:
            self._lose(beat.rank, "another process took its place")
            return Word(GroupState.FAILED, f"rank {beat.rank} was here before: a rank cannot come back to its group")
        known.heard_ms = now_ms
        self.stops = self.stops or beat.stops
        if beat.ended:
            self._lose(beat.rank, beat.ended)
        return self.word

    def check(self, now_ms: float) -> None:
        """Look for ranks that have been silent for the lease."""
        for rank, known in self._ranks.items():
            if rank not in self._lost and now_ms - known.heard_ms > self._lease_ms:
                self._lose(rank, f"it was silent for more than {self._lease_ms:.0f} ms")

    def run(self) -> None:
        """Note that the engine does its work."""
        if self._state is GroupState.STARTING:
            self._state = GroupState.RUNNING

    def begin_end(self) -> None:
        """Note that the engine is being shut down in order."""
        self._is_ending = True

    def end(self, failure: str = "") -> None:
        """Note that the engine is over: in order, or with what broke it; the first word of it stays."""
        if self._state in (GroupState.STARTING, GroupState.RUNNING):
            self._state = GroupState.FAILED if failure else GroupState.DONE
            self._reason = failure[:REASON_CHARS_MAX]

    def describe(self) -> dict[str, object]:
        """Return which ranks there are and what became of the lost, as JSON values."""
        missing = self.missing
        described: dict[str, object] = {
            "expected": self.size,
            "alive": self.size - len(missing),
            "hosts": sorted({each.host for each in self._ranks.values()}),
        }
        if missing:
            described["missing"] = missing
        if self._lost:
            described["lost"] = {str(rank): reason for rank, reason in self._lost.items()}
        return described

    def _lose(self, rank: int, why: str) -> None:
        if self._is_ending or rank in self._lost:
            return
        self._lost[rank] = f"rank {rank} on host {self._ranks[rank].host} was lost: {why}"
        self.end(self._lost[rank])


def named(ranks: Sequence[int]) -> str:
    """Return ranks as a line names them: ``rank 3``, ``ranks 0 to 7 and 9``."""
    spans: list[tuple[int, int]] = []
    for rank in ranks[:NAMED_MAX]:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    words: list[str] = []
    for first, last in spans:
        words += [f"{first} to {last}"] if last > first + 1 else [str(rank) for rank in range(first, last + 1)]
    if len(ranks) > NAMED_MAX:
        words.append(f"{len(ranks) - NAMED_MAX} more")
    said = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"
