"""The journal's directory on a POSIX file system."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

LOCK_NAME = "journal.lock"
_TEMPORARY = ".tmp"


class DirectoryInUse(OSError):
    """Another process writes this journal."""


class PosixDisk:
    """One directory, locked for this process; ``OSError`` passes through with the file's name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._appending: tuple[str, int] | None = None
        self._lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DirectoryInUse(
                f"opening the journal in {directory}: another process holds {LOCK_NAME}; "
                "stop that process or give this one a data_dir of its own"
            ) from None
        for leftover in directory.glob(f"*{_TEMPORARY}"):
            leftover.unlink()

    def names(self) -> list[str]:
        return _names(self.directory)

    def size(self, name: str) -> int:
        return os.stat(self.directory / name).st_size

    def read(self, name: str, at: int, length: int) -> bytes:
        return _read(self.directory / name, at, length)

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, creating it."""
        if self._appending is None or self._appending[0] != name:
            self._close_appending()
            created = not (self.directory / name).exists()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._appending = (name, os.open(self.directory / name, flags, 0o644))
            if created:
                self._sync_directory()
        view = memoryview(data)
        while view:
            view = view[os.write(self._appending[1], view) :]

    def truncate(self, name: str, size: int) -> None:
        os.truncate(self.directory / name, size)

    def sync(self, name: str) -> None:
        """Make a file's content durable."""
        # A descriptor of its own: another thread may be moving on to the next segment.
        descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def write_atomically(self, name: str, parts: Iterable[bytes]) -> int:
        """Write a whole file durably, so that it exists completely or not at all."""
        temporary = self.directory / (name + _TEMPORARY)
        size = 0
        try:
            with open(temporary, "wb") as file:
                for part in parts:
                    size += file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_directory()
        return size

    def remove(self, name: str) -> None:
        (self.directory / name).unlink()

    def close(self) -> None:
        self._close_appending()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close_appending(self) -> None:
        if self._appending is not None:
            os.close(self._appending[1])
            self._appending = None

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ReadOnlyDirectory:
    """A journal's directory for those who only look: takes no lock, changes nothing.

    What a running process writes meanwhile is seen or not; what it removes is a ``FileNotFoundError``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(directory))

    def is_in_use(self) -> bool:
        """Return whether some process writes this journal now."""
        try:
            descriptor = os.open(self.directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def names(self) -> list[str]:
        """Return the names of all files, sorted; those that are still being written are left out."""
        return [name for name in _names(self.directory) if not name.endswith(_TEMPORARY)]

    def size(self, name: str) -> int:
        return os.stat(self.directory / name).st_size

    def read(self, name: str, at: int, length: int) -> bytes:
        return _read(self.directory / name, at, length)


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_file())


def _read(path: Path, at: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(descriptor, length, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)
