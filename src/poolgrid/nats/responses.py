"""Responses that are kept for all routers of a pool: in a bucket of NATS JetStream, so that any of them can continue
one.

Rules
    1. NATS has the only copy. What one router kept or forgot, all others find or miss with their next question.
    2. A response is found by its *owner* (the tenant that asked for it) and its id only. Keys have hashes of
       both, and what is read is compared with what was asked for.
    3. A response is written in parts that NATS takes, the first part last: it is there once that one is.
    4. A response names all before it, so a conversation is read with two questions, however long it is.
    5. Any server may answer, perhaps one that is a little behind. What is not there is asked for once more, where it is
       written, before it counts as missing.
    6. When the bucket is full the oldest goes, of any owner; what is older than ``ttl_s`` goes too. A conversation
       of which a part is gone cannot be continued from there.
    7. What cannot be written is lost, and the answer goes out all the same.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from poolgrid.frontend.responses_api.kept import RETRY_AFTER_S, KeptResponse, Owner, Part
from poolgrid.inference import Refused
from poolgrid.nats.bucket import Bucket, BucketSpec, key_of
from poolgrid.nats.connection import NatsUnavailable
from poolgrid.process.clock import Clock
from poolgrid.process.nats_settings import NatsSettings

log = logging.getLogger(__name__)

BUCKET = "poolgrid-responses"

PART_BYTES = 512 * 1024
"""Of a response in one message: half of what NATS servers take by default."""

PARTS_MAX = 128
"""Of one response: 64 MiB, four times what a request may have unless it is allowed more."""

TURNS_MAX = 4096
"""Responses of one conversation, with 8 kB of keys for each of the last; a longer one is not kept any further."""

SUBJECTS_PER_QUESTION = 256
"""The servers take 1,024."""

KEY_BYTES = 16

PARTS_HEADER = "Poolgrid-Parts"


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
        spec = BucketSpec(
            BUCKET,
            "responses that poolgrid's clients may continue",
            budget_bytes,
            PART_BYTES + 1024,
            replicas=replicas,
            drops_oldest=True,
            age_max_s=ttl_s,
        )
        self._bucket = Bucket(settings, "responses", spec, clock)
        self._connection = self._bucket.connection
        self._clock = clock
        self._scope = scope

    @property
    def is_ready(self) -> bool:
        return self._bucket.is_open.is_set() and not self._connection.out_of_reach_ms(self._clock.monotonic_ms())

    def start(self) -> None:
        """Connect in the background: a router does not wait for NATS. Raises ``ValueError`` without nats-py."""
        self._bucket.start("share_state")

    def close(self) -> None:
        """Do nothing: answers in flight may still be kept (``disconnect``)."""

    async def disconnect(self) -> None:
        await self._bucket.close()

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
        subject = f"{self._bucket.spec.subject}{self._key(owner.name, _digest(response_id))}.*"
        jetstream = self._connection.jetstream
        try:
            await self._connection.asked(
                f"forgetting {subject}", jetstream.purge_stream(self._bucket.spec.stream, subject=subject)
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
        if len(parts) > PARTS_MAX or len(data) > self._bucket.spec.bytes_max // 2:
            log.warning("a response of %d bytes is not kept: it is too large", len(data))
            return False
        key = self._key(owner, _digest(kept.id))
        for number in reversed(range(len(parts))):
            await self._bucket.write(f"{key}.{number}", parts[number], {PARTS_HEADER: str(len(parts))})
        return True

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
        keys = [f"{self._key(owner, digest)}.*" for digest in digests]
        while keys:
            now, rest = keys[:SUBJECTS_PER_QUESTION], keys[SUBJECTS_PER_QUESTION:]
            count = await self._gather(found, now)
            # An answer has so many bytes at most; what is left of it is asked for by itself.
            wanted = {key.rpartition(".")[0] for key in now}
            left = [
                f"{self._key(owner, digest)}.{number}"
                for digest, each in found.items()
                if self._key(owner, digest) in wanted
                for number in range(each.total)
                if number not in each.parts
            ]
            unseen = [each for each in now if each.endswith(".*") and _digest_of(each) not in found]
            keys = [*(left if count else []), *(unseen if count else []), *rest]
        entries: dict[bytes, _Entry] = {}
        for digest in digests:
            each = found.get(digest)
            if each is None or not each.is_whole:
                each = await self._read_where_written(self._key(owner, digest))
            if each is not None and each.is_whole:
                entry = _entry(each)
                if entry is not None and entry.owner == owner:
                    entries[digest] = entry
        return entries

    async def _gather(self, found: dict[bytes, _PartsFound], keys: Iterable[str]) -> int:
        """Read the parts under some keys; return how many are new. What no router wrote is not among them."""
        before = sum(len(each.parts) for each in found.values())
        question = {"multi_last": [self._bucket.spec.subject + key for key in keys], "batch": SUBJECTS_PER_QUESTION * 4}
        messages = await self._connection.batch(self._bucket.spec.stream, question)
        for message in messages:
            key, _, number = key_of(message, self._bucket.spec).rpartition(".")
            _add(found, _digest_of(f"{key}.0"), message.headers, number, message.data)
        return sum(len(each.parts) for each in found.values()) - before

    async def _read_where_written(self, key: str) -> _PartsFound | None:
        """Read an entry from the server that writes the bucket, which is behind no other."""
        found: dict[bytes, _PartsFound] = {}
        number = 0
        while True:
            message = await self._bucket.last(f"{key}.{number}")
            if message is None:
                return None
            _add(found, b"", message.headers or {}, str(number), message.data or b"")
            number += 1
            if b"" not in found or number >= found[b""].total:
                return found.get(b"")

    def _key(self, owner: str, digest: bytes) -> str:
        return f"{self._scope}.{_digest(owner).hex()}.{digest.hex()}"


def _digest_of(key: str) -> bytes:
    return bytes.fromhex(key.rpartition(".")[0].rpartition(".")[2])


def _add(found: dict[bytes, _PartsFound], digest: bytes, headers: Any, number: str, data: bytes) -> None:
    """Add a part that was read; one that no router of ours wrote is left out."""
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
