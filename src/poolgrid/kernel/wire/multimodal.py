"""The media of a request, as they travel in ``Generate.multimodal``: resolved, checked, hashed, in prompt order.

The front end makes a ``MultimodalInput``; routers pass it on; a worker decodes it
(``poolgrid.kernel.wire.codec.multimodal``). Nothing in it is a reference any more: a worker never opens a URL or a path
that a client wrote.

``media_hash`` is the 32-byte BLAKE3 digest of the raw bytes as they were fetched. Its first eight bytes, little-endian,
are the u64 that enters the hashes of the KV blocks that the item's tokens touch (``poolgrid.kernel.wire.hashing``):
equal media share cached blocks, different media never do, however alike the tokens are that stand for them.

Tensors between workers: embeddings go from an encode worker to the worker that computes the prompt.

A source *offers* a tensor and describes it; the description travels in ``disaggregated_params``, unread by routers. Who
takes it asks the source for it piece by piece (or reads its memory, where both have NIXL), then lets it go. A source
keeps what it offered for a lease that every question renews, so that nothing is kept in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from poolgrid.kernel.wire.identifiers import U32, U64, Identifier
from poolgrid.kernel.wire.limits import (
    MEDIA_ITEMS_MAX,
    MULTIMODAL_BYTES_MAX,
    NIXL_METADATA_BYTES_MAX,
    PROMPT_CHARS_MAX,
    TENSOR_BYTES_MAX,
    TENSOR_CHUNK_BYTES_MAX,
    TENSOR_DIMENSIONS_MAX,
    TENSORS_PER_REQUEST_MAX,
)

MEDIA_HASH_BYTES = 32
"""Length of a BLAKE3 digest."""


class MediaKind(StrEnum):
    """What the bytes of an item are."""

    IMAGE = "image"
    """An encoded image of the type ``media_type`` (PNG, JPEG, …)."""
    EMBEDDINGS = "embeddings"
    """A file of precomputed embeddings: ``.safetensors``."""


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One medium of a prompt."""

    kind: MediaKind
    data: Annotated[bytes, Meta(max_length=MULTIMODAL_BYTES_MAX)]
    """The raw bytes; empty after an encode leg, whose ``disaggregated_params`` stand for them."""
    media_type: Identifier
    """``image/png``, ``application/x-safetensors``, … by content, never by what a client or server claimed."""
    media_hash: Annotated[bytes, Meta(min_length=MEDIA_HASH_BYTES, max_length=MEDIA_HASH_BYTES)]
    """BLAKE3 of the raw bytes."""
    first_token: U32 = 0
    """Position among ``Generate.token_ids`` of the first token that stands for the item."""
    token_count: U32 = 0
    """How many tokens stand for it; 0 = not known before the engine has looked at it."""
    width: U32 = 0
    """Pixels of an image, by its header; 0 = no image, or not known."""
    height: U32 = 0


class MultimodalInput(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Input of a multimodal engine in addition to the token ids."""

    prompt_text: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)]
    """The rendered prompt, with one placeholder per item as the model's chat template writes it."""
    items: Annotated[tuple[MediaItem, ...], Meta(min_length=1, max_length=MEDIA_ITEMS_MAX)]
    """In the order of their placeholders."""


def digest_media(data: bytes | memoryview) -> bytes:
    """Return the BLAKE3 digest of a medium's raw bytes (32 bytes)."""
    return blake3(data).digest()


def media_hash_u64(media_hash: bytes) -> int:
    """Return the u64 that stands for a medium in block hashes: the digest's first 8 bytes, little-endian."""
    return int.from_bytes(media_hash[:8], "little")


def media_hashes_of_blocks(items: Sequence[MediaItem], block_size: int) -> dict[int, list[int]]:
    """Map each block's position to the u64 hashes of the items whose tokens touch it.

    ``block_size`` is in tokens. Items of unknown ``token_count`` touch nothing: see ``known_tokens``.
    """
    touched: dict[int, list[int]] = {}
    for item in items:
        if item.token_count:
            last = item.first_token + item.token_count - 1
            for block in range(item.first_token // block_size, last // block_size + 1):
                touched.setdefault(block, []).append(media_hash_u64(item.media_hash))
    return touched


def known_tokens(items: Sequence[MediaItem], prompt_tokens: int) -> int:
    """Return how many leading tokens of a prompt are those that the engine will see.

    That is all ``prompt_tokens`` of them, unless the token count of an item is not known: from there on the engine
    counts differently, and no block may be hashed.
    """
    return min((item.first_token for item in items if item.token_count == 0), default=prompt_tokens)


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
