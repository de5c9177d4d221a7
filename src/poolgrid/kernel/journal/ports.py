"""What the consolidator needs from the world, and what readers of the pool must offer it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import BlockChain, WorkerState
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot


class PoolListener(Protocol):
    """A reader of the pool: the same calls in the same order, whether it runs inside the consolidator or far away."""

    def on_snapshot(
        self,
        offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        """Replace everything known by the state before record ``offset``.

        Chains name their worker by position; they may be read later, once.
        """
        ...

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Apply records, in order and without holes after the snapshot or the records before."""
        ...


class Journal(ABC):
    """An append-only log of encoded records with offsets from 0, and snapshots of the state they fold to.

    Appends come from one thread; meanwhile others may sync, read, write a snapshot or retain.

    Every method may raise ``OSError`` when what it is kept on fails. What ``append`` was given comes again then,
    perhaps with more behind it: it is stored once. ``append``, ``drop_lost``, ``keep_snapshot`` and ``retain`` may
    raise ``JournalFenced``: another process writes this journal now.
    """

    in_memory = False
    """Whether no disk is waited for: it may then be used on an event loop."""

    @property
    def report(self) -> list[str]:
        """Return what opening and ``recover`` found and did, for the log."""
        return []

    @property
    @abstractmethod
    def next_offset(self) -> int:
        """Return the offset of the next record."""

    @property
    @abstractmethod
    def oldest_offset(self) -> int:
        """Return the offset of the oldest record still kept (``next_offset`` when there is none)."""

    @abstractmethod
    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        """Append encoded records, all of them or none, in one write."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where appended is durable
        """Make everything appended durable."""

    @abstractmethod
    def read(self, from_offset: int, limit: int, bytes_max: int) -> list[bytes]:
        """Return encoded records from ``from_offset`` on: at most ``limit``, and at least one if there is one."""

    @abstractmethod
    def recover(self, blocks_per_worker_max: int) -> PoolState:
        """Return the state after the last record."""

    def snapshot_parts(self, frozen: FrozenPool) -> Iterator[bytes]:
        """Yield the content of a snapshot, to be kept; each part is a millisecond or two of work, and no wait."""
        return framing.parts(frozen, 0)

    @abstractmethod
    def keep_snapshot(self, offset: int, parts: Iterable[bytes]) -> None:
        """Keep a snapshot: all parts of one at that offset, each asked for once; remove those before the last two."""

    def write_snapshot(self, frozen: FrozenPool) -> None:
        self.keep_snapshot(frozen.offset, self.snapshot_parts(frozen))

    @property
    def crowded(self) -> bool:
        """Return whether there is much more than retention keeps, so that it is worth a look of its own."""
        return False

    @property
    def snapshot_due(self) -> bool:
        """Return whether a crowded journal could be made much smaller by a snapshot of now."""
        return False

    @abstractmethod
    def retain(self, now_ms: int) -> int:
        """Remove what retention allows and return the number of segments removed."""

    def make_room(self, blocks_per_worker_max: int, now_ms: int) -> int:
        """Remove what can be removed while nothing can be appended; return the number of segments removed."""
        return self.retain(now_ms)

    def drop_lost(self) -> list[str]:
        """Drop deleted or cut segments and return their names; call it where ``append`` is."""
        return []

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the number of segments and of bytes."""

    @abstractmethod
    def close(self) -> None:
        """Make everything durable and close the files."""


class ReadableDisk(Protocol):
    """A flat directory of files for readers."""

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, at: int, length: int) -> bytes: ...


class Disk(ReadableDisk, Protocol):
    """A flat directory of files: the little that the journal needs, so that a test can make it fail."""

    def append(self, name: str, data: bytes) -> None:
        """Write at the end of a file, creating it; on ``OSError`` a part of the data may have been written."""
        ...

    def truncate(self, name: str, size: int) -> None: ...

    def sync(self, name: str) -> None:
        """Make a file's content durable."""
        ...

    def write_atomically(self, name: str, parts: Iterable[bytes]) -> int:
        """Write a whole file durably, so that it exists completely or not at all; return its size."""
        ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...
