"""The select plane: a global router's DEALER socket talks to a pool router's ROUTER socket in these messages.

1. The global router asks ``AskStatus`` again and again; ``PoolStatus`` has the pool's models and its load.
   It is also how each learns that the other lives.
2. ``Select`` chooses a worker and reserves it, in one go; the answer is ``Selected`` or ``SelectRefused``. ``Probe``
   asks what a ``Select`` would find and reserves nothing.
3. A reservation counts as load until the worker's own events take over. Unconfirmed, it ends after its lease; ``Renew``
   extends it, ``Release`` ends it at once. Neither is answered.
4. Token ids never cross the select plane: a prompt is its length and the sequence hashes of its whole blocks, made with
   the block size and hash spec that ``PoolStatus`` names.

``ask`` is the asker's own number for a question; the answer repeats it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.card import NO_CHAT_SPEC, ChatSpec, Inabilities, MediaSpec
from poolgrid.kernel.wire.identifiers import U32, U64, Identifier, PackedHashes, Role, Stage, Text
from poolgrid.kernel.wire.limits import (
    LORAS_PER_WORKER_MAX,
    MEDIA_KINDS_MAX,
    POOL_MODELS_MAX,
    REFUSAL_REASONS_MAX,
    RENEWALS_MAX,
    WORKERS_EXCLUDED_MAX,
)
from poolgrid.kernel.wire.trace_context import TraceContext


class WorkerRank(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A routing target by name."""

    worker_id: Identifier
    dp_rank: U32 = 0


ALL_RANKS = 2**32 - 1
"""Stands for every rank of a worker among those that are excluded."""


class Select(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Choose a worker for one dispatch and reserve it."""

    ask: U64
    request_id: Identifier
    """Id of the dispatch, by which the worker's events will name it."""
    model: Identifier
    stage: Stage
    isl: U32
    """Prompt tokens, those of a migrated request's output included."""
    sequence_hashes: PackedHashes = b""
    """Whole blocks of the prompt, in order; empty when they are not known."""
    excluded: Annotated[tuple[WorkerRank, ...], Meta(max_length=WORKERS_EXCLUDED_MAX)] = ()
    """Workers that failed this request."""
    priority: int = 0
    lease_ms: U32 = 0
    """Wanted lease of the reservation; 0 = as long as the pool gives."""
    media_hashes: PackedHashes = b""
    """u64 hashes of the request's media, in order."""
    media_kinds: Annotated[tuple[Identifier, ...], Meta(max_length=MEDIA_KINDS_MAX)] = ()
    """Kinds of media that the worker must take."""
    trace: TraceContext | None = None
    """The asker's span of this question, for a request that is traced; ``None`` without tracing."""
    seed: U64 = 0
    """Of the hashes (``poolgrid.kernel.wire.hashing.hash_seed``) of a request with an adapter or a cache salt; 0 =
    neither."""


class Probe(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """What would a ``Select`` find? Nothing is reserved."""

    ask: U64
    model: Identifier
    stage: Stage
    isl: U32
    sequence_hashes: PackedHashes = b""


class Reservation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One reserved dispatch."""

    request_id: Identifier
    worker: WorkerRank


class Renew(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """These dispatches are still needed: their leases begin again."""

    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=RENEWALS_MAX)]


class Release(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """A dispatch is over, or was never sent: it is no load any more."""

    reservation: Reservation


class AskStatus(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """How is the pool?"""

    ask: U64


ToPool = Select | Probe | Renew | Release | AskStatus


class Selected(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """A worker is chosen and reserved; send it the request."""

    ask: U64
    worker: WorkerRank
    request_endpoint: Identifier
    """The worker's request plane."""
    epoch: U64
    overlap_blocks: U32
    """Leading blocks of the prompt that the worker is thought to hold."""
    block_size: U32
    reason: Text
    """Short reason code of the choice."""
    lease_ms: U32
    """How long the reservation stands unconfirmed."""


class SelectRefusal(StrEnum):
    """Why a pool gives no worker; what the asker does next differs."""

    BUSY = "busy"
    """Some worker will have room: ask again later, or another pool now."""
    DRAINING = "draining"
    """Its workers take nothing new: another pool."""
    NO_WORKER = "no_worker"
    """None can serve this: another pool."""
    NOT_READY = "not_ready"
    """Its router is rebuilding its state: another pool, and this one has failed."""
    POLICY_FAILED = "policy_failed"
    """The pool's policy raised: another pool."""


class SelectRefused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """No worker is given."""

    ask: U64
    code: SelectRefusal
    message: Text
    retry_after_s: float | None = None
    reasons: Annotated[tuple[tuple[WorkerRank, Text], ...], Meta(max_length=REFUSAL_REASONS_MAX)] = ()
    """Of each worker why not; beyond the limit the rest is left off."""


class Probed(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """What a ``Select`` would have found."""

    ask: U64
    code: SelectRefusal | None
    """``None`` when a worker would be given, else as in ``SelectRefused``."""
    overlap_blocks: U32 = 0
    """Leading blocks that the worker it would choose holds."""
    best_overlap_blocks: U32 = 0
    """The most that any worker of the stage holds."""
    block_size: U32 = 0
    prefill_tokens: U64 = 0
    """Prompt tokens that this worker has still to compute for others."""
    requests: U32 = 0
    """Requests on this worker."""


class RoleStatus(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The workers of one model and role."""

    role: Role
    ready: U32
    draining: U32
    unreachable: U32
    """Members that the pool's router cannot talk to."""
    requests: U32
    """Requests on ready workers, reserved ones included."""
    capacity: U32
    """Requests that ready workers are given at a time."""
    decodes_only: bool = False
    """Whether none of them takes a whole request."""


class ModelStatus(msgspec.Struct, array_like=True, frozen=True):
    """One model that the pool serves."""

    model: Identifier
    block_size: U32
    hash_spec: Identifier
    max_sequence_length: U32
    roles: Annotated[tuple[RoleStatus, ...], Meta(max_length=len(Role))]
    loras: Annotated[tuple[Identifier, ...], Meta(max_length=LORAS_PER_WORKER_MAX)] = ()
    media: MediaSpec = MediaSpec()
    """Media that it takes, as its workers' cards declare."""
    chat: ChatSpec = NO_CHAT_SPEC
    """How its chats are written and read, as its workers' cards declare."""
    aliases: Annotated[tuple[Identifier, ...], Meta(max_length=LORAS_PER_WORKER_MAX)] = ()
    """Further names of the model."""
    inabilities: Inabilities = ()
    """What none of its workers can do."""
    server_kind: Identifier = ""
    """The kind of the engine servers that get requests as their clients wrote them, ``openai`` where kinds that are not
    known are among them; empty = its workers take tokens."""


class PoolStatus(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """What the pool serves and how busy it is, at one moment."""

    ask: U64
    ready: bool
    """Whether the pool's router knows its pool; without it ``models`` is empty."""
    models: Annotated[tuple[ModelStatus, ...], Meta(max_length=POOL_MODELS_MAX)] = ()
    waiting_requests: U32 = 0
    """Requests in the pool router's own queue."""
    saturation: float = 0.0
    """Requests on ready workers over what they are given at a time."""
    retry_after_s: float | None = None
    loading_workers: U32 = 0
    """Workers that are not in the pool yet because they still load."""


FromPool = Selected | SelectRefused | Probed | PoolStatus
