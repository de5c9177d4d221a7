"""A further source of a worker that joins by itself: a KV block manager or an engine that publishes about it.

The worker pushes, and its own stream reports its name and whether it lives. A further source only reports which blocks
are held in addition. Its frames are followed as those of any PUB engine (``wire.publishers``); this file decides for
which epoch of the worker they count. Rules:

1. A source is followed while its worker is a member. Before the worker joins, and after it left, nothing is taken in.
2. A message of a source counts for the epoch of the worker that is a member at that time, and is dropped with it.
3. An epoch of the publisher belongs to the worker's epoch that was seen at the same time: the publisher was met first,
   a message of the worker came after that, and the publisher has published. When the worker comes back with another
   epoch, such a publisher is *former*: nothing of it is taken in until it begins another epoch itself, or reports that
   its cache is empty. Until either happens its blocks may be those that the worker lost. A cleared cache is as good as
   another epoch of the publisher, when it arrives live, or is known to be later than the worker's exit.
4. A worker whose lease ran out and that comes back under the same epoch is the same epoch: the publisher's messages
   count again, read from its replay buffer.
5. A publisher that ``outlives_worker`` (a block manager in a process of its own whose blocks the next epoch finds
   again) is read from its beginning whenever the worker joins. Rule 3 does not hold for it.
6. Each life of the publisher, and each loss of frames, begins a new epoch of the source, and its first batch takes
   back what the source held. Batches are numbered here, without holes. Frames without content make none.
7. A source that is not connected for the lease is *absent*: a batch takes back what only it reported. After a restart
   of the consolidator this holds too, for what the journal knows of it.

    state        the publisher ...
    -----------  ------------------------------------------------------------------------------------------
    SYNCING      was not reached yet in this epoch of the worker, and the lease is not over
    LIVE         is followed
    REPLAYING    was asked for missing frames
    STALE        is not connected, and the lease is not over; or it lost frames (what it reports from then on counts)
    ABSENT       is not connected for the lease; nothing of it is held
    FORMER       belongs to an epoch of the worker that has ended (rule 3); nothing of it is held
"""

from __future__ import annotations

from typing import NamedTuple

from poolgrid.kernel.consolidation.consolidator import MemberJoined, MemberLeft
from poolgrid.kernel.consolidation.pool_state import MemberRank
from poolgrid.kernel.kv_events.follower import (
    COUNTED,
    NOWHERE,
    AskReplay,
    Leave,
    NewLife,
    Position,
    PubEffect,
    PubFollower,
    SourceState,
)
from poolgrid.kernel.wire.events import AnyEvent, CacheCleared, EventBatch
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey


class FollowerLimits(NamedTuple):
    """What a follower is made with."""

    blocks_max: int
    has_replay: bool
    replay_timeout_ms: int
    lease_ms: int


class FurtherSource:
    """One further source of one worker rank; every input returns batches and questions in order."""

    def __init__(self, worker: WorkerKey, name: str, limits: FollowerLimits, outlives_worker: bool) -> None:
        self.worker = worker
        self.name = name
        self._limits = limits
        self._outlives_worker = outlives_worker
        self._follower: PubFollower | None = None
        self._counts = dict.fromkeys(COUNTED, 0)
        """Of the epochs of the worker before this one."""
        self._epoch = 0
        self._seq = 0
        self._speaks = False
        """Whether the source has an epoch in this epoch of the worker, so that it may hold blocks."""
        self._await_until_ms: float | None = None
        """When a publisher that was not reached yet is absent."""
        self._gone = False
        self._worker_epoch = 0
        self._over = False
        """Whether the last epoch of the worker is known to have ended."""
        self._past: Position | None = None
        """Position of the publisher that belonged to the last epoch of the worker."""
        self._past_was_former = False
        self._past_is_behind = False
        """Whether all its messages of that epoch had been read when the worker left."""

    # The worker

    def joined(self, member: MemberJoined, now_ms: float) -> None:
        """The worker became a member: follow the publisher from now on."""
        resumed = not self._over and member.epoch == self._worker_epoch
        former = self._past if self._past_was_former or not resumed else None
        self._follow(member.epoch, member.block_size, now_ms, None if self._outlives_worker else former)
        self._speaks = False

    def recovered(self, worker: MemberRank, now_ms: float) -> None:
        """Continue with a worker that the journal knows, and with what it knows of this source."""
        is_former = worker.stream(self.name).state is StreamState.FORMER and not self._outlives_worker
        cursor = worker.cursors.get(self.name)
        if cursor is not None:
            self._epoch, self._seq = cursor.epoch, cursor.next_seq
        self._follow(worker.epoch, worker.card.block_size, now_ms, NOWHERE if is_former else None)
        self._speaks = cursor is not None

    def left(self, member: MemberLeft) -> None:
        """The worker is no member any more; remember its publisher."""
        follower = self._follower
        if follower is None:
            return
        spoke = follower.position != NOWHERE and follower.began_ms is not None and follower.began_ms <= member.heard_ms
        self._past = follower.position if follower.is_former or spoke else None
        self._past_was_former = follower.is_former
        # A lease runs out while we listen; messages of a replaced worker may arrive before those about the last one.
        self._past_is_behind = follower.state is SourceState.LIVE and follower.clears_count and not member.over
        self._over = member.over
        self._counts = self.counts
        self._follower = None
        self._await_until_ms = None

    def _follow(self, epoch: int, block_size: int, now_ms: float, former: Position | None) -> None:
        limits = self._limits
        self._worker_epoch = epoch
        self._follower = PubFollower(
            self.worker,
            block_size,
            limits.blocks_max,
            limits.has_replay,
            limits.replay_timeout_ms,
            limits.lease_ms,
            self._epoch,
            former,
            self._past_is_behind,
        )
        self._gone = False
        self._await_until_ms = now_ms + limits.lease_ms

    # Views

    @property
    def is_followed(self) -> bool:
        return self._follower is not None

    @property
    def health(self) -> tuple[StreamState, str]:
        """Return how the source stands in this epoch of the worker, and why."""
        follower = self._follower
        if follower is None:
            return StreamState.SYNCING, "its worker has not joined"
        if follower.is_former:
            return (
                StreamState.FORMER,
                "it belongs to an earlier epoch of the worker; it counts again when it restarts or clears its "
                "cache, or at once with outlives_worker in the sources file",
            )
        if self._gone:
            return StreamState.ABSENT, f"it is not connected for {self._limits.lease_ms} ms; nothing of it is held"
        if follower.state is SourceState.ABSENT and self._await_until_ms is not None:
            return StreamState.SYNCING, "it was not reached yet"
        return follower.health

    @property
    def counts(self) -> dict[str, int]:
        """Return the counters of the source, over all epochs of the worker."""
        if self._follower is None:
            return self._counts
        return {name: count + self._follower.counts[name] for name, count in self._counts.items()}

    def count_undecodable(self) -> None:
        if self._follower is not None:
            self._follower.count_undecodable()

    # The publisher

    def connected(self, now_ms: float, wall_ms: int) -> list[EventBatch | AskReplay]:
        if self._follower is None:
            return []
        return self._count(self._follower.connected(now_ms, wall_ms), wall_ms)

    def disconnected(self, now_ms: float) -> list[EventBatch | AskReplay]:
        return [] if self._follower is None else self._count(self._follower.disconnected(now_ms), 0)

    def live(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> list[EventBatch | AskReplay]:
        if self._follower is None:
            return []
        return self._count(self._follower.live(seq, payload, now_ms, wall_ms), wall_ms)

    def replayed(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> list[EventBatch | AskReplay]:
        if self._follower is None:
            return []
        return self._count(self._follower.replayed(seq, payload, now_ms, wall_ms), wall_ms)

    def tick(self, now_ms: float, wall_ms: int) -> list[EventBatch | AskReplay]:
        """Time has passed; call at ``due_ms``."""
        follower = self._follower
        if follower is None:
            return []
        out = self._count(follower.tick(now_ms, wall_ms), wall_ms)
        if self._await_until_ms is not None and now_ms >= self._await_until_ms:
            self._await_until_ms = None
            if follower.state is SourceState.ABSENT:
                self._take_back(wall_ms, out)
        return out

    def due_ms(self) -> float | None:
        """Return the monotonic time at which ``tick`` has something to do."""
        if self._follower is None:
            return None
        due = [self._follower.due_ms(), self._await_until_ms]
        return min((moment for moment in due if moment is not None), default=None)

    # Inside

    def _count(self, effects: list[PubEffect], wall_ms: int) -> list[EventBatch | AskReplay]:
        """Turn what follows from a frame into batches of this source."""
        out: list[EventBatch | AskReplay] = []
        for effect in effects:
            if isinstance(effect, NewLife):
                self._epoch, self._seq = effect.epoch, 0
                self._gone = False
                self._speaks = True
                self._await_until_ms = None
                self._batch([CacheCleared()], wall_ms, out)
            elif isinstance(effect, Leave):
                self._take_back(wall_ms, out)
            elif isinstance(effect, EventBatch):
                self._batch(effect.events, effect.time_ms, out)
            else:
                out.append(effect)
        return out

    def _take_back(self, wall_ms: int, out: list[EventBatch | AskReplay]) -> None:
        self._gone = True
        if self._speaks:
            self._batch([CacheCleared()], wall_ms, out)

    def _batch(self, events: list[AnyEvent], time_ms: int, out: list[EventBatch | AskReplay]) -> None:
        out.append(EventBatch(*self.worker, self._epoch, self._seq, time_ms, events, self.name))
        self._seq += 1
