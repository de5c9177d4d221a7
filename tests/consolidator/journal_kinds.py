"""Every kind of journal that outlives its process, to be opened again and again by the same tests."""

from __future__ import annotations

from itertools import count
from typing import Protocol

from poolgrid.kernel.journal.ports import Journal
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings
from poolgrid.plugins.nats.message import RecordStream
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from tests.clock import HandClock
from tests.consolidator.fake_stream import FakeStream
from tests.consolidator.journal_builder import FakeDisk

BLOCKS_MAX = 1_000_000


class JournalKind(Protocol):
    """Where a journal is kept."""

    def open(self, retention_bytes: int = 2**30, retention_ms: int = 10**9) -> Journal:
        """Open it, as the next process would."""
        ...

    def spoil_newest_snapshot(self) -> None:
        """Change a byte of it."""
        ...

    def refuse(self, refused: bool) -> None:
        """Take no records, or take them again."""
        ...


class InDirectory:
    """A directory."""

    def __init__(self) -> None:
        self.disk = FakeDisk()

    def open(self, retention_bytes: int = 2**30, retention_ms: int = 10**9) -> Journal:
        return FileJournal(self.disk, JournalSettings(600, retention_bytes, retention_ms))

    def spoil_newest_snapshot(self) -> None:
        newest = [name for name in self.disk.names() if name.endswith("snapshot")][-1]
        self.disk.files[newest][-1] ^= 1

    def refuse(self, refused: bool) -> None:
        self.disk.room = 0 if refused else None


class InStream:
    """A stream; the lives of its writers have names of their own."""

    def __init__(self, stream: RecordStream) -> None:
        self.stream = stream
        self._lives = count()

    def open(self, retention_bytes: int = 2**30, retention_ms: int = 10**9) -> Journal:
        settings = StreamJournalSettings(retention_bytes, retention_ms, durable_after_ms=0)
        return StreamJournal(self.stream, f"life-{next(self._lives)}", HandClock(), settings)


class InFakeStream(InStream):
    """A stream in memory."""

    def __init__(self) -> None:
        super().__init__(FakeStream())

    @property
    def fake(self) -> FakeStream:
        assert isinstance(self.stream, FakeStream)
        return self.stream

    def spoil_newest_snapshot(self) -> None:
        newest = self.fake.snapshots()[-1]
        content = bytearray(self.fake.objects[newest])
        content[-1] ^= 1
        self.fake.objects[newest] = bytes(content)

    def refuse(self, refused: bool) -> None:
        self.fake.down = refused
