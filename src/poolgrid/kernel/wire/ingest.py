"""The push protocol by which a worker hands its events to the consolidator (worker DEALER, consolidator ROUTER).

1. The worker opens with ``Hello`` (again after every silence); the consolidator answers ``Welcome`` with the next
   sequence number it wants, or ``JoinRefused``.
2. The worker sends ``EventBatch``es, each encoded on its own and sent as one frame behind the tag frame ``b"B"``;
   control messages come behind ``b"C"``. The consolidator answers ``Acknowledged`` once a batch is in the journal.
3. The worker keeps what is not acknowledged. ``Resend`` asks for it again from a sequence number; when the worker's
   bounded outbox no longer reaches back that far it sends a snapshot of itself (``SnapshotBegan`` ...) instead.
4. ``Heartbeat`` keeps the worker's lease when it has no events; ``Goodbye`` ends it.
5. Before ``Hello``, while it loads, a worker may report it behind another tag frame.

Reports of a worker that still loads: it is no member of its pool yet, and nothing of it is in the journal.

1. A worker that loads sends ``LoadingWorker`` behind the tag frame ``LOADING_FRAME`` to the consolidator, again and
   again (``TELL_EVERY_S``). There is no answer. With ``Hello`` it becomes a member, and stops sending.
2. The consolidator keeps the last message of each for ``LOADING_TTL_S``, and publishes all of them with the feed, under
   ``LOADING_TOPIC``, whenever one arrives. Readers keep the last list as long.
3. What is lost is sent again. Nothing is decided by it: a worker that loads cannot be chosen.

Which consolidator writes a pool's journal, where several may: the entry by which one claims it.

The entry lies in the key-value bucket of the pool and goes when its writer does not renew it in time. Workers push to
the ``ingest`` of the active consolidator, and routers follow its ``feed`` and ask its ``query``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.feed import FEED_TOPIC
from poolgrid.kernel.wire.identifiers import U32, U64, Identifier, Text

BATCH_FRAME = b"B"
CONTROL_FRAME = b"C"


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Open (or resume) the stream of one worker rank."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    card: WorkerCard
    next_seq: U64
    """The sequence number of the next batch the worker will make."""
    oldest_seq: U64
    """The oldest batch the worker can still send."""


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker lives; ``next_seq`` lets the consolidator notice a batch that was lost at the end."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    next_seq: U64


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker ends in good order, all its batches sent."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    reason: Text


ToConsolidator = Hello | Heartbeat | Goodbye


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker is a member; send batches from ``next_seq`` on."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    next_seq: U64
    consolidator_id: Identifier
    """Id of the running consolidator: after a change the worker sends ``Hello`` again."""
    lease_ms: U32
    """Silence after which the worker counts as gone."""


class Acknowledged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Every batch below ``next_seq`` is in the journal and may be forgotten."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    next_seq: U64
    consolidator_id: Identifier


class Resend(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Batches from ``from_seq`` on are missing: send them again, or a snapshot when they are gone."""

    worker_id: Identifier
    dp_rank: U32
    epoch: U64
    from_seq: U64


class Unknown(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The consolidator does not know this epoch (it restarted, or the lease ran out): send ``Hello`` again."""

    worker_id: Identifier
    dp_rank: U32


class JoinRefused(msgspec.Struct, array_like=True, frozen=True, tag="Refused"):
    """The worker may not join, and why; it should report that and stop trying at full speed."""

    worker_id: Identifier
    dp_rank: U32
    reason: Text


FromConsolidator = Welcome | Acknowledged | Resend | Unknown | JoinRefused


LOADING_FRAME = b"L"

LOADING_TOPIC = FEED_TOPIC + b".loading"

TELL_EVERY_S = 1.0
"""People look at it; a load takes minutes."""

LOADING_TTL_S = 5.0
"""Five words in a row are lost before a worker that loads counts as gone."""

LOADING_WORKERS_MAX = 4096
"""Loading at a time in one pool; of more the rest is not shown."""


class LoadingWorker(msgspec.Struct, array_like=True, frozen=True):
    """One worker that loads."""

    worker_id: Identifier
    model: Identifier
    """As far as its settings have it."""
    role: Identifier
    phase: Identifier
    """``wait``, ``fetch``, ``verify``, ``load``, ``warm_up``."""
    done_bytes: U64
    total_bytes: U64
    """Of the phase; 0 = not reported."""


class LoadingWorkers(msgspec.Struct, array_like=True, frozen=True):
    """All that load now."""

    workers: Annotated[list[LoadingWorker], Meta(max_length=LOADING_WORKERS_MAX)]


class Leader(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The consolidator that is active."""

    consolidator_id: Identifier
    ingest: str = ""
    """Where workers push; empty while it reads the journal."""
    feed: str = ""
    """Where routers subscribe."""
    query: str = ""
    """Where routers ask for snapshots and records."""
