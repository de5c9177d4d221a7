"""What the simulated engine makes of media: embeddings that depend on every byte, and tokens that depend on those.

An image's embeddings are drawn from a digest of its bytes, so the same bytes give the same embeddings on every worker,
and any other bytes others. Their digest enters the generation of tokens (``Sequence``): a medium that is missing,
swapped or altered on its way over an encode worker changes the whole answer, and a test sees it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.identifiers import U32, U64
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media, media_hash_u64
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.refusal import BrokenError, RefusedError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

EMBEDDING_WIDTH = 32
"""Numbers per token; real models have thousands, and nothing here depends on it."""

Embeddings: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
"""NumPy is imported by workers with media only: it is a fifth of the CPU that a worker takes to start."""


class MediaMark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a sequence keeps of one medium."""

    embedding_digest: U64
    media_hash: U64
    """As it enters the hashes of blocks."""
    first_token: U32
    token_count: U32


def embed(data: bytes, tokens: int) -> Embeddings:
    """Return the embeddings of an image, ``(tokens, EMBEDDING_WIDTH)``."""
    import numpy as np

    return np.random.default_rng(xxh3_64_intdigest(data)).random((tokens, EMBEDDING_WIDTH), np.float32)


def read_media(request: Generate) -> MultimodalInput | None:
    """Return a request's media; raises ``RefusedError`` when they are not what they should be."""
    if request.multimodal is None:
        return None
    try:
        media = codec.multimodal.decode(request.multimodal)
    except DecodeError as error:
        raise RefusedError(str(error)) from None
    prompt_tokens = len(request.token_ids) // TOKEN_BYTES
    for place, item in enumerate(media.items):
        if not item.token_count or item.first_token + item.token_count > prompt_tokens:
            raise RefusedError(
                f"medium {place} stands at tokens {item.first_token} to {item.first_token + item.token_count} of a "
                f"prompt of {prompt_tokens}; the simulated engine needs its place (tokens_per_image on the card)"
            )
        if item.data and digest_media(item.data) != item.media_hash:
            raise RefusedError(f"medium {place} is not the bytes that its hash names")
    return media


def images_of(media: MultimodalInput) -> list[MediaItem]:
    """Return the items that an encode worker computes embeddings for, in order."""
    return [item for item in media.items if item.kind is MediaKind.IMAGE]


def mark_media(media: MultimodalInput, embeddings: Sequence[Embeddings] | None = None) -> tuple[MediaMark, ...]:
    """Return the marks of media, from their bytes or, for images, from embeddings that an encode worker made.

    Raises ``RefusedError`` when bytes are missing or the embeddings do not fit.
    """
    images = images_of(media)
    if embeddings is not None and [tensor.shape for tensor in embeddings] != [
        (item.token_count, EMBEDDING_WIDTH) for item in images
    ]:
        raise RefusedError(
            f"the embeddings have the shapes {[tensor.shape for tensor in embeddings]}, the {len(images)} images of "
            f"the request take {[item.token_count for item in images]} tokens"
        )
    arrived = iter(embeddings or ())
    marks: list[MediaMark] = []
    for place, item in enumerate(media.items):
        if item.kind is MediaKind.IMAGE:
            tensor = next(arrived, None)
            if tensor is None:
                if not item.data:
                    raise BrokenError(f"medium {place} came without its bytes and without embeddings")
                tensor = embed(item.data, item.token_count)
            digest = xxh3_64_intdigest(tensor.tobytes())  # in C's order, however it lies in memory
        else:
            digest = xxh3_64_intdigest(item.data)
        marks.append(MediaMark(digest, media_hash_u64(item.media_hash), item.first_token, item.token_count))
    return tuple(marks)


def touched_blocks(marks: Sequence[MediaMark], block_size: int) -> Mapping[int, Sequence[int]]:
    """Map each block's position to the hashes of the media that touch it."""
    touched: dict[int, list[int]] = {}
    for mark in marks:
        last = mark.first_token + mark.token_count - 1
        for block in range(mark.first_token // block_size, last // block_size + 1):
            touched.setdefault(block, []).append(mark.media_hash)
    return touched


def key_of(marks: Sequence[MediaMark]) -> bytes:
    """Return what media add to the bytes that tokens are generated from; empty without any."""
    return struct.pack(f"<{len(marks)}Q", *(mark.embedding_digest for mark in marks))


def marks_of(request: Generate, embeddings: Sequence[Embeddings] | None, takes_media: bool) -> tuple[MediaMark, ...]:
    """Return the marks of a request's media; raises ``RefusedError``."""
    media = None
    if request.multimodal is not None:
        if not takes_media:
            raise UnsupportedError("the request has media, and this worker takes text only")
        media = read_media(request)
    return () if media is None else mark_media(media, embeddings)
