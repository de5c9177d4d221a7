"""What a content part refers to: where a medium is, and what it is said to be.

Parts of type ``image_url`` (``{"image_url": {"url": ...}}``, or the URL alone) name an image; a URL or path that ends
in ``.pt``, ``.pth`` or ``.safetensors`` names precomputed embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from poolgrid.frontend.media.refusals import MediaRefused
from poolgrid.wire.multimodal import MediaKind

IMAGE_PARTS = ("image_url", "input_image")
"""Types of content parts that name an image."""

EMBEDDINGS_SUFFIXES = (".pt", ".pth", ".safetensors")

URL_CHARS_MAX = 8192
"""A URL that is fetched; browsers and servers stop at about this length. Data URLs have the media's own limits."""

SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class MediaReference:
    """One medium that a message names, not looked at yet."""

    source: str
    """``http``, ``https``, ``data`` or ``file``."""
    url: str
    """As the client wrote it."""
    kind: MediaKind
    param: str
    """Its place in the body, e.g. ``messages[0].content[1].image_url.url``."""

    @property
    def shown(self) -> str:
        """Return the URL for an error message: cut, and without what may be a secret."""
        return shown(self.url)


def shown(url: str) -> str:
    """Return a URL as error messages and logs may show it: query and fragment left out, cut to ``SHOWN_CHARS``."""
    plain = url if url[:5].lower() == "data:" else url.partition("#")[0].partition("?")[0]
    plain = "".join(character if character.isprintable() else "?" for character in plain[: SHOWN_CHARS + 1])
    return repr(plain if len(plain) <= SHOWN_CHARS else f"{plain[:SHOWN_CHARS]}…")


def read_reference(url: str, param: str) -> MediaReference:
    """Return what a URL refers to; raises ``MediaRefused`` for what is no URL that media can have."""
    if not url:
        raise MediaRefused("media_reference_invalid", "the URL is empty: allowed is an http(s), data or file URL")
    if url[:5].lower() == "data:":
        return MediaReference("data", url, MediaKind.IMAGE, param)
    if len(url) > URL_CHARS_MAX:
        raise MediaRefused(
            "media_reference_invalid", f"the URL has {len(url)} characters, allowed are at most {URL_CHARS_MAX}"
        )
    if "\0" in url or any(ord(character) < 32 for character in url):
        raise MediaRefused("media_reference_invalid", f"the URL {shown(url)} has control characters")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaRefused("media_reference_invalid", f"the URL {shown(url)} is not valid: {error}") from None
    scheme = parts.scheme.lower()
    if url.startswith("/"):
        scheme, path = "file", url
    elif scheme in ("http", "https", "file"):
        path = parts.path
    else:
        raise MediaRefused(
            "media_scheme_not_allowed",
            f"the URL {shown(url)} has the scheme {scheme!r}: allowed are http, https, data and file"
            if scheme
            else f"{shown(url)} is not a URL: allowed is an http(s), data or file URL, or an absolute path",
        )
    embeddings = PurePosixPath(path).suffix.lower() in EMBEDDINGS_SUFFIXES
    return MediaReference(scheme, url, MediaKind.EMBEDDINGS if embeddings else MediaKind.IMAGE, param)
