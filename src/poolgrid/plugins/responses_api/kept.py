"""Requests that continue an earlier response, and stored responses: between the endpoint and the store.

Responses that are kept, asked for by their id: show one, forget it, list what it was asked with.

Responses that are kept, so that a client may name an earlier one instead of sending the conversation again.

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
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Query, Request, Response

from poolgrid.kernel.requests.inference import Refused
from poolgrid.kernel.wire.identifiers import SECRET_BYTES, name_of
from poolgrid.plugins.responses_api.conversation import ITEMS_MAX, ResponsesBody
from poolgrid.plugins.responses_api.encoder import ResponsesEncoder
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.list_page import PAGE_MAX, page_of
from poolgrid.server.frontend.prepared_request import AnswerForm, AnswerStart
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


Item = dict[str, Any]
_items_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_raw_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])

REFERENCE = "item_reference"


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """The store behind the endpoints, and its limits. ``store`` is ``None`` where nothing is kept."""

    store: ResponseStore | None
    conversation_bytes_max: int
    count: Callable[[str], None] = lambda outcome: None
    """Told of each response that was to be kept: ``kept`` or ``lost``."""

    async def earlier(self, body: ResponsesBody, owner: Owner | None) -> list[Item]:
        """Return the items of the conversation that a request continues; raises ``RequestError``."""
        wanted = body.previous_response_id
        if wanted is None:
            return []
        if self.store is None or owner is None:
            raise unsupported("previous_response_id", f"{self._why_not(owner)}; send the whole conversation as input")
        conversation = await self.store.conversation(owner, wanted)
        if conversation is None:
            raise RequestError(
                400,
                "previous_response_not_found",
                f"previous_response_id is {quoted(wanted)}: neither it nor all responses before it are kept here (any "
                "more); send the whole conversation as input. The request was not run.",
                param="previous_response_id",
            )
        if sum(len(kept.input) + len(kept.output) for kept in conversation) > self.conversation_bytes_max:
            raise invalid(
                "previous_response_id",
                f"previous_response_id is {quoted(wanted)}: the conversation has more than "
                f"{self.conversation_bytes_max} bytes, the limit (setting max_body_bytes). The request was not run.",
            )
        items = [item for kept in conversation for part in (kept.input, kept.output) for item in decoded(part)]
        if len(items) > ITEMS_MAX:
            raise invalid(
                "previous_response_id",
                f"previous_response_id is {quoted(wanted)}: the conversation has {len(items)} items, allowed are up to "
                f"{ITEMS_MAX}. The request was not run.",
            )
        return items

    async def dereference(self, body: ResponsesBody, owner: Owner | None) -> None:
        """Put the items that a request refers to in the places of its references; raises ``RequestError``.

        What is kept of the request then has the items themselves: it does not depend on the responses they are from.
        """
        found = dict(references(body.input))
        if not found:
            return
        items: list[Any] = list(body.input)
        if self.store is None or owner is None:
            raise unsupported(next(iter(found)), f"{self._why_not(owner)}; send the item itself")
        read: dict[tuple[str, Part], dict[str, msgspec.Raw]] = {}
        read_bytes = taken_bytes = 0
        for where, (index, identity) in found.items():
            for place in _places(identity):
                if place not in read:
                    kept = await self.store.items(owner, *place)
                    read_bytes += len(kept)
                    read[place] = _by_id(kept)
                raw = read[place].get(identity)
                if raw is not None:
                    items[index] = msgspec.json.decode(raw)
                    taken_bytes += len(raw)
                    break
            else:
                raise RequestError(
                    404,
                    "item_not_found",
                    f"{where} is {quoted(identity)}: no such item of a response is kept here (any more); send the item "
                    "itself. The request was not run.",
                    param=where,
                )
            # Before the next: a few bytes of references may mean very much.
            if max(read_bytes, taken_bytes) > self.conversation_bytes_max:
                raise invalid(
                    where,
                    f"{where} is {quoted(identity)}: with it the items that are referred to, or the responses that "
                    f"they are from, have more than {self.conversation_bytes_max} bytes, the limit (setting "
                    "max_body_bytes). The request was not run.",
                )
        body.input = items

    def form(self, body: ResponsesBody, owner: Owner | None) -> AnswerForm:
        """Return the form of the answer, which keeps it if it may; raises ``RequestError``."""
        if body.store and (self.store is None or owner is None):
            raise unsupported("store", f"{self._why_not(owner)}; send store: false, or leave it out")
        if self.store is None or owner is None or body.store is False:
            return AnswerForm(partial(_encoder, body, False), counts_reasoning=True)
        return AnswerForm(partial(_encoder, body, True), partial(self._keep, self.store, body, owner), True)

    async def _keep(
        self, store: ResponseStore, body: ResponsesBody, owner: Owner, encoder: ResponsesEncoder
    ) -> bytes | None:
        """Keep a complete answer, before its client can ask for it; return the end of one that is not kept."""
        response = encoder.response
        encode = msgspec.json.encode
        entry = KeptResponse(
            id=response["id"],
            previous=body.previous_response_id,
            input=encode(input_items(body, response["id"])),
            output=encode(response["output"]),
            response=encode(response),
        )
        is_kept = await store.keep(owner, entry)
        self.count("kept" if is_kept else "lost")
        return None if is_kept else encoder.not_stored()

    def _why_not(self, owner: Owner | None) -> str:
        if self.store is None:
            return "this server keeps no responses (setting response_store_bytes)"
        return "this server keeps no responses without API keys, which tell clients apart (setting isolate_tenants)"


def _encoder(body: ResponsesBody, stored: bool, start: AnswerStart) -> ResponsesEncoder:
    secret = f"_{secrets.token_hex(SECRET_BYTES)}" if stored else ""
    return ResponsesEncoder(body, start, f"resp_{name_of(start.request_ids[0])}{secret}", stored)


def references(items: str | Sequence[Item]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the place of each reference, with its index and the id of the item that it means."""
    for index, item in enumerate(() if isinstance(items, str) else items):
        # OpenAI's own schema lets the type be absent.
        if item.get("type") == REFERENCE or (item.get("type") is None and item.keys() <= {"type", "id"}):
            where, identity = f"input[{index}].id", item.get("id")
            if not isinstance(identity, str):
                raise invalid(
                    where,
                    f"{where} is {quoted(identity)}: allowed is the id of an item. The request was not run.",
                    "invalid_type",
                )
            yield where, (index, identity)


def _places(identity: str) -> Iterator[tuple[str, Part]]:
    """Yield the response, and the list of it, in which an item of this id is, if it is kept."""
    name = identity.partition("_")[2].rpartition("_")[0]
    if name:
        yield f"resp_{name}", "output"
    if name.startswith(_INPUT):
        yield f"resp_{name.removeprefix(_INPUT)}", "input"


class _Identified(msgspec.Struct):
    id: Any = None
    """What the client that sent the item put there: perhaps no string."""


_decode_identified = msgspec.json.Decoder(_Identified).decode


def _by_id(items: bytes) -> dict[str, msgspec.Raw]:
    named = ((_decode_identified(raw).id, raw) for raw in _raw_items_decoder.decode(items))
    return {identity: raw for identity, raw in named if isinstance(identity, str)}


def input_items(body: ResponsesBody, response_id: str) -> list[Item]:
    """Return what a request brought, as items with ids."""
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items: list[Item] = []
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        named: Item = {"id": f"{_PREFIXES.get(kind, 'item')}_{_INPUT}{response_id.removeprefix('resp_')}_{number}"}
        named.update({"type": kind, **{key: value for key, value in item.items() if key != "id" or value}})
        if kind == "message" and isinstance(item.get("content"), str):
            text = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": text, "text": item["content"]}
            named["content"] = [{**part, "annotations": []} if text == "output_text" else part]
        items.append(named)
    return items


def decoded(items: bytes) -> list[Item]:
    """Return a list of items from its JSON."""
    return _items_decoder.decode(items)


_INPUT = "in_"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


RESPONSE_PATH = "/v1/responses/{response_id}"
ITEMS_PATH = "/v1/responses/{response_id}/input_items"
COMPACT_PATH = "/v1/responses/compact"


def add_kept_response_endpoints(app: FastAPI, kept: KeptResponses, owner_of: Callable[[Request], Owner | None]) -> None:
    """Add the endpoints to an application."""

    @app.get(RESPONSE_PATH, tags=["responses"])
    async def get_response(request: Request, response_id: str) -> Response:
        """Return a response that is kept."""
        owner = owner_of(request)
        found = None if kept.store is None or owner is None else await kept.store.response(owner, response_id)
        if found is None:
            raise _not_found(response_id)
        return Response(found, media_type="application/json")

    @app.delete(RESPONSE_PATH, tags=["responses"])
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        """Forget a response; conversations can no longer continue it, or what followed it."""
        owner = owner_of(request)
        if kept.store is None or owner is None or not await kept.store.forget(owner, response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(ITEMS_PATH, tags=["responses"])
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List what a response was asked with: its own input, and before it the conversation that it continued."""
        owner = owner_of(request)
        conversation = (
            None if kept.store is None or owner is None else await kept.store.conversation(owner, response_id)
        )
        if conversation is None:
            raise _not_found(response_id)
        items: list[Item] = []
        for entry in conversation:
            items += decoded(entry.input)
            if entry is not conversation[-1]:
                items += decoded(entry.output)
        return Response(msgspec.json.encode(page_of(items, limit, order, after)), media_type="application/json")

    @app.post(COMPACT_PATH, include_in_schema=False)
    async def compact() -> None:
        """Refuse: the path would be taken for the id of a response otherwise."""
        raise RequestError(
            404,
            "not_found",
            f"POST {COMPACT_PATH}: conversations are not compacted here; ask the model for a summary with "
            "/v1/responses and continue from it",
        )


def _not_found(response_id: str) -> RequestError:
    return RequestError(
        404,
        "not_found",
        f"no response {quoted(response_id)} is kept here: it never was, it was deleted, or there was no more room",
        param="response_id",
    )
