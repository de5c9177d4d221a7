"""Tensors between workers: embeddings go from an encode worker to the worker that computes the prompt.

A source *offers* a tensor and describes it; the description travels in ``disaggregated_params``, unread by routers. Who
takes it asks the source for it piece by piece (or reads its memory, where both have NIXL), then lets it go. A source
keeps what it offered for a lease that every question renews, so that nothing is kept in vain.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.wire.identifiers import U64, Identifier
from poolgrid.wire.limits import (
    NIXL_METADATA_BYTES_MAX,
    TENSOR_BYTES_MAX,
    TENSOR_CHUNK_BYTES_MAX,
    TENSOR_DIMENSIONS_MAX,
    TENSORS_PER_REQUEST_MAX,
)

TensorSize = Annotated[int, Meta(ge=0, le=TENSOR_BYTES_MAX)]
ChunkSize = Annotated[int, Meta(ge=1, le=TENSOR_CHUNK_BYTES_MAX)]


class NixlRegion(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a tensor lies in its source's memory, for a peer that reads it there."""

    agent: Identifier
    metadata: Annotated[bytes, Meta(max_length=NIXL_METADATA_BYTES_MAX)]
    """What the peer's NIXL agent needs to reach the source's."""
    address: U64


class TensorDescriptor(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """One offered tensor: what it is, and where to ask for it."""

    tensor_id: Identifier
    name: Identifier
    dtype: Identifier
    """NumPy's name of the element type, e.g. ``float16``; ``bfloat16`` travels as ``uint16``."""
    shape: Annotated[tuple[TensorSize, ...], Meta(max_length=TENSOR_DIMENSIONS_MAX)]
    size_bytes: TensorSize
    endpoint: Identifier
    """ZMQ endpoint of the source."""
    nixl: NixlRegion | None = None
    """Set by a source that offers its memory too."""


class TensorList(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The tensors of one request, in order."""

    tensors: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=TENSORS_PER_REQUEST_MAX)]


class FetchTensor(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Send me these bytes of a tensor; renews its lease. ``size`` 0 bytes are never asked for."""

    tensor_id: Identifier
    offset: TensorSize
    size: ChunkSize


class ReleaseTensor(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Received, or given up: the source may free it. Needs no answer."""

    tensor_id: Identifier


ToTensorSource = FetchTensor | ReleaseTensor


class TensorChunk(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The bytes of a tensor from ``offset`` on."""

    tensor_id: Identifier
    offset: TensorSize
    data: Annotated[bytes, Meta(max_length=TENSOR_CHUNK_BYTES_MAX)]


class TensorUnknown(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The source does not keep this tensor (any more), or it has no such bytes."""

    tensor_id: Identifier


FromTensorSource = TensorChunk | TensorUnknown
