"""What a content part refers to: where a medium is, and what it is said to be.

Parts of type ``image_url`` (``{"image_url": {"url": ...}}``, or the URL alone) name an image; a URL or path that ends
in ``.safetensors`` names precomputed embeddings, and so does one in ``.pt`` or ``.pth``, which is refused.

Why a medium is not taken: one code per reason, each with its HTTP status.

The 4xx are the client's to fix, 502 and 504 are those of a remote server, 429 is ours and passes.

Files below one allowed directory, opened without races.

Rules
    1. A name is resolved first (``..``, symbolic links, ``//``); what it comes to must lie below the allowed directory.
    2. What is opened is what was resolved: from a descriptor of the allowed directory downwards, one component at a
       time, following no link. A link that was put there in between makes the open fail; it is never followed out.
    3. Only regular files are read, and they are told from the descriptor. Opening never waits (a FIFO has no say).
    4. At most ``bytes_max`` bytes are read, whatever the file's size was when it was asked.
"""

from __future__ import annotations

import binascii
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from poolgrid.kernel.wire.multimodal import MediaKind

STATUS_BY_CODE = {
    "media_not_supported": 400,
    "media_too_many": 400,
    "media_reference_invalid": 400,
    "media_scheme_not_allowed": 403,
    "media_address_not_allowed": 403,
    "media_path_not_allowed": 403,
    "media_not_found": 400,
    "media_host_unknown": 400,
    "media_redirect_refused": 400,
    "media_encoding_invalid": 400,
    "media_type_not_allowed": 400,
    "media_broken": 400,
    "media_too_large": 413,
    "media_too_many_pixels": 400,
    "media_embeddings_unsafe": 400,
    "media_placeholder_mismatch": 400,
    "media_busy": 429,
    "media_fetch_failed": 502,
    "media_fetch_timeout": 504,
}
"""Every code that media can be refused with; also the values of the metric's ``reason`` label."""


class MediaRefused(Exception):
    """One medium is not taken; the message says what was found and what is allowed, not where in the body it stood.

    It is raised where it is found, and returned (``alone``) from one task or thread to another: an exception that a
    task ends with is in a circle with the frames that wait for it, and 50 MB would wait for the garbage collector.
    """

    def __init__(self, code: str, message: str) -> None:
        assert code in STATUS_BY_CODE, f"an unlisted code: {code}"
        self.code = code
        self.message = message
        super().__init__(message)

    def alone(self) -> MediaRefused:
        """Return the same without where it was raised: an exception holds its frames, and these hold a medium."""
        return MediaRefused(self.code, self.message)

    @property
    def status(self) -> int:
        return STATUS_BY_CODE[self.code]


IMAGE_PARTS = ("image_url", "input_image")
"""Types of content parts that name an image."""

EMBEDDINGS_SUFFIXES = (".pt", ".pth", ".safetensors")

URL_CHARS_MAX = 8192
"""A URL that is fetched; browsers and servers stop at about this length. Data URLs have the media's own limits."""

SHOWN_CHARS = 80


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


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_READ_BYTES = 1024 * 1024


class LocalFiles:
    """Reads files below ``root``, an existing directory that is already resolved."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, url: str, bytes_max: int) -> bytes:
        """Return the content of the file that a file URL or an absolute path names; raises ``MediaRefused``."""
        relative = self._locate(_path_of(url), url)
        descriptor = self._open(relative, url)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaRefused("media_path_not_allowed", f"{shown(url)} is not a regular file")
            if status.st_size > bytes_max:
                raise MediaRefused(
                    "media_too_large", f"{shown(url)} has {status.st_size} bytes, allowed are at most {bytes_max}"
                )
            return _read(descriptor, bytes_max, url)
        finally:
            os.close(descriptor)

    def _locate(self, path: str, url: str) -> tuple[str, ...]:
        """Return the components below the root of what a path comes to."""
        try:
            resolved = Path(os.path.realpath(path))
        except (OSError, ValueError) as error:
            raise MediaRefused("media_path_not_allowed", f"{shown(url)} cannot be resolved: {error}") from None
        if resolved == self._root or not resolved.is_relative_to(self._root):
            # The same words whether the file exists or not: what is outside stays secret.
            raise MediaRefused(
                "media_path_not_allowed",
                f"{shown(url)} is not below the directory that media may be read from (allowed-local-media-path)",
            )
        return resolved.relative_to(self._root).parts

    def _open(self, relative: tuple[str, ...], url: str) -> int:
        try:
            directory = os.open(self._root, _DIRECTORY)
            try:
                for name in relative[:-1]:
                    below = os.open(name, _DIRECTORY, dir_fd=directory)
                    os.close(directory)
                    directory = below
                return os.open(relative[-1], _FILE, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise MediaRefused("media_not_found", f"{shown(url)} does not exist") from None
            if error.errno == errno.ELOOP:
                raise MediaRefused("media_path_not_allowed", f"{shown(url)} changed while it was opened") from None
            raise MediaRefused("media_path_not_allowed", f"{shown(url)} cannot be read: {error.strerror}") from None


def _path_of(url: str) -> str:
    if url.startswith("/"):
        return url
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise MediaRefused(
            "media_path_not_allowed", f"{shown(url)} names the host {parts.netloc!r}: allowed is file:///absolute/path"
        )
    path = unquote(parts.path, errors="strict") if "%" in parts.path else parts.path
    if not path.startswith("/") or "\0" in path:
        raise MediaRefused("media_path_not_allowed", f"{shown(url)} has no absolute path: allowed is file:///path")
    return path


def _read(descriptor: int, bytes_max: int, url: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size <= bytes_max:
        try:
            piece = os.read(descriptor, min(_READ_BYTES, bytes_max + 1 - size))
        except OSError as error:
            raise MediaRefused("media_not_found", f"{shown(url)} cannot be read: {error.strerror}") from None
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise MediaRefused("media_too_large", f"{shown(url)} has more than {bytes_max} bytes, the limit")
