"""A pool's journal on NATS JetStream: a stream of records, an object store of snapshots, a bucket of roles.

    poolgrid-POOL                 stream of ``poolgrid.POOL.journal.WRITER``
    poolgrid-POOL-snapshots       object store, an object for each snapshot
    poolgrid-POOL                 key-value bucket with the key ``leader``

What is there and is not ours is skipped, counted, and named in the log with the command that removes it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec

from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.plugins.nats.bucket import WRONG_LAST_SEQUENCE
from poolgrid.plugins.nats.connection import NatsConnection, NatsMessage, NatsUnavailable
from poolgrid.plugins.nats.leader import BUCKET, bucket_stream, told_subject
from poolgrid.plugins.nats.message import (
    Anchor,
    Damaged,
    Outgoing,
    OutOfTurn,
    StoredMessage,
    StreamFacts,
    StreamUnavailable,
    begins_body,
    foreign_message,
    stored_message,
)
from poolgrid.server.process.tasks import wait_from_thread

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DUPLICATE_WINDOW_S = 120.0
"""How long a server knows the names of messages; a writer asks what is stored before it sends anything again."""

BEGINNINGS_BYTES = 4 * 1024 * 1024
"""Room that the servers keep in addition to records: a stream that is full takes the first messages of thousands of
writers more, so that the next writer can make room."""

SNAPSHOTS_MAX = 1024
"""Objects that are looked at; two are kept."""

SEQUENCE_HEADER = "Poolgrid-Sequence"
MESSAGE_HEADER = "Poolgrid-Message"

SEQUENCE_DIGITS_MAX = 20
"""Of an unsigned number of 64 bits."""

NUID = "^[A-Za-z0-9]{1,64}$"
"""What a client calls the pieces of an object; without wildcards."""


class _ObjectEntry(msgspec.Struct):
    """What an object store keeps of an object."""

    name: str
    nuid: Annotated[str, msgspec.Meta(pattern=NUID)]
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    digest: str = ""
    headers: dict[str, list[str]] | None = None
    deleted: bool = False


_decode_entry = msgspec.json.Decoder(_ObjectEntry).decode


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a pool's stream is made, by each process that makes it."""

    replicas: int = 1
    bytes_max: int = 4 * 1024 * 1024 * 1024
    """How large it may be and still take records: ``stream.journal.bytes_max_of`` what retention keeps."""


class JetStreamJournal:
    """The journal of one pool, on a connection; belongs to its loop. What asks may raise ``StreamUnavailable``."""

    def __init__(self, connection: NatsConnection, shape: StreamShape | None = None) -> None:
        pool = connection.pool
        self._connection = connection
        self.name = f"poolgrid-{pool}"
        self._subjects = f"poolgrid.{pool}.journal"
        self._has_holes = False
        """Whether messages between the first and the last were removed, as far as is known."""
        self._shape = shape or StreamShape()
        self._objects = f"poolgrid-{pool}-snapshots"
        self._objects_stream = f"OBJ_{self._objects}"
        self._bucket_stream = bucket_stream(pool)
        self._bucket = BUCKET.format(pool=pool)

    @property
    def connection(self) -> NatsConnection:
        return self._connection

    async def facts(self) -> StreamFacts:
        """Return the stream as its leader knows it; one that is not there is empty."""
        from nats.js.errors import NotFoundError

        try:
            found = await self._asked(
                f"asking for stream {self.name}", self._connection.jetstream.stream_info(self.name)
            )
        except NotFoundError:
            return StreamFacts(1, 0, 0, 0)
        state = found.state
        first = state.first_seq if state.messages else state.last_seq + 1
        self._has_holes = state.messages < state.last_seq + 1 - first
        return StreamFacts(first, state.last_seq, state.messages, state.bytes)

    async def append(
        self, messages: Sequence[Outgoing], last_sequence: int, begins: bool = False, own_sequence: int | None = None
    ) -> None:
        """Store messages right behind ``last_sequence``, each sent once the one before it is stored.

        Each writer has a subject of its own, and expects the last message there, too: the server compares numbers and
        not names, and a stream that lost its end may have got as many messages from another writer.

        Sent together, the second message of a writer that was overtaken would expect the very sequence at which the
        first one of the next writer was stored, and would be stored behind it. To name the message before it as well
        (``Nats-Expected-Last-Msg-Id``) leaves later messages without an answer on clusters. What is written at once is
        in few messages anyway.
        """
        what = f"appending {len(messages)} messages to stream {self.name}"
        before = 0 if begins else last_sequence if own_sequence is None else await self._last_of(messages, own_sequence)
        for expected, message in enumerate(messages, last_sequence):
            own = before if expected == last_sequence else expected
            headers = {
                **message.headers(),
                "Nats-Expected-Last-Sequence": str(expected),
                "Nats-Expected-Last-Subject-Sequence": str(own),
            }
            subject = self._subject_of(message.message_id)
            try:
                answer = await self._connection.publish(what, subject, headers, message.body)
            except NatsUnavailable as error:
                raise StreamUnavailable(str(error)) from error
            if answer.error_code in WRONG_LAST_SEQUENCE:
                raise OutOfTurn(f"{answer.error}, expected {expected}")
            if answer.error:
                raise StreamUnavailable(f"{what}: {answer.error}")
            if answer.sequence != expected + 1:
                raise OutOfTurn(f"message {expected + 1} is stored at {answer.sequence}")

    async def read(self, from_sequence: int, limit: int) -> list[StoredMessage]:
        """Return messages from a sequence on, as many as fit an answer."""
        found = await self._batch(self.name, {"seq": from_sequence, "batch": limit})
        messages: list[StoredMessage] = []
        at = from_sequence
        if found and sequence_of(found[0]) > at and (await self.facts()).first_sequence > at:
            at = sequence_of(found[0])  # what was before it is not kept any more
        for each in found:
            sequence = sequence_of(each)
            messages += map(foreign_message, range(at, min(sequence, at + limit - len(messages))))
            if len(messages) >= limit:
                return messages
            messages.append(self._read_message(sequence, each.headers, each.data))
            at = sequence + 1
        if not found and self._has_holes:
            facts, newest = await self.facts(), await self._newest()
            if at > newest:
                messages += map(foreign_message, range(at, min(facts.last_sequence + 1, at + limit)))
        return messages

    def _read_message(self, sequence: int, headers: Mapping[str, str], body: bytes) -> StoredMessage:
        try:
            return self._own_message(sequence, headers, body)
        except Damaged as error:
            self._connection.foreign.skipped(self.name, sequence, error)
            return foreign_message(sequence)

    def _own_message(self, sequence: int, headers: Mapping[str, str], body: bytes) -> StoredMessage:
        """Return a message; raises ``Damaged`` when it is none of ours."""
        message = stored_message(sequence, headers, body)
        subject = headers.get("Nats-Subject")
        if subject is not None and subject != self._subject_of(message.message_id):
            raise Damaged(f"{message.message_id[:80]!r} wrote it on {subject[:80]!r}")
        if message.piece == 0 and not begins_body(body):
            raise Damaged(f"its {len(body)} bytes begin with {body[:8]!r}")
        return message

    def _subject_of(self, message_id: str) -> str:
        return f"{self._subjects}.{message_id.rpartition('.')[0]}"

    async def _last_of(self, messages: Sequence[Outgoing], own_sequence: int) -> int:
        """Return where the last message on a writer's subject is, foreign or not; not before its own last one."""
        found = await self._last_on(self._subject_of(messages[0].message_id))
        if found < own_sequence:
            raise OutOfTurn(f"the last message of the writer was {own_sequence}, the server has {found}")
        return found

    async def _newest(self) -> int:
        return await self._last_on(f"{self._subjects}.>")

    async def _last_on(self, subject: str) -> int:
        from nats.js.errors import NotFoundError

        question = self._connection.jetstream.get_last_msg(self.name, subject)
        try:
            message = await self._asked(f"asking for the last message of {subject}", question)
        except NotFoundError:
            return 0
        return int(message.seq)

    # Inside

    async def _ensure(self, config: Any) -> None:
        from nats.js.errors import BadRequestError

        jetstream = self._connection.jetstream
        try:
            await self._asked(f"making stream {config.name}", jetstream.add_stream(config))
        except StreamUnavailable as error:
            # There, with other settings than ours: those that may change are changed.
            if not isinstance(error.__cause__, NatsUnavailable) or not isinstance(
                error.__cause__.__cause__, BadRequestError
            ):
                raise
            await self._asked(f"changing stream {config.name}", jetstream.update_stream(config))

    async def _asked(self, what: str, question: Any) -> Any:
        try:
            return await self._connection.asked(what, question)
        except NatsUnavailable as error:
            raise StreamUnavailable(str(error)) from error

    async def _batch(self, stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
        try:
            return await self._connection.batch(stream, question)
        except NatsUnavailable as error:
            raise StreamUnavailable(str(error)) from error

    # Making

    async def open(self) -> None:
        """Make the stream, the object store and the bucket, or bring what is there up to the settings."""
        from nats.js import api

        shape = self._shape
        await self._ensure(
            api.StreamConfig(
                name=self.name,
                description="journal of a poolgrid pool",
                subjects=[f"{self._subjects}.>"],
                retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.FILE,
                discard=api.DiscardPolicy.NEW,
                max_bytes=shape.bytes_max + BEGINNINGS_BYTES,
                num_replicas=shape.replicas,
                duplicate_window=DUPLICATE_WINDOW_S,
                allow_direct=True,
            )
        )
        await self._ensure(
            api.StreamConfig(
                name=self._objects_stream,
                description="snapshots of a poolgrid pool",
                subjects=[f"$O.{self._objects}.C.>", f"$O.{self._objects}.M.>"],
                storage=api.StorageType.FILE,
                discard=api.DiscardPolicy.NEW,
                num_replicas=shape.replicas,
                allow_rollup_hdrs=True,
                allow_direct=True,
            )
        )
        await self._ensure(
            api.StreamConfig(
                name=self._bucket_stream,
                description="leader and shares of a poolgrid pool",
                subjects=[f"$KV.{self._bucket}.>"],
                storage=api.StorageType.FILE,
                discard=api.DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                num_replicas=shape.replicas,
                allow_rollup_hdrs=True,
                allow_direct=True,
                allow_msg_ttl=True,
                deny_delete=True,
                republish=api.RePublish(src=f"$KV.{self._bucket}.>", dest=told_subject(self._connection.pool, ">")),
            )
        )
        await self._clear_unfinished()

    async def _clear_unfinished(self) -> None:
        """Remove pieces of snapshots that a writer which was killed did not finish."""
        known = {information.nuid for information in (await self._object_list()).values()}
        found = await self._asked(
            "looking for unfinished snapshots",
            self._connection.jetstream.stream_info(self._objects_stream, subjects_filter=f"$O.{self._objects}.C.>"),
        )
        for subject in sorted(found.state.subjects or {}):
            if subject.rpartition(".")[2] not in known:
                await self._purge(self._objects_stream, subject=subject)

    # Records

    async def remove_before(self, sequence: int) -> None:
        await self._purge(self.name, seq=sequence)

    # Snapshots

    async def snapshots(self) -> list[Anchor]:
        """Return the snapshots that are kept, oldest first."""
        found = []
        for name, information in (await self._object_list()).items():
            offset = name.removesuffix(framing.SUFFIX)
            sequence, message_id = (
                _one((information.headers or {}).get(key)) for key in (SEQUENCE_HEADER, MESSAGE_HEADER)
            )
            if _is_number(offset) and _is_number(sequence) and message_id:
                found.append(Anchor(int(offset), int(sequence), message_id))
        return sorted(found, key=lambda anchor: anchor.offset)

    async def put_snapshot(self, anchor: Anchor, content: bytes) -> None:
        """Keep a snapshot: its pieces first, then the entry that names them."""
        from nats.js import api
        from nats.js.object_store import ObjectStore

        store = ObjectStore(self._objects, self._objects_stream, self._connection.jetstream)
        name = framing.name_of(anchor.offset)
        headers = {SEQUENCE_HEADER: [str(anchor.sequence)], MESSAGE_HEADER: [anchor.message_id]}
        options = api.ObjectMetaOptions(max_chunk_size=128 * 1024)
        await self._asked(
            f"keeping snapshot {name}",
            store.put(name, content, meta=api.ObjectMeta(name=name, headers=headers, options=options)),
        )

    async def get_snapshot(self, anchor: Anchor) -> bytes:
        """Return the content of a snapshot; raises ``JournalCorrupt`` when it is not what was put there."""
        name = framing.name_of(anchor.offset)
        information = (await self._object_list()).get(name)
        if information is None:
            raise StreamUnavailable(f"reading snapshot {name}: it is not there any more")
        digest, parts, sequence, size = hashlib.sha256(), [], 1, 0
        while size < information.size:
            question = {
                "seq": sequence,
                "next_by_subj": f"$O.{self._objects}.C.{information.nuid}",
                "batch": 64,
            }
            found = await self._batch(self._objects_stream, question)
            if not found:
                break
            for each in found:
                digest.update(each.data)
                parts.append(each.data)
                size += len(each.data)
            sequence = int(found[-1].headers["Nats-Sequence"]) + 1
        expected = information.digest.partition("=")[2]
        if size != information.size or base64.urlsafe_b64encode(digest.digest()).decode() != expected:
            raise JournalCorrupt(
                f"{self._objects}/{name}",
                0,
                anchor.offset,
                f"{size} of {information.size} bytes are there, or their digest is not the one that was kept",
                "remove the object: the snapshot before it and the stream hold the same",
            )
        return b"".join(parts)

    async def remove_snapshot(self, anchor: Anchor) -> None:
        """Remove a snapshot: the entry first, so that it is never found without its pieces."""
        name = framing.name_of(anchor.offset)
        information = (await self._object_list()).get(name)
        if information is None:
            return
        await self._purge(self._objects_stream, subject=self._entry_subject(name))
        await self._purge(self._objects_stream, subject=f"$O.{self._objects}.C.{information.nuid}")

    def _entry_subject(self, name: str) -> str:
        return f"$O.{self._objects}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def _object_list(self) -> dict[str, _ObjectEntry]:
        found = await self._batch(
            self._objects_stream, {"multi_last": [f"$O.{self._objects}.M.>"], "batch": SNAPSHOTS_MAX}
        )
        entries = {}
        for each in found:
            try:
                information = _decode_entry(each.data)
                if each.headers.get("Nats-Subject") != self._entry_subject(information.name):
                    raise ValueError(f"the entry of object {information.name[:80]!r} is on another subject")
            except ValueError as error:  # of msgspec, too
                self._connection.foreign.skipped(self._objects_stream, sequence_of(each), error)
                continue
            if not information.deleted:
                entries[information.name] = information
        return entries

    # Inside

    async def _purge(self, stream: str, **which: Any) -> None:
        await self._asked(f"removing from stream {stream}", self._connection.jetstream.purge_stream(stream, **which))


def sequence_of(message: NatsMessage) -> int:
    """Return where a message is that was read."""
    return int(message.headers["Nats-Sequence"])


def _one(values: list[str] | None) -> str:
    return values[0] if values else ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= SEQUENCE_DIGITS_MAX


class ThreadedStream:
    """``RecordStream`` for threads, over a loop that runs meanwhile: each call waits for the journal's own."""

    def __init__(self, journal: JetStreamJournal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self.name = journal.name
        self._timeout_s = journal.connection.timeout_s * 20
        """Beyond every answer's own: many questions make an object."""
        self.open = self._waiting(journal.open)
        self.facts = self._waiting(journal.facts)
        self.append = self._waiting(journal.append)
        self.read = self._waiting(journal.read)
        self.remove_before = self._waiting(journal.remove_before)
        self.snapshots = self._waiting(journal.snapshots)
        self.put_snapshot = self._waiting(journal.put_snapshot)
        self.get_snapshot = self._waiting(journal.get_snapshot)
        self.remove_snapshot = self._waiting(journal.remove_snapshot)

    @property
    def body_bytes_max(self) -> int:
        return self._journal.connection.body_bytes_max

    def close(self) -> None:
        """Do nothing: the connection is its owner's."""

    def _waiting(self, call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        def wait(*arguments: P.args, **named: P.kwargs) -> T:
            try:
                return wait_from_thread(self._loop, call(*arguments, **named), f"stream {self.name}", self._timeout_s)
            except TimeoutError as error:
                raise StreamUnavailable(f"stream {self.name}: no answer in {self._timeout_s:g} s") from error

        return wait
