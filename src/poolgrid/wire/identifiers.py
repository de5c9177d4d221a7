"""The names by which processes name workers, blocks and positions in streams.

A *block hash* names the content of one block, a *sequence hash* a block and all blocks before it (a whole prefix), an
*engine hash* is an engine's own name for a block, mapped at the edge and never sent to routers: all u64. An *epoch* is
one life of a worker process, a *seq* the number of a batch within it, an *offset* the position of a record in a pool's
journal: u64, the last two from 0 without holes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final, NamedTuple, NewType

from msgspec import Meta

from poolgrid.wire.limits import (
    BLOCKS_PER_EVENT_MAX,
    GROUPS_PER_WORKER_MAX,
    IDENTIFIER_BYTES_MAX,
    MULTIMODAL_BYTES_MAX,
    OPAQUE_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    TEXT_CHARS_MAX,
    U32_MAX,
)

U64 = Annotated[int, Meta(ge=0)]
"""An unsigned 64-bit integer; msgpack itself cannot carry a larger one."""

U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
"""An unsigned 32-bit integer: token ids, counts, sizes."""

Identifier = Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)]
"""A name that another process chose."""

Opaque = Annotated[bytes, Meta(max_length=OPAQUE_BYTES_MAX)]
"""Bytes that only their producer and their final consumer understand."""

Media = Annotated[bytes, Meta(max_length=MULTIMODAL_BYTES_MAX)]
"""An encoded ``poolgrid.wire.multimodal.MultimodalInput``."""

Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
"""Words for people: a reason, an error message."""

PackedHashes = Annotated[bytes, Meta(max_length=8 * BLOCKS_PER_EVENT_MAX)]
"""u64 little-endian hashes, 8 bytes each; the codec checks that the length is a multiple of 8."""

GroupNumber = Annotated[int, Meta(ge=0, le=GROUPS_PER_WORKER_MAX)]
"""A KV group of a worker's model; 0 is full attention."""

PackedTokens = Annotated[bytes, Meta(max_length=4 * PROMPT_TOKENS_MAX)]
"""u32 little-endian token ids, 4 bytes each; the codec checks that the length is a multiple of 4."""

WorkerId = NewType("WorkerId", str)
"""Name of one worker process within a pool; stable over restarts."""


class WorkerKey(NamedTuple):
    """A routing target: one data-parallel rank of one worker process."""

    worker_id: WorkerId
    dp_rank: int = 0

    def __str__(self) -> str:
        return self.worker_id if self.dp_rank == 0 else f"{self.worker_id}/{self.dp_rank}"


class Tier(IntEnum):
    """Where a block lies, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class StreamState(IntEnum):
    """How far a source's event stream can be trusted; ``poolgrid.wire.feed`` explains each."""

    SYNCING = 0
    LIVE = 1
    REPLAYING = 2
    SNAPSHOTTING = 3
    STALE = 4
    ABSENT = 5
    FORMER = 6


class Role(IntEnum):
    """What a worker does with a request."""

    AGGREGATED = 0
    PREFILL = 1
    DECODE = 2
    ENCODE = 3
    EMBEDDING = 4
    IMAGE = 5
    VIDEO = 6


class Stage(IntEnum):
    """Which part of a request a worker is asked to do."""

    WHOLE = 0
    PREFILL = 1
    """Context only: compute the prompt, generate one token, keep the KV blocks for the decode worker."""
    DECODE = 2
    """Generation only: take the KV blocks that a prefill worker offers, continue after its first token."""
    ENCODE = 3
    """Media only: compute their embeddings and keep them for the worker that computes the prompt."""
    EMBEDDING = 4
    """A task (``poolgrid.wire.tasks``), whose answer is not tokens: vectors of texts."""
    IMAGE = 5
    """A task: images of a prompt."""
    VIDEO = 6
    """A task: a video of a prompt."""


STAGE_WORD: Final = {stage: stage.name.lower() for stage in Stage}
"""What people read."""
