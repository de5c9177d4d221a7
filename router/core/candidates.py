"""The workers that may serve a request, side by side: what a policy looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from poolgrid.wire.identifiers import Stage, WorkerKey
from poolgrid.wire.request_ids import name_of

FloatArray = NDArray[np.float64]

Column = FloatArray | Sequence[float]
"""One number per candidate, as a record keeps it."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a request."""

    request_id: str
    model: str
    isl: int
    """Prompt tokens."""
    block_size: int
    blocks: int
    """Blocks of the prompt, a partial last one included."""
    priority: int = 0
    stage: Stage = Stage.WHOLE
    """What the chosen worker will be asked to do."""
    media: tuple[int, ...] = ()
    """u64 hashes of its media, in order."""
    media_kinds: tuple[str, ...] = ()
    """Kinds of media that the worker must take."""
    seed: int = 0
    """Of its blocks' hashes (``poolgrid.wire.hashing.hash_seed``), where how long they stay is learnt; else 0."""

    @property
    def drawn_by(self) -> str:
        """Return what samples are drawn by: the name that the client chose, the same in every process and run."""
        return name_of(self.request_id)

    @property
    def tie_key(self) -> str:
        """Return what ties are broken by: the name, or the media, so that equal media meet among equal workers."""
        return " ".join(map(str, self.media)) if self.media else self.drawn_by


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns of equal length, one row per worker, in the order of worker keys."""

    workers: tuple[WorkerKey, ...]
    prefill_tokens: FloatArray
    """Prompt tokens accepted and not yet computed."""
    active_blocks: FloatArray
    """Blocks of active requests."""
    requests: FloatArray
    """Active requests, waiting ones included."""
    device_overlap: FloatArray
    """Leading blocks of the prompt already in device memory."""
    host_overlap: FloatArray
    disk_overlap: FloatArray

    def __len__(self) -> int:
        """Return the number of candidates (at least 1 when a policy is asked)."""
        return len(self.workers)


class FewCandidates(msgspec.Struct):
    """The same columns of a handful of workers, as plain numbers: walking through them costs less than an array."""

    workers: tuple[WorkerKey, ...]
    prefill_tokens: Sequence[float]
    active_blocks: Sequence[float]
    requests: Sequence[float]
    device_overlap: Sequence[float]
    host_overlap: Sequence[float]
    disk_overlap: Sequence[float]

    def __len__(self) -> int:
        """Return the number of candidates, at least 1."""
        return len(self.workers)
