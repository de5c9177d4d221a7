"""Headers of images: read as Pillow reads them, and of hostile ones in a bounded number of steps."""

from __future__ import annotations

import functools
import io
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from poolgrid.server.frontend.media import image_headers
from poolgrid.server.frontend.media.image_headers import (
    FILL_BYTES_MAX,
    FORMATS,
    STEPS_MAX,
    STRAY_BYTES_MAX,
    BrokenImage,
    read_header,
)
from tests.frontend.media.samples import image, png_bomb

MEGABYTE = 1024 * 1024
LINES_PER_STEP_MAX = 20
"""Lines of Python that the longest step of any reader has."""


def saved(form: str, mode: str = "RGB", size: tuple[int, int] = (37, 21), **options: Any) -> bytes:
    out = io.BytesIO()
    picture = Image.effect_noise(size, 90).convert(mode)
    if options.pop("animated", False):
        options |= {"save_all": True, "append_images": [picture.rotate(90), picture.rotate(180)]}
    picture.save(out, form, **options)
    return out.getvalue()


PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: saved("PNG"),
    "PNG of a palette": lambda: saved("PNG", "P"),
    "PNG with alpha": lambda: saved("PNG", "RGBA"),
    "PNG of 16 bits": lambda: saved("PNG", "I;16"),
    "PNG of one bit": lambda: saved("PNG", "1"),
    "animated PNG": lambda: saved("PNG", "RGBA", animated=True),
    "PNG with profile and resolution": lambda: saved("PNG", icc_profile=bytes(5000), dpi=(300, 300)),
    "large PNG": lambda: saved("PNG", size=(1200, 900)),
    "JPEG": lambda: saved("JPEG"),
    "progressive JPEG": lambda: saved("JPEG", progressive=True),
    "gray JPEG": lambda: saved("JPEG", "L"),
    "CMYK JPEG": lambda: saved("JPEG", "CMYK"),
    "JPEG with Exif, profile and comment": lambda: saved(
        "JPEG", exif=b"Exif\0\0" + bytes(60_000), icc_profile=bytes(200_000), comment=b"hello"
    ),
    "JPEG with restart markers": lambda: saved("JPEG", restart_marker_rows=1),
    "JPEG of several pictures": lambda: saved("MPO", animated=True),
    "WEBP": lambda: saved("WEBP"),
    "lossless WEBP": lambda: saved("WEBP", lossless=True),
    "WEBP with alpha": lambda: saved("WEBP", "RGBA"),
    "WEBP with profile": lambda: saved("WEBP", icc_profile=bytes(501)),
    "animated WEBP": lambda: saved("WEBP", "RGBA", animated=True),
    "GIF": lambda: saved("GIF", "P"),
    "GIF with a comment": lambda: saved("GIF", "P", comment=b"x" * 1000),
    "animated GIF": lambda: saved("GIF", "P", animated=True),
    "interlaced GIF": lambda: saved("GIF", "L", interlace=1),
}


SMALL = sorted(set(PICTURES) - {"large PNG", "JPEG with Exif, profile and comment"})


@functools.cache
def made(name: str) -> bytes:
    return PICTURES[name]()


def by_pillow(data: bytes) -> tuple[str, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            form = "JPEG" if picture.format == "MPO" else str(picture.format)
            return form, *picture.size


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_pillow_says_it_is(name: str) -> None:
    data = made(name)

    assert read_header(data) == by_pillow(data)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_is_cut_off_in_its_header_is_broken_and_nothing_else_happens(name: str) -> None:
    data = made(name)
    for end in range(len(data)):
        if end > 300 and end % 997:
            continue
        try:
            header = read_header(data[:end])
        except BrokenImage:
            continue
        # What is left is too short to be told, or reaches as far as the pixels.
        assert header is None or (header == by_pillow(data) and header.format != "PNG")


@settings(deadline=None)
@given(st.sampled_from(SMALL), st.integers(0, 400), st.integers(0, 255), st.integers(0, 3))
def test_where_pillow_reads_a_damaged_picture_too_it_finds_no_more_pixels(
    name: str, at: int, value: int, repeat: int
) -> None:
    data = bytearray(made(name))
    for place in range(at, min(at + repeat + 1, len(data))):
        data[place] = value
    try:
        header = read_header(bytes(data))
    except BrokenImage:
        return
    if header is None:
        return
    try:
        form, width, height = by_pillow(bytes(data))
    except Exception:  # Pillow's parsers raise anything; then nobody decodes it
        return
    assert (header.format, header.width >= width, header.height >= height) == (form, True, True)


def chunk(name: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def ihdr(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def frame(width: int, height: int) -> bytes:
    return segment(0xC0, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")


SIGNATURE = image_headers.PNG_SIGNATURE
GIF = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0, 0, 0)


def riff(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) & 1)


CANVAS = webp_chunk(b"VP8X", bytes(4) + b"\3\0\0" + b"\3\0\0")
LOSSLESS = webp_chunk(b"VP8L", b"\x2f" + struct.pack("<I", 9_999 | 9_999 << 14))

TWO_WAYS = {
    "a second IHDR": SIGNATURE + ihdr(4, 4) + ihdr(60_000, 60_000) + chunk(b"IDAT") + chunk(b"IEND"),
    "IHDR not first": SIGNATURE + chunk(b"gAMA", bytes(4)) + ihdr(4, 4) + chunk(b"IDAT") + chunk(b"IEND"),
    "no IDAT": SIGNATURE + ihdr(4, 4) + chunk(b"IEND"),
    "a wrong check sum": SIGNATURE + ihdr(4, 4)[:-1] + b"\0" + chunk(b"IDAT") + chunk(b"IEND"),
    "an APNG frame beyond its picture": SIGNATURE
    + ihdr(4, 4)
    + chunk(b"fcTL", struct.pack(">5I", 0, 60_000, 60_000, 0, 0) + bytes(6))
    + chunk(b"IDAT")
    + chunk(b"IEND"),
    "two JPEG frames": b"\xff\xd8" + frame(4, 4) + frame(60_000, 60_000) + segment(0xDA, b"\0"),
    "a JPEG scan without a frame": b"\xff\xd8" + segment(0xDA, b"\0"),
    "a JPEG in a JPEG": b"\xff\xd8\xff\xd8" + frame(4, 4) + segment(0xDA, b"\0"),
    "a JPEG that ends before its scan": b"\xff\xd8" + frame(4, 4) + b"\xff\xd9",
    "a JPEG whose height comes later": b"\xff\xd8" + frame(4, 0) + segment(0xDA, b"\0"),
    "a WEBP frame beyond its canvas": riff(CANVAS, LOSSLESS),
    "two WEBP canvases": riff(CANVAS, CANVAS, LOSSLESS),
    "an animated WEBP without a canvas": riff(webp_chunk(b"ANMF", bytes(24))),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO_WAYS)
def test_what_a_decoder_could_read_in_two_ways_is_broken(name: str) -> None:
    with pytest.raises(BrokenImage):
        read_header(TWO_WAYS[name])


def test_a_gif_is_as_large_as_its_first_frame_makes_it() -> None:
    data = GIF + b"," + struct.pack("<4HB", 2, 3, 60_000, 50_000, 0) + b"\2\0;"

    assert read_header(data) == ("GIF", 60_002, 50_003)


SIZE = 24 * MEGABYTE

HOSTILE: dict[str, Callable[[], bytes]] = {
    "fill bytes": lambda: b"\xff\xd8" + b"\xff" * SIZE,
    "fill bytes in every segment": lambda: b"\xff\xd8" + (b"\xff" * 1000 + segment(0xE1, b"")) * 24_000,
    "stray bytes": lambda: b"\xff\xd8\xff" + bytes(SIZE),
    "stray bytes between segments": lambda: b"\xff\xd8" + (segment(0xE1, b"") + bytes(STRAY_BYTES_MAX)) * 24_000,
    "stuffed bytes": lambda: b"\xff\xd8" + b"\xff\0" * (SIZE // 2),
    "restart markers": lambda: b"\xff\xd8" + b"\xff\xd0" * (SIZE // 2),
    "empty segments": lambda: b"\xff\xd8" + segment(0xE0, b"") * (SIZE // 4),
    "empty comments": lambda: b"\xff\xd8" + segment(0xFE, b"") * (SIZE // 4),
    "long Exif segments": lambda: b"\xff\xd8" + segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 380,
    "empty PNG chunks": lambda: SIGNATURE + ihdr(4, 4) + chunk(b"tEXt") * (SIZE // 12),
    "empty IDATs": lambda: SIGNATURE + ihdr(4, 4) + chunk(b"IDAT") * (SIZE // 12),
    "one long PNG chunk": lambda: SIGNATURE + ihdr(4, 4) + chunk(b"tEXt", bytes(SIZE)),
    "GIF comments": lambda: GIF + (b"\x21\xfe" + (b"\xff" + bytes(255)) * 90_000),
    "GIF comments of one byte": lambda: GIF + (b"\x21\xfe" + b"\1x" * (SIZE // 2)),
    "GIF extensions": lambda: GIF + b"\x21\xf9\0" * (SIZE // 3),
    "GIF terminators": lambda: GIF + bytes(SIZE),
    "empty WEBP chunks": lambda: riff(webp_chunk(b"XMP ", b"") * (SIZE // 8)),
    "a GIF of nothing but its head": lambda: GIF,
    "a bomb": png_bomb,
}


@pytest.fixture
def lines() -> Iterator[list[int]]:
    """Counts the lines of Python that the readers run: what they cost, on any machine."""
    count = [0]
    traced = image_headers.__file__

    def local(frame: FrameType, event: str, argument: object) -> Any:
        count[0] += event == "line"
        return local

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_filename == traced else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_takes_a_bounded_number_of_steps(name: str, lines: list[int]) -> None:
    data = HOSTILE[name]()
    lines[0] = 0
    try:
        read_header(data)
    except BrokenImage:
        pass

    assert lines[0] <= STEPS_MAX * LINES_PER_STEP_MAX


def test_formats_that_are_not_taken_are_not_read() -> None:
    for form in ("BMP", "TIFF"):
        assert read_header(image(form)) is None


@pytest.mark.parametrize("fill", [1, 2, FILL_BYTES_MAX])
def test_fill_bytes_before_a_marker_are_passed_over(fill: int) -> None:
    data = image("JPEG")

    assert read_header(data[:2] + b"\xff" * fill + data[3:]) == read_header(data)


def test_reading_many_small_chunks_lets_the_event_loop_have_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    breaths = [0]

    def breathe() -> None:
        breaths[0] += 1

    monkeypatch.setattr(image_headers, "breathe", breathe)
    with pytest.raises(BrokenImage):
        read_header(HOSTILE["empty PNG chunks"]())

    assert breaths[0] == STEPS_MAX // image_headers.STEPS_IN_A_ROW - 1
