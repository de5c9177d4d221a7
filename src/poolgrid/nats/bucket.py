"""Key-value buckets of JetStream: made where there is none, read from a position on without a consumer.

A bucket is a stream that keeps the latest message of each subject, which is a key.

Any replica of it may answer a question, also one that is behind. What it shows is believed only when it is as new as
what was shown before, and as what the stream's leader had a while ago (``fresh_ms``). A replica that has come to a
stand would otherwise have everybody be silent who goes on renewing a lease.
"""

from __future__ import annotations

from typing import NamedTuple

from poolgrid.nats.connection import NatsConnection, NatsMessage, NatsUnavailable
from poolgrid.process.clock import Clock

MESSAGES_PER_ANSWER = 512
"""Messages that one question is answered with at most; the servers also stop at some bytes."""

ANSWERS_MAX = 4
"""Replicas that are asked before what is known stays: of three, one that is behind is asked by chance each time."""

FRESH_PARTS = 3
"""Leases are renewed so many times until they are over: what is read is at most one of these parts of a lease old."""


class BucketSpec(NamedTuple):
    """What a bucket is."""

    name: str
    description: str
    bytes_max: int
    """What the servers keep; a message beyond it is refused, or makes the oldest go with ``drops_oldest``."""
    message_bytes_max: int
    replicas: int = 1
    drops_oldest: bool = False
    age_max_s: float = 0.0
    """How long a message stays; 0 = as long as there is room."""

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    @property
    def subject(self) -> str:
        return f"$KV.{self.name}."


async def make_bucket(connection: NatsConnection, bucket: BucketSpec) -> None:
    """Make a bucket where there is none; who may not needs one that is there. Raises ``NatsUnavailable``."""
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
        discard=api.DiscardPolicy.OLD if bucket.drops_oldest else api.DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_age=bucket.age_max_s,
        max_bytes=bucket.bytes_max,
        max_msg_size=bucket.message_bytes_max,
        num_replicas=bucket.replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
    )
    await connection.asked(f"making stream {bucket.stream}", jetstream.add_stream(config))


class BucketReader:
    """Reads some keys (a subject, with wildcards) again and again, and believes no replica that is behind.

    ``lease_s`` is how long somebody may be silent whose signs are read; the leader is asked ``FRESH_PARTS`` times as
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
    """Tell whether a message says that its key is gone."""
    return "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers
