"""What the keeper of one rank does: it watches this rank's part of the engine and the leader, until one of them ends.

Rules:

1. It beats as long as it lives, and says in its beats when its part of the engine has ended, or when it was told to
   end. To be told to end is a wish to the leader and ends nothing by itself: the requests of the engine need all ranks
   until they are done.
2. The leader's word ends it: after ``done`` its part has ``ORDERLY_END_MS`` to end by itself; after ``failed`` it is
   ended at once, for it hangs in a collective call. Rank 0 has ``LAST_WORDS_MS`` then: the worker is there, and has to
   tell its routers.
3. A leader that is silent is gone: for the lease while the engine runs, for ``LEADER_START_MS`` while it starts, for
   the start time-out before its first word.
"""

from __future__ import annotations

from dataclasses import dataclass

from poolgrid.workers.core.rank_messages import REASON_CHARS_MAX, Beat, GroupState, Word

ORDERLY_END_MS = 30_000.0
"""How long a rank may take to end after the engine has: it frees its GPU."""

LAST_WORDS_MS = 10_000.0
"""How long the worker may take to move its requests elsewhere and say goodbye: two seconds, and some for a busy
machine."""

LEADER_START_MS = 60_000.0
"""How long the leader may be silent while it starts: importing the engine's library may hold the interpreter. A rank
that is told to end waits as long for the leader's first word: who goes alone leaves the others waiting for it."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """This rank is to end."""

    reason: str
    in_order: bool
    grace_ms: float
    """How long its part of the engine may take to end by itself."""


class RankKeeping:
    """The state of one rank's keeper."""

    def __init__(
        self, group: str, rank: int, host: str, life: int, *, lease_ms: float, start_timeout_ms: float, now_ms: float
    ) -> None:
        self._beat = Beat(group, rank, host, life)
        self._lease_ms = lease_ms
        self._start_timeout_ms = start_timeout_ms
        self._word: Word | None = None
        self._heard_ms = now_ms
        self._ended = ""
        self._ended_ms = 0.0
        self._stopped_ms: float | None = None

    @property
    def beat(self) -> Beat:
        """What the leader is told now."""
        beat = self._beat
        return Beat(beat.group, beat.rank, beat.host, beat.life, self._ended, self._stopped_ms is not None)

    def heard(self, word: Word, now_ms: float) -> None:
        """Take the leader's word; the first that is final stays."""
        self._heard_ms = now_ms
        if self._word is None or self._word.state in (GroupState.STARTING, GroupState.RUNNING):
            self._word = word

    def engine_ended(self, how: str, now_ms: float) -> None:
        """Note that this rank's part of the engine has ended."""
        self._ended, self._ended_ms = how[:REASON_CHARS_MAX], now_ms

    def stop(self, now_ms: float) -> None:
        """Note that this rank was told to end; again changes nothing."""
        if self._stopped_ms is None:
            self._stopped_ms = now_ms

    def check(self, now_ms: float) -> RankEnd | None:
        """Return how this rank ends; ``None`` = not yet."""
        word = self._word
        rank = self._beat.rank
        if word is not None and word.state is GroupState.DONE:
            return RankEnd("the engine has ended", True, ORDERLY_END_MS)
        if word is not None and word.state is GroupState.FAILED:
            return RankEnd(word.reason, False, LAST_WORDS_MS if rank == 0 else 0.0)
        if word is None and self._stopped_ms is not None and now_ms - self._stopped_ms > LEADER_START_MS:
            return RankEnd("it was told to end, and no leader was there", True, 0.0)
        silent_ms = now_ms - self._heard_ms
        patience_ms = self._patience_ms(word)
        if silent_ms > patience_ms:
            if self._ended:
                return RankEnd(f"rank {rank}: {self._ended}", False, 0.0)
            return RankEnd(f"rank {rank}: the leader was silent for more than {patience_ms:.0f} ms", False, 0.0)
        if self._ended and word is None and now_ms - self._ended_ms > self._lease_ms:
            return RankEnd(f"rank {rank}: {self._ended}, and no leader was there", False, 0.0)
        return None

    def _patience_ms(self, word: Word | None) -> float:
        if word is None:
            return self._start_timeout_ms
        return max(self._lease_ms, LEADER_START_MS) if word.state is GroupState.STARTING else self._lease_ms
