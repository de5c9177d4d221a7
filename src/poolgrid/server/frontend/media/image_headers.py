"""What an image says of itself before its pixels: format and size in pixels. Pure, and bounded in time and memory.

A decoder is not asked, because one that stands in the way of hostile files must be bounded, and Pillow's parsers are
not: a JPEG of fill bytes costs it 300 ns a byte, and what a file names it reads, copies and warns about. Rules here:

    1. No loop takes more than ``STEPS_MAX`` steps. A step costs a constant, or one call of C that passes over bytes
       which no other step passes over. So an image costs at most about 20 ms and one pass over its bytes.
    2. Nothing is copied but headers of a few bytes, and nothing is allocated by what a file claims.
    3. What a decoder could read in two ways is broken: a second header, a frame beyond its canvas, a size of none.
    4. It runs in a thread, and lets the event loop have the interpreter after every ``STEPS_IN_A_ROW`` steps.
    5. The structure is followed as far as the pixels begin, for PNG to its end with all check sums, so that a file that
       was cut off is told. The pixels themselves are the engine's to decode.

Sources: RFC 2083 and APNG, ITU T.81, GIF89a, the WebP container specification with RFC 6386 and the lossless bitstream
specification.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

from poolgrid.server.frontend.media.references import MediaRefused
from poolgrid.server.process.tasks import breathe

PIXELS_MAX = 50_000_000
"""Width times height of an image: a 48-megapixel photograph, which takes 150 MB decoded, whatever its file size."""

STEPS_MAX = 16_384
"""Segments, chunks or blocks of one image. A PNG of 52 MiB in chunks of 8 KiB, as libpng writes them, has
6,700; the comments of a GIF have blocks of 255 bytes, so this is 4 MiB of comments."""

STEPS_IN_A_ROW = 256
"""Steps between two breaths: 0.2 ms."""

FILL_BYTES_MAX = 16_384
"""Fill bytes before one JPEG marker, passed over in one call of C. Encoders write none or one."""

STRAY_BYTES_MAX = 1024
"""Bytes that belong to nothing before one JPEG marker; libjpeg skips them with a warning, encoders write none."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class BrokenImage(Exception):
    """The structure does not hold; the message says where."""


class ImageHeader(NamedTuple):
    """What was found."""

    format: str
    """One of ``FORMATS``."""
    width: int
    height: int

    @property
    def media_type(self) -> str:
        return f"image/{self.format.lower()}"


def check_image(data: bytes) -> ImageHeader:
    """Return what an image is, by its content; raises ``MediaRefused``.

    The pixels are left to the engine, which decodes them anyway; what is bounded is what it will then have to hold.
    """
    if not data:
        raise MediaRefused("media_broken", "the image is empty (0 bytes)")
    try:
        header = read_header(data)
    except BrokenImage as error:
        raise MediaRefused("media_broken", f"the image is broken: {error}") from None
    if header is None:
        raise MediaRefused(
            "media_type_not_allowed",
            f"the {len(data)} bytes are not an image of a format that is taken ({', '.join(FORMATS)}); "
            f"they begin with {data[:8]!r}",
        )
    if header.width * header.height > PIXELS_MAX:
        raise MediaRefused(
            "media_too_many_pixels",
            f"the image has {header.width} x {header.height} pixels, allowed are at most {PIXELS_MAX}; "
            "nothing was decoded",
        )
    return header


def read_header(data: bytes) -> ImageHeader | None:
    """Return what an image is, or ``None`` when it begins as none of ``FORMATS``; raises ``BrokenImage``."""
    for name, looks_like, size in _READERS:
        if looks_like(data):
            try:
                width, height = size(data)
            except (struct.error, IndexError, OverflowError):
                raise BrokenImage(f"it ends within its {name} header, after {len(data)} bytes") from None
            if width < 1 or height < 1:
                raise BrokenImage(f"it has {width} x {height} pixels")
            return ImageHeader(name, width, height)
    return None


# -- PNG -----------------------------------------------------------------------------------------------------------


def _png(data: bytes) -> tuple[int, int]:
    at = len(PNG_SIGNATURE)
    size: tuple[int, int] | None = None
    pixels = False
    view = memoryview(data)
    for _ in _steps():
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        [check] = struct.unpack_from(">I", data, end)
        if zlib.crc32(view[at + 4 : end]) != check:
            raise BrokenImage(f"the check sum of its chunk {name!r} at byte {at} is wrong")
        if (name == b"IHDR") != (size is None):
            raise BrokenImage("its first chunk is not IHDR, or there is a second one")
        if name == b"IHDR":
            width, height = struct.unpack_from(">II", data, at + 8)
            size = (width, height)
        elif name == b"fcTL":
            width, height, left, top = struct.unpack_from(">4I", data, at + 12)
            assert size is not None, "IHDR was first"
            if left + width > size[0] or top + height > size[1]:
                raise BrokenImage(f"a frame of it reaches {left + width} x {top + height}, beyond its size")
        elif name == b"IDAT":
            pixels = True
        elif name == b"IEND":
            if not pixels or size is None:
                raise BrokenImage("it has no pixels (IDAT)")
            return size
        at = end + 4
    raise _too_long("PNG chunks")


# -- JPEG ----------------------------------------------------------------------------------------------------------

_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers SOF0 to SOF15: C4 defines Huffman tables, C8 is reserved, CC defines arithmetic conditioning."""

_START, _END, _SCAN = 0xD8, 0xD9, 0xDA
_FILL = re.compile(rb"\xff{1,%d}+" % (FILL_BYTES_MAX + 1))
_WITHOUT_LENGTH = frozenset({0x00, 0x01, *range(0xD0, 0xD8)})


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    size: tuple[int, int] | None = None
    for _ in _steps():
        marker_at = data.find(b"\xff", at, at + STRAY_BYTES_MAX + 1)
        if marker_at < 0:
            raise BrokenImage(f"there is no marker within {STRAY_BYTES_MAX} bytes of byte {at}")
        marker = data[marker_at + 1]
        if marker == 0xFF:
            # The match reaches one byte further than it may, to see whether there are more.
            fill = _FILL.match(data, marker_at)
            assert fill is not None, "it begins with two of them"
            marker_at = fill.end() - 1
            if fill.end() - fill.start() > FILL_BYTES_MAX:
                raise BrokenImage(f"it has more than {FILL_BYTES_MAX} fill bytes before one marker, the limit")
            marker = data[marker_at + 1]
        at = marker_at + 2
        if marker in _WITHOUT_LENGTH:
            continue
        if marker in (_START, _END):
            raise BrokenImage(f"marker {marker:#04x} at byte {marker_at} stands before any scan")
        [length] = struct.unpack_from(">H", data, at)
        if length < 2 or at + length > len(data):
            raise BrokenImage(f"its segment at byte {marker_at} claims {length} bytes, {len(data) - at} are left")
        if marker == _SCAN:
            if size is None:
                raise BrokenImage("its scan begins without a frame")
            return size
        if marker in _FRAMES:
            if size is not None:
                raise BrokenImage("it has two frames")
            height, width = struct.unpack_from(">HH", data, at + 3)
            size = (width, height)
        at += length
    raise _too_long("JPEG segments")


# -- GIF -----------------------------------------------------------------------------------------------------------


def _gif(data: bytes) -> tuple[int, int]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _color_table_bytes(flags)
    in_extension = False
    for _ in _steps():
        kind = data[at]
        if in_extension:
            in_extension = kind != 0
            at += 1 + kind
        elif kind == 0x21:
            in_extension = True
            at += 2
        elif kind == 0x2C:
            left, top, frame_width, frame_height, frame_flags = struct.unpack_from("<4HB", data, at + 1)
            data[at + 10 + _color_table_bytes(frame_flags)]  # its pixels begin
            # Decoders make the canvas as large as its first frame needs.
            return max(width, left + frame_width), max(height, top + frame_height)
        elif kind == 0x00:
            at += 1  # stray terminators are skipped by decoders
        else:
            raise BrokenImage(f"it has a block of kind {kind:#04x} at byte {at} before any frame")
    raise _too_long("GIF blocks")


def _color_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


# -- WebP ----------------------------------------------------------------------------------------------------------


def _webp(data: bytes) -> tuple[int, int]:
    [length] = struct.unpack_from("<I", data, 4)
    if length + 8 > len(data):
        raise BrokenImage(f"it claims {length + 8} bytes and has {len(data)}")
    canvas: tuple[int, int] | None = None
    at = 12
    for _ in _steps():
        name, length = struct.unpack_from("<4sI", data, at)
        begin = at + 8
        if begin + length > len(data):
            raise BrokenImage(f"its chunk {name!r} claims {length} bytes, {len(data) - begin} are left")
        if name == b"VP8X":
            if canvas is not None:
                raise BrokenImage("it has two canvases")
            canvas = (_u24(data, begin + 4) + 1, _u24(data, begin + 7) + 1)
        elif name in (b"VP8 ", b"VP8L", b"ANMF"):
            frame = _webp_frame(data, name, begin)
            if canvas is None:
                if name == b"ANMF":
                    raise BrokenImage("it has frames without a canvas")
                return frame
            if frame[0] > canvas[0] or frame[1] > canvas[1]:
                raise BrokenImage(f"a frame of it reaches {frame[0]} x {frame[1]}, beyond its canvas")
            return canvas
        at = begin + length + (length & 1)
    raise _too_long("WebP chunks")


def _webp_frame(data: bytes, name: bytes, at: int) -> tuple[int, int]:
    if name == b"VP8 ":
        if data[at] & 1 or data[at + 3 : at + 6] != b"\x9d\x01\x2a":
            raise BrokenImage("its frame does not begin as a VP8 key frame")
        width, height = struct.unpack_from("<HH", data, at + 6)
        return width & 0x3FFF, height & 0x3FFF
    if name == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, at)
        if signature != 0x2F:
            raise BrokenImage("its frame does not begin as lossless VP8L")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    left, top = 2 * _u24(data, at), 2 * _u24(data, at + 3)
    return left + _u24(data, at + 6) + 1, top + _u24(data, at + 9) + 1


def _u24(data: bytes, at: int) -> int:
    low, high = struct.unpack_from("<HB", data, at)
    return int(low | high << 16)


def _steps() -> Iterator[None]:
    """Count ``STEPS_MAX`` steps, and stand back now and then."""
    for first in range(0, STEPS_MAX, STEPS_IN_A_ROW):
        if first:
            breathe()
        yield from repeat(None, STEPS_IN_A_ROW)


def _too_long(what: str) -> BrokenImage:
    return BrokenImage(f"it has more than {STEPS_MAX} {what}, the limit")


_READERS: tuple[tuple[str, Callable[[bytes], bool], Callable[[bytes], tuple[int, int]]], ...] = (
    ("PNG", lambda data: data.startswith(PNG_SIGNATURE), _png),
    ("JPEG", lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg),
    ("WEBP", lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", _webp),
    ("GIF", lambda data: data.startswith((b"GIF87a", b"GIF89a")), _gif),
)

FORMATS = tuple(name for name, _, _ in _READERS)
