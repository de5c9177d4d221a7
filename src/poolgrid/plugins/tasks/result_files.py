"""Results that are fetched later, by URL: files in a directory, which the HTTP processes of one router share.

Rules
    1. A result is found by its *owner* (the tenant that asked for it) and its id only: ``ID.json`` describes it,
       ``ID.bin`` is its content.
    2. Results are kept for ``TTL_S``, and those of one owner up to its equal part of ``BYTES_MAX`` (descriptions
       included) and of ``RESULTS_MAX``; beyond that the oldest go first. One that alone is larger is refused by
       ``RESULT_BYTES_MAX`` before.
    3. Without a directory they are in a temporary one, which is gone with the process.
    4. A result that is forgotten stays forgotten: a process that still makes it is told so when it describes it
       again. A lock on the owner's folder holds across processes.

The methods wait for the disk: callers run them in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError, quoted

FOLDER: Final = Path("results")
"""Where results are kept within a data_dir."""

TTL_S: Final = 86_400.0
"""How long a result is kept: videos are fetched when they are done, and are large."""

BYTES_MAX: Final = 1024 * 1024 * 1024
"""Bytes of all results: some twenty videos of the largest size, or a thousand usual ones."""

RESULTS_MAX: Final = 16_384
"""Results of all owners: each costs a look when room is made for another."""

TIME_HEX: Final = 12
"""Leading hexadecimal digits of an id that are its time in milliseconds: ids in order are results in order."""

MEDIA_TYPES: Final = frozenset(
    ("image/png", "image/jpeg", "image/webp", "image/gif", "image/avif", "video/mp4", "video/webm", "video/x-msvideo")
)
"""Types as which a result is served. A worker chooses its own; a page would be one of the router's origin."""

_ID: Final = re.compile(r"(image|video)_[0-9a-f]{32}")


class ResultFiles:
    """The results of one router."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._temporary: Path | None = None

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def keep(self, owner: Owner, result_id: str, description: bytes, content: bytes | None = None) -> None:
        """Keep a new result; raises ``OSError``."""
        folder = self._folder(owner)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            _place(folder / f"{result_id}.json", description, content, owner, is_new=True)

    def keep_again(self, owner: Owner, result_id: str, description: bytes, content: bytes | None = None) -> bool:
        """Describe a result again, with its content once it is made; return whether it is still wanted.

        Raises ``OSError``.
        """
        path = self._folder(owner) / f"{result_id}.json"
        if not path.parent.exists():
            return False
        with _locked(path.parent):
            if not path.exists():
                return False
            _place(path, description, content, owner)
        return True

    def describe(self, owner: Owner, result_id: str) -> tuple[bytes, float] | None:
        """Return a description and how many seconds ago it was written or touched; ``None`` = there is none."""
        if _ID.fullmatch(result_id) is None:
            return None
        path = self._folder(owner) / f"{result_id}.json"
        try:
            return path.read_bytes(), time.time() - path.stat().st_mtime
        except OSError:
            return None

    def content(self, owner: Owner, result_id: str) -> Path | None:
        path = self._folder(owner) / f"{result_id}.bin"
        return path if _ID.fullmatch(result_id) and path.is_file() else None

    def touch(self, owner: Owner, result_id: str) -> bool:
        """Show that a result is still being made; return whether it is still wanted."""
        try:
            os.utime(self._folder(owner) / f"{result_id}.json")
        except FileNotFoundError:
            return False
        return True

    def forget(self, owner: Owner, result_id: str) -> bool:
        """Forget a result; return whether there was one."""
        if self.describe(owner, result_id) is None:
            return False
        path = self._folder(owner) / f"{result_id}.json"
        with _locked(path.parent):
            _remove(path)
        return True

    def page(
        self, owner: Owner, prefix: str, limit: int, newest_first: bool, after: str | None
    ) -> list[dict[str, Any]] | None:
        """Return the descriptions of up to so many jobs behind one of them, by age; ``None`` where that is not kept.

        Only these are read.
        """
        names = sorted((path.stem for path in self._folder(owner).glob(f"{prefix}*.json")), reverse=newest_first)
        if after is not None:
            if after not in names:
                return None
            names = names[names.index(after) + 1 :]
        found: list[dict[str, Any]] = []
        for name in names:
            described = self.describe(owner, name)
            if described is not None and "status" in (item := msgspec.json.decode(described[0])):
                found.append(item)
                if len(found) == limit:
                    break
        return found

    def _folder(self, owner: Owner) -> Path:
        if self._directory is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="poolgrid-results-"))
        directory = self._directory or self._temporary
        assert directory is not None, "made above"
        # A name of a tenant may hold what a file system cannot.
        return directory / hashlib.sha256(owner.name.encode()).hexdigest()[:32]


def _aged(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of the last change, the bytes and the description of each result, the oldest first."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process may forget it meanwhile
            content, described = path.with_suffix(".bin"), path.stat()
            size = content.stat().st_size if content.exists() else 0
            found.append((described.st_mtime, described.st_size + size, path))
    return sorted(found)


def _make_room(folder: Path, budget: int, results_max: int) -> None:
    """Forget the oldest results until the rest is within a budget; those that are being made are always young."""
    results = _aged(folder)
    for _, _, path in results[: max(0, len(results) - results_max)]:
        _remove(path)
    results = results[-results_max:]
    used = sum(size for _, size, _ in results)
    oldest = time.time() - TTL_S
    for modified, size, path in results:
        if used <= budget and modified >= oldest:
            return
        used -= size
        _remove(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep the other threads and processes out of a folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _place(path: Path, description: bytes, content: bytes | None, owner: Owner, is_new: bool = False) -> None:
    if content is not None or is_new:
        owners = max(1, owner.owners)
        size = len(description) + len(content or b"")
        _make_room(path.parent, BYTES_MAX // owners - size, max(1, RESULTS_MAX // owners - 1))
    if content is not None:
        _write(path.with_suffix(".bin"), content)
    _write(path, description)


def _remove(description: Path) -> None:
    for path in (description, description.with_suffix(".bin")):
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all: others may read it meanwhile."""
    partial = path.with_suffix(f".{time.monotonic_ns()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def new_id(kind: str) -> str:
    """Return an id of a result that no client can guess, and that is behind those before it."""
    return f"{kind}_{time.time_ns() // 1_000_000:0{TIME_HEX}x}{secrets.token_hex(10)}"


def shown_type(media_type: str) -> str:
    """Return the type as which a worker's result is served."""
    return media_type if media_type in MEDIA_TYPES else "application/octet-stream"


def not_found(kind: str, result_id: str) -> RequestError:
    """Return the 404 for a result that is not kept."""
    return RequestError(
        404,
        "not_found",
        f"no {kind} {quoted(result_id)} is kept here: it never was, it was deleted, or there was no more room",
        param=f"{kind}_id",
    )
