"""Requests that continue an earlier response, and stored responses: between the endpoint and the store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from poolgrid.kernel.wire.identifiers import SECRET_BYTES, name_of
from poolgrid.plugins.responses_api.encoder import ResponsesEncoder
from poolgrid.plugins.responses_api.response_store import KeptResponse, Part, ResponseStore
from poolgrid.plugins.responses_api.schema import ITEMS_MAX, ResponsesBody
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.prepared_request import AnswerForm, AnswerStart

Item = dict[str, Any]
_items_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_raw_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])

REFERENCE = "item_reference"

_INPUT = "in_"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


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
