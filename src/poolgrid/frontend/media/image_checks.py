"""Which images are taken, by content: their format, their size in pixels, whether their structure holds.

Only headers are read (``image_headers``). The pixels are left to the engine, which decodes them anyway; what is bounded
here is what it will then have to hold.
"""

from __future__ import annotations

from poolgrid.frontend.media.image_headers import BrokenImage, ImageHeader, read_header
from poolgrid.frontend.media.refusals import MediaRefused


def check_image(data: bytes, formats: tuple[str, ...], pixels_max: int) -> ImageHeader:
    """Return what an image is; raises ``MediaRefused``."""
    if not data:
        raise MediaRefused("media_broken", "the image is empty (0 bytes)")
    try:
        header = read_header(data, formats)
    except BrokenImage as error:
        raise MediaRefused("media_broken", f"the image is broken: {error}") from None
    if header is None:
        raise MediaRefused(
            "media_type_not_allowed",
            f"the {len(data)} bytes are not an image of a format that is taken ({', '.join(formats)}); "
            f"they begin with {data[:8]!r}",
        )
    if header.width * header.height > pixels_max:
        raise MediaRefused(
            "media_too_many_pixels",
            f"the image has {header.width} x {header.height} pixels, allowed are at most {pixels_max} "
            "(max-image-pixels); nothing was decoded",
        )
    return header
