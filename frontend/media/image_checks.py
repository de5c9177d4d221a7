"""What an image really is, by content: its format, its size in pixels, whether its structure holds.

Only the header is decoded. The pixels are left to the engine, which decodes them anyway; what is bounded here is what
it will then have to hold. Pillow is asked for the allowed formats only, so that no other decoder sees the bytes.
"""

from __future__ import annotations

import io
import struct
import warnings

from PIL import Image, UnidentifiedImageError

from frontend.media.refusals import MediaRefused

_MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
}

# The bound of pixels is ours, per request and checked before Pillow's; its warning would only fill the log.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def check_image(data: bytes, formats: tuple[str, ...], pixels_max: int) -> str:
    """Return the media type of an image; raises ``MediaRefused``."""
    if not data:
        raise MediaRefused("media_broken", "the image is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            name = image.format or ""
            width, height = image.size
            if width < 1 or height < 1:
                raise MediaRefused("media_broken", f"the image has {width} x {height} pixels")
            if width * height > pixels_max:
                raise _too_many(f"{width} x {height}", pixels_max)
            image.verify()
    except UnidentifiedImageError:
        raise MediaRefused(
            "media_type_not_allowed",
            f"the {len(data)} bytes are not an image of a format that is taken ({', '.join(formats)}); "
            f"they begin with {data[:8]!r}",
        ) from None
    except Image.DecompressionBombError:
        raise _too_many("far too many", pixels_max) from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as error:
        # What Pillow's parsers raise for broken files; MediaRefused is none of these.
        raise MediaRefused("media_broken", f"the image is broken: {error}") from None
    except (struct.error, MemoryError, RecursionError) as error:
        raise MediaRefused("media_broken", f"the image is broken: {type(error).__name__}") from None
    return _MEDIA_TYPES[name] if name in _MEDIA_TYPES else _MEDIA_TYPES["JPEG" if name == "MPO" else "PNG"]


def _too_many(pixels: str, pixels_max: int) -> MediaRefused:
    return MediaRefused(
        "media_too_many_pixels",
        f"the image has {pixels} pixels, allowed are at most {pixels_max} (max-image-pixels); nothing was decoded",
    )
