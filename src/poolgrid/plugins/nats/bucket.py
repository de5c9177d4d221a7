"""Key-value buckets of JetStream: made where there is none, read from a position on without a consumer.

A bucket is a stream that keeps the latest message of each subject, which is a key.

Any replica of it may answer a question, also one that is behind. What it shows counts only when it is as new as
what was shown before, and as what the stream's leader had a while ago (``fresh_ms``). A replica that has come to a
stand would otherwise show each process as silent that still renews its lease.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Mapping
from typing import NamedTuple

from poolgrid.plugins.nats.connection import NatsConnection, NatsMessage, NatsUnavailable, NatsUnusable
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.nats_settings import NatsSettings
from poolgrid.server.process.tasks import cancel_all, end_process, supervised

log = logging.getLogger(__name__)

MESSAGES_PER_ANSWER = 512
"""Messages that one question is answered with at most; the servers also stop at some bytes."""

ANSWERS_MAX = 4
"""Replicas that are asked before what is known stays: of three, one that is behind is asked by chance each time."""

FRESH_PARTS = 3
"""Leases are renewed so many times until they are over: what is read is at most one of these parts of a lease old."""

MAKE_AGAIN_S = 1.0
"""Before making a bucket is tried again."""

WRONG_LAST_SEQUENCE = (10071, 10164)
"""Error codes of the servers for a value that was not made of the last one."""


class NotLast(NatsUnavailable):
    """The servers did not take a value: it was not made of the last one."""


class NoBucket(NatsUnavailable):
    """The servers have no such bucket, or it has no leader."""


class BucketSpec(NamedTuple):
    """What a bucket is."""

    name: str
    description: str
    bytes_max: int
    """What the servers keep; a message beyond it is refused."""
    message_bytes_max: int
    replicas: int = 1

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    @property
    def subject(self) -> str:
        return f"$KV.{self.name}."


async def make_bucket(connection: NatsConnection, bucket: BucketSpec) -> None:
    """Make a bucket where there is none; a process without that right needs one that is there. Raises
    ``NatsUnavailable``."""
    from nats.js import api
    from nats.js.errors import NotFoundError

    jetstream = connection.jetstream
    try:
        await connection.asked(f"looking for stream {bucket.stream}", jetstream.stream_info(bucket.stream))
        return
    except NotFoundError:
        pass
    config = api.StreamConfig(
        name=bucket.stream,
        description=bucket.description,
        subjects=[f"{bucket.subject}>"],
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_bytes=bucket.bytes_max,
        max_msg_size=bucket.message_bytes_max,
        num_replicas=bucket.replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
    )
    await connection.asked(f"making stream {bucket.stream}", jetstream.add_stream(config))


async def put(
    connection: NatsConnection,
    subject: str,
    data: bytes,
    headers: Mapping[str, str] | None = None,
    ttl_s: int | None = None,
    after: int | None = None,
) -> int:
    """Write a value for ``ttl_s`` and return its position; with ``after`` only behind the one at that position.

    Raises ``NotLast``, ``NoBucket``, ``NatsUnavailable``.
    """
    from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

    all_headers = dict(headers or {})
    if after is not None:
        all_headers["Nats-Expected-Last-Subject-Sequence"] = str(after)
    published = connection.jetstream.publish(subject, data, headers=all_headers, msg_ttl=ttl_s)
    try:
        return int((await connection.asked(f"writing {subject}", published)).seq)
    except NotFoundError as error:
        raise NoBucket(f"writing {subject}: {error}") from None
    except NatsUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, APIError) and cause.err_code in WRONG_LAST_SEQUENCE:
            raise NotLast(str(error)) from None
        if isinstance(cause, NoStreamResponseError):
            raise NoBucket(str(error)) from None
        raise


class Bucket:
    """A bucket that is made, and the connection to it, which is opened in the background: no caller waits for NATS."""

    def __init__(self, settings: NatsSettings, role: str, spec: BucketSpec, clock: Clock) -> None:
        """``role`` is what it is for: ``names``."""
        self.connection = NatsConnection(settings, f"poolgrid {role}", clock)
        self.spec = spec
        self._clock = clock
        self._what = f"connection to NATS for {role}"
        self._opening: asyncio.Task[None] | None = None
        self.is_open = asyncio.Event()

    def start(self, option: str) -> None:
        """Begin to connect; raises ``ValueError`` without nats-py, which ``option`` asked for."""
        if importlib.util.find_spec("nats") is None:
            raise ValueError(
                f"{option} is nats and nats-py is not installed: install poolgrid with the extra nats "
                "(extra nats: pip install '.[nats]' in a checkout)"
            )
        self._opening = supervised(self._open, self._what)

    async def _open(self) -> None:
        try:
            await self.connection.open()
        except NatsUnusable as error:
            end_process(self._what, error)
            return
        while not self.is_open.is_set():
            try:
                await make_bucket(self.connection, self.spec)
                self.is_open.set()
            except NatsUnavailable as error:
                log.warning("making the bucket %s failed (%s): it is tried again", self.spec.name, error)
                await asyncio.sleep(MAKE_AGAIN_S)

    async def close(self) -> None:
        if self._opening is not None:
            await cancel_all([self._opening])
        await self.connection.close()

    async def write(
        self,
        key: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        ttl_s: int | None = None,
    ) -> int:
        """Write as ``put`` does; a bucket that has gone with its servers is made again, and this value is lost."""
        self.connection.check()
        try:
            return await put(self.connection, self.spec.subject + key, data, headers, ttl_s)
        except NoBucket as error:
            await make_bucket(self.connection, self.spec)
            raise NotLast(f"there was no bucket: {error}") from None

    async def remove(self, key: str, ttl_s: int) -> None:
        await self.write(key, b"", {"KV-Operation": "DEL"}, ttl_s)

    def reader(self, keys: str, lease_s: float, messages_max: int) -> BucketReader:
        return BucketReader(self.connection, self.spec, keys, lease_s, messages_max, self._clock)


class BucketReader:
    """Reads some keys (a subject, with wildcards) repeatedly, and accepts no replica that is behind.

    ``lease_s`` is how long a process whose signs are read may be silent; the leader is asked ``FRESH_PARTS`` times as
    often.
    """

    def __init__(
        self, connection: NatsConnection, bucket: BucketSpec, keys: str, lease_s: float, messages_max: int, clock: Clock
    ) -> None:
        self._connection = connection
        self._bucket = bucket
        self._subject = bucket.subject + keys
        self._fresh_ms = 1000.0 * lease_s / FRESH_PARTS
        self._messages_max = messages_max
        self._clock = clock
        self._known = 0
        """The number of a message that an answer has to reach: what was shown, or what the leader had."""
        self._asked_ms = float("-inf")

    async def read(self, first: int) -> list[NatsMessage]:
        """Return the messages from a position on, in the bucket's order.

        Raises ``NatsUnavailable``, also for more than ``messages_max``, and when only replicas that are behind answer.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._asked_ms >= self._fresh_ms:
            self._known = await self._newest_of_leader()
            self._asked_ms = now_ms
        for _ in range(ANSWERS_MAX):
            messages = await self._read_once(first)
            newest = sequence_of(messages[-1]) if messages else first - 1
            # What was removed makes the leader's last message an older one.
            if newest >= self._known or newest >= await self._newest_of_leader():
                self._known = newest
                return messages
        raise NatsUnavailable(f"the replicas of the bucket {self._bucket.name} that answered are behind its leader")

    async def _newest_of_leader(self) -> int:
        """Return the number of the last message on the keys, 0 for none, as the stream's leader has it."""
        from nats.js.errors import NotFoundError

        stream = self._bucket.stream
        try:
            message = await self._connection.asked(
                f"asking the leader of {stream}", self._connection.jetstream.get_msg(stream, subject=self._subject)
            )
        except NotFoundError:
            return 0
        return int(message.seq)

    async def _read_once(self, first: int) -> list[NatsMessage]:
        found: list[NatsMessage] = []
        while len(found) <= self._messages_max:
            question = {"seq": first, "next_by_subj": self._subject, "batch": MESSAGES_PER_ANSWER}
            messages = await self._connection.batch(self._bucket.stream, question)
            found += messages
            # The servers may stop early, for what an answer may weigh.
            if not messages or messages[-1].headers.get("Nats-Num-Pending") == "0":
                return found
            first = sequence_of(messages[-1]) + 1
        raise NatsUnavailable(
            f"the bucket {self._bucket.name} has more than {self._messages_max} entries at {self._subject}"
        )


def sequence_of(message: NatsMessage) -> int:
    """Return the position of a message that was read."""
    return int(message.headers["Nats-Sequence"])


def key_of(message: NatsMessage, bucket: BucketSpec) -> str:
    """Return the key of a message that was read."""
    return message.headers["Nats-Subject"].removeprefix(bucket.subject)


def is_deleted(message: NatsMessage) -> bool:
    """Return whether a message says that its key is gone."""
    return "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers
