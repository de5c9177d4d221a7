"""Results that are fetched later, by URL: files in a directory, which the HTTP processes of one router share.

Rules
    1. A result is found by its *owner* (the tenant that asked for it) and its id only: ``ID.json`` describes it,
       ``ID.bin`` is its content.
    2. Results are kept for ``TTL_S``, and those of one owner up to its equal part of ``BYTES_MAX``; beyond that the
       oldest go first. One that alone is larger is refused by ``RESULT_BYTES_MAX`` before.
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
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from poolgrid.frontend.responses_api.store import Owner

TTL_S: Final = 86_400.0
"""How long a result is kept: videos are fetched when they are done, and are large."""

BYTES_MAX: Final = 1024 * 1024 * 1024
"""Bytes of all results: some twenty videos of the largest size, or a thousand usual ones."""

_ID: Final = re.compile(r"(image|video)_[0-9a-f]{32}")


class ResultFiles:
    """The results of one router."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._temporary: Path | None = None

    def close(self) -> None:
        """Remove what is this process's alone."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def keep(self, owner: Owner, result_id: str, description: bytes, content: bytes | None = None) -> None:
        """Keep a new result; raises ``OSError``."""
        folder = self._folder(owner)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            _place(folder / f"{result_id}.json", description, content, BYTES_MAX // max(1, owner.owners))

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
            _place(path, description, content, BYTES_MAX // max(1, owner.owners))
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
        """Return the file of a result's content."""
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

    def of(self, owner: Owner, prefix: str) -> list[bytes]:
        """Return the descriptions of an owner's results whose ids begin with ``prefix``, the oldest first."""
        found: list[bytes] = []
        for _, _, path in _aged(self._folder(owner)):
            if path.name.startswith(prefix):
                with suppress(FileNotFoundError):
                    found.append(path.read_bytes())
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
            content = path.with_suffix(".bin")
            found.append((path.stat().st_mtime, content.stat().st_size if content.exists() else 0, path))
    return sorted(found)


def _make_room(folder: Path, budget: int) -> None:
    """Forget the oldest results until the rest is within a budget; those that are being made are always young."""
    results = _aged(folder)
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


def _place(path: Path, description: bytes, content: bytes | None, budget: int) -> None:
    if content is not None:
        _make_room(path.parent, budget - len(content))
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
