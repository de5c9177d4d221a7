"""NATS without servers: a pool's stream, its snapshots and its lease, which fail as a cluster's do.

What is like the real thing

1. A message is stored behind the sequence that its sender expects, or refused. One whose name is known is not stored
   again, and answered with where it is.
2. What is not answered may be stored: before, later, or never. Messages without an answer may arrive after their sender
   has asked what is stored, and after another one has begun to write.
3. What is acknowledged is durable only after ``sync_s``. When the power of the servers fails they lose the end of the
   stream from some message on, entries of the lease, snapshots or parts of them, and all connections; then there is no
   leader for a while.
4. Entries of the leader are published to those who listen: late, twice, out of order, or not at all. A process that
   was cut off is called when its connection stands again, and receives nothing of what was published meanwhile.
5. Reads may be answered by a replica that is a little behind. The lease goes some time after it is over.

``records`` is what the stream holds, told by what was stored and nothing else. The watcher is told of each message that
does not continue it: that would be a record stored twice, a hole, or a writer that should have been fenced.

Left out: bodies in several pieces, because no record here is as large.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.plugins.nats.connection import NatsConnection, NatsMessage, NatsUnavailable
from poolgrid.plugins.nats.jetstream import JetStreamJournal
from poolgrid.plugins.nats.message import (
    Anchor,
    Outgoing,
    OutOfTurn,
    StoredMessage,
    StreamFacts,
    StreamUnavailable,
    open_body,
    stored_message,
)
from tests.fault_simulation.network import Network
from tests.fault_simulation.virtual_loop import Life, VirtualLoop
from tests.fault_simulation.watcher import Watcher

ANSWER_TIMEOUT_S = 0.4
BEGINNINGS_BYTES = 4_000
"""Room for the first messages of writers, which a stream that is full for records takes."""
LEADERLESS_S = (0.2, 1.0)
"""How long there is no leader after a power failure: no election is faster."""
BROKEN_S = 0.3
LOOK_S = 0.1
SWEEP_MAX_S = 1.0
"""How long an entry that is over may still be read: servers look for those once a second."""
READ_MAX = 7
WRONG_LAST_SEQUENCE = 10071


@dataclass(frozen=True, slots=True)
class StreamFaults:
    """Chances per question, and how long until what is stored is durable."""

    refused: float = 0.0
    """There is no leader, or it has no room."""
    lost: float = 0.0
    """The message does not arrive."""
    late: float = 0.0
    """It arrives when nobody waits for the answer any more."""
    unanswered: float = 0.0
    """It is stored, and the answer is lost."""
    doubled: float = 0.0
    """It arrives once more, later."""
    untold: float = 0.0
    told_twice: float = 0.0
    told_late: float = 0.0
    lagging: float = 0.0
    """A replica answers that is behind."""
    slow: float = 0.0
    sync_s: float = 0.5


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way, and what its sender expects before it."""

    message: Outgoing
    expected: int
    begins: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    data: bytes
    headers: Mapping[str, str]
    written_s: float
    gone_s: float


class SimulatedJetStream:
    """The servers of one pool."""

    def __init__(self, pool: str, loop: VirtualLoop, network: Network, watcher: Watcher, seed: int) -> None:
        self.pool = pool
        self.machine = f"{pool}.nats"
        self.loop = loop
        self.network = network
        self.watcher = watcher
        self.rng = Random(f"{seed}/{self.machine}")
        self.faults = StreamFaults()
        self.retention_bytes = 0
        self.bytes_max = 0
        self.messages: dict[int, StoredMessage] = {}
        self.first = 1
        self.last = 0
        self.records: list[JournalRecord] = []
        self.ever: dict[int, list[JournalRecord]] = {}
        """By offset: records that were stored there, also those that were lost."""
        self.objects: dict[Anchor, bytes] = {}
        self.leaderless_s = 0.0
        """There is no leader until then."""
        self.slow_s = 0.0
        self.counts: dict[str, int] = {}
        self._stored_s: dict[int, float] = {}
        self._kept_s: dict[Anchor, float] = {}
        self._records_at: dict[int, int] = {}
        """By sequence: how many records there are with that message."""
        self._names: dict[str, int] = {}
        self._entries: list[_Entry] = []
        self._number = 0
        self._late: list[_Sent] = []
        self._listeners: list[tuple[Link, Callable[[Any], Any], contextvars.Context]] = []
        self._broken: dict[str, float] = {}

    def link(self, life: Life) -> Link:
        """Return the connection of a process."""
        return Link(self, life)

    # What happens to them

    def power_failure(self) -> None:
        """Lose what was not durable, from some message on."""
        durable = max((at for at, when in self._stored_s.items() if self._is_durable(when)), default=self.first - 1)
        last = self.rng.randint(max(durable, self.first - 1), self.last) if self.last >= durable else self.last
        for sequence in range(last + 1, self.last + 1):
            message = self.messages.pop(sequence)
            del self._stored_s[sequence], self._records_at[sequence]
            self._names.pop(message.message_id, None)
        self.last = last
        del self.records[self._records_at.get(last, 0) :]
        for anchor in sorted(self.objects, key=lambda anchor: anchor.offset):
            what = self.rng.choice(("kept", "lost", "cut"))
            if what == "lost" and not self._is_durable(self._kept_s[anchor]):
                del self.objects[anchor]
            elif what == "cut" and not self._is_durable(self._kept_s[anchor]):
                self.objects[anchor] = self.objects[anchor][: self.rng.randrange(len(self.objects[anchor]))]
        while self._entries and not self._is_durable(self._entries[-1].written_s) and self.rng.random() < 0.7:
            self._entries.pop()
        self._late.clear()
        self.leaderless_s = self.loop.time() + self.rng.uniform(*LEADERLESS_S)
        self.watcher.note("lost", f"{self.machine} ends at message {last}, record {len(self.records)}")

    def leaderless(self, until_s: float) -> None:
        """Have no leader until a time."""
        self.leaderless_s = max(self.leaderless_s, until_s)

    def break_link(self, machine: str) -> None:
        """Break a machine's connection."""
        self._broken[machine] = self.loop.time() + BROKEN_S

    def mend(self) -> None:
        """Be well from now on."""
        self.leaderless_s = 0.0
        self.slow_s = 0.0
        self.faults = StreamFaults()
        self._broken.clear()

    def _is_durable(self, since_s: float) -> bool:
        return since_s <= self.loop.time() - self.faults.sync_s

    def _chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def count(self, what: str) -> None:
        """Count something that happened."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # Asking, as all do

    def is_reached_by(self, machine: str) -> bool:
        """Say whether what a machine sends arrives."""
        return self._is_whole(machine) and self.network.blocked_until(machine, self.machine) <= self.loop.time()

    def is_heard_by(self, machine: str) -> bool:
        """Say whether what is sent to a machine arrives."""
        return self._is_whole(machine) and self.network.blocked_until(self.machine, machine) <= self.loop.time()

    def _is_whole(self, machine: str) -> bool:
        return self._broken.get(machine, 0.0) <= self.loop.time()

    def delay_s(self) -> float:
        """Return how long an answer takes."""
        return self.slow_s + self.rng.uniform(0.0002, 0.002) + (0.1 if self._chance(self.faults.slow) else 0.0)

    def check(self) -> None:
        """Refuse while there is no leader."""
        if self.leaderless_s > self.loop.time():
            raise StreamUnavailable(f"stream {self.machine} has no leader")
        if self._chance(self.faults.refused):
            self.count("refused")
            raise StreamUnavailable(f"stream {self.machine} refuses")

    def between(self) -> None:
        """Let something happen between two questions of one thread: what was on its way arrives."""
        while self._late and self.rng.random() < 0.3:
            self._arrive(self._late[0])

    # Records

    def facts(self) -> StreamFacts:
        """Return the stream as its leader knows it."""
        first = self.first if self.messages else self.last + 1
        return StreamFacts(first, self.last, len(self.messages), self._bytes())

    def _bytes(self) -> int:
        return sum(len(message.body) for message in self.messages.values())

    def send(self, sent: _Sent) -> int:
        """Do with a message as the network and the servers do; return where it is stored."""
        if self._chance(self.faults.lost):
            self.count("lost")
            raise TimeoutError
        if self._chance(self.faults.late):
            self._send_late(sent)
            raise TimeoutError
        self.check()
        sequence = self._store(sent)
        if self._chance(self.faults.doubled):
            self._send_late(sent)
        if self._chance(self.faults.unanswered):
            self.count("unanswered")
            raise TimeoutError
        return sequence

    def _send_late(self, sent: _Sent) -> None:
        self._late.append(sent)
        delay_s = self.rng.choice((0.01, 0.5, 2.0)) * self.rng.random()
        self.loop.call_later(delay_s, self._arrive, sent, context=contextvars.Context())

    def _arrive(self, sent: _Sent) -> None:
        if not any(each is sent for each in self._late):
            return
        self._late = [each for each in self._late if each is not sent]
        try:
            if self.leaderless_s <= self.loop.time():
                self._store(sent)
        except (OutOfTurn, StreamUnavailable):
            self.count("late and refused")
        else:
            self.count("late and taken")

    def _store(self, sent: _Sent) -> int:
        message, expected = sent.message, sent.expected
        known = self._names.get(message.message_id)
        if known is not None:
            self.count("known")
            return known
        if expected != self.last:
            raise OutOfTurn(f"wrong last sequence: {self.last}, expected {expected}")
        writer = _writer(message.message_id)
        own = max((at for at, each in self.messages.items() if _writer(each.message_id) == writer), default=0)
        if own != (0 if sent.begins else expected):
            raise OutOfTurn(f"wrong last sequence of {writer}: {own}, expected {expected}")
        if self._bytes() + len(message.body) > self.bytes_max + BEGINNINGS_BYTES:
            self.count("full")
            raise StreamUnavailable("maximum bytes exceeded")
        self.last = sequence = self.last + 1
        stored = self.messages[sequence] = stored_message(sequence, message.headers(), message.body)
        self._names[message.message_id] = sequence
        self._stored_s[sequence] = self.loop.time()
        self._take(stored)
        self._records_at[sequence] = len(self.records)
        self.watcher.note("stored", f"{self.machine} {sequence} {message.message_id}, records {len(self.records)}")
        return sequence

    def _take(self, message: StoredMessage) -> None:
        body = open_body(message.sequence, message.body)
        if body.first_offset != len(self.records):
            self.watcher.fail(
                f"{self.machine} was given message {message.message_id} with record {body.first_offset} where "
                f"{len(self.records)} follows"
            )
            return
        for payload in body.payloads:
            record = codec.journal_record.decode(payload)
            self.ever.setdefault(len(self.records), []).append(record)
            self.records.append(record)

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on, as some replica has them."""
        last = self.last - (self.rng.randint(1, 3) if self._chance(self.faults.lagging) else 0)
        first = max(from_sequence, self.first)
        return [self.messages[at] for at in range(first, min(last + 1, first + min(limit, READ_MAX)))]

    def remove_before(self, sequence: int) -> None:
        """Remove messages."""
        for at in range(self.first, min(sequence, self.last + 1)):
            del self.messages[at], self._stored_s[at], self._records_at[at]
        self.first = max(self.first, sequence)

    def put_snapshot(self, anchor: Anchor, content: bytes) -> None:
        """Keep a snapshot in place of one of the same name."""
        self.objects = {each: kept for each, kept in self.objects.items() if each.offset != anchor.offset}
        self.objects[anchor] = content
        self._kept_s[anchor] = self.loop.time()

    # The lease

    def entry(self) -> _Entry | None:
        """Return the entry of the leader."""
        while self._entries and self._entries[-1].gone_s <= self.loop.time():
            self._entries.clear()
        return self._entries[-1] if self._entries else None

    def read_entry(self) -> _Entry | None:
        """Return the entry as some replica has it."""
        newest = self.entry()
        if newest is not None and len(self._entries) > 1 and self._chance(self.faults.lagging):
            return self._entries[-2]
        return newest

    def write_entry(self, data: bytes, headers: Mapping[str, str], ttl_s: float | None) -> int | None:
        """Write the entry behind the one whose number is expected; ``None`` when that is not the last."""
        newest = self.entry()
        if int(headers["Nats-Expected-Last-Subject-Sequence"]) != (newest.number if newest is not None else 0):
            return None
        self._number += 1
        now_s = self.loop.time()
        gone_s = float("inf") if ttl_s is None else now_s + ttl_s + self.rng.uniform(0.0, SWEEP_MAX_S)
        entry = _Entry(self._number, data, headers, now_s, gone_s)
        self._entries.append(entry)
        self.watcher.note("lease", f"{self.machine} entry {entry.number}")
        self._tell(SimpleNamespace(headers=dict(headers), data=data))
        return entry.number

    # Telling

    def listen(self, link: Link, heard: Callable[[Any], Any]) -> None:
        """Tell a process of each entry of the leader from now on."""
        self._listeners.append((link, heard, contextvars.copy_context()))

    def forget(self, link: Link) -> None:
        """Tell a process nothing any more."""
        self._listeners = [each for each in self._listeners if each[0] is not link]

    def _tell(self, what: Any) -> None:
        self._listeners = [each for each in self._listeners if not each[0].life.dead]
        for link, heard, context in self._listeners:
            if not self.is_heard_by(link.life.machine) or self._chance(self.faults.untold):
                self.count("untold")
                continue
            for _ in range(2 if self._chance(self.faults.told_twice) else 1):
                late_s = self.rng.uniform(0.0, 0.3) if self._chance(self.faults.told_late) else 0.0
                self.loop.call_later(self.delay_s() + late_s, self._hear, heard, what, context=context)

    def _hear(self, heard: Callable[[Any], Any], what: Any) -> None:
        waiting = heard(what)
        if waiting is not None:
            self.loop.create_task(waiting)


class Link:
    """Stands for a process's ``NatsConnection``, and has the ports of the journal over it."""

    def __init__(self, servers: SimulatedJetStream, life: Life) -> None:
        self.servers = servers
        self.life = life
        self.pool = servers.pool
        self.timeout_s = ANSWER_TIMEOUT_S
        self.client = SimpleNamespace(subscribe=self._subscribe, is_closed=False)
        self.jetstream = SimpleNamespace(publish=self._publish)
        self._on_connected: list[Callable[[], None]] = []
        self._connected = False
        self._first = asyncio.Event()
        self._since_s = 0.0
        self._closed = False

    @property
    def connection(self) -> NatsConnection:
        """Return it as what it stands for."""
        return cast(NatsConnection, self)

    @property
    def journal(self) -> JetStreamJournal:
        """Return what makes the stream, as ``LeaderElection`` uses it."""
        return cast(JetStreamJournal, SimpleNamespace(connection=self.connection, open=self._open_stream))

    async def open(self) -> None:
        """Connect, however long the servers take."""
        self._look()
        await self._first.wait()

    async def close(self) -> None:
        """End the connection."""
        self._closed = True
        self.servers.forget(self)

    def on_connected(self, call: Callable[[], None]) -> None:
        """Have a callback called whenever the connection stands again."""
        self._on_connected.append(call)

    def out_of_reach_ms(self, now_ms: float) -> float:
        """Return for how long there has been no connection."""
        return 0.0 if self._connected else 1000 * max(0.001, self.servers.loop.time() - self._since_s)

    def _stands(self) -> bool:
        machine = self.life.machine
        return self.servers.is_reached_by(machine) and self.servers.is_heard_by(machine)

    def _look(self) -> None:
        if self._closed:
            return
        stands = self._stands()
        if stands != self._connected:
            self._connected = stands
            self._since_s = self.servers.loop.time()
            if stands and not self._first.is_set():
                self._first.set()
            elif stands:
                for call in self._on_connected:
                    call()
        self.servers.loop.call_later(LOOK_S, self._look)

    async def ask(self, question: Callable[[], Any]) -> Any:
        """Return an answer of the servers; raises ``StreamUnavailable`` for none."""
        servers, machine = self.servers, self.life.machine
        await asyncio.sleep(servers.delay_s())
        if not servers.is_reached_by(machine):
            await asyncio.sleep(ANSWER_TIMEOUT_S)
            raise StreamUnavailable(f"{servers.machine}: no answer")
        servers.check()
        answer = question()
        if not servers.is_heard_by(machine):
            await asyncio.sleep(ANSWER_TIMEOUT_S)
            raise StreamUnavailable(f"{servers.machine}: no answer")
        return answer

    # As ``NatsConnection`` is used by the lease

    async def asked(self, what: str, question: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer to a question."""
        from nats.errors import Error

        try:
            return await question
        except (Error, StreamUnavailable) as error:
            raise NatsUnavailable(f"{what}: {error}") from error

    async def batch(self, stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
        """Return the entry of the leader, which is all that is asked for."""
        assert question["multi_last"] == [f"$KV.poolgrid-{self.pool}.leader"]
        try:
            entry = await self.ask(self.servers.read_entry)
        except StreamUnavailable as error:
            raise NatsUnavailable(str(error)) from error
        if entry is None:
            return []
        return [NatsMessage({**entry.headers, "Nats-Sequence": str(entry.number)}, entry.data)]

    async def _publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], msg_ttl: float | None = None
    ) -> Any:
        from nats.js.errors import APIError

        assert subject == f"$KV.poolgrid-{self.pool}.leader"
        stored = headers if msg_ttl is None else {**headers, "Nats-TTL": str(int(msg_ttl))}
        number = await self.ask(lambda: self.servers.write_entry(data, stored, msg_ttl))
        if number is None:
            raise APIError(code=400, err_code=WRONG_LAST_SEQUENCE, description="wrong last sequence")
        return SimpleNamespace(seq=number)

    async def _subscribe(self, subject: str, cb: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        told = f"poolgrid.{self.pool}.told."
        assert subject == f"{told}leader", subject
        self.servers.listen(self, cb)

    async def _open_stream(self) -> None:
        await self.ask(lambda: None)


class WrittenStream:
    """``stream.ports.RecordStream`` of one life of a consolidator, on its threads."""

    body_bytes_max = 1024 * 1024

    def __init__(self, servers: SimulatedJetStream, machine: str) -> None:
        self.name = servers.machine
        self._servers = servers
        self._machine = machine

    def _ask(self, question: Callable[[], Any]) -> Any:
        servers = self._servers
        servers.between()
        servers.loop.spend(servers.delay_s())
        try:
            if not servers.is_reached_by(self._machine):
                raise TimeoutError
            answer = question()
            if not servers.is_heard_by(self._machine):
                raise TimeoutError
        except TimeoutError:
            servers.loop.spend(ANSWER_TIMEOUT_S)
            raise StreamUnavailable(f"{servers.machine}: no answer") from None
        return answer

    def _checked(self, question: Callable[[], Any]) -> Any:
        def checked() -> Any:
            self._servers.check()
            return question()

        return self._ask(checked)

    def open(self) -> None:
        """Ask whether anybody is there."""
        self._checked(lambda: None)

    def facts(self) -> StreamFacts:
        """Return the stream as its leader knows it."""
        return cast(StreamFacts, self._checked(self._servers.facts))

    def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        """Store messages, each once the one before it is stored."""
        for expected, message in enumerate(messages, last_sequence):
            sent = _Sent(message, expected, begins and expected == last_sequence)
            sequence = self._ask(partial(self._servers.send, sent))
            if sequence != expected + 1:
                raise OutOfTurn(f"message {expected + 1} is stored at {sequence}")

    def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on."""
        return cast(list[StoredMessage], self._checked(lambda: self._servers.read(from_sequence, limit)))

    def remove_before(self, sequence: int) -> None:
        """Remove messages."""
        self._checked(lambda: self._servers.remove_before(sequence))

    def snapshots(self) -> list[Anchor]:
        """Return the snapshots that are kept."""
        return sorted(self._checked(lambda: self._servers.objects), key=lambda anchor: anchor.offset)

    def put_snapshot(self, anchor: Anchor, content: bytes) -> None:
        """Keep a snapshot."""
        self._checked(lambda: self._servers.put_snapshot(anchor, content))

    def get_snapshot(self, anchor: Anchor) -> bytes:
        """Return the content of a snapshot."""
        return cast(bytes, self._checked(lambda: _content(self._servers, anchor)))

    def remove_snapshot(self, anchor: Anchor) -> None:
        """Remove a snapshot."""
        self._checked(lambda: self._servers.objects.pop(anchor, None))

    def close(self) -> None:
        """Do nothing."""


def _writer(message_id: str) -> str:
    return message_id.rpartition(".")[0]


def _content(servers: SimulatedJetStream, anchor: Anchor) -> bytes:
    content = servers.objects.get(anchor)
    if content is None:
        raise StreamUnavailable(f"the snapshot at {anchor.offset} is not there any more")
    return content
