"""What tenants have used, in memory that the processes of one router share, so that a limit holds for all of them.

Rules
    1. One file in the group's directory, mapped by every process: a table of records by the hash of the tenant's name,
       and for each process a column with its requests in flight. The file ends with the group.
    2. A record is changed under a lock of its own, a byte range of the file (``fcntl``). The kernel lets go of the
       locks of a process that died. The table is changed under one more lock; whoever has that may wait for a record,
       never the other way round.
    3. Every store is eight bytes or less, and the record means something after each: what a process that is killed in
       between leaves behind errs on the strict side, by what that one request was charged.
    4. Times are those of CLOCK_MONOTONIC, which all processes of a machine share.
    5. A record of which everything is full and nothing in flight says what no record says: it is free for another
       tenant. So removed tenants need no care, and whoever uses a record looks first whether it is still its own.
    6. A process writes its own column only, as absolute counts, and empties it when it starts: what its predecessor had
       in flight has ended. Until then it counts.
    7. A full table (more tenants within a minute than there are records) leaves further ones to each process alone. A
       lock that is not had within ``LOCK_PATIENCE_MS`` (its holder was stopped, not killed) is done without: at worst
       two processes grant what was one's to grant.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
from pathlib import Path

from poolgrid.frontend.access.key_file import TENANTS_MAX
from poolgrid.frontend.access.meter import Bucket, OwnCell, Rate
from poolgrid.process.clock import Clock

log = logging.getLogger(__name__)

FILE_NAME = "tenants.1"
"""With the number of the layout: processes of two versions of this module do not share a table."""

RECORDS = 16_384
"""More than ``TENANTS_MAX`` by two thirds, so that chains stay short and changed files find free records."""

assert RECORDS > TENANTS_MAX

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
RECORD_WORDS = 6
"""Words of eight bytes: two of the key, and two of each bucket."""

RECORD_BYTES = 8 * RECORD_WORDS
COLUMNS_OFFSET = RECORDS * RECORD_BYTES
COUNT_BYTES = 4
TABLE_LOCK = RECORDS
"""The byte that is locked for the table; those before it are the records'."""

LOCK_PATIENCE_MS = 50.0
"""A record is locked for some ten microseconds. Longer than a time slice of a busy machine means a stopped process."""


class SharedCells:
    """The table, as one process of the group sees it. ``size`` is the number of processes, ``index`` this one's."""

    def __init__(self, directory: Path, index: int, size: int, clock: Clock) -> None:
        """Map the file, made if need be; raises ``OSError``."""
        self._clock = clock
        self._stuck: set[int] = set()
        """Locks that were not had in time; they are tried once at a time until they are."""
        self._file = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        length = COLUMNS_OFFSET + size * RECORDS * COUNT_BYTES
        os.ftruncate(self._file, length)  # zeros, of which only what is used takes memory
        memory = memoryview(mmap.mmap(self._file, length))
        self._records = memory[:COLUMNS_OFFSET]
        # Casts to native types store a word in one go.
        self._words = self._records.cast("d")
        self._counts = memory[COLUMNS_OFFSET:].cast("I")
        self._first = index * RECORDS
        self._counts[self._first : self._first + RECORDS] = memoryview(bytes(RECORDS * COUNT_BYTES)).cast("I")

    def cell(self, tenant: str) -> SharedCell:
        """Return the cell of a tenant; it takes a record when it is first locked."""
        return SharedCell(self, tenant)

    # -- locks -----------------------------------------------------------------------------------------------------

    def lock(self, place: int) -> None:
        """Have one byte's lock, or go on without it."""
        until_ms = 0.0
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):
                if place in self._stuck:
                    return
                now_ms = self._clock.monotonic_ms()
                until_ms = until_ms or now_ms + LOCK_PATIENCE_MS
                if now_ms > until_ms:
                    log.warning("the shared limits of tenants: another HTTP process holds a lock and stands still")
                    self._stuck.add(place)
                    return
                os.sched_yield()
            else:
                self._stuck.discard(place)
                return

    def unlock(self, place: int) -> None:
        """Let go of one byte's lock; of one that was not had, nothing."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    # -- the table -------------------------------------------------------------------------------------------------

    def is_of(self, record: int, key: bytes) -> bool:
        """Tell whether a record is the one of a key; sure only under its lock."""
        start = record * RECORD_BYTES
        return self._records[start : start + KEY_BYTES] == key

    def find(self, key: bytes, now_ms: float) -> int | None:
        """Return a key's record, locked: its own, or a free one that is its own from now on; ``None``: all are used."""
        self.lock(TABLE_LOCK)
        free: int | None = None
        try:
            first = int.from_bytes(key[:4], "little") % RECORDS
            for step in range(RECORDS):
                record = (first + step) % RECORDS
                if self.is_of(record, key):
                    if free is not None:
                        self.unlock(free)
                    self.lock(record)
                    return record
                ends = self.is_of(record, NO_KEY)
                if free is None:
                    self.lock(record)
                    if ends or self._is_free(record, now_ms):
                        free = record
                    else:
                        self.unlock(record)
                if ends:
                    break
            if free is not None:
                word = free * RECORD_WORDS
                for offset in range(2, RECORD_WORDS):
                    self._words[word + offset] = 0.0
                # Last: until it is whole the record is nobody's, and free.
                self._records[free * RECORD_BYTES : free * RECORD_BYTES + KEY_BYTES] = key
            return free
        finally:
            self.unlock(TABLE_LOCK)

    def _is_free(self, record: int, now_ms: float) -> bool:
        return not any(self._counts[record::RECORDS]) and all(
            self.bucket(record, rate).full_at_ms <= now_ms for rate in Rate
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def bucket(self, record: int, rate: Rate) -> Bucket:
        """Return a bucket of a record."""
        word = record * RECORD_WORDS + 2 + 2 * rate
        return Bucket(self._words[word], self._words[word + 1])

    def store(self, record: int, rate: Rate, bucket: Bucket) -> None:
        """Replace a bucket of a record."""
        word = record * RECORD_WORDS + 2 + 2 * rate
        if bucket.per_minute > self._words[word + 1]:
            # What was used is the product of both: what grows is stored first, so that it is never too little.
            self._words[word + 1] = bucket.per_minute
            self._words[word] = bucket.full_at_ms
        else:
            self._words[word] = bucket.full_at_ms
            self._words[word + 1] = bucket.per_minute

    def elsewhere(self, record: int) -> int:
        return sum(self._counts[record::RECORDS]) - self._counts[self._first + record]

    def publish(self, record: int, in_flight: int) -> None:
        self._counts[self._first + record] = in_flight


class SharedCell:
    """One tenant's figures in the table (``poolgrid.frontend.access.meter.Cell``)."""

    __slots__ = ("_alone", "_cells", "_key", "_record", "_tenant")

    def __init__(self, cells: SharedCells, tenant: str) -> None:
        self._cells = cells
        self._tenant = tenant
        self._key = hashlib.blake2b(tenant.encode(), digest_size=KEY_BYTES).digest()
        self._record: int | None = None
        self._alone: OwnCell | None = None
        """What is used while there is no record."""

    def lock(self, now_ms: float) -> None:
        """Lock the tenant's record, wherever it is now."""
        record = self._record
        if record is not None:
            self._cells.lock(record)
            if self._cells.is_of(record, self._key):
                return
            self._cells.unlock(record)
        self._record = self._cells.find(self._key, now_ms)
        if self._record is not None:
            self._alone = None
        elif self._alone is None:
            log.error(
                "the shared limits of tenants: all %d records are in use; tenant %s is limited in each process alone",
                RECORDS,
                self._tenant,
            )
            self._alone = OwnCell()

    def unlock(self) -> None:
        """Let others have it."""
        if self._record is not None:
            self._cells.unlock(self._record)

    def bucket(self, rate: Rate) -> Bucket:
        """Return a bucket as it is."""
        if self._record is None:
            return self._own().bucket(rate)
        return self._cells.bucket(self._record, rate)

    def store(self, rate: Rate, bucket: Bucket) -> None:
        """Replace a bucket."""
        if self._record is None:
            self._own().store(rate, bucket)
        else:
            self._cells.store(self._record, rate, bucket)

    def elsewhere(self) -> int:
        return 0 if self._record is None else self._cells.elsewhere(self._record)

    def publish(self, in_flight: int) -> None:
        """Tell other processes how many requests are in flight in this one."""
        if self._record is not None:
            self._cells.publish(self._record, in_flight)

    def _own(self) -> OwnCell:
        assert self._alone is not None, "a cell without a record is one of this process alone"
        return self._alone
