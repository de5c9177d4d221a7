"""The worker's side of ``poolgrid.kernel.wire.ingest`` without sockets: frames in, effects out, time as an argument.

Theory of operation. The stream is *greeting* until the consolidator welcomes it, then *open*; a refusal makes it
*refused* for a while. Only an open stream sends batches; they are kept in the outbox in every state.

    state      input                        next state   effects
    ---------  ---------------------------  -----------  ---------------------------------------------------------
    greeting   begin, retry time            greeting     Send(Hello)
    any        greet_again                  greeting     Send(Hello), to another consolidator
    any        Welcome                      open         Send(batches from next_seq) or RestateNeeded
    open       Welcome, same epoch          open         (the outbox forgets: it answers an earlier Hello)
    open       publish                      open         Send(batch); on overflow: greeting, Send(Hello)
    open       heartbeat time               open         Send(Heartbeat)
    open       Acknowledged, same epoch     open         (the outbox forgets)
    open       Acknowledged, another epoch  greeting     Send(Hello)
    open       Resend                       open         Send(batches from from_seq) or RestateNeeded
    open       Unknown                      greeting     Send(Hello)
    open       silence_ms without a word    greeting     Send(Hello)
    any        JoinRefused                      refused      Warn; Hello again after a back-off that doubles
    refused    retry time                   greeting     Send(Hello)
    any        end                          ended        Send(Goodbye)
    ended      publish                      ended        (it is left out: a worker that returns restates)
    ended      begin_again                  greeting     Send(Hello), in another epoch

Without an answer, greetings come at intervals that double up to that of heartbeats: a consolidator that stood still
finds those of all that time in its socket, and answers each. Only the first Welcome has anything sent.

``RestateNeeded`` asks the owner to call ``restate`` with the whole truth at once, before it publishes anything else.
Messages that are about another worker or another epoch are ignored.

Output of several engine steps that is sent together, for requests whose answer is not read before its end.

Every message costs its router more than the tokens in it, so a router sets for each request how many tokens may come
together (``Routing.tokens_together``).

Rules
    1. What has more than tokens (the first delta, an end, log probabilities) is never kept back, and takes what was
       kept before it along: order and positions are those of the engine.
    2. At most ``tokens_together`` tokens are kept of a request, 4 bytes each; then they go.
    3. What is kept is lost with the worker, and computed again by the next one: that, and no more, is its price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    EventBatch,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
)
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.ingest import (
    BATCH_FRAME,
    CONTROL_FRAME,
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
from poolgrid.kernel.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.kernel.worker_protocol.cache_facts import CACHE_EVENTS

OUTBOX_BYTES_DEFAULT = 32 * 1024 * 1024
"""About ten minutes of a busy worker (50 steps a second, 1 KiB of events each); beyond it the cache is restated."""

OUTBOX_BYTES_MIN = 64 * 1024

FRAME_OVERHEAD_BYTES = 64
"""Counted per kept batch besides its bytes, so that a flood of small batches is bounded too."""


class Outbox:
    """The batches of one worker life, from the oldest unacknowledged on: kept, bounded, in order.

    Every batch takes the next sequence number, also one that is thrown away; what is kept is contiguous and ends at
    ``next_seq``. When one more would break the bound, all is dropped, and so is what comes until ``reopen``: a stream
    with a hole is worth nothing, and a full resync has everything. A restatement does not count: one that overflowed
    would be followed by another, without end.
    """

    def __init__(self, worker_id: str, dp_rank: int, epoch: int, bytes_max: int = OUTBOX_BYTES_DEFAULT) -> None:
        if bytes_max < OUTBOX_BYTES_MIN:
            raise ValueError(
                f"making an outbox: bytes_max is {bytes_max}, allowed are integers from {OUTBOX_BYTES_MIN}"
            )
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._frames: deque[tuple[bytes, int]] = deque()  # each with what it counts
        self._bytes = 0
        self.next_seq = 0
        """Number of the next batch."""
        self.overflowed = False
        """Batches are being thrown away until ``reopen``."""
        self.overflows = 0
        """How often that began."""

    @property
    def oldest_seq(self) -> int:
        """Return the first batch that can still be sent; ``next_seq`` when there is none."""
        return self.next_seq - len(self._frames)

    @property
    def kept_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, events: list[AnyEvent], time_ms: int, counts: bool = True) -> bytes | None:
        """Number and keep a batch; return its frame, or ``None`` when the outbox overflows or did before.

        ``counts=False`` is for the batches of a restatement.
        """
        seq = self.next_seq
        if self.overflowed:
            self.next_seq = seq + 1
            return None
        # Encoded before the number is used up: a batch that breaks a limit must not leave a hole.
        frame = codec.event_batch.encode(EventBatch(self._worker_id, self._dp_rank, self._epoch, seq, time_ms, events))
        self.next_seq = seq + 1
        size = len(frame) + FRAME_OVERHEAD_BYTES if counts else 0
        if size and self._bytes + size > self._bytes_max:
            self._frames.clear()
            self._bytes = 0
            self.overflowed = True
            self.overflows += 1
            return None
        self._frames.append((frame, size))
        self._bytes += size
        return frame

    def acknowledge(self, next_seq: int) -> None:
        while self._frames and self.oldest_seq < next_seq:
            self._bytes -= self._frames.popleft()[1]

    def frames_from(self, seq: int) -> Iterator[bytes]:
        skip = max(0, seq - self.oldest_seq)
        for index, (frame, _) in enumerate(self._frames):
            if index >= skip:
                yield frame

    def reopen(self) -> None:
        """Drop what is kept and begin to keep again: a restatement follows."""
        self._frames.clear()
        self._bytes = 0
        self.overflowed = False


EVENTS_PER_RESTATED_BATCH = 1024
"""A restatement goes out in batches of this many events; far below what the contract and the consolidator allow."""

BLOCKS_PER_RESTATED_BATCH = 1024
"""And of this many blocks, longer chains in pieces: a batch is one record, which its readers apply in one go, and this
many blocks take a router a millisecond or two."""

HASH_BYTES = 8
"""Of one sequence hash in an event."""


@dataclass(frozen=True, slots=True)
class PushTiming:
    """When the stream sends without being asked."""

    heartbeat_ms: float = 1000.0
    """Between two heartbeats; the consolidator's lease (``Welcome.lease_ms``) shortens it to a third of itself."""
    hello_retry_ms: float = 100.0
    """First wait between two greetings without an answer, what a start waits for a consolidator that starts with it;
    doubles each time, up to ``heartbeat_ms``: a greeting is a heartbeat too."""
    silence_ms: float = 5000.0
    """Without a word from the consolidator the stream greets again."""
    refused_retry_ms: float = 1000.0
    """First wait after a refusal; doubles each time."""
    refused_retry_max_ms: float = 30_000.0


class State(Enum):
    """Where the stream is; see the module."""

    GREETING = "greeting"
    OPEN = "open"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Send:
    """Send these frames to the consolidator."""

    frames: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class RestateNeeded:
    """Call ``restate`` now: batches that the consolidator misses are gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell people."""

    text: str


Effect = Send | RestateNeeded | Warn


class PushStream:
    """The event stream of one worker rank in one epoch."""

    def __init__(
        self,
        worker_id: str,
        dp_rank: int,
        epoch: int,
        card: WorkerCard,
        timing: PushTiming | None = None,
        outbox_bytes_max: int = OUTBOX_BYTES_DEFAULT,
    ) -> None:
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._card = card
        self._timing = timing or PushTiming()
        self._outbox_bytes_max = outbox_bytes_max
        self.outbox = Outbox(worker_id, dp_rank, epoch, outbox_bytes_max)
        self.state = State.GREETING
        self.restatements = 0
        self._consolidator_id = ""
        self._heartbeat_ms = self._timing.heartbeat_ms
        self._refused_retry_ms = self._timing.refused_retry_ms
        self._hello_retry_ms = self._timing.hello_retry_ms
        self._speak_ms = 0.0
        """Time of the next Hello or Heartbeat."""
        self._heard_ms = 0.0
        self._goodbye_acknowledged = False

    @property
    def dp_rank(self) -> int:
        return self._dp_rank

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    @property
    def is_settled(self) -> bool:
        return not len(self.outbox) and not self.outbox.overflowed

    @property
    def goodbye_acknowledged(self) -> bool:
        return self._goodbye_acknowledged

    def begin(self, now_ms: float) -> list[Effect]:
        return self._greet(now_ms)

    def begin_again(self, epoch: int, now_ms: float) -> list[Effect]:
        """Open the stream in another epoch, after ``end``; what it is about must be restated at once."""
        overflows = self.outbox.overflows
        self.outbox = Outbox(self._worker_id, self._dp_rank, epoch, self._outbox_bytes_max)
        self.outbox.overflows = overflows
        self._epoch = epoch
        self._consolidator_id = ""
        self._goodbye_acknowledged = False
        self._hello_retry_ms = self._timing.hello_retry_ms
        return self._greet(now_ms)

    def greet_again(self, now_ms: float) -> list[Effect]:
        """Greet a consolidator that has taken another one's place; a stream that has ended stays so."""
        if self.state is State.ENDED:
            return []
        self._hello_retry_ms = self._timing.hello_retry_ms
        self._refused_retry_ms = self._timing.refused_retry_ms
        return self._greet(now_ms)

    def introduce(self, card: WorkerCard, now_ms: float) -> list[Effect]:
        """Greet with another card: the consolidator takes the rank out and in again, and has all of it restated."""
        self._card = card
        return self.greet_again(now_ms)

    def publish(self, events: list[AnyEvent], time_ms: int, now_ms: float) -> list[Effect]:
        """Send a batch, or keep it for later; ``time_ms`` is wall-clock time."""
        return self._publish(events, time_ms, now_ms, counts=True)

    def restate(self, facts: Sequence[AnyEvent], time_ms: int, now_ms: float) -> list[Effect]:
        """Send the whole truth instead of what is lost; ``facts`` follow a ``SnapshotBegan``."""
        self.outbox.reopen()
        self.restatements += 1
        effects: list[Effect] = []
        for part in _batches([SnapshotBegan(), *facts]):
            effects += self._publish(part, time_ms, now_ms, counts=False)
        return effects

    def receive(self, message: FromConsolidator, now_ms: float) -> list[Effect]:
        if (message.worker_id, message.dp_rank) != (self._worker_id, self._dp_rank):
            return []
        if not isinstance(message, Unknown | JoinRefused) and message.epoch != self._epoch:
            return []
        self._heard_ms = now_ms
        if self.state is State.ENDED:
            if isinstance(message, Acknowledged | Unknown):
                self._goodbye_acknowledged = True
            return []
        if isinstance(message, Welcome):
            # What was sent behind the first Welcome is on its way: this one answers a Hello that was sent before it.
            repeated = self.is_open and message.consolidator_id == self._consolidator_id
            self.state = State.OPEN
            self._consolidator_id = message.consolidator_id
            self._heartbeat_ms = min(self._timing.heartbeat_ms, max(1.0, message.lease_ms / 3.0))
            self._refused_retry_ms = self._timing.refused_retry_ms
            self._hello_retry_ms = self._timing.hello_retry_ms
            self.outbox.acknowledge(message.next_seq)
            if repeated:
                return []
            self._speak_ms = now_ms + self._heartbeat_ms
            return self._send_from(message.next_seq)
        if isinstance(message, JoinRefused):
            self.state = State.REFUSED
            wait_ms = self._refused_retry_ms
            self._speak_ms = now_ms + wait_ms
            self._refused_retry_ms = min(wait_ms * 2.0, self._timing.refused_retry_max_ms)
            return [Warn(f"the consolidator refuses this worker: {message.reason}; asking again in {wait_ms:.0f} ms")]
        if self.state is not State.OPEN:
            return []
        if isinstance(message, Unknown):
            return self._greet(now_ms)
        if isinstance(message, Resend):
            self.outbox.acknowledge(message.from_seq)
            return self._send_from(message.from_seq)
        if message.consolidator_id != self._consolidator_id:
            return self._greet(now_ms)
        self.outbox.acknowledge(message.next_seq)
        return []

    def next_moment_ms(self) -> float | None:
        """Return when ``tick`` has something to do, or ``None`` when the stream has ended."""
        if self.state is State.ENDED:
            return None
        if self.state is State.OPEN:
            return min(self._speak_ms, self._heard_ms + self._timing.silence_ms)
        return self._speak_ms

    def tick(self, now_ms: float) -> list[Effect]:
        """Do what is due; nothing when called early."""
        moment = self.next_moment_ms()
        if moment is None or now_ms < moment:
            return []
        if self.state is not State.OPEN or now_ms >= self._heard_ms + self._timing.silence_ms:
            return self._greet(now_ms)
        self._speak_ms = now_ms + self._heartbeat_ms
        return [self._control(Heartbeat(self._worker_id, self._dp_rank, self._epoch, next_seq=self.outbox.next_seq))]

    def end(self, reason: str) -> list[Effect]:
        """Say goodbye; nothing is published after this, unless the stream begins again."""
        self.state = State.ENDED
        return [self._control(Goodbye(self._worker_id, self._dp_rank, self._epoch, reason))]

    def _publish(self, events: list[AnyEvent], time_ms: int, now_ms: float, counts: bool) -> list[Effect]:
        if self.state is State.ENDED:
            return []
        overflowed = self.outbox.overflowed
        frame = self.outbox.add(events, time_ms, counts)
        if frame is None:
            if overflowed:
                return []
            warning = Warn("the outbox of events is full: all of it is dropped, the whole cache will be restated")
            return [warning, *(self._greet(now_ms) if self.state is State.OPEN else ())]
        if self.state is not State.OPEN:
            return []
        self._speak_ms = now_ms + self._heartbeat_ms
        return [Send((BATCH_FRAME, frame))]

    def _greet(self, now_ms: float) -> list[Effect]:
        self.state = State.GREETING
        self._speak_ms = now_ms + self._hello_retry_ms
        self._hello_retry_ms = min(2.0 * self._hello_retry_ms, max(self._timing.hello_retry_ms, self._heartbeat_ms))
        hello = Hello(
            self._worker_id,
            self._dp_rank,
            self._epoch,
            self._card,
            next_seq=self.outbox.next_seq,
            oldest_seq=self.outbox.oldest_seq,
        )
        return [self._control(hello)]

    def _send_from(self, seq: int) -> list[Effect]:
        oldest = self.outbox.oldest_seq
        if seq < oldest:
            return [RestateNeeded(f"batches {seq} to {oldest - 1} are wanted and no longer kept")]
        if self.outbox.overflowed:
            # Everything arrived before it was dropped here.
            self.outbox.reopen()
        return [Send((BATCH_FRAME, frame)) for frame in self.outbox.frames_from(seq)]

    def _control(self, message: ToConsolidator) -> Send:
        return Send((CONTROL_FRAME, codec.to_consolidator.encode(message)))


def _batches(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """Cut what is restated into batches, in its order."""
    batch: list[AnyEvent] = []
    room = BLOCKS_PER_RESTATED_BATCH
    for event in events:
        for piece in _pieces(event):
            blocks = len(piece.sequence_hashes) // HASH_BYTES if type(piece) is BlocksStored else 0
            if len(batch) == EVENTS_PER_RESTATED_BATCH or blocks > room:
                yield batch
                batch, room = [], BLOCKS_PER_RESTATED_BATCH
            batch.append(piece)
            room -= blocks
    yield batch


def _pieces(event: AnyEvent) -> Iterator[AnyEvent]:
    """Yield an event, a long chain as several that name the block before as their parent."""
    longest = BLOCKS_PER_RESTATED_BATCH * HASH_BYTES
    if type(event) is not BlocksStored or len(event.sequence_hashes) <= longest:
        yield event
        return
    parent, hashes = event.parent, event.sequence_hashes
    for at in range(0, len(hashes), longest):
        piece = hashes[at : at + longest]
        yield BlocksStored(parent, piece, event.tier, event.group)
        parent = unpack_hashes(piece[-HASH_BYTES:])[0]


class PublishedRequests:
    """Requests that count as running for readers of the stream; bounded by what the engine accepts."""

    def __init__(self) -> None:
        self._started: dict[str, RequestStarted] = {}
        self._prefilled: set[str] = set()

    def __len__(self) -> int:
        return len(self._started)

    def apply(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            if type(event) in CACHE_EVENTS:
                continue
            if isinstance(event, RequestStarted):
                self._started[event.request_id] = event
            elif isinstance(event, PrefillCompleted):
                self._prefilled.add(event.request_id)
            elif isinstance(event, RequestProgressed):
                started = self._started.get(event.request_id)
                if started is not None:
                    self._started[event.request_id] = msgspec.structs.replace(
                        started, active_blocks=event.active_blocks
                    )
            elif isinstance(event, RequestFinished):
                self._started.pop(event.request_id, None)
                self._prefilled.discard(event.request_id)

    def restate(self) -> list[AnyEvent]:
        """Return facts that bring a reader who knows nothing to the same state."""
        facts: list[AnyEvent] = []
        for request_id, started in self._started.items():
            facts.append(started)
            if request_id in self._prefilled:
                facts.append(PrefillCompleted(request_id))
        return facts


ENDS_WITH_TOKENS = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that a router takes as the last of the output; after another one it asks another worker for what is missing."""


class _Kept:
    """Tokens of one request that were not sent yet."""

    __slots__ = ("bytes_max", "position", "tokens")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.position = 0
        self.tokens = b""


class TokenCoalescer:
    """What is kept back of one worker's requests."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """Return how many requests are known whose tokens may come together."""
        return len(self._kept)

    def begin(self, request: Generate) -> None:
        """Note an accepted request; log probabilities belong to their step's tokens, so they are never joined."""
        together = request.routing.tokens_together
        if together > 1 and request.sampling.logprobs is None:
            self._kept[request.request_id] = _Kept(4 * together)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def add(self, delta: TokenDelta, ready: list[TokenDelta]) -> None:
        """Keep a delta, or put it among those that are ready, behind what was kept before it."""
        kept = self._kept.get(delta.request_id)
        if kept is None:
            ready.append(delta)
            return
        if delta.finish_reason is None and delta.cached_tokens is None and delta.prompt_logprobs is None:
            if not kept.tokens:
                kept.position = delta.position
            kept.tokens += delta.token_ids
            if len(kept.tokens) >= kept.bytes_max:
                ready.append(TokenDelta(delta.request_id, kept.position, kept.tokens))
                kept.tokens = b""
            return
        if kept.tokens:
            if delta.finish_reason in ENDS_WITH_TOKENS:
                delta = msgspec.structs.replace(delta, position=kept.position, token_ids=kept.tokens + delta.token_ids)
            else:
                ready.append(TokenDelta(delta.request_id, kept.position, kept.tokens))
            kept.tokens = b""
        ready.append(delta)
