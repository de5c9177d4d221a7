"""Follow a journal's stream by its sequence: hear what is stored, read what was missed, take snapshots. Pure.

Rules
    1. Messages are taken in the order of their sequence, each once, and each must follow the one before it by name
       (``message.Chain``). So records are delivered in order and without holes, behind a snapshot, whoever wrote them.
    2. Nothing of the server's remembers where a reader is: there is no consumer that could be deleted or stand still.
       What is heard is only a hint; what is missing is read, and after ``poll_ms`` of silence the stream is asked.
    3. A message beyond the next one waits in a bounded buffer while the ones before it are read; when that is full
       everything in it goes, and is read.
    4. A stream that does not reach back to the next message, ends before it, or has another one in its place, means a
       new snapshot.

    state      input                             what happens
    ---------  --------------------------------  ------------------------------------------------
    any        ``resync``                        SYNCING, snapshot asked
    SYNCING    message                           kept
               ``loaded``                        REPLAYING, messages behind the snapshot asked
    REPLAYING  message                           kept
               messages                          delivered; more asked, or what was kept and LIVE
               gone, lost, damaged               SYNCING, snapshot asked
    LIVE       message, next                     delivered
               message beyond                    REPLAYING, messages asked
               ``poll_ms`` of silence            messages asked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poolgrid.consolidator.core.feed_reader import Deliver, FeedState
from poolgrid.nats.message import BrokenChain, Chain, Damaged, StoredMessage, open_body
from poolgrid.nats.ports import Anchor, StreamFacts
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.events import JournalRecord

KEPT_MESSAGES_MAX = 20_000
"""Messages kept during a snapshot or while others are read: seconds of a busy pool."""

KEPT_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of messages kept meanwhile."""

AGAIN_MS = 50.0
"""Wait before a replica is asked again that does not have yet what must be there."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Find the newest snapshot that belongs to the stream, or its beginning, and answer with ``loaded``."""

    request: int


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Read messages from a sequence on, and answer with ``answer``."""

    request: int
    sequence: int
    """The last message taken, so that another one in its place is noticed; the next one where there is none."""
    wanted: int
    """The next message: when it does not come, the stream's facts are needed."""


StreamEffect = Deliver | LoadSnapshot | ReadFrom


class StreamReader:
    """The state of one reader; every method returns the effects in order."""

    def __init__(self, answer_timeout_ms: float = 5000.0, poll_ms: float = 1000.0, retry_ms: float = 250.0) -> None:
        self.state = FeedState.SYNCING
        self.next_offset = 0
        self.next_sequence = 1
        self.holes = 0
        """How often messages were missed."""
        self.snapshots = 0
        self.breaks = 0
        """How often the stream was not what it had been."""
        self.fault = ""
        """What was wrong with it last."""
        self._answer_timeout_ms = answer_timeout_ms
        self._poll_ms = poll_ms
        self._retry_ms = retry_ms
        self._chain = Chain()
        self._kept: dict[int, StoredMessage] = {}
        self._kept_bytes = 0
        self._goal = 0
        """The highest sequence that is known to be stored."""
        self._request = 0
        self._asking = False
        self._due_ms = 0.0

    @property
    def behind(self) -> int:
        """Return how many messages, at least, are missing of those that are known to be stored: 0 while live."""
        return 0 if self.state is FeedState.LIVE else max(1, self._goal + 1 - self.next_sequence)

    def start(self, now_ms: float) -> list[StreamEffect]:
        """Begin: what is stored from now on is heard."""
        return self._ask_snapshot(now_ms)

    def resync(self, now_ms: float) -> list[StreamEffect]:
        """Start over with a snapshot: what was delivered could not be used."""
        return self._ask_snapshot(now_ms)

    def receive(self, message: StoredMessage, now_ms: float) -> list[StreamEffect]:
        """Take in a message that was just stored."""
        self._goal = max(self._goal, message.sequence)
        if self.state is not FeedState.SYNCING and message.sequence < self.next_sequence:
            return []
        if self.state is FeedState.LIVE and message.sequence == self.next_sequence:
            if not self._asking:
                self._due_ms = now_ms + self._poll_ms
            return self._take([message], now_ms)
        self._keep(message)
        if self.state is FeedState.LIVE:
            self.holes += 1
            self.state = FeedState.REPLAYING
            return self._ask_messages(now_ms)
        return []

    def connected(self, now_ms: float) -> list[StreamEffect]:
        """The connection stands again: what was stored meanwhile was not heard."""
        return self._ask_messages(now_ms) if self.state is FeedState.LIVE else []

    def loaded(self, request: int, anchor: Anchor | None, first_sequence: int, now_ms: float) -> list[StreamEffect]:
        """The snapshot at an anchor is what the reader holds now; ``None`` = nothing yet, the stream's beginning."""
        if request != self._request or self.state is not FeedState.SYNCING:
            return []
        self.snapshots += 1
        if anchor is None:
            self.next_offset, self.next_sequence, self._chain = 0, first_sequence, Chain()
        else:
            self.next_offset, self.next_sequence = anchor.offset, anchor.sequence
            self._chain = Chain(anchor=anchor.message_id)
        self.state = FeedState.REPLAYING
        return self._ask_messages(now_ms)

    def answer(
        self, request: int, messages: Sequence[StoredMessage], facts: StreamFacts | None, now_ms: float
    ) -> list[StreamEffect]:
        """Take in what was read; ``facts`` of the stream are needed when nothing was that is wanted."""
        if request != self._request or self.state is FeedState.SYNCING:
            return []
        self._asking = False
        self._due_ms = now_ms + self._poll_ms
        last_id = self._chain.last_id
        for message in messages[:1]:
            if message.is_foreign:
                continue  # what was before it is named by the next message of ours
            if message.sequence == self.next_sequence - 1 and last_id not in (None, message.message_id):
                return self._break(f"message {message.sequence} is {message.message_id!r}, was {last_id!r}", now_ms)
        messages = [message for message in messages if message.sequence >= self.next_sequence]
        first = messages[0].sequence if messages else self.next_sequence
        if first > self.next_sequence or (facts is not None and facts.first_sequence > self.next_sequence):
            return self._ask_snapshot(now_ms)
        if facts is not None:
            # Where a snapshot belongs is a message that must be there, though none behind it need be.
            needed = self.next_sequence if self._chain.is_anchored else self.next_sequence - 1
            if facts.last_sequence < needed:
                return self._break(f"the stream ends at message {facts.last_sequence}, before what was read", now_ms)
            self._goal = facts.last_sequence
        before = self.next_sequence
        breaks = self.breaks
        effects = self._take(messages, now_ms)
        if self.breaks == breaks:
            effects += self._take_kept(now_ms)
        if self.breaks != breaks:
            return effects
        if self.state is FeedState.LIVE and self.next_sequence > before:
            self.holes += 1
        if messages or facts is None:
            effects += self._ask_messages(now_ms)  # until there is nothing more
        elif self.next_sequence > self._goal:
            self.state = FeedState.LIVE
        else:
            self.state = FeedState.REPLAYING
            self._due_ms = now_ms + AGAIN_MS
        return effects

    def failed(self, request: int, now_ms: float) -> None:
        """A question could not be answered: it is asked again after a while, for ever."""
        if request == self._request:
            self._asking = False
            self._due_ms = now_ms + self._retry_ms

    def tick(self, now_ms: float) -> list[StreamEffect]:
        """Time has passed; call at ``due_ms``."""
        if now_ms < self._due_ms:
            return []
        return self._ask_snapshot(now_ms) if self.state is FeedState.SYNCING else self._ask_messages(now_ms)

    def due_ms(self) -> float:
        """Return the time at which ``tick`` has something to do."""
        return self._due_ms

    # Inside

    def _ask_snapshot(self, now_ms: float) -> list[StreamEffect]:
        self.state = FeedState.SYNCING
        self._ask(now_ms)
        return [LoadSnapshot(self._request)]

    def _ask_messages(self, now_ms: float) -> list[StreamEffect]:
        self._ask(now_ms)
        before = int(self._chain.last_id is not None)
        return [ReadFrom(self._request, self.next_sequence - before, self.next_sequence)]

    def _ask(self, now_ms: float) -> None:
        self._request += 1
        self._asking = True
        self._due_ms = now_ms + self._answer_timeout_ms

    def _break(self, why: str, now_ms: float) -> list[StreamEffect]:
        """Start over, after a pause: damage is there also the next time."""
        self.breaks += 1
        self.fault = why
        self.state = FeedState.SYNCING
        self._kept.clear()
        self._kept_bytes = 0
        self._goal = 0
        self._request += 1
        self._asking = False
        self._due_ms = now_ms + self._retry_ms
        return []

    def _take(self, messages: Sequence[StoredMessage], now_ms: float) -> list[StreamEffect]:
        """Deliver what messages hold that follow each other; what was taken before is passed over."""
        records: list[JournalRecord] = []
        fault = ""
        for message in messages:
            if message.sequence < self.next_sequence:
                continue
            try:
                if message.sequence > self.next_sequence:
                    raise Damaged(f"messages {self.next_sequence} to {message.sequence - 1} are missing")
                data = self._chain.take(message)
                self.next_sequence += 1
                if data is not None:
                    self._open(message.sequence, data, records)
            except (Damaged, BrokenChain, DecodeError) as error:
                fault = str(error)
                break
        delivered: list[StreamEffect] = [Deliver(records)] if records else []
        return delivered + (self._break(fault, now_ms) if fault else [])

    def _open(self, sequence: int, data: bytes, records: list[JournalRecord]) -> None:
        body = open_body(sequence, data)
        if body.first_offset > self.next_offset:
            raise Damaged(f"message {sequence}: records {self.next_offset} to {body.first_offset - 1} are missing")
        for payload in body.payloads[self.next_offset - body.first_offset :]:
            record = codec.journal_record.decode(payload)
            if record.offset != self.next_offset:
                raise Damaged(f"message {sequence}: record {record.offset} where {self.next_offset} should be")
            records.append(record)
            self.next_offset += 1

    def _take_kept(self, now_ms: float) -> list[StreamEffect]:
        following: list[StoredMessage] = []
        at = self.next_sequence
        while (message := self._kept.pop(at, None)) is not None:
            following.append(message)
            at += 1
        for sequence in [sequence for sequence in self._kept if sequence < at]:
            del self._kept[sequence]
        self._kept_bytes = sum(len(each.body) for each in self._kept.values())
        return self._take(following, now_ms)

    def _keep(self, message: StoredMessage) -> None:
        if len(self._kept) >= KEPT_MESSAGES_MAX or self._kept_bytes + len(message.body) > KEPT_BYTES_MAX:
            self._kept.clear()
            self._kept_bytes = 0
        if message.sequence not in self._kept:
            self._kept[message.sequence] = message
            self._kept_bytes += len(message.body)
