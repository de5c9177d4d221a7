"""Responses that are kept for all routers of a pool: in a bucket of NATS JetStream, so that any of them goes on.

Rules
    1. NATS has the only copy. What one router kept or forgot, all others find or miss with their next question.
    2. A response is found by who asked for it (its *owner*, a tenant) and its id, by nobody else. Keys have hashes of
       both, and what is read is compared with what was asked for.
    3. A response is written in parts that NATS takes, the first part last: it is there once that one is.
    4. A response names all before it, so a conversation is read with two questions, however long it is.
    5. Any server may answer, perhaps one that is a little behind. What is not there is asked for once more, where it is
       written, before it counts as missing.
    6. When the bucket is full the oldest goes, whoever's it is; what is older than ``ttl_s`` goes too. A conversation
       of which a part is gone cannot go on from there.
    7. What cannot be written is lost, and the answer goes out all the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from poolgrid.frontend.responses_api.store import RETRY_AFTER_S, KeptResponse, Owner, Part
from poolgrid.inference.ports import Refused
from poolgrid.nats.bucket import BucketSpec, key_of, make_bucket
from poolgrid.nats.connection import NatsConnection, NatsUnavailable, NatsUnusable
from poolgrid.process.clock import Clock
from poolgrid.process.nats_settings import NatsSettings
from poolgrid.process.tasks import cancel_all, end_process, supervised

log = logging.getLogger(__name__)

BUCKET = "poolgrid-responses"

PART_BYTES = 512 * 1024
"""Of a response in one message: half of what NATS servers take unless they are told otherwise."""

PARTS_MAX = 128
"""Of one response: 64 MiB, four times what a request may have unless it is allowed more."""

TURNS_MAX = 4096
"""Responses of one conversation, with 8 kB of keys for each of the last; a longer one is not kept any further."""

SUBJECTS_PER_QUESTION = 256
"""The servers take 1,024."""

KEY_BYTES = 16

PARTS_HEADER = "Poolgrid-Parts"

MAKE_AGAIN_S = 1.0
"""Before making the bucket is tried again."""


class _Entry(msgspec.Struct, frozen=True):
    """What is kept under one key."""

    owner: str
    id: str
    before: list[bytes]
    """Keys of the responses before it, the first one first."""
    previous: str | None
    input: bytes
    output: bytes
    response: bytes

    def kept(self) -> KeptResponse:
        return KeptResponse(self.id, self.previous, self.input, self.output, self.response)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Entry).decode


class _PartsFound(NamedTuple):
    total: int
    parts: dict[int, bytes]

    @property
    def is_whole(self) -> bool:
        return len(self.parts) == self.total


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class NatsResponseStore:
    """The responses of a pool, for one event loop; ``scope`` is what routers of one pool agree on.

    Implements ``poolgrid.frontend.responses_api.kept.Store``.
    """

    def __init__(
        self, settings: NatsSettings, scope: str, budget_bytes: int, ttl_s: float, replicas: int, clock: Clock
    ) -> None:
        self._connection = NatsConnection(settings, "poolgrid responses", clock)
        self._clock = clock
        self._scope = scope
        self._bucket = BucketSpec(
            BUCKET,
            "responses that poolgrid's clients may go on from",
            budget_bytes,
            PART_BYTES + 1024,
            replicas=replicas,
            drops_oldest=True,
            age_max_s=ttl_s,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._has_bucket = False

    @property
    def is_ready(self) -> bool:
        return self._has_bucket and not self._connection.out_of_reach_ms(self._clock.monotonic_ms())

    def start(self) -> None:
        """Connect in the background: a router does not wait for NATS."""
        self._tasks.append(supervised(self._open, "connection to NATS for responses"))

    async def _open(self) -> None:
        try:
            await self._connection.open()
        except NatsUnusable as error:
            end_process("connection to NATS for responses", error)
            return
        while True:
            try:
                await make_bucket(self._connection, self._bucket)
                self._has_bucket = True
                return
            except NatsUnavailable as error:
                log.warning("making the bucket %s failed (%s): it is tried again", BUCKET, error)
                await asyncio.sleep(MAKE_AGAIN_S)

    def close(self) -> None:
        """Do nothing: answers that are under way may still be kept (``disconnect``)."""

    async def disconnect(self) -> None:
        """End the connection."""
        await cancel_all(self._tasks)
        await self._connection.close()

    async def keep(self, owner: Owner, kept: KeptResponse) -> bool:
        try:
            return await self._keep(owner.name, kept)
        except NatsUnavailable as error:
            log.warning("a response is not kept: %s", error)
            return False

    async def conversation(self, owner: Owner, response_id: str) -> list[KeptResponse] | None:
        last = await self._asked(owner.name, response_id)
        if last is None:
            return None
        try:
            found = await self._read(owner.name, last.before)
        except NatsUnavailable as error:
            raise _unavailable(error) from None
        earlier = [found.get(digest) for digest in last.before]
        if any(each is None for each in earlier):
            return None
        return [each.kept() for each in (*earlier, last) if each is not None]

    async def items(self, owner: Owner, response_id: str, part: Part) -> bytes:
        found = await self._asked(owner.name, response_id)
        return b"[]" if found is None else found.input if part == "input" else found.output

    async def response(self, owner: Owner, response_id: str) -> bytes | None:
        found = await self._asked(owner.name, response_id)
        return None if found is None else found.response

    async def forget(self, owner: Owner, response_id: str) -> bool:
        if await self._asked(owner.name, response_id) is None:
            return False
        subject = self._subject(owner.name, _digest(response_id))
        jetstream = self._connection.jetstream
        try:
            await self._connection.asked(
                f"forgetting {subject}", jetstream.purge_stream(self._bucket.stream, subject=f"{subject}.*")
            )
        except NatsUnavailable as error:
            raise _unavailable(error) from None
        return True

    # What is in NATS

    async def _keep(self, owner: str, kept: KeptResponse) -> bool:
        before: list[bytes] = []
        if kept.previous is not None:
            previous = await self._find(owner, kept.previous)
            if previous is None or len(previous.before) >= TURNS_MAX:
                return False  # it was forgotten meanwhile, or the conversation is too long
            before = [*previous.before, _digest(kept.previous)]
        data = _encode(_Entry(owner, kept.id, before, kept.previous, kept.input, kept.output, kept.response))
        size = min(PART_BYTES, self._connection.body_bytes_max)
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        if len(parts) > PARTS_MAX or len(data) > self._bucket.bytes_max // 2:
            log.warning("a response of %d bytes is not kept: it is too large", len(data))
            return False
        subject = self._subject(owner, _digest(kept.id))
        for number in reversed(range(len(parts))):
            await self._publish(f"{subject}.{number}", parts[number], len(parts))
        return True

    async def _publish(self, subject: str, data: bytes, parts: int) -> None:
        from nats.js.errors import NoStreamResponseError

        self._connection.check()
        headers = {PARTS_HEADER: str(parts)}
        try:
            await self._connection.asked(
                f"writing {subject}", self._connection.jetstream.publish(subject, data, headers=headers)
            )
        except NatsUnavailable as error:
            if isinstance(error.__cause__, NoStreamResponseError):
                await make_bucket(self._connection, self._bucket)  # it may have gone with the servers that had it
            raise

    async def _asked(self, owner: str, response_id: str) -> _Entry | None:
        """Return what a client asked for; raises ``Refused`` 503 when it cannot be read now."""
        try:
            return await self._find(owner, response_id)
        except NatsUnavailable as error:
            raise _unavailable(error) from None

    async def _find(self, owner: str, response_id: str) -> _Entry | None:
        digest = _digest(response_id)
        found = (await self._read(owner, [digest])).get(digest)
        return found if found is not None and found.id == response_id else None

    async def _read(self, owner: str, digests: list[bytes]) -> dict[bytes, _Entry]:
        """Return entries of an owner, those that are there; raises ``NatsUnavailable``."""
        found: dict[bytes, _PartsFound] = {}
        subjects = [f"{self._subject(owner, digest)}.*" for digest in digests]
        while subjects:
            now, rest = subjects[:SUBJECTS_PER_QUESTION], subjects[SUBJECTS_PER_QUESTION:]
            count = await self._gather(found, now)
            # An answer has so many bytes at most; what is left of it is asked for by itself.
            wanted = {subject.rpartition(".")[0] for subject in now}
            left = [
                f"{self._subject(owner, digest)}.{number}"
                for digest, each in found.items()
                if self._subject(owner, digest) in wanted
                for number in range(each.total)
                if number not in each.parts
            ]
            unseen = [each for each in now if each.endswith(".*") and _digest_of(each) not in found]
            subjects = [*(left if count else []), *(unseen if count else []), *rest]
        entries: dict[bytes, _Entry] = {}
        for digest in digests:
            each = found.get(digest)
            if each is None or not each.is_whole:
                each = await self._read_where_written(self._subject(owner, digest))
            if each is not None and each.is_whole:
                entry = _entry(each)
                if entry is not None and entry.owner == owner:
                    entries[digest] = entry
        return entries

    async def _gather(self, found: dict[bytes, _PartsFound], subjects: Iterable[str]) -> int:
        """Read the parts under some subjects; return how many are new. What no router wrote is not among them."""
        before = sum(len(each.parts) for each in found.values())
        question = {"multi_last": list(subjects), "batch": SUBJECTS_PER_QUESTION * 4}
        messages = await self._connection.batch(self._bucket.stream, question)
        for message in messages:
            key, _, number = key_of(message, self._bucket).rpartition(".")
            _add(found, _digest_of(f"{key}.0"), message.headers, number, message.data)
        return sum(len(each.parts) for each in found.values()) - before

    async def _read_where_written(self, subject: str) -> _PartsFound | None:
        """Read an entry from the server that writes the bucket, which is behind no other."""
        from nats.js.errors import NotFoundError

        found: dict[bytes, _PartsFound] = {}
        number = 0
        while True:
            self._connection.check()
            try:
                message: Any = await self._connection.asked(
                    f"reading {subject}.{number}",
                    self._connection.jetstream.get_last_msg(self._bucket.stream, f"{subject}.{number}"),
                )
            except NotFoundError:
                return None
            _add(found, b"", message.headers or {}, str(number), message.data or b"")
            number += 1
            if b"" not in found or number >= found[b""].total:
                return found.get(b"")

    def _subject(self, owner: str, digest: bytes) -> str:
        return f"{self._bucket.subject}{self._scope}.{_digest(owner).hex()}.{digest.hex()}"


def _digest_of(subject: str) -> bytes:
    """Return the key of a response, by the subject of one of its parts."""
    return bytes.fromhex(subject.rpartition(".")[0].rpartition(".")[2])


def _add(found: dict[bytes, _PartsFound], digest: bytes, headers: Any, number: str, data: bytes) -> None:
    """Add a part that was read; one that nobody of ours wrote is left out."""
    count = str(headers.get(PARTS_HEADER, ""))  # nats-py returns an object for what is not ASCII
    total, part = _small_number(count), _small_number(number)
    if 0 < total <= PARTS_MAX and 0 <= part < total:
        found.setdefault(digest, _PartsFound(total, {})).parts[part] = data


def _small_number(text: str) -> int:
    """Return a number of at most ``PARTS_MAX``'s digits; -1 for anything else: long ones are an error of ``int``."""
    return int(text) if text.isdecimal() and len(text) <= len(str(PARTS_MAX)) else -1


def _entry(found: _PartsFound) -> _Entry | None:
    try:
        return _decode(b"".join(found.parts[number] for number in range(found.total)))
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        log.warning("a response that is kept in NATS cannot be read: %s", error)
        return None


def _unavailable(error: Exception) -> Refused:
    log.warning("the responses that are kept cannot be read: %s", error)
    message = "the responses that are kept cannot be read now; try again later"
    return Refused(503, "responses_unavailable", message, RETRY_AFTER_S)
