"""Files that are made of what a stream holds, for those who only look."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import NoReturn


class ReadOnlyDisk(ABC):
    """Implements ``poolgrid.consolidator.ports.Disk`` for reading; changes are refused."""

    def __init__(self, refusal: str, files_kept: int) -> None:
        """``refusal`` is the error of a change; ``files_kept`` files keep their content, for who asks for their size
        and reads them then: of more, what was made first is let go of."""
        self._refusal = refusal
        self._files_kept = files_kept
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    @abstractmethod
    def _read(self, name: str) -> bytes:
        """Return a whole file; raises ``FileNotFoundError``."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._content(name))

    def read(self, name: str, at: int, length: int) -> bytes:
        """Return up to ``length`` bytes from position ``at``."""
        return self._content(name)[at : at + length]

    def _content(self, name: str) -> bytes:
        content = self._kept.get(name)
        if content is None:
            content = self._kept[name] = self._read(name)
            if len(self._kept) > self._files_kept:
                self._kept.popitem(last=False)
        return content

    def append(self, name: str, data: bytes) -> None:
        self._refuse(name)

    def truncate(self, name: str, size: int) -> None:
        self._refuse(name)

    def sync(self, name: str) -> None:
        self._refuse(name)

    def write_atomically(self, name: str, parts: Iterable[bytes]) -> int:
        self._refuse(name)

    def remove(self, name: str) -> None:
        self._refuse(name)

    def close(self) -> None:  # noqa: B027 - there is nothing to close, here and for all below
        """Do nothing: the stream is its owner's."""

    def _refuse(self, name: str) -> NoReturn:
        raise OSError(errno.EROFS, self._refusal, name)
