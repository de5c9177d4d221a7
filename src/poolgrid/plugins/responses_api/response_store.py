"""Responses that are kept, so that a client may name an earlier one instead of sending the conversation again.

Rules
    1. A response is found by its *owner* (the tenant that asked for it) and its id only.
    2. Responses that lead to each other are one conversation. What is too much is forgotten by whole conversations, the
       one that was used longest ago first: half a conversation could not continue. An owner has an equal part of
       ``budget_bytes``; what is kept of owners that are no more goes when the whole is full.
    3. A conversation that alone is larger than its owner's part is forgotten, its latest turn with it, and no other for
       it.
    4. A conversation that was not used for ``ttl_s`` is forgotten.
    5. All is in one SQLite database: in memory, or in a file, which the HTTP processes of one router share. A file of
       another version is begun again. A response that cannot be written is delivered with ``store`` false: its client
       has the answer, and knows that it cannot continue from it.
    6. Reading needs no room on the disk: a time of use that cannot be written is lost.

Every call waits for a thread of the store's own: a file may have to wait for its disk or for another process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.process.clock import Clock

log = logging.getLogger(__name__)

MEMORY = ":memory:"

VERSION = 1
"""Of the tables; SQLite keeps it in the file (``user_version``)."""

TTL_S = 30 * 86_400.0
"""How long a conversation is kept after its last use; OpenAI keeps them for 30 days."""

LOCK_WAIT_S = 5.0
"""Longest wait for another process that writes; a write takes about a millisecond."""

RETRY_AFTER_S = 1.0

ENTRY_BYTES = 512
"""Size of a response in addition to its own bytes: ids and indexes."""

_TABLES = """
CREATE TABLE conversations (
    owner TEXT, root TEXT, used_ms INTEGER, bytes INTEGER, PRIMARY KEY (owner, root)
) WITHOUT ROWID;
CREATE INDEX used ON conversations (used_ms);
CREATE TABLE responses (
    owner TEXT, id TEXT, root TEXT, previous TEXT, input BLOB, output BLOB, response BLOB, PRIMARY KEY (owner, id)
);
CREATE INDEX conversation ON responses (owner, root);
"""

T = TypeVar("T")

Part = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One response with what was asked for: everything JSON, as bytes."""

    id: str
    previous: str | None
    input: bytes
    """The list of its own input items."""
    output: bytes
    """The list of its output items."""
    response: bytes
    """The response as the client got it."""

    @property
    def size(self) -> int:
        return len(self.input) + len(self.output) + len(self.response) + ENTRY_BYTES


class ResponseStore:
    """The store of one process, for one event loop. ``path`` is a file, ``None`` = in memory."""

    def __init__(self, path: Path | None, budget_bytes: int, ttl_s: float, clock: Clock) -> None:
        """Open; raises ``OSError`` when a file cannot be used."""
        self._budget_bytes = budget_bytes
        self._ttl_ms = 1000 * ttl_s
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, "responses")
        try:
            self._database = self._executor.submit(_open, path).result()
        except (sqlite3.Error, OSError) as error:
            self._executor.shutdown()
            raise OSError(f"opening the responses that are kept at {path}: {error}") from error

    async def keep(self, owner: Owner, kept: KeptResponse) -> bool:
        """Keep a response and return whether it is kept; never fails."""
        try:
            return await self._run(partial(self._keep, owner, kept))
        except sqlite3.Error as error:
            log.warning("a response is not kept: %s", error)
            return False

    async def conversation(self, owner: Owner, response_id: str) -> list[KeptResponse] | None:
        """Return a response and all before it, the first one first; ``None`` when one of them is not kept."""
        return await self._asked(partial(self._conversation, owner.name, response_id))

    async def items(self, owner: Owner, response_id: str, part: Part) -> bytes:
        """Return the items that a response was asked with, or its answer's."""
        return await self._asked(partial(self._items, owner.name, response_id, part))

    async def response(self, owner: Owner, response_id: str) -> bytes | None:
        found = await self._asked(partial(self._find, owner.name, response_id))
        return None if found is None else found.response

    async def forget(self, owner: Owner, response_id: str) -> bool:
        return await self._asked(partial(self._forget, owner.name, response_id))

    def close(self) -> None:
        """End the thread; what is in memory is gone."""
        self._executor.submit(self._database.close)
        self._executor.shutdown()

    async def _asked(self, work: Callable[[], T]) -> T:
        """Do what a client asked for; raises ``Refused`` 503 when the file cannot be read now."""
        try:
            return await self._run(work)
        except sqlite3.Error as error:
            log.warning("the responses that are kept cannot be read: %s", error)
            message = "the responses that are kept cannot be read now; try again later"
            raise Refused(503, "responses_unavailable", message, RETRY_AFTER_S) from None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # In the thread.

    def _keep(self, owner: Owner, kept: KeptResponse) -> bool:
        database, now_ms = self._database, int(self._clock.wall_ms())
        part = self._budget_bytes // max(1, owner.owners)
        with database:
            database.execute("BEGIN IMMEDIATE")
            before = None if kept.previous is None else self._find(owner.name, kept.previous)
            if kept.previous is not None and before is None:
                return False  # it was forgotten meanwhile
            root = kept.id if kept.previous is None else self._root(owner.name, kept.previous)
            database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (owner.name, kept.id, root, kept.previous, kept.input, kept.output, kept.response),
            )
            database.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "used_ms = max(used_ms, excluded.used_ms), bytes = bytes + excluded.bytes",
                (owner.name, root, now_ms, kept.size),
            )
            for stale in database.execute(
                "SELECT owner, root FROM conversations WHERE used_ms < ?", (now_ms - self._ttl_ms,)
            ).fetchall():
                self._drop(*stale)
            (size,) = database.execute(
                "SELECT bytes FROM conversations WHERE owner = ? AND root = ?", (owner.name, root)
            ).fetchone()
            if size > part:
                self._drop(owner.name, root)  # first: others would be forgotten for it in vain
            self._make_room(part, "WHERE owner = ?", (owner.name,))
            self._make_room(self._budget_bytes)
            return self._find(owner.name, kept.id) is not None

    def _make_room(self, budget: int, where: str = "", values: tuple[str, ...] = ()) -> None:
        """Forget conversations of an owner, or of all, until the rest is within a budget."""
        (used,) = self._database.execute(f"SELECT total(bytes) FROM conversations {where}", values).fetchone()
        if used <= budget:
            return
        oldest = self._database.execute(
            f"SELECT owner, root, bytes FROM conversations {where} ORDER BY used_ms, owner, root", values
        ).fetchall()
        for owner, root, size in oldest:
            self._drop(owner, root)
            used -= size
            if used <= budget:
                return

    def _drop(self, owner: str, root: str) -> None:
        self._database.execute("DELETE FROM responses WHERE owner = ? AND root = ?", (owner, root))
        self._database.execute("DELETE FROM conversations WHERE owner = ? AND root = ?", (owner, root))

    def _find(self, owner: str, response_id: str) -> KeptResponse | None:
        row = self._database.execute(
            "SELECT id, previous, input, output, response FROM responses WHERE owner = ? AND id = ?",
            (owner, response_id),
        ).fetchone()
        return None if row is None else KeptResponse(*row)

    def _root(self, owner: str, response_id: str) -> str:
        (root,) = self._database.execute(
            "SELECT root FROM responses WHERE owner = ? AND id = ?", (owner, response_id)
        ).fetchone()
        return str(root)

    def _conversation(self, owner: str, response_id: str) -> list[KeptResponse] | None:
        found: list[KeptResponse] = []
        following: str | None = response_id
        while following is not None:
            kept = self._find(owner, following)
            if kept is None:
                return None
            found.append(kept)
            following = kept.previous
        self._touch(owner, found[-1].id)
        return found[::-1]

    def _items(self, owner: str, response_id: str, part: Part) -> bytes:
        kept = self._find(owner, response_id)
        if kept is None:
            return b"[]"
        self._touch(owner, self._root(owner, response_id))
        return kept.input if part == "input" else kept.output

    def _touch(self, owner: str, root: str) -> None:
        try:
            with self._database:
                self._database.execute(
                    "UPDATE conversations SET used_ms = ? WHERE owner = ? AND root = ?",
                    (int(self._clock.wall_ms()), owner, root),
                )
        except sqlite3.OperationalError as error:
            log.warning("the time of use of a kept response is not written: %s", error)

    def _forget(self, owner: str, response_id: str) -> bool:
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            kept = self._find(owner, response_id)
            if kept is None:
                return False
            root = self._root(owner, response_id)
            self._database.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))
            self._database.execute(
                "UPDATE conversations SET bytes = bytes - ? WHERE owner = ? AND root = ?", (kept.size, owner, root)
            )
            self._database.execute(
                "DELETE FROM conversations WHERE owner = ? AND root = ? AND NOT EXISTS "
                "(SELECT 1 FROM responses WHERE owner = ? AND root = ?)",
                (owner, root, owner, root),
            )
            return True


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Conversations are private.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    database = sqlite3.connect(
        MEMORY if path is None else path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
    )
    database.execute("PRAGMA journal_mode = WAL")
    # A power failure may lose the last turns, and never more.
    database.execute("PRAGMA synchronous = NORMAL")
    with database:
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                database.execute(f"DROP TABLE {name}")
            for statement in _TABLES.strip().split(";"):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {VERSION}")
    return database
