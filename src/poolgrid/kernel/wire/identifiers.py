"""The names by which processes name workers, blocks and positions in streams.

A *block hash* names the content of one block, a *sequence hash* a block and all blocks before it (a whole prefix), an
*engine hash* is an engine's own name for a block, mapped at the edge and never sent to routers: all u64. An *epoch* is
one life of a worker process, a *seq* the number of a batch within it, an *offset* the position of a record in a pool's
journal: u64, the last two from 0 without holes.

How requests and their dispatches are named between processes, so that no two are ever called the same.

Rules
    1. A request's id is ``NAME~UNIQUE``: the name that its client chose, and a part that the front end adds, which
       differs between all requests of all front ends. One whose client chose none is ``UNIQUE``, and perhaps ``-N``.
    2. A dispatch of a request is called ``ID`` the first time, then ``ID~1``, ``ID~2``, … (legs, migrations).
    3. A name has no ``~``, and ``UNIQUE`` neither; ``UNIQUE`` begins with a letter. So the id of one request is never
       that of another one, nor of another one's dispatch, whatever names clients choose.

Only rule 1's name is the client's. Answers show it, people look requests up by it, and ties and seeds are drawn from
it, so that the same name is drawn the same; nothing is found, cancelled or reserved by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final, NamedTuple, NewType

from msgspec import Meta

from poolgrid.kernel.wire.limits import (
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
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""An unsigned 32-bit integer: token ids, counts, sizes."""

Identifier = Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)]
"""A name that another process chose."""

Opaque = Annotated[bytes, Meta(max_length=OPAQUE_BYTES_MAX)]
"""Bytes that only their producer and their final consumer understand."""

Media = Annotated[bytes, Meta(max_length=MULTIMODAL_BYTES_MAX)]
"""An encoded ``poolgrid.kernel.wire.multimodal.MultimodalInput``."""

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
    """How far a source's event stream can be trusted; ``poolgrid.kernel.wire.feed`` explains each."""

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
    """A task (``poolgrid.kernel.wire.tasks``), whose answer is not tokens: vectors of texts."""
    IMAGE = 5
    """A task: images of a prompt."""
    VIDEO = 6
    """A task: a video of a prompt."""


STAGE_WORD: Final = {stage: stage.name.lower() for stage in Stage}
"""What people read."""


SEPARATOR: Final = "~"

OBJECT_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What stands before a request's name in the ids of OpenAI's and Anthropic's objects."""

SECRET_BYTES: Final = 12
"""Of the id of a response that is kept: ``resp_NAME_`` and so many random bytes, so that it cannot be guessed."""

_SECRET: Final = re.compile(rf"_[0-9a-f]{{{2 * SECRET_BYTES}}}$")

SEQUENCE: Final = 2
"""The :func:`nearness` of a request's sequence to the request's name."""

_INDEX: Final = re.compile(r"-\d+$")
"""The end of a sequence's name, of a request that has several."""


def internal_id(name: str, unique: str) -> str:
    """Return the id of a request whose client calls it ``name``."""
    return f"{name}{SEPARATOR}{unique}"


def dispatch_id(request_id: str, number: int) -> str:
    """Return what a request's dispatch ``number`` (from 0) is called."""
    return request_id if number == 0 else f"{request_id}{SEPARATOR}{number}"


def dispatch_of(name: str) -> tuple[str, int]:
    """Return the request and the number of a later dispatch; ``(name, 0)`` for what is called like no such one."""
    request_id, _, number = name.rpartition(SEPARATOR)
    if request_id and number.isascii() and number.isdecimal():
        return request_id, int(number)
    return name, 0


def request_of(name: str) -> str:
    """Return the request of a dispatch."""
    return dispatch_of(name)[0] if SEPARATOR in name else name


def name_of(request_id: str) -> str:
    """Return what the client calls a request, given its id or that of a dispatch; the unique part if it has no name."""
    return request_id.partition(SEPARATOR)[0]


def spellings(asked: str) -> tuple[str, ...]:
    """Return the names that ``asked`` may stand for, the likeliest first.

    People have the header's name, the ``id`` of an answer's body (``chatcmpl-NAME``), or what lists and logs show:
    a request's id, or that of one of its dispatches.
    """
    bare = next((asked.removeprefix(prefix) for prefix in OBJECT_PREFIXES if asked.startswith(prefix)), asked)
    without_secret = _SECRET.sub("", bare) if bare != asked else bare
    return tuple(dict.fromkeys(name for name in (asked, bare, without_secret, dispatch_of(bare)[0]) if name))


def kept_under(asked: str, known: Callable[[str], str | None]) -> list[str]:
    """Return the ids of the kept requests that ``asked`` means: one, or one for each sequence of a request with ``n``.

    ``known`` returns the id that is kept under an id or a client's name, ``None`` for none. The name of a request with
    several sequences, without an index, means all of them.
    """
    for name in spellings(asked):
        found = known(name)
        if found is not None:
            return [found]
        sequences: list[str] = []
        while (found := known(f"{name}-{len(sequences)}")) is not None:
            if sequences and not are_sequences(found, sequences[0]):
                break
            sequences.append(found)
        if sequences:
            return sequences
    return []


def nearness(asked: str, request_id: str) -> int | None:
    """Return how well ``asked`` names a request: 0 by its id, 1 by its client's name, ``SEQUENCE`` as one of several.

    ``None`` when it does not.
    """
    names = spellings(asked)
    name = name_of(request_id)
    if request_id in names:
        return 0
    if name in names:
        return 1
    return SEQUENCE if _INDEX.sub("", name) in names else None


def are_sequences(one: str, other: str) -> bool:
    """Return whether two ids are of sequences of the same request, and not of two whose names end in numbers."""
    return _INDEX.sub("", name_of(one)) == _INDEX.sub("", name_of(other)) and _unique(one) == _unique(other)


def _unique(request_id: str) -> str:
    return request_id.partition(SEPARATOR)[2]
