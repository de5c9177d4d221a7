"""Key-value buckets of JetStream: made where there is none, read from a position on without a consumer.

A bucket is a stream that keeps the latest message of each subject, which is a key.
"""

from __future__ import annotations

from typing import NamedTuple

from poolgrid.runtime.nats_connection import NatsConnection, NatsMessage, NatsUnavailable

MESSAGES_PER_ANSWER = 512
"""Messages that one question is answered with at most; the servers also stop at some bytes."""


class Bucket(NamedTuple):
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
        """Return the name of its stream."""
        return f"KV_{self.name}"

    @property
    def subject(self) -> str:
        """Return what its keys begin with."""
        return f"$KV.{self.name}."


async def make_bucket(connection: NatsConnection, bucket: Bucket) -> None:
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


async def read_from(
    connection: NatsConnection, bucket: Bucket, keys: str, first: int, messages_max: int
) -> list[NatsMessage]:
    """Return the messages of some keys (a subject, with wildcards) from a position on, in the bucket's order.

    Raises ``NatsUnavailable``, also for more than ``messages_max``.
    """
    found: list[NatsMessage] = []
    while len(found) <= messages_max:
        question = {"seq": first, "next_by_subj": bucket.subject + keys, "batch": MESSAGES_PER_ANSWER}
        messages = await connection.batch(bucket.stream, question)
        found += messages
        # The servers may stop early, for what an answer may weigh, and say how many are left only on the way.
        if not messages:
            return found
        first = sequence_of(messages[-1]) + 1
    raise NatsUnavailable(f"the bucket {bucket.name} has more than {messages_max} entries at {keys}")


def sequence_of(message: NatsMessage) -> int:
    """Return the position of a message that was read."""
    return int(message.headers["Nats-Sequence"])


def key_of(message: NatsMessage, bucket: Bucket) -> str:
    """Return the key of a message that was read."""
    return message.headers["Nats-Subject"].removeprefix(bucket.subject)


def is_deleted(message: NatsMessage) -> bool:
    """Tell whether a message says that its key is gone."""
    return "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers
