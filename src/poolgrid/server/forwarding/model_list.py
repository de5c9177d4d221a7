"""The models of several servers as one list, each card as its server wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from poolgrid.server.forwarding.body_edit import edit, elements, top_level

MAX_LIST_BYTES: Final = 1 << 20
"""Of one server's answer. A card has about 600 bytes, so there is room for 1,700 adapters. Longer answers are not
read."""

MAX_CARDS: Final = 4096
"""Of one server that are read, and of all servers together. Further ones are left out of the list and of the choice by
model."""

EMPTY: Final = b'{"object":"list","data":[]}'


class ModelCards(NamedTuple):
    """What all servers list."""

    body: bytes
    """The answer to ``GET /v1/models``."""
    cards: dict[str, bytes]
    """The card of each model by its id, of the first server that has it; the answer to ``GET /v1/models/{id}``."""
    unread: dict[str, str]
    """Servers whose answer is no list of models, with what is wrong."""


_decode_name = msgspec.json.Decoder(str).decode


def merge_model_lists(answers: Iterable[tuple[str, bytes]]) -> ModelCards:
    """Merge the answers of servers, given with the servers' names.

    The list is the first server's answer, with the others' cards behind its own. It is that answer byte for byte where
    the others have nothing more.
    """
    first: bytes | None = None
    merged = ModelCards(EMPTY, {}, {})
    added: list[bytes] = []
    for server, body in answers:
        try:
            cards = _cards_of(body)
        except ValueError as error:
            merged.unread[server] = str(error)
            continue
        for name, card in cards:
            if name not in merged.cards and len(merged.cards) < MAX_CARDS:
                merged.cards[name] = card
                if first is not None:
                    added.append(card)
        first = body if first is None else first
    if first is None:
        return merged
    return merged._replace(body=_with_cards(first, added) if added else first)


def _with_cards(body: bytes, added: list[bytes]) -> bytes:
    fields = top_level(body)
    data = fields.value("data") or b"[]"
    is_empty = data[1:-1].strip() == b""
    return edit(fields, {"data": data[:-1] + (b"" if is_empty else b",") + b",".join(added) + b"]"})


def _cards_of(body: bytes) -> list[tuple[str, bytes]]:
    """The cards with their ids.

    Raises:
        ValueError: The answer is no list of models, or too long.
    """
    if len(body) > MAX_LIST_BYTES:
        raise ValueError(f"the list of models has {len(body)} bytes, allowed are {MAX_LIST_BYTES}")
    data = top_level(body).value("data")
    if data is None or not data.startswith(b"["):
        raise ValueError("the list of models has no member data that is a list")
    cards: list[tuple[str, bytes]] = []
    for card in elements(data, MAX_CARDS):
        try:
            name = _decode_name(top_level(card).value("id") or b"null")
        except (ValueError, msgspec.DecodeError):
            raise ValueError(f"card {len(cards)} of the list of models has no id that is a string") from None
        cards.append((name, card))
    return cards
