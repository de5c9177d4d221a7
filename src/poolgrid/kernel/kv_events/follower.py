"""Follow one engine that publishes its KV events over ZMQ PUB: numbered frames, and a socket that replays them.

Rules for this file:

1. What comes out is a push stream like a worker's: lives (``NewLife``, with an epoch of ours) and batches numbered from
   0 without holes. The engine's own numbers end here.
2. Live frames of one connection only grow. A live frame that does not is a restarted engine: a new epoch.
3. A hole is filled by a replay, which begins one frame early: if that frame is not the one we know, the engine
   restarted unnoticed, and everything known belongs to its last epoch.
4. What cannot be filled is a *loss*: the cache known so far is dropped with a new epoch, and the source is ``degraded``
   (what it stores from then on is true, what it stored before is not known) until its next epoch begins at frame 0 or
   its cache is cleared. Where nothing of an epoch is known yet nothing can be dropped: an engine whose buffer begins
   later than its epoch is followed from there (``unknown``), and what it reports is trusted.
5. During a replay live frames wait in a bounded queue; when it is full the oldest go, which is a hole again.
6. A follower that starts with a *former* epoch of the engine (how far it had come) takes nothing in from that epoch; it
   reads on only to see that life end: by a restart, or by a cleared cache, behind which nothing of it is left. What the
   first replay shows may be older than the end of that epoch elsewhere, so a cleared cache in it means nothing.

    state        input                         what happens
    -----------  ----------------------------  ----------------------------------------------------------
    ABSENT       connected                     NewLife on the first connection, replay from where we are
    LIVE         live, next                    batch
                 live, already replayed        dropped
                 live, not above the last      NewLife, then as in a fresh epoch
                 live, beyond next             kept, REPLAYING; without a replay socket: loss
                 undecodable                   loss
    REPLAYING    live                          kept
                 replayed, next                batch
                 replayed, not what we know    NewLife, replay from 0
                 replayed, beyond next         asked again; loss where an answer begins so, or no answer has more
                 end of replay, or it reaches
                 what was kept                 what was kept is taken in; LIVE, or another replay
                 silence                       asked again ``REPLAY_ATTEMPTS_MAX`` times, then loss
    any          disconnected                  ABSENT; after the lease the worker leaves the pool
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest

from poolgrid.kernel.kv_events.pub import EngineCleared, EngineEvent, decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator, RootSeed
from poolgrid.kernel.kv_events.unclaimed_chains import UnclaimedChains
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, CacheCleared, EventBatch
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey
from poolgrid.kernel.wire.limits import EVENTS_PER_BATCH_MAX

PENDING_FRAMES_MAX = 20_000
"""Live frames kept during a replay: twice what engines keep for replay by default."""

PENDING_BYTES_MAX = 128 * 1024 * 1024
"""Bytes of live frames kept during a replay."""

REPLAY_ATTEMPTS_MAX = 3
"""Replays asked for without any progress before the missing frames count as lost."""

REST_TIMEOUT_MS = 500
"""How long the rest of an answer may be silent once frames of it came: publishers send it in one go, and of what their
sockets drop at its end nothing else tells."""

END_OF_REPLAY = 2**64 - 1
"""The sequence number −1 that ends a replay, read as u64."""


UNREAD_MIN = 32
"""Stored events in a row that cannot be read before that is a fault: a few are of prompts with what is not followed."""

UNFIT_MIN = 4
"""Stored events in a row without the tokens of their blocks, or without a parent, before that is a fault: no engine
makes one."""

COUNTED = (
    "source_gaps",
    "source_replays",
    "source_losses",
    "source_restarts",
    "source_undecodable",
    "source_ignored_blocks",
)
"""What a follower counts."""

Position = tuple[int, int | None]
"""How far an epoch of an engine is known: its next frame, and the digest of the frame before when that is known."""

NOWHERE: Position = (0, None)
"""No frame of an epoch was received."""


class SourceState(Enum):
    """Where a source stands."""

    ABSENT = "absent"
    LIVE = "live"
    REPLAYING = "replaying"


@dataclass(frozen=True, slots=True)
class NewLife:
    """What was known of the worker is void; batches of this epoch follow, from 0."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Send the engine's replay socket this sequence number, in place of any request before."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The engine has been gone for the lease."""

    reason: str


PubEffect = NewLife | EventBatch | AskReplay | Leave


class PubFollower:
    """The state of one source; every method returns the effects in order."""

    def __init__(
        self,
        worker: WorkerKey,
        block_size: int,
        blocks_max: int,
        has_replay: bool,
        replay_timeout_ms: int,
        lease_ms: int,
        epoch_floor: int = 0,
        former: Position | None = None,
        former_is_behind: bool = False,
        root_seed: RootSeed | None = None,
        holds_unclaimed: bool = False,
        drafts: bool = False,
    ) -> None:
        """``holds_unclaimed`` keeps chains whose seed is not known until one fits (``claim``).

        ``drafts`` tells whether the engine is known to draft tokens.
        """
        self._worker = worker
        self._translator = EngineTranslator(block_size, blocks_max, root_seed, drafts)
        self._unclaimed = UnclaimedChains(root_seed) if root_seed is not None and holds_unclaimed else None
        self._has_replay = has_replay
        self._replay_timeout_ms = replay_timeout_ms
        self._lease_ms = lease_ms
        self.state = SourceState.ABSENT
        self.degraded = False
        self._lost = ""
        """What made it degraded."""
        self.unknown = ""
        """Why blocks that were stored before the first frame are not known; empty = the epoch is known from frame 0."""
        self._epoch = 0
        self._epoch_floor = epoch_floor
        """Epochs up to here are in use, perhaps by an earlier process of ours."""
        self._seq = 0
        self.is_former = former is not None
        """Whether published events belong to an epoch that was given as a former one."""
        self.clears_count = former is None or former_is_behind
        """Whether a cleared cache ends the former epoch: no frame of it is still to come."""
        self._next, self._digest = former or NOWHERE
        """The next frame, and the digest of the one before it, when we have seen that."""
        self._past = NOWHERE
        """Where the engine stood when it was given up, which does not mean that it has ended."""
        self.began_ms: float | None = None
        """When the epoch that is followed was met first, monotonic."""
        self._now_ms = 0.0
        self._last_live = -1
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0
        self._asked = 0
        self._attempts = 0
        self._answered = False
        self._is_mute = False
        """Whether the replay socket left as many questions as are asked without an answer, and answered none since."""
        self._heard_ms = 0.0
        self._absent_since_ms = 0.0
        self._other_rank: int | None = None
        """Whose events come instead of those of the rank."""
        self._unread = 0
        """Stored events in a row that could not be read."""
        self._why_unread = ""
        self._cut = 0
        """Stored events in a row without the tokens of their blocks."""
        self._orphans = 0
        """Stored events in a row whose parent is not known, although the epoch is known from its beginning."""
        self.counts = dict.fromkeys(COUNTED, 0)

    @property
    def fault(self) -> str:
        """Return in what the engine's events do not fit its label, so that they are of no use; empty = they fit."""
        translator = self._translator
        if self._other_rank is not None:
            return f"its publisher sends events of rank {self._other_rank}, and is followed for {self._worker.dp_rank}"
        if translator.other_block_size:
            return (
                f"it stores blocks of {translator.other_block_size} tokens, and its label has {translator.block_size}: "
                f"none of them is known to routers. Give kv_block_size {translator.other_block_size}"
            )
        if translator.has_unknown_groups:
            return "its model has layers of which it is not known what they need: nothing is promised"
        if self._unread >= UNREAD_MIN:
            return f"the last {self._unread} stores could not be read ({self._why_unread})"
        if self._unclaimed is not None and self._unclaimed.chains >= UNREAD_MIN and not len(translator):
            return (
                f"none of its {self._unclaimed.chains} chains of blocks is known: either no router has reported their "
                "salts, or this version names blocks in another way"
            )
        if self._cut >= UNFIT_MIN:
            return f"the last {self._cut} stores have fewer tokens than their blocks: something shortens their lists"
        if self._orphans >= UNFIT_MIN:
            return f"the last {self._orphans} stores continue blocks that no event has stored: something drops events"
        if self._is_mute:
            return (
                f"its replay endpoint has not answered {REPLAY_ATTEMPTS_MAX} questions: what was stored before the "
                "connection is not known, and a lost frame stays lost"
            )
        return ""

    @property
    def health(self) -> tuple[StreamState, str]:
        """Return how far the stream can be trusted, and why."""
        if self.state is SourceState.ABSENT:
            return StreamState.STALE, "the connection to the engine is lost"
        if self.degraded:
            return StreamState.STALE, self._lost
        if self.state is SourceState.REPLAYING:
            return StreamState.REPLAYING, f"a replay from frame {self._asked} is awaited"
        return StreamState.LIVE, self.fault or self.unknown

    @property
    def position(self) -> Position:
        return (self._next, self._digest) if self._next else self._past

    def count_undecodable(self) -> None:
        self.counts["source_undecodable"] += 1

    # Inputs

    def connected(self, now_ms: float, wall_ms: int) -> list[PubEffect]:
        """The subscription reached the engine (again)."""
        effects: list[PubEffect] = []
        self._now_ms = now_ms
        first = self._epoch == 0
        self.state = SourceState.LIVE
        self._last_live = -1
        self._drop_pending()
        if self.is_former:
            if not self._has_replay:
                self._last_live = self._next - 1  # a number that goes back is then the only sign of another epoch
                self.clears_count = True
        elif first:
            self._begin_life("attached", wall_ms, effects)
        elif not self._has_replay:
            # Whether it is the same epoch cannot be asked.
            self._begin_life("reconnected, and the engine has no replay socket", wall_ms, effects)
        if self._has_replay:
            self._attempts = 0
            self._ask(now_ms, effects)
        return effects

    def disconnected(self, now_ms: float) -> list[PubEffect]:
        """The connection is gone; ZMQ tries to get it back."""
        if self.state is not SourceState.ABSENT:
            self.state = SourceState.ABSENT
            self._absent_since_ms = now_ms
            self._drop_pending()
        return []

    def live(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> list[PubEffect]:
        effects: list[PubEffect] = []
        self._now_ms = now_ms
        if self.state is SourceState.ABSENT:
            effects += self.connected(now_ms, wall_ms)
        if seq <= self._last_live:
            self._drop_pending()
            self.state = SourceState.LIVE
            self._restarted(f"sequence went back from {self._last_live} to {seq}", wall_ms, effects)
        self._last_live = seq
        if self.state is SourceState.REPLAYING:
            self._keep(seq, payload)
            self._meet(now_ms, wall_ms, effects)
        else:
            self._live(seq, payload, now_ms, wall_ms, effects)
        return effects

    def replayed(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> list[PubEffect]:
        """A frame of the replay socket; ``END_OF_REPLAY`` ends the answer."""
        effects: list[PubEffect] = []
        if self.state is not SourceState.REPLAYING:
            return effects
        self._heard_ms = self._now_ms = now_ms
        self._is_mute = False
        if seq == END_OF_REPLAY:
            self._end_of_replay(now_ms, wall_ms, effects)
            return effects
        is_first = not self._answered
        if is_first:
            self._answered = True
            unknown = seq == self._next - 1 and self._digest is not None and xxh3_64_intdigest(payload) != self._digest
            if unknown:
                self._restarted(
                    f"frame {seq} is not the one that was seen before: the engine restarted", wall_ms, effects
                )
                self._ask(now_ms, effects)
                return effects
        if seq < self._next:
            return effects
        if seq > self._next and not is_first and self._attempts < REPLAY_ATTEMPTS_MAX:
            # The publisher's socket drops what it cannot send fast enough; its buffer still has it.
            self.counts["source_gaps"] += 1
            self._ask(now_ms, effects)
            return effects
        if seq > self._next:
            what = "began at" if is_first else "continues at"
            self._lose(seq, f"a replay from frame {self._asked} {what} frame {seq}", wall_ms, effects)
        self._attempts = 0
        self._apply(seq, payload, wall_ms, effects)
        self._meet(now_ms, wall_ms, effects)
        return effects

    def _meet(self, now_ms: float, wall_ms: int, effects: list[PubEffect]) -> None:
        """End a replay that has reached the live frames: its own end is a message that may get lost too."""
        if self._answered and not self.is_former and self._pending and self._pending[0][0] <= self._next:
            self._end_of_replay(now_ms, wall_ms, effects)

    def tick(self, now_ms: float, wall_ms: int) -> list[PubEffect]:
        """Time has passed; call at ``due_ms``."""
        effects: list[PubEffect] = []
        self._now_ms = now_ms
        if self.state is SourceState.REPLAYING and now_ms - self._heard_ms >= self._patience_ms:
            if self._attempts < REPLAY_ATTEMPTS_MAX:
                self._ask(now_ms, effects)
            else:
                self._is_mute = not self._answered
                self._give_up(
                    f"{self._attempts} replay requests from {self._asked} were not answered", wall_ms, effects
                )
        elif self.state is SourceState.ABSENT and self._epoch and now_ms - self._absent_since_ms >= self._lease_ms:
            self._forget_blocks()
            self._past = self.position
            self._epoch = 0
            self._next, self._digest = NOWHERE
            effects.append(Leave(f"connection lost for {self._lease_ms} ms"))
        return effects

    def claim(self, seed: RootSeed, wall_ms: int) -> list[PubEffect]:
        """A seed became known: tell of the chains that it fits."""
        effects: list[PubEffect] = []
        held = [] if self._unclaimed is None else self._unclaimed.claimed_by(seed)
        if held:
            self._put_out(self._translator.translate(held), wall_ms, effects)
        return effects

    def due_ms(self) -> float | None:
        """Return the monotonic time at which ``tick`` has something to do."""
        if self.state is SourceState.REPLAYING:
            return self._heard_ms + self._patience_ms
        if self.state is SourceState.ABSENT and self._epoch:
            return self._absent_since_ms + self._lease_ms
        return None

    # Inside

    @property
    def _patience_ms(self) -> int:
        """Return how long a replay may be silent: less where the answer has brought something."""
        return self._replay_timeout_ms if self._attempts else min(REST_TIMEOUT_MS, self._replay_timeout_ms)

    def _live(self, seq: int, payload: bytes, now_ms: float, wall_ms: int, effects: list[PubEffect]) -> None:
        if seq < self._next:
            return
        if seq > self._next:
            self.counts["source_gaps"] += 1
            if self._has_replay:
                self._attempts = 0
                self._keep(seq, payload)
                self._ask(now_ms, effects)
                return
            self._lose(seq, f"frames {self._next} to {seq - 1} are missing and there is no replay", wall_ms, effects)
        self._apply(seq, payload, wall_ms, effects, is_live=True)

    def _apply(self, seq: int, payload: bytes, wall_ms: int, effects: list[PubEffect], is_live: bool = False) -> None:
        self._next = seq + 1
        self._digest = xxh3_64_intdigest(payload)
        try:
            batch = decode_pub(payload)
        except DecodeError as error:
            self.counts["source_undecodable"] += 1
            self._lose(seq + 1, str(error), wall_ms, effects)
            self._digest = xxh3_64_intdigest(payload)
            return
        is_of_rank = batch.dp_rank is None or batch.dp_rank == self._worker.dp_rank
        self._other_rank = None if is_of_rank else batch.dp_rank
        said = batch.events if is_of_rank else []
        if self.is_former:
            said = _behind_the_last_clear(said) if self.clears_count else []
            if not said:
                return
            here = self._next, self._digest
            self._begin_life("its cache was cleared: nothing is left of the epoch before", wall_ms, effects)
            self.began_ms = self._now_ms
            self._next, self._digest = here
        elif is_live and EngineCleared in map(type, said):
            self.began_ms = self._now_ms  # as good as another epoch: nothing from before is held
        if self._unclaimed is not None:
            said = self._unclaimed.pass_on(said)
        before, cut = self._translator.ignored_blocks, self._translator.cut_stores
        orphans = self._translator.orphan_stores
        events = self._translator.translate(said)
        self.counts["source_ignored_blocks"] += self._translator.ignored_blocks - before + batch.ignored
        if BlocksStored in map(type, events):
            self._unread = self._cut = self._orphans = 0
        elif batch.why_ignored:
            self._unread, self._why_unread = self._unread + batch.ignored, batch.why_ignored
        elif cut < self._translator.cut_stores:
            self._cut += self._translator.cut_stores - cut
        elif not (self.degraded or self.unknown):
            self._orphans += self._translator.orphan_stores - orphans
        if (self.degraded or self.unknown) and CacheCleared in map(type, events):
            self.degraded = False
            self.unknown = ""
        self._put_out(events, batch.time_ms, effects)

    def _put_out(self, events: list[AnyEvent], time_ms: int, effects: list[PubEffect]) -> None:
        for at in range(0, max(1, len(events)), EVENTS_PER_BATCH_MAX):
            part = events[at : at + EVENTS_PER_BATCH_MAX]
            effects.append(EventBatch(*self._worker, self._epoch, self._seq, time_ms, part))
            self._seq += 1

    def _end_of_replay(self, now_ms: float, wall_ms: int, effects: list[PubEffect]) -> None:
        if not self._answered and (self._digest is not None or self.is_former):
            # It does not even have the last frame that we saw: it is another epoch, or its buffer was cut. What this
            # epoch has is read from its beginning.
            self._restarted("the engine has no frame that was seen before: it restarted", wall_ms, effects)
            self._ask(now_ms, effects)
            return
        self.state = SourceState.LIVE
        self.clears_count = True
        before = self._next
        pending, self._pending, self._pending_bytes = self._pending, deque(), 0
        while pending:
            seq, payload = pending[0]
            if seq > self._next:
                break
            pending.popleft()
            if seq == self._next:
                self._apply(seq, payload, wall_ms, effects)
        if pending:
            self._pending = pending
            self._pending_bytes = sum(len(payload) for _, payload in pending)
            if self._next == before and self._attempts >= REPLAY_ATTEMPTS_MAX:
                self._give_up(f"the replay does not reach frame {pending[0][0]}", wall_ms, effects)
            else:
                self._ask(now_ms, effects)

    def _give_up(self, reason: str, wall_ms: int, effects: list[PubEffect]) -> None:
        """Continue from what was kept, without what is missing."""
        self.state = SourceState.LIVE
        self.clears_count = True
        pending, self._pending, self._pending_bytes = self._pending, deque(), 0
        self._lose(pending[0][0] if pending else self._next, reason, wall_ms, effects)
        for seq, payload in pending:
            if seq > self._next:
                self._lose(seq, f"frames {self._next} to {seq - 1} are missing", wall_ms, effects)
            if seq == self._next:
                self._apply(seq, payload, wall_ms, effects)

    def _restarted(self, reason: str, wall_ms: int, effects: list[PubEffect]) -> None:
        """Begin another epoch of the engine: the one before has ended."""
        self.counts["source_restarts"] += 1
        self._past = NOWHERE
        self.began_ms = self._now_ms
        self._begin_life(reason, wall_ms, effects)

    def _lose(self, continue_at: int, reason: str, wall_ms: int, effects: list[PubEffect]) -> None:
        if self.is_former:
            # Nothing of it is held that could be lost; which frame comes before the next is not known any more.
            self._next, self._digest = continue_at, None
            return
        if not self._next and continue_at:
            self._next = continue_at
            self.degraded = False
            self.unknown = (
                f"{reason}: blocks that the engine stored before frame {continue_at}, and those that continue them, "
                "are not known until it evicts them or clears its cache"
            )
            return
        self.counts["source_losses"] += 1
        self._begin_life(f"events were lost: {reason}", wall_ms, effects)
        self._next = continue_at
        self.degraded = True
        self._lost = f"events were lost: {reason}"

    def _begin_life(self, reason: str, wall_ms: int, effects: list[PubEffect]) -> None:
        self._epoch = self._epoch_floor = max(self._epoch_floor + 1, wall_ms)
        self._seq = 0
        self._next, self._digest = NOWHERE
        self.is_former = False
        self.degraded = False
        self.unknown = ""
        if self.began_ms is None:
            self.began_ms = self._now_ms
        self._forget_blocks()
        effects.append(NewLife(self._epoch, reason))

    def _forget_blocks(self) -> None:
        self._translator.clear()
        if self._unclaimed is not None:
            self._unclaimed.clear()

    def _ask(self, now_ms: float, effects: list[PubEffect]) -> None:
        self.state = SourceState.REPLAYING
        self._attempts += 1
        self._answered = False
        self._heard_ms = now_ms
        # The frame before tells whether it is still the same epoch.
        self._asked = max(0, self._next - 1) if self._digest is not None or self.is_former else self._next
        self.counts["source_replays"] += 1
        effects.append(AskReplay(self._asked))

    def _keep(self, seq: int, payload: bytes) -> None:
        self._pending.append((seq, payload))
        self._pending_bytes += len(payload)
        while len(self._pending) > PENDING_FRAMES_MAX or self._pending_bytes > PENDING_BYTES_MAX:
            self._pending_bytes -= len(self._pending.popleft()[1])

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0


def _behind_the_last_clear(events: list[EngineEvent]) -> list[EngineEvent]:
    """Return what follows when a cache was emptied, that included; nothing when it was not."""
    cleared = [position for position, event in enumerate(events) if isinstance(event, EngineCleared)]
    return events[cleared[-1] :] if cleared else []
