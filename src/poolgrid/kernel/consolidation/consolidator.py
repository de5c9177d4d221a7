"""The consolidator: takes messages of sources, decides which become records of the pool's journal, and answers.

Rules for this file:

1. Everything that happens goes through a ``ConsolidatorTurn``: the caller opens one, hands in messages, and gets back
   records and replies. **The shell appends the records to the journal first; only then do replies leave and records
   get published.** An acknowledgement therefore always means "in the journal".
2. Every accepted batch becomes a record, also when nothing of it is news: the record moves the cursor that a restarted
   consolidator will know. A large one becomes several (``event_work``), and the last moves the cursor: a consolidator
   that restarts in between gets the batch again, and it ends in the same state. Offsets have no holes.
3. An epoch ends before the next begins: a new epoch writes ``WorkerLeft`` and ``WorkerJoined`` before anything of the
   new epoch. A batch of an earlier epoch is refused.
4. A gap is never skipped. The only batch accepted out of turn is one that restates the whole cache
   (``SnapshotBegan`` first); requests that were open before it are finished with reason ``lost``, because their end may
   have been among the missing batches. A worker restates the requests it still has with ``RequestStarted``.
5. A stream's health (``poolgrid.kernel.wire.feed``) is part of the state: a gap makes it ``REPLAYING``, a gap that is
   not filled for ``stale_after_ms`` makes it ``STALE``, and a stream that has caught up is ``LIVE`` again. Each is a
   record.
6. A rank that is silent for the lease leaves the pool. Ranks attached by configuration hold their lease by connection.
7. A rank has its own stream, and may have further sources (``consolidation.further_source``) with cursors of their
   own. A block is held while any of them reports it; readers get the first report and the last removal. Gaps, leases
   and acknowledgements are the business of the rank's own stream alone.

What may join: see ``compatibility``. Limits: ``ConsolidatorLimits``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from poolgrid.kernel.consolidation.event_work import parts_of
from poolgrid.kernel.consolidation.pool_state import (
    BLOCKS_PER_WORKER_MAX,
    MemberRank,
    PoolState,
    SequenceVerdict,
)
from poolgrid.kernel.wire.card import WorkerCard, card_problem, name_problem
from poolgrid.kernel.wire.events import (
    AnyEvent,
    CacheCleared,
    EventBatch,
    JournalRecord,
    RequestFinished,
    SnapshotBegan,
    StreamStateChanged,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.feed import CONSOLIDATOR_SOURCE, WORKER_SOURCE, fold
from poolgrid.kernel.wire.hashing import HASH_SPEC
from poolgrid.kernel.wire.identifiers import StreamState, WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import (
    Acknowledged,
    FromConsolidator,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRefused,
    Resend,
    ToConsolidator,
    Unknown,
    Welcome,
)
from poolgrid.kernel.wire.limits import EVENTS_PER_BATCH_MAX, POOL_TEMPLATES_CHARS_MAX, TEXT_CHARS_MAX


def incompatibility(
    members: Mapping[WorkerKey, MemberRank], workers_max: int, key: WorkerKey, card: WorkerCard
) -> str | None:
    """Return why a rank with this card may not join the members of a pool, or ``None``."""
    if key not in members and len(members) >= workers_max:
        return f"the pool has {len(members)} worker ranks, allowed are at most {workers_max}"
    problem = name_problem("worker_id", key.worker_id, needed=True) or card_problem(card)
    if problem is not None:
        return problem
    if card.dp_size < 1 or key.dp_rank >= card.dp_size:
        return f"dp_rank is {key.dp_rank}, the card's dp_size {card.dp_size} allows 0 to {card.dp_size - 1}"
    if card.hash_spec != HASH_SPEC:
        return (
            f"the card's hash_spec is {card.hash_spec!r}, this pool hashes blocks with {HASH_SPEC!r}: "
            "its blocks would never be found"
        )
    templates = len(card.chat.chat_template)
    for other_key, other in members.items():
        if other_key == key:
            continue
        if other_key.worker_id == key.worker_id and other.card.dp_size != card.dp_size:
            return f"the card's dp_size is {card.dp_size}, rank {other_key} of the worker has {other.card.dp_size}"
        if other.card.model == card.model and other.card.block_size != card.block_size:
            return (
                f"the card's block_size is {card.block_size}, worker {other_key} serves model {card.model!r} with "
                f"{other.card.block_size}; all workers of a model in a pool must agree"
            )
        if other.card.model == card.model:
            contradiction = _contradiction(card, other_key, other.card)
            if contradiction is not None:
                return contradiction
        templates += len(other.card.chat.chat_template)
    if card.chat.chat_template and templates > POOL_TEMPLATES_CHARS_MAX:
        return (
            f"with the card's chat.chat_template those of the pool have {templates} characters, allowed are "
            f"{POOL_TEMPLATES_CHARS_MAX}: give the template to the routers"
        )
    return None


def _contradiction(card: WorkerCard, other_key: WorkerKey, other: WorkerCard) -> str | None:
    """Say what two workers of a model tell routers differently, or ``None``."""
    told = [(f"chat.{field}", own, others) for field, own, others in card.chat.contradictions(other.chat)]
    largest, others = card.media.item_bytes_max, other.media.item_bytes_max
    if largest and others and largest != others:
        told.append(("media.item_bytes_max", str(largest), str(others)))
    if not told:
        return None
    field, own_value, other_value = told[0]
    return (
        f"the card's {field} is {own_value}, worker {other_key} serves model {card.model!r} with {other_value}; all "
        "workers of a model in a pool must agree, or leave it out"
    )


LIVE = StreamState.LIVE
"""Found once, not in the enumeration for each batch."""

SOURCES_PER_WORKER_MAX = 8
"""Event sources of one worker rank, its own stream included; engines and block managers have two or three."""

NAME_CHARS_IN_REASON_MAX = 200
"""Characters of a refused value that are repeated in the reason."""


class Now(NamedTuple):
    """One reading of the shell's clock."""

    monotonic_ms: float
    """For leases and retries; stands still while the consolidator does, or does not listen."""
    wall_ms: int
    """For records, Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class ConsolidatorLimits:
    """Bounds of the core, each with what happens beyond it."""

    workers_max: int = 4096
    """WorkerRank ranks in the pool; a further one is refused."""
    sources_per_worker_max: int = SOURCES_PER_WORKER_MAX
    """Sources of one rank; a further one is refused."""
    blocks_per_worker_max: int = BLOCKS_PER_WORKER_MAX
    """Blocks remembered per rank; further chains are not taken in and counted."""
    lease_ms: int = 3000
    """Silence after which a rank has left."""
    resend_retry_ms: int = 200
    """How long an answer to ``Resend`` may take before it is asked again."""
    stale_after_ms: int = 2000
    """How long a gap may stay open before the rank's blocks are not trusted any more: ten attempts to fill it."""


@dataclass(slots=True)
class Tally:
    """What happened since the start, for the metrics of the shell."""

    batches: int = 0
    events: int = 0
    duplicates: int = 0
    gaps: int = 0
    resends: int = 0
    restatements: int = 0
    refused: int = 0
    unknown: int = 0
    ignored_events: int = 0
    joined: int = 0
    left: int = 0
    lease_expiries: int = 0
    lost_requests: int = 0
    stale: int = 0
    muted: int = 0


class MemberJoined(NamedTuple):
    """A rank became a member; its further sources may be followed."""

    key: WorkerKey
    epoch: int
    block_size: int


class MemberLeft(NamedTuple):
    """Drop a rank that is no member any more, with all that its sources reported."""

    key: WorkerKey
    over: bool
    """Whether its epoch is known to have ended; a rank whose lease ran out may come back with all that it has."""
    heard_ms: float
    """Time of its last message, monotonic."""


@dataclass(slots=True)
class ConsolidatorTurn:
    """All that follows from the messages of one wake-up, in order."""

    now: Now
    records: list[JournalRecord] = field(default_factory=list)
    replies: list[tuple[bytes, FromConsolidator]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """For the log: what an operator should know."""
    acknowledge: dict[WorkerKey, bytes] = field(default_factory=dict)
    """Ranks whose batches were taken in, with the peer to tell; ``finish`` makes one acknowledgement of each."""
    members: list[MemberJoined | MemberLeft] = field(default_factory=list)
    """Workers that came and went, in order, for followers of further sources."""


@dataclass(slots=True)
class _Link:
    """How a rank is connected, which no journal knows."""

    heard_ms: float
    peer: bytes = b""
    attached: bool = False
    """Attached by configuration: no lease, and no worker may take its name."""
    asked_seq: int = -1
    asked_ms: float = 0.0
    behind_seq: int = -1
    """The latest batch that is known to exist; the stream has a hole until it is taken in."""
    behind_since_ms: float = 0.0
    muted_until_ms: float = 0.0
    """Before, what it sends is dropped unread."""
    lag_ms: int = 0


class Consolidator:
    """The owner of a pool's state."""

    def __init__(self, pool: PoolState, consolidator_id: str, limits: ConsolidatorLimits, now: Now) -> None:
        self.pool = pool
        pool.discarded.in_slices = True  # its owner has messages of workers to read and routers to serve
        self.consolidator_id = consolidator_id
        self.limits = limits
        self.tally = Tally()
        # Ranks known from the journal have one lease, from now on, to send a message.
        self._links: dict[WorkerKey, _Link] = {key: _Link(now.monotonic_ms) for key in pool.workers}

    # Turns

    def finish(self, turn: ConsolidatorTurn) -> None:
        """Close a turn: one acknowledgement per rank whose batches were taken in."""
        for key, peer in turn.acknowledge.items():
            worker = self.pool.workers.get(key)
            if worker is not None and peer:
                turn.replies.append((peer, self._acknowledged(worker)))
        turn.acknowledge.clear()

    # What workers send

    def receive(self, peer: bytes, message: ToConsolidator, turn: ConsolidatorTurn) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, turn)
        elif isinstance(message, Heartbeat):
            self._heartbeat(peer, message, turn)
        else:
            self._goodbye(peer, message, turn)

    def batch(
        self,
        peer: bytes,
        batch: EventBatch,
        turn: ConsolidatorTurn,
        part: list[AnyEvent] | None = None,
        more: bool = False,
    ) -> None:
        """Take in a batch that a worker pushed, or the next ``part`` of one, behind which there may be more."""
        # A plain tuple finds what a WorkerKey was stored under, and costs less to make.
        name = (batch.worker_id, batch.dp_rank)
        worker = self.pool.workers.get(name)  # type: ignore[call-overload]
        link = self._links.get(name)  # type: ignore[call-overload]
        if worker is None or link is None or link.attached or batch.epoch != worker.epoch:
            self._live(peer, batch.worker, batch.epoch, turn)  # answers why not
            return
        link.heard_ms = turn.now.monotonic_ms
        link.peer = peer
        if batch.source != WORKER_SOURCE:
            self._refuse(
                peer,
                batch.worker,
                f"a pushed batch names source {batch.source[:NAME_CHARS_IN_REASON_MAX]!r}, "
                f"allowed is {WORKER_SOURCE!r}; it was dropped",
                turn,
            )
            return
        self._take(worker, batch, peer, turn, batch.events if part is None else part, more)

    def _live(self, peer: bytes, key: WorkerKey, epoch: int, turn: ConsolidatorTurn) -> MemberRank | None:
        """Return the rank when this epoch of it is a member, else answer why not."""
        worker = self.pool.workers.get(key)
        link = self._links.get(key)
        if worker is None or link is None or epoch > worker.epoch:
            self.tally.unknown += 1
            turn.replies.append((peer, Unknown(*key)))
            return None
        if link.attached:
            self._refuse(peer, key, f"worker {key} is attached by configuration; a push of that name is refused", turn)
            return None
        if epoch < worker.epoch:
            self._refuse(peer, key, _older(key, epoch, worker.epoch), turn)
            return None
        link.heard_ms = turn.now.monotonic_ms
        link.peer = peer
        return worker

    def _hello(self, peer: bytes, hello: Hello, turn: ConsolidatorTurn) -> None:
        key = WorkerKey(WorkerId(hello.worker_id), hello.dp_rank)
        worker = self.pool.workers.get(key)
        link = self._links.get(key)
        if link is not None and link.attached:
            self._refuse(peer, key, f"worker {key} is attached by configuration; a push of that name is refused", turn)
            return
        if worker is not None and hello.epoch < worker.epoch:
            self._refuse(peer, key, _older(key, hello.epoch, worker.epoch), turn)
            return
        objection = incompatibility(self.pool.workers, self.limits.workers_max, key, hello.card)
        if objection is not None:
            self._refuse(peer, key, objection, turn)
            return
        if worker is not None:
            verdict = worker.cursors[WORKER_SOURCE].judge_announcement(hello.epoch, hello.next_seq)
            reason = None
            if verdict is SequenceVerdict.NEW_EPOCH:
                reason = f"replaced by epoch {hello.epoch}"
            elif verdict is SequenceVerdict.BACKWARDS:
                reason = f"its sequence went back to {hello.next_seq}"
            elif hello.card != worker.card:
                reason = "its card changed"
            if reason is not None:
                self._leave(
                    worker, reason, turn, over=verdict in (SequenceVerdict.NEW_EPOCH, SequenceVerdict.BACKWARDS)
                )
                worker = None
        if worker is None:
            worker = self._join(key, hello.epoch, hello.card, turn, hello.next_seq)
        link = self._links[key]
        link.peer = peer
        link.heard_ms = turn.now.monotonic_ms
        link.asked_seq = -1
        turn.replies.append(
            (
                peer,
                Welcome(
                    worker_id=key.worker_id,
                    dp_rank=key.dp_rank,
                    epoch=worker.epoch,
                    next_seq=worker.cursors[WORKER_SOURCE].next_seq,
                    consolidator_id=self.consolidator_id,
                    lease_ms=self.limits.lease_ms,
                ),
            )
        )

    def _heartbeat(self, peer: bytes, heartbeat: Heartbeat, turn: ConsolidatorTurn) -> None:
        key = WorkerKey(WorkerId(heartbeat.worker_id), heartbeat.dp_rank)
        worker = self._live(peer, key, heartbeat.epoch, turn)
        if worker is None:
            return
        cursor = worker.cursors[WORKER_SOURCE]
        verdict = cursor.judge_announcement(heartbeat.epoch, heartbeat.next_seq)
        if verdict is SequenceVerdict.GAP:
            self._ask_again(worker, heartbeat.next_seq, peer, turn)
        elif verdict is SequenceVerdict.NEXT:
            self._caught_up(worker, turn)
        elif verdict is SequenceVerdict.BACKWARDS:
            # Only a Hello carries the card that a new epoch needs.
            self.tally.unknown += 1
            turn.replies.append((peer, Unknown(*key)))
            return
        turn.acknowledge[key] = peer

    def _goodbye(self, peer: bytes, goodbye: Goodbye, turn: ConsolidatorTurn) -> None:
        key = WorkerKey(WorkerId(goodbye.worker_id), goodbye.dp_rank)
        worker = self._live(peer, key, goodbye.epoch, turn)
        if worker is None:
            return
        turn.acknowledge.pop(key, None)
        turn.replies.append((peer, self._acknowledged(worker)))
        self._leave(worker, goodbye.reason or "it shut down", turn)

    # Sources of the consolidator's own making: engines that publish themselves

    def attach(self, key: WorkerKey, epoch: int, card: WorkerCard, turn: ConsolidatorTurn) -> str | None:
        """Make a rank a member by configuration, under a new epoch; return why not when it may not."""
        worker = self.pool.workers.get(key)
        objection = incompatibility(self.pool.workers, self.limits.workers_max, key, card)
        if objection is None and worker is not None and epoch <= worker.epoch:
            objection = _older(key, epoch, worker.epoch)
        if objection is not None:
            self.tally.refused += 1
            return objection
        if worker is not None:
            self._leave(worker, f"replaced by epoch {epoch}", turn)
        self._join(key, epoch, card, turn, 0)
        self._links[key].attached = True
        return None

    def detach(self, key: WorkerKey, reason: str, turn: ConsolidatorTurn) -> None:
        worker = self.pool.workers.get(key)
        if worker is not None:
            self._leave(worker, reason, turn)

    def take(self, batch: EventBatch, turn: ConsolidatorTurn) -> bool:
        """Take in a batch of an attached source; return whether it was accepted.

        A further source of a worker that joined by itself has a cursor of its own; a new epoch on it drops what the
        source held and nothing else. No replay is requested for it: its batches come without holes.
        """
        worker = self.pool.workers.get(batch.worker)
        if worker is None:
            return False
        before: list[AnyEvent] = []
        if batch.source != WORKER_SOURCE and not worker.admits(batch, self.limits.sources_per_worker_max, before):
            self.tally.refused += 1
            return False
        parts = parts_of(batch.events)
        for at, part in enumerate(parts, 1):
            if not self._take(worker, batch, b"", turn, part, at < len(parts), before):
                return False
            before = []
        return True

    def drop_unlisted(self, listed: Mapping[WorkerKey, Collection[str]], turn: ConsolidatorTurn) -> None:
        """Take back what the journal knows from further sources that are not followed any more."""
        for key, worker in self.pool.workers.items():
            for source, cursor in list(worker.cursors.items()):
                if source == WORKER_SOURCE or source in listed.get(key, ()) or not worker.presence.count_of(source):
                    continue
                turn.remarks.append(f"worker {key}: source {source!r} is not listed any more, its blocks are dropped")
                wall_ms = turn.now.wall_ms
                batch = EventBatch(*key, cursor.epoch, cursor.next_seq, wall_ms, [CacheCleared()], source)
                self._take(worker, batch, b"", turn, batch.events, False)
                self.note_stream(key, source, StreamState.ABSENT, "it is not in the sources file any more", turn)

    # Leases

    def next_expiry_ms(self) -> float | None:
        """Return the monotonic time at which the first lease runs out or the first gap has been open for too long."""
        heard = [link.heard_ms for link in self._links.values() if not link.attached]
        due = [min(heard) + self.limits.lease_ms] if heard else []
        due += [link.behind_since_ms + self.limits.stale_after_ms for _, link in self._behind()]
        return min(due, default=None)

    def _behind(self) -> list[tuple[WorkerKey, _Link]]:
        """Return the ranks that were asked to fill a hole and have not; few, if any."""
        return [
            (key, link)
            for key, link in self._links.items()
            if link.behind_seq >= 0 and self.pool.workers[key].stream(WORKER_SOURCE).state is StreamState.REPLAYING
        ]

    def expire(self, turn: ConsolidatorTurn) -> None:
        """Remove the ranks whose lease has expired, and stop trusting those whose gap is not filled."""
        open_since = turn.now.monotonic_ms - self.limits.stale_after_ms
        for key, link in self._behind():
            if link.behind_since_ms <= open_since:
                wanted = self.pool.workers[key].cursors[WORKER_SOURCE].next_seq
                reason = f"batches from {wanted} are missing and were not sent for {self.limits.stale_after_ms} ms"
                self.tally.stale += 1
                turn.remarks.append(f"worker {key} is stale: {reason}")
                self.note_stream(key, WORKER_SOURCE, StreamState.STALE, reason, turn)
        deadline = turn.now.monotonic_ms - self.limits.lease_ms
        for key in sorted(key for key, link in self._links.items() if not link.attached and link.heard_ms <= deadline):
            self.tally.lease_expiries += 1
            reason = f"lease expired: silent for {self.limits.lease_ms} ms"
            self._leave(self.pool.workers[key], reason, turn, over=False)

    def note_stream(self, key: WorkerKey, source: str, state: StreamState, reason: str, turn: ConsolidatorTurn) -> None:
        """Write how far the stream of a source can be trusted, if that is news."""
        worker = self.pool.workers.get(key)
        # One that is live may be of no use, which is news too.
        if worker is None or worker.stream(source).is_known(state, reason[:TEXT_CHARS_MAX]):
            return
        events: list[AnyEvent] = [StreamStateChanged(source, state, reason[:TEXT_CHARS_MAX])]
        fold(worker.streams, CONSOLIDATOR_SOURCE, events)
        self._record(key, worker.epoch, 0, turn.now.wall_ms, events, CONSOLIDATOR_SOURCE, turn)

    def mute(self, peer: bytes, for_ms: float, turn: ConsolidatorTurn) -> None:
        """Note that a peer's batches are dropped for a while, as they cost more than its share of the loop."""
        for key in sorted(key for key, link in self._links.items() if link.peer == peer):
            self.tally.muted += 1
            self._links[key].muted_until_ms = turn.now.monotonic_ms + for_ms
            reason = f"muted for {for_ms / 1000:.0f} s: its events take more than a worker's share of the event loop"
            turn.remarks.append(f"worker {key} is {reason}")
            self.note_stream(key, WORKER_SOURCE, StreamState.STALE, reason, turn)

    def _caught_up(self, worker: MemberRank, turn: ConsolidatorTurn) -> None:
        """Note that nothing is missing of what a rank is known to have sent."""
        link = self._links[worker.key]
        link.behind_seq = -1
        if turn.now.monotonic_ms < link.muted_until_ms:
            return
        if worker.stream(WORKER_SOURCE).state in (StreamState.REPLAYING, StreamState.STALE):
            self.note_stream(worker.key, WORKER_SOURCE, StreamState.LIVE, "", turn)

    def lags_ms(self) -> dict[WorkerKey, int]:
        return {key: link.lag_ms for key, link in self._links.items()}

    # The one way in for batches

    def _take(
        self,
        worker: MemberRank,
        batch: EventBatch,
        peer: bytes,
        turn: ConsolidatorTurn,
        given: list[AnyEvent],
        more: bool,
        before: Sequence[AnyEvent] = (),
    ) -> bool:
        source, seq = batch.source, batch.seq
        cursor = worker.cursors[source]
        tally = self.tally
        if seq == cursor.next_seq and batch.epoch == cursor.epoch:
            pass  # the next one, as nearly always, found without asking for a verdict
        elif (verdict := cursor.judge_batch(batch.epoch, seq)) is SequenceVerdict.NEXT:
            pass
        elif verdict is SequenceVerdict.DUPLICATE:
            tally.duplicates += 1
            turn.acknowledge[worker.key] = peer
            return False
        elif verdict is SequenceVerdict.GAP and batch.events and type(batch.events[0]) is SnapshotBegan:
            tally.restatements += 1
            turn.remarks.append(
                f"worker {worker.key} restates its cache at batch {batch.seq}: "
                f"batches {cursor.next_seq} to {batch.seq - 1} are lost"
            )
            self._lose_requests(worker, batch, turn)
            cursor.next_seq = batch.seq
        elif verdict is SequenceVerdict.GAP:
            self._ask_again(worker, batch.seq, peer, turn)
            link = self._links[worker.key]
            link.behind_seq = max(link.behind_seq, batch.seq)
            return False
        else:
            tally.refused += 1
            return False
        known = worker.streams.get(source)
        is_live = known is not None and known.state is LIVE
        events, tells, ignored = worker.take(source, given, is_live)
        tally.ignored_events += ignored
        if before:
            events[:0] = before
        if not more:
            cursor.next_seq += 1
            tally.batches += 1
            tally.events += len(batch.events)
        if tells or not is_live:  # else one that is live stays so
            fold(worker.streams, source, events)
        key, pool, wall_ms = worker.key, self.pool, turn.now.wall_ms
        # Positional: hot.
        record = JournalRecord(pool.offset, *key, batch.epoch, seq, batch.time_ms, wall_ms, events, source, more)
        turn.records.append(record)
        pool.offset += 1
        pool.sessions.apply(record)
        if source == WORKER_SOURCE:
            link = self._links[key]
            behind_seq = link.behind_seq
            if (behind_seq >= 0 or tells or not is_live) and cursor.next_seq > behind_seq and not link.attached:
                self._caught_up(worker, turn)
            lag_ms = wall_ms - batch.time_ms
            link.lag_ms = lag_ms if lag_ms > 0 else 0
            turn.acknowledge[key] = peer
        return True

    def _lose_requests(self, worker: MemberRank, batch: EventBatch, turn: ConsolidatorTurn) -> None:
        if not worker.requests or batch.source != WORKER_SOURCE:
            return
        lost: list[AnyEvent] = [RequestFinished(request_id, "lost") for request_id in worker.requests]
        self.tally.lost_requests += len(lost)
        worker.requests.clear()
        for at in range(0, len(lost), EVENTS_PER_BATCH_MAX):
            part = lost[at : at + EVENTS_PER_BATCH_MAX]
            self._record(worker.key, worker.epoch, 0, batch.time_ms, part, CONSOLIDATOR_SOURCE, turn)

    def _ask_again(self, worker: MemberRank, seen_seq: int, peer: bytes, turn: ConsolidatorTurn) -> None:
        """Ask for what is missing; once per gap, and again when no answer came for ``resend_retry_ms``."""
        wanted = worker.cursors[WORKER_SOURCE].next_seq
        link = self._links[worker.key]
        now_ms = turn.now.monotonic_ms
        if now_ms < link.muted_until_ms:
            return
        if link.asked_seq == wanted:
            if now_ms - link.asked_ms < self.limits.resend_retry_ms:
                return
        else:
            self.tally.gaps += 1
            turn.remarks.append(f"worker {worker.key}: batches {wanted} to {seen_seq - 1} are missing, asking again")
        if link.behind_seq < 0:
            link.behind_since_ms = now_ms
            if worker.stream(WORKER_SOURCE).state is not StreamState.STALE:
                reason = f"batches {wanted} to {seen_seq - 1} are missing"
                self.note_stream(worker.key, WORKER_SOURCE, StreamState.REPLAYING, reason, turn)
        link.behind_seq = max(link.behind_seq, seen_seq - 1)
        link.asked_seq = wanted
        link.asked_ms = now_ms
        self.tally.resends += 1
        if peer:
            turn.replies.append((peer, Resend(*worker.key, epoch=worker.epoch, from_seq=wanted)))

    # Membership

    def _join(self, key: WorkerKey, epoch: int, card: WorkerCard, turn: ConsolidatorTurn, batches: int) -> MemberRank:
        worker = self.pool.workers[key] = self.pool.new_worker(key, epoch, card)
        self._links[key] = _Link(turn.now.monotonic_ms)
        self.tally.joined += 1
        events = _joining(worker, batches)
        self._record(key, epoch, 0, turn.now.wall_ms, events, CONSOLIDATOR_SOURCE, turn)
        turn.members.append(MemberJoined(key, epoch, card.block_size))
        turn.remarks.append(f"worker {key} joined: epoch {epoch}, model {card.model}, {card.role.name.lower()}")
        return worker

    def _leave(self, worker: MemberRank, reason: str, turn: ConsolidatorTurn, over: bool = True) -> None:
        self.pool.forget(worker.key)
        turn.members.append(MemberLeft(worker.key, over, self._links.pop(worker.key).heard_ms))
        turn.acknowledge.pop(worker.key, None)
        self.tally.left += 1
        left: list[AnyEvent] = [WorkerLeft(reason[:TEXT_CHARS_MAX])]
        self._record(worker.key, worker.epoch, 0, turn.now.wall_ms, left, CONSOLIDATOR_SOURCE, turn)
        turn.remarks.append(f"worker {worker.key} left: epoch {worker.epoch}, {reason[:TEXT_CHARS_MAX]}")

    def _record(
        self,
        key: WorkerKey,
        epoch: int,
        seq: int,
        time_ms: int,
        events: list[AnyEvent],
        source: str,
        turn: ConsolidatorTurn,
    ) -> None:
        pool = self.pool
        record = JournalRecord(pool.offset, *key, epoch, seq, time_ms, turn.now.wall_ms, events, source)
        turn.records.append(record)
        pool.offset += 1
        pool.sessions.apply(record)

    # Answers

    def _acknowledged(self, worker: MemberRank) -> Acknowledged:
        return Acknowledged(*worker.key, worker.epoch, worker.cursors[WORKER_SOURCE].next_seq, self.consolidator_id)

    def _refuse(self, peer: bytes, key: WorkerKey, reason: str, turn: ConsolidatorTurn) -> None:
        self.tally.refused += 1
        turn.remarks.append(f"refused worker {key}: {reason}")
        if peer:
            turn.replies.append((peer, JoinRefused(*key, reason=reason[:TEXT_CHARS_MAX])))


def _older(key: WorkerKey, epoch: int, current: int) -> str:
    return (
        f"epoch {epoch} of worker {key} is older than the one in the pool, {current}; a later one has taken its place"
    )


def _joining(worker: MemberRank, batches: int) -> list[AnyEvent]:
    """Return the events of a rank that joins. Where it has ``batches`` to send already, its readers wait for them."""
    events: list[AnyEvent] = [WorkerJoined(worker.card)]
    if batches:
        awaited = f"its first {batches} batches are awaited"
        events.append(StreamStateChanged(WORKER_SOURCE, StreamState.SYNCING, awaited))
        fold(worker.streams, CONSOLIDATOR_SOURCE, events)
    return events
