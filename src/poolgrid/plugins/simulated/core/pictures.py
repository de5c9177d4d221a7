"""What the simulated engine makes of tasks: vectors, images and videos that can be told apart, in real formats. Pure.

Equal tasks give equal results. A vector has length 1. An image is a PNG whose tiles have colours drawn from prompt and
seed; a video is an MP4 file whose frames are such images, as QuickTime's codec ``png `` has them.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.tasks import VisualTask

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
    """Return a box with a version, 0, and flags."""
    return _box(kind, struct.pack(">I", flags), content)
