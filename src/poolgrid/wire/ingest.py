"""The push protocol by which a worker hands its events to the consolidator (worker DEALER, consolidator ROUTER).

1. The worker opens with ``Hello`` (again after every silence); the consolidator answers ``Welcome`` with the next
   sequence number it wants, or ``JoinRefused``.
2. The worker sends ``EventBatch``es, each encoded on its own and sent as one frame behind the tag frame ``b"B"``;
   control messages come behind ``b"C"``. The consolidator answers ``Acknowledged`` once a batch is in the journal.
3. The worker keeps what is not acknowledged. ``Resend`` asks for it again from a sequence number; when the worker's
   bounded outbox no longer reaches back that far it sends a snapshot of itself (``SnapshotBegan`` ...) instead.
4. ``Heartbeat`` keeps the worker's lease when it has no events; ``Goodbye`` ends it.
5. Before ``Hello``, while it loads, a worker may report it behind another tag frame (``poolgrid.wire.loading``).
"""

from __future__ import annotations

import msgspec

from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import U32, U64, Identifier, Text

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
