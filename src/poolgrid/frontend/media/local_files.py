"""Files below one allowed directory, opened without races.

Rules
    1. A name is resolved first (``..``, symbolic links, ``//``); what it comes to must lie below the allowed directory.
    2. What is opened is what was resolved: from a descriptor of the allowed directory downwards, one component at a
       time, following no link. A link that was put there in between makes the open fail; it is never followed out.
    3. Only regular files are read, and they are told from the descriptor. Opening never waits (a FIFO has no say).
    4. At most ``bytes_max`` bytes are read, whatever the file's size was when it was asked.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from poolgrid.frontend.media.references import MediaRefused, shown

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
