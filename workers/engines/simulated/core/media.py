"""What the simulated engine makes of media: embeddings that depend on every byte, and tokens that depend on those.

An image's embeddings are drawn from a digest of its bytes, so the same bytes give the same embeddings on every worker,
and any other bytes others. Their digest enters the generation of tokens (``Sequence``): a medium that is missing,
swapped or altered on its way over an encode worker changes the whole answer, and a test sees it.

What the simulated engine makes of tasks: vectors, images and videos that can be told apart, in real formats. Pure.

Equal tasks give equal results. A vector has length 1. An image is a PNG whose tiles have colours drawn from prompt and
seed; a video is an MP4 file whose frames are such images, as QuickTime's codec ``png `` has them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.wire.identifiers import U32, U64
from poolgrid.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media, media_hash_u64
from poolgrid.wire.requests import Generate
from poolgrid.wire.tasks import VisualTask
from poolgrid.workers.core.refusal import BrokenError, RefusedError, UnsupportedError

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


DIMENSIONS = 384
"""Numbers of a vector, as small models for embeddings have."""

TILES = 8
"""Tiles along a side of an image."""


def vector(text: str | tuple[int, ...], dimensions: int) -> bytes:
    """Return the vector of a text, as float32."""
    numbers = np.random.default_rng(stable_u64(str(text))).standard_normal(dimensions)
    return bytes((numbers / np.linalg.norm(numbers)).astype("<f4"))


def image(task: VisualTask, width: int, height: int, number: int = 0) -> bytes:
    """Return the image of a prompt, or one of several, as PNG."""
    seed = stable_u64(f"{task.prompt}\0{task.negative_prompt}\0{task.seed}\0{number}\0{task.reference!r}")
    tiles = np.random.default_rng(seed).integers(0, 256, (TILES, TILES, 3), np.uint8)
    rows = tiles[np.arange(height) * TILES // height][:, np.arange(width) * TILES // width]
    # Each row begins with the number of its filter: none.
    scanlines = np.concatenate([np.zeros((height, 1), np.uint8), rows.reshape(height, 3 * width)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(scanlines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def video(task: VisualTask, width: int, height: int, frames: int, frame_rate: float) -> bytes:
    """Return a video of as many frames, each another image, as MP4."""
    samples = [image(task, width, height, number) for number in range(frames)]
    ticks = 1000
    per_frame = max(1, round(ticks / frame_rate))
    duration = frames * per_frame
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    entry = _box(
        b"png ",
        bytes(6)
        + struct.pack(">H16xHHIIIH", 1, width, height, 0x480000, 0x480000, 0, 1)
        + bytes(32)
        + b"\0\x18\xff\xff",
    )
    header = _box(b"ftyp", b"qt  " + struct.pack(">I", 512) + b"qt  isommp41")
    table = _box(
        b"stbl",
        _full(b"stsd", struct.pack(">I", 1) + entry),
        _full(b"stts", struct.pack(">III", 1, frames, per_frame)),
        _full(b"stsc", struct.pack(">IIII", 1, 1, frames, 1)),
        _full(b"stsz", struct.pack(">II", 0, frames) + b"".join(struct.pack(">I", len(each)) for each in samples)),
        _full(b"stco", struct.pack(">II", 1, len(header) + 8)),
    )
    media = _box(
        b"mdia",
        _full(b"mdhd", struct.pack(">IIIIHH", 0, 0, ticks, duration, 0x55C4, 0)),
        _full(b"hdlr", bytes(4) + b"vide" + bytes(12) + b"\0"),
        _box(
            b"minf",
            _full(b"vmhd", bytes(8), flags=1),
            _box(b"dinf", _full(b"dref", struct.pack(">I", 1) + _full(b"url ", b"", flags=1))),
            table,
        ),
    )
    track = _full(
        b"tkhd",
        struct.pack(">IIIII8xhhhH", 0, 0, 1, 0, duration, 0, 0, 0, 0)
        + matrix
        + struct.pack(">II", width << 16, height << 16),
        flags=3,
    )
    movie = _full(
        b"mvhd",
        struct.pack(">IIIIIH10x", 0, 0, ticks, duration, 0x10000, 0x100) + matrix + bytes(24) + struct.pack(">I", 2),
    )
    return header + _box(b"mdat", *samples) + _box(b"moov", movie, _box(b"trak", track, media))


def _box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I", len(data) + 8) + kind + data


def _full(kind: bytes, content: bytes, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", flags), content)
