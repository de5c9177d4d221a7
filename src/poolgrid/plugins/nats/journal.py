"""The journal in a stream: ``poolgrid.kernel.journal.ports.Journal`` over a ``RecordStream``.

Rules
    1. A writer begins with a body of no records, stored right behind the last message there is. From then on nothing of
       an earlier writer is stored any more, however late it arrives: it expects an earlier end of the stream. Only then
       is the state read.
    2. Every message is stored behind the one before it, which must be the writer's own, or not at all. A stream that
       does not end where the writer left it has another writer, or lost its end: ``JournalFenced``, and nothing of
       this writer is stored any more. The sequence alone does not ensure it: where an end was lost another writer may
       have written as many messages as were lost.
    3. What was sent and not answered may be stored. Before anything else is sent the stream is asked: messages of ours
       count, and what they do not hold is sent again under new names. So nothing is stored twice.
    4. Retention removes messages, oldest first, and only what is behind a snapshot that a power failure cannot take
       any more (``durable_after_ms``), with a newer one kept in case it is damaged. Otherwise servers that lose
       the end of the stream could lose every snapshot's message with it, and keep records that nothing comes before.
       A power failure may have taken it before it was durable, without a word to the writer: so it is read back once,
       when it has become durable by its age, before anything relies on it.
    5. A stream that is full takes no records, but always the body with which a writer begins. It is made smaller from
       what is stored: a snapshot of that, read back before it stands alone, and then retention as above. So no size of
       records, and no writer that was killed, leaves a stream that cannot be written any more.
    6. Foreign messages (``stream.message``) are skipped: the writer continues after them while its own last message
       is where it was.
    7. Where it is durable is the matter of the servers: ``sync`` has nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.framing import JournalCorrupt, JournalFenced
from poolgrid.kernel.journal.ports import Journal
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.plugins.nats.history import StreamHistory, corrupt
from poolgrid.plugins.nats.message import (
    BODY_BYTES,
    MESSAGE_BYTES,
    PIECES_MAX,
    Anchor,
    BodyAssembler,
    Damaged,
    Outgoing,
    OutOfTurn,
    RecordStream,
    StreamFacts,
    StreamUnavailable,
    bodies,
    empty_body,
    first_offset_of,
    open_body,
    pieces,
)
from poolgrid.server.process.clock import Clock

log = logging.getLogger(__name__)

CROWDED = 2
"""How many times of what retention keeps may be there until a snapshot is written for it."""

SIZE_FACTOR = 4
"""How many times of what retention keeps a stream may hold before it takes no records any more: enough for what comes
until a snapshot is durable."""

RECORDS_MAX = 3
"""Records of the largest kind that any stream has room for: the one behind which nothing is removed, the one that
comes, and what is between."""

SNAPSHOT_SHARE = 4
"""A crowded stream wants a snapshot once there is a quarter of what retention keeps behind the newest: enough to be
removed for the work of making one."""

FOREIGN_ATTEMPTS = 10
"""How often records are sent again at once because a foreign message was stored before them."""

BEGIN_ATTEMPTS = 100
"""How often a writer tries to be the next one; each attempt that fails means that another writer stored something."""


def bytes_max_of(retention_bytes: int) -> int:
    """Return how large a stream may be and still take records."""
    return max(SIZE_FACTOR * retention_bytes, RECORDS_MAX * FRAME_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class StreamJournalSettings:
    """Sizes and ages; see ``ConsolidatorSettings`` for their reasons."""

    retention_bytes: int = 1024 * 1024 * 1024
    retention_ms: int = 24 * 3600 * 1000
    bytes_max: int = SIZE_FACTOR * 1024 * 1024 * 1024
    """How large the stream may be and still take records."""
    body_bytes: int = BODY_BYTES
    durable_after_ms: float = 150_000.0
    """How long after it was kept a snapshot counts as durable: servers write their files to the disk every two minutes
    by default, and each at its own time."""


class KeptSnapshots:
    """The snapshots of a stream, as its writer keeps them."""

    def __init__(self, stream: RecordStream, history: StreamHistory, clock: Clock, durable_after_ms: float) -> None:
        self._stream = stream
        self._history = history
        self._clock = clock
        self._durable_after_ms = durable_after_ms
        self._kept: list[Anchor] = []
        self._kept_since_ms: dict[Anchor, float] = {}
        """By snapshot: since when this life knows it."""
        self._whole: set[Anchor] = set()
        """Snapshots that were read back, and whole, after they had become durable by their age."""

    def recover(self, facts: StreamFacts) -> None:
        """Know the snapshots that belong to the stream, and remove all others."""
        usable = self._history.usable_snapshots(facts)
        for anchor in self._stream.snapshots():
            if anchor not in usable:
                self._stream.remove_snapshot(anchor)
                self._history.report.append(
                    f"{framing.name_of(anchor.offset)} is of a history that the stream lost; it was removed"
                )
        self._kept = usable
        self._whole = set()
        self._kept_since_ms = dict.fromkeys(usable, self._clock.monotonic_ms())

    @property
    def newest(self) -> Anchor | None:
        return self._kept[-1] if self._kept else None

    def is_old(self, anchor: Anchor) -> bool:
        return self._kept_since_ms[anchor] <= self._clock.monotonic_ms() - self._durable_after_ms

    def keep(self, anchor: Anchor, content: bytes) -> None:
        """Store a snapshot, in place of one of the same offset, and remove those that are not needed any more."""
        self._stream.put_snapshot(anchor, content)
        known = [each for each in self._kept if each.offset != anchor.offset]
        self._kept_since_ms[anchor] = self._clock.monotonic_ms()
        self._kept = sorted([*known, anchor], key=lambda each: each.offset)
        self._whole.discard(anchor)
        self._whole.intersection_update(self._kept)
        self.thin_out()

    def read_back(self, anchor: Anchor, blocks_per_worker_max: int) -> None:
        """Raise ``JournalCorrupt`` when a snapshot is damaged, which then is none any more."""
        try:
            self._history.snapshot(anchor, blocks_per_worker_max)
        except JournalCorrupt:
            self._forget(anchor)
            raise

    def thin_out(self) -> None:
        """Remove the snapshots that are not needed: kept are the durable one, the next to become it, and the newest."""
        base = self.durable()
        after = self._kept if base is None else self._kept[self._kept.index(base) + 1 :]
        needed = {base, *after[:1], *after[-1:]}
        for each in list(self._kept):
            if each not in needed:
                self._forget(each)

    def durable(self) -> Anchor | None:
        """Return the newest snapshot that is durable and has a newer one kept with it, or the only one."""
        while True:
            candidates = self._kept[:-1] or self._kept
            durable = [each for each in candidates if self.is_old(each)]
            if not durable or self._is_there(durable[-1]):
                return durable[-1] if durable else None

    def _is_there(self, anchor: Anchor) -> bool:
        """Return whether a snapshot that is durable by its age is there and whole; one that is not is none any more."""
        if anchor in self._whole:
            return True
        name = framing.name_of(anchor.offset)
        lost = "" if anchor in self._stream.snapshots() else "it is not there any more"
        if not lost:
            try:
                framing.check(name, self._stream.get_snapshot(anchor))
            except JournalCorrupt as error:
                lost = str(error)
        if lost:
            log.warning(
                "snapshot %s of stream %s was kept and lost before it was durable, by a power failure perhaps: %s; "
                "nothing is removed because of it",
                name,
                self._stream.name,
                lost,
            )
            self._forget(anchor)
            return False
        self._whole.add(anchor)
        return True

    def _forget(self, anchor: Anchor) -> None:
        """Remove a snapshot, from the stream as well if it is there."""
        self._stream.remove_snapshot(anchor)
        self._kept = [each for each in self._kept if each != anchor]
        self._kept_since_ms.pop(anchor, None)
        self._whole.discard(anchor)


class StreamJournal(Journal):
    """A journal in a stream, written by one process at a time."""

    def __init__(
        self, stream: RecordStream, writer: str, clock: Clock, settings: StreamJournalSettings | None = None
    ) -> None:
        """Begin as the next writer; ``writer`` names this life and no other. Raises ``StreamUnavailable``."""
        self._stream = stream
        self._settings = settings or StreamJournalSettings()
        self._writer = writer
        self._clock = clock
        self._number = 0
        """Of the next message: a name is never used again, also for the same records."""
        self._history = StreamHistory(stream)
        self._snapshots = KeptSnapshots(stream, self._history, clock, self._settings.durable_after_ms)
        self._next = 0
        """Offset behind the last record that is stored."""
        self._done = 0
        """Offset behind the last record that ``append`` has confirmed."""
        self._oldest = 0
        self._end = (0, "")
        """Sequence and name of the last message that is known to be stored: together, for threads that read."""
        self._last = 0
        """Sequence of the last message behind it that is known, all of them foreign; else its own."""
        self._unanswered = False
        """Whether messages were sent of which it is not known whether they are stored."""
        self._fenced = ""
        self._facts = StreamFacts(1, 0, 0, 0)
        self._bytes = 0
        """Size of the stream: what was found last where records are appended, and what was appended since."""
        if stream.body_bytes_max * PIECES_MAX < FRAME_BYTES_MAX + BODY_BYTES:
            raise StreamUnavailable(
                f"opening stream {stream.name}: its server takes messages of {stream.body_bytes_max} bytes, needed are "
                f"{(FRAME_BYTES_MAX + BODY_BYTES) // PIECES_MAX}; set max_payload there"
            )
        stream.open()
        self._begin(clock.wall_ms())

    # Opening

    def _begin(self, now_ms: int) -> None:
        for _ in range(BEGIN_ATTEMPTS):
            facts = self._facts = self._stream.facts()
            self._done = self._next = self._end_of(facts)
            beginning = Outgoing(self._name(), 0, False, empty_body(self._next, now_ms))
            try:
                self._stream.append([beginning], facts.last_sequence, begins=True)
            except OutOfTurn:
                continue
            self._end = (facts.last_sequence + 1, beginning.message_id)
            self._last = self._end[0]
            self._look()
            self._find_oldest()
            return
        raise StreamUnavailable(
            f"opening stream {self._stream.name}: others stored something there {BEGIN_ATTEMPTS} times in a row; end "
            "the other consolidators of this pool"
        )

    def _end_of(self, facts: StreamFacts) -> int:
        """Return the offset of the next record."""
        last = self._history.last_own(facts) if facts.messages else None
        if last is None:
            for anchor in self._stream.snapshots():
                self._stream.remove_snapshot(anchor)  # of a history of which nothing is left
            return 0
        first = self._history.first_piece(last.sequence, facts.first_sequence)
        if first is None:
            raise corrupt(self._stream.name, facts.first_sequence, 0, "the first piece of its only body is missing")
        try:
            if last.more:
                # A writer ended in the middle of it: it was never acknowledged.
                return first_offset_of(first)
            assembler = BodyAssembler()
            data = None
            for message in self._history.messages(first.sequence, last.sequence):
                data = assembler.take(message)
            assert data is not None, "the last piece completes its body"
            return open_body(last.sequence, data).next_offset
        except Damaged as error:
            raise corrupt(self._stream.name, last.sequence, 0, str(error)) from None

    def _find_oldest(self) -> None:
        if not self._facts.messages:
            self._oldest = self._next
            return
        for message in self._history.messages(self._facts.first_sequence, self._facts.last_sequence):
            if message.piece == 0 and not message.is_foreign:
                self._oldest = first_offset_of(message)
                return

    def recover(self, blocks_per_worker_max: int) -> PoolState:
        """Return the state after the last record: the newest sound snapshot, and the records after it."""
        facts = StreamFacts(self._facts.first_sequence, self._end[0], self._facts.messages, self._facts.bytes)
        self._snapshots.recover(facts)
        return self._history.recover(blocks_per_worker_max, facts)

    @property
    def report(self) -> list[str]:
        """Return what opening and ``recover`` found and did, for the log."""
        return self._history.report

    # Appending

    @property
    def next_offset(self) -> int:
        return self._done

    @property
    def oldest_offset(self) -> int:
        return self._oldest

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Append encoded records; raises ``JournalFenced`` and ``StreamUnavailable``, after which the same come again.

        The same may come with more behind them.
        """
        self._check()
        if self._unanswered:
            self._settle()
        # What an attempt before this one stored is at the front.
        rest = payloads[self._next - self._done :]
        if rest:
            self._append(rest, now_ms)
        self._done = self._next

    def _append(self, payloads: Sequence[bytes], now_ms: int, attempts: int = FOREIGN_ATTEMPTS) -> None:
        messages = self._messages(payloads, now_ms)
        count = self._fitting(messages)
        what = f"appending {len(payloads)} records to stream {self._stream.name}"
        self._unanswered = True
        try:
            if count:
                self._store(messages[:count])
        except OutOfTurn as error:
            next_offset, last = self._next, self._last
            self._settle()
            if attempts and self._next == next_offset and self._last > last:
                self._append(payloads, now_ms, attempts - 1)
                return
            raise StreamUnavailable(f"{what}: {error}") from None
        if count < len(messages):
            self._settle()
            raise StreamUnavailable(
                f"{what}: it holds {self._bytes} bytes and may hold {self._settings.bytes_max}; it takes more when a "
                "snapshot is durable and what is behind that was removed"
            )
        self._unanswered = False
        self._end = (self._last + count, messages[-1].message_id)
        self._last = self._end[0]
        self._bytes += sum(map(_size_of, messages))
        self._next += len(payloads)

    def _store(self, messages: Sequence[Outgoing]) -> None:
        own = self._end[0]
        if self._last == own:
            self._stream.append(messages, own)
        else:
            self._stream.append(messages, self._last, own_sequence=own)

    def _fitting(self, messages: Sequence[Outgoing]) -> int:
        """Return how many of the messages the stream has room for: those of whole bodies."""
        if self._bytes + sum(map(_size_of, messages)) <= self._settings.bytes_max:
            return len(messages)
        self._look()
        room = self._settings.bytes_max - self._bytes
        count = 0
        for number, message in enumerate(messages, 1):
            room -= _size_of(message)
            if room < 0:
                break
            if not message.more:
                count = number
        return count

    def _look(self) -> StreamFacts:
        facts = self._facts = self._stream.facts()
        self._bytes = facts.bytes
        return facts

    def _messages(self, payloads: Sequence[bytes], now_ms: int) -> list[Outgoing]:
        return [
            Outgoing(self._name(), number, more, piece)
            for body in bodies(payloads, self._next, now_ms, self._settings.body_bytes)
            for number, more, piece in pieces(body, self._stream.body_bytes_max)
        ]

    def _name(self) -> str:
        self._number += 1
        return f"{self._writer}.{self._number}"

    def _settle(self) -> None:
        """Find out what of the messages without an answer is stored.

        Raises ``JournalFenced`` when another writer stored something, or the stream ends before the last answer.
        """
        facts = self._look()
        self._check_end(facts)
        assembler = BodyAssembler()
        for message in self._history.messages(self._last + 1, facts.last_sequence):
            self._last = message.sequence
            if message.is_foreign:
                continue
            if message.message_id.rpartition(".")[0] != self._writer:
                self._fence(f"message {message.sequence} is of another writer, {message.message_id!r}")
            data = assembler.take(message)
            self._end = (message.sequence, message.message_id)
            if data is not None:
                self._next = open_body(message.sequence, data).next_offset
        self._unanswered = False

    def _check_end(self, facts: StreamFacts) -> None:
        """Raise ``JournalFenced`` when what this writer stored last is not where it was stored."""
        sequence, last_id = self._end
        if facts.last_sequence < sequence:
            self._fence(f"it ends at message {facts.last_sequence}, {sequence} was acknowledged: its end is lost")
        if facts.first_sequence > sequence:
            self._fence(
                f"it begins at message {facts.first_sequence}, {sequence} was the last: another writer has taken over"
            )
        found = self._history.message(sequence)
        if found.message_id != last_id:
            self._fence(f"message {sequence} is of another writer, {found.message_id!r}: its end was lost")

    def _fence(self, why: str) -> None:
        self._fenced = (
            f"stream {self._stream.name} is not what consolidator {self._writer} left behind record {self._done - 1}: "
            f"{why}; this writer stores nothing any more, and the next one reads the stream from the start"
        )
        self._check()

    def _check(self) -> None:
        if self._fenced:
            raise JournalFenced(self._fenced)

    # Reading

    def read(self, from_offset: int, limit: int, bytes_max: int) -> list[bytes]:
        if from_offset < self._oldest:
            raise ValueError(f"reading the journal: offset {from_offset}, the oldest kept is {self._oldest}")
        next_offset = self._done
        if from_offset >= next_offset:
            return []
        # Only what is answered for: what comes behind it may still turn out to be another's.
        facts = self._stream.facts()
        known = StreamFacts(facts.first_sequence, min(facts.last_sequence, self._end[0]), facts.messages, facts.bytes)
        first = self._history.locate(from_offset, known)
        if first is None:
            raise ValueError(f"reading the journal: offset {from_offset} is not kept any more")
        found: list[bytes] = []
        for _, body in self._history.bodies(first.sequence, known.last_sequence):
            for offset, payload in enumerate(body.payloads, body.first_offset):
                if offset < from_offset:
                    continue
                bytes_max -= len(payload)
                if len(found) == limit or offset >= next_offset or (bytes_max < 0 and found):
                    return found
                found.append(payload)
        return found

    # Snapshots and retention

    def keep_snapshot(self, offset: int, parts: Iterable[bytes]) -> None:
        """Keep a snapshot and remove those before the newest two; may be called from another thread."""
        self._check()
        facts = self._stream.facts()
        last = self._history.locate(max(0, offset - 1), facts)
        # Behind it: what was found may be of another history only when the end is, too.
        self._check_end(facts)
        if last is None:
            raise StreamUnavailable(
                f"keeping a snapshot at offset {offset}: stream {self._stream.name} does not hold the record before it"
            )
        anchor = Anchor(offset, last.sequence, last.message_id)
        self._snapshots.keep(anchor, b"".join(parts))

    @property
    def crowded(self) -> bool:
        return self._bytes > CROWDED * self._settings.retention_bytes

    @property
    def snapshot_due(self) -> bool:
        """Return whether a good part of a crowded stream is behind the newest snapshot."""
        if not self.crowded:
            return False
        last = self._end[0]
        newest = self._snapshots.newest
        behind = last - (self._facts.first_sequence - 1 if newest is None else newest.sequence)
        messages = max(1, last - self._facts.first_sequence + 1)
        return SNAPSHOT_SHARE * behind * self._bytes >= messages * self._settings.retention_bytes

    def make_room(self, blocks_per_worker_max: int, now_ms: int) -> int:
        """Remove messages while no records are taken; return their number. Raises ``JournalCorrupt``.

        The state that the process has is ahead of what is stored, so a snapshot is made of what is stored. It takes
        until that is durable before anything is removed.
        """
        removed = self.retain(now_ms)
        facts = self._stream.facts()
        if removed or facts.bytes <= CROWDED * self._settings.retention_bytes:
            return removed
        end = self._end[0]
        known = StreamFacts(facts.first_sequence, min(facts.last_sequence, end), facts.messages, facts.bytes)
        newest = self._snapshots.newest
        if newest is None or newest.offset < self._next:
            self.write_snapshot(StreamHistory(self._stream).recover(blocks_per_worker_max, known).freeze())
        elif self._snapshots.is_old(newest):
            # Everything is behind it, and no newer one can be stored with it.
            self._snapshots.read_back(newest, blocks_per_worker_max)
            return self._retain(newest, now_ms)
        return self.retain(now_ms)

    def retain(self, now_ms: int) -> int:
        """Remove messages that are too many or too old and not needed; return their number."""
        self._check()
        base = self._snapshots.durable()
        return 0 if base is None else self._retain(base, now_ms)

    def _retain(self, base: Anchor, now_ms: int) -> int:
        facts = self._facts = self._stream.facts()
        to = min(base.sequence, self._surplus(facts, now_ms))
        first = self._history.first_piece(to, facts.first_sequence) if facts.first_sequence < to else None
        if first is None or first.sequence <= facts.first_sequence:
            return 0
        self._stream.remove_before(first.sequence)
        self._facts = self._stream.facts()
        self._oldest = first_offset_of(first)
        return first.sequence - facts.first_sequence

    def _surplus(self, facts: StreamFacts, now_ms: int) -> int:
        """Return the first message that is neither too old nor beyond the size."""
        sequence = facts.first_sequence
        beyond = facts.bytes - self._settings.retention_bytes
        if beyond > 0 and facts.messages:
            sequence += min(facts.messages - 1, -(-beyond * facts.messages // facts.bytes))
        old = self._history.newest_before(now_ms - self._settings.retention_ms, facts)
        return max(sequence, old.sequence) if old is not None else sequence

    def drop_lost(self) -> list[str]:
        """Look whether the stream is still what this writer left; raises ``JournalFenced`` when it is not."""
        self._check()
        if self._unanswered:
            return []  # the next append finds out
        first = self._facts.first_sequence
        self._settle()
        facts = self._facts
        if facts.first_sequence != first:
            try:
                self._find_oldest()
            except JournalCorrupt as error:
                raise StreamUnavailable(str(error)) from None
        return []

    def sizes(self) -> tuple[int, int]:
        """Return the number of messages and of bytes, when they were looked at last."""
        return self._facts.messages, self._facts.bytes

    def close(self) -> None:
        self._stream.close()


def _size_of(message: Outgoing) -> int:
    return len(message.body) + MESSAGE_BYTES
