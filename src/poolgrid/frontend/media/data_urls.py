"""``data:`` URLs (RFC 2397), base64 only, as every OpenAI client writes them."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

from poolgrid.frontend.media.refusals import MediaRefused

HEAD_CHARS_MAX = 256
"""Media type and parameters before the comma."""

PIECE_CHARS = 128 * 1024
"""Characters that are decoded in one call, a multiple of four: half a millisecond, in which no other thread runs."""


def decode_data_url(url: str, bytes_max: int) -> bytes:
    """Return the bytes of a data URL (at most ``bytes_max``), whatever type it claims; raises ``MediaRefused``."""
    comma = url.find(",", 0, HEAD_CHARS_MAX)
    if comma < 0:
        raise MediaRefused(
            "media_encoding_invalid",
            f"the data URL has no comma in its first {HEAD_CHARS_MAX} characters: "
            "allowed is data:image/png;base64,<base64>",
        )
    head = url[5:comma].lower().split(";")
    if head[-1].strip() != "base64":
        raise MediaRefused(
            "media_encoding_invalid", f"the data URL is not base64 ({head[-1][:40]!r}): allowed is data:...;base64,..."
        )
    # Four characters are three bytes: too much is refused before it is decoded.
    size = (len(url) - comma - 1) // 4 * 3
    if size > bytes_max + 2:
        raise MediaRefused("media_too_large", f"the data URL holds {size} bytes, allowed are at most {bytes_max}")
    try:
        data = b"".join(_pieces(url, comma + 1))
    except (binascii.Error, UnicodeEncodeError) as error:
        reason = "it has characters that are not base64" if isinstance(error, UnicodeEncodeError) else str(error)
        raise MediaRefused("media_encoding_invalid", f"the data URL is not valid base64: {reason}") from None
    if len(data) > bytes_max:
        raise MediaRefused("media_too_large", f"the data URL holds {len(data)} bytes, allowed are at most {bytes_max}")
    return data


def _pieces(url: str, begin: int) -> Iterator[bytes]:
    """Yield the bytes of strict base64 from ``begin`` on; raises ``binascii.Error`` or ``UnicodeEncodeError``."""
    for at in range(begin, len(url), PIECE_CHARS):
        piece = url[at : at + PIECE_CHARS].encode("ascii")
        if b"=" in piece and at + PIECE_CHARS < len(url):
            raise binascii.Error("Excess data after padding")
        yield binascii.a2b_base64(piece, strict_mode=True)
