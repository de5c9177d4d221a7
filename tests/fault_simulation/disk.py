"""A disk that fails as disks do: full, refusing to write or sync, torn when the power fails.

What a file holds and what of it is durable are two things. A process that is killed loses nothing that it wrote; when
the power fails, each file keeps what was synced and some prefix of the rest, now and then with zeros where data should
be.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from poolgrid.kernel.journal.ports import Disk

SECTOR_BYTES = 512
"""What a disk writes as a whole."""


@dataclass(slots=True)
class _File:
    data: bytearray
    durable: int = 0


class SimulatedDisk:
    """The files of one machine."""

    def __init__(self, rng: Random, spend: Callable[[float], None]) -> None:
        self._rng = rng
        self._spend = spend
        self.slow_s = 0.0
        """What each write and sync takes."""
        self.slow_once_s = 0.0
        """What the next one takes beside."""
        self.files: dict[str, _File] = {}
        self.full = False
        """Appends write a part of their data and fail."""
        self.sync_fails = False

    def take_time(self) -> None:
        """Let the caller wait as long as the device takes."""
        seconds = self.slow_s + self.slow_once_s
        self.slow_once_s = 0.0
        if seconds:
            self._spend(seconds)

    def open(self) -> Disk:
        """Return the directory for one life of a process."""
        return DiskHandle(self, self._rng)

    def power_failure(self) -> None:
        """Lose what was not durable, from some byte on."""
        for file in self.files.values():
            if file.durable < len(file.data):
                kept = self._rng.randint(file.durable, len(file.data))
                size = len(file.data)
                if self._rng.random() < 0.3:
                    # The length arrived, the data of the last sectors did not.
                    kept = max(file.durable, kept - kept % SECTOR_BYTES)
                    file.data[kept:] = bytes(size - kept)
                else:
                    del file.data[kept:]
                file.durable = len(file.data)


class DiskHandle:
    """``poolgrid.kernel.journal.ports.Disk`` over the files of a machine."""

    def __init__(self, disk: SimulatedDisk, rng: Random) -> None:
        self._disk = disk
        self._rng = rng

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(self._disk.files)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._file(name).data)

    def read(self, name: str, at: int, length: int) -> bytes:
        """Return up to ``length`` bytes from position ``at``."""
        return bytes(self._file(name).data[at : at + length])

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, creating it; a full disk takes a part."""
        self._disk.take_time()
        if self._disk.full:
            part = self._rng.randrange(0, len(data))
            if part or name in self._disk.files:
                self._disk.files.setdefault(name, _File(bytearray())).data += data[:part]
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self._disk.files.setdefault(name, _File(bytearray())).data += data

    def truncate(self, name: str, size: int) -> None:
        """Cut a file."""
        file = self._file(name)
        del file.data[size:]
        file.durable = min(file.durable, size)

    def sync(self, name: str) -> None:
        """Make a file's content durable."""
        self._disk.take_time()
        file = self._file(name)
        if self._disk.sync_fails:
            raise OSError(errno.EIO, "Input/output error", name)
        file.durable = len(file.data)

    def write_atomically(self, name: str, parts: Iterable[bytes]) -> int:
        """Write a whole file durably, so that it exists completely or not at all; return its size."""
        self._disk.take_time()
        data = bytearray(b"".join(parts))
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self._disk.files[name] = _File(data, len(data))
        return len(data)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._file(name)
        del self._disk.files[name]

    def close(self) -> None:
        """Let go of nothing: a life ends without cleaning up anyway."""

    def _file(self, name: str) -> _File:
        file = self._disk.files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return file
