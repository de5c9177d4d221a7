"""Which server made what only it has: responses, conversations, files, batches, videos.

An id says nothing of its server, and it may have been made through another router. So what passes here is remembered,
and for an id that is not known every server is asked, which answers without its engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Raw

from poolgrid.server.proxy.collector import look_up
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.ports import ServerPlace
from poolgrid.server.proxy.server_connection import AnswerFailed

IDS_MAX: Final = 100_000
"""Ids that are remembered, the ones used last; for others servers are asked."""

ID_CHARS_MAX: Final = 256
"""Longest id that is remembered; engines write some 40 characters. With longer ones the memory of ``IDS_MAX`` would be
the servers' to choose. For such an id every server is asked."""

ASKED_MAX: Final = 64
"""Servers that are asked about one id: each costs a request."""

COLLECTION_OF: Final = {
    "previous_response_id": "/v1/responses",
    "conversation": "/v1/conversations",
    "input_file_id": "/v1/files",
}
"""By member of a JSON body that names an id: where a server is asked for it. The first member that is given counts."""


class ServerState:
    """What a router knows of such ids."""

    def __init__(self) -> None:
        self._url_of: OrderedDict[str, str] = OrderedDict()

    def note(self, state_id: str, url: str) -> None:
        """Remember which server made an id."""
        if len(state_id) > ID_CHARS_MAX:
            return
        self._url_of[state_id] = url
        self._url_of.move_to_end(state_id)
        if len(self._url_of) > IDS_MAX:
            self._url_of.popitem(last=False)

    async def find(
        self, collection: str, state_id: str, places: Sequence[tuple[ServerPlace, ForwardServer]]
    ) -> ServerPlace | None:
        """Return the server that has an id; ``None`` when none of the pool has."""
        url = self._url_of.get(state_id)
        for place, _ in places:
            if place.url == url:
                return place
        target = f"{collection}/{quote(state_id, safe='')}".encode()  # it may be any text of a client's body
        asked = places[:ASKED_MAX]
        answers = await asyncio.gather(*(_has(server, target, place.is_router) for place, server in asked))
        for (place, _), has in zip(asked, answers, strict=True):
            if has:
                self.note(state_id, place.url)
                return place
        return None


async def _has(server: ForwardServer, target: bytes, is_router: bool) -> bool:
    try:
        answer = await look_up(server, target, is_router)
    except (AnswerFailed, OSError, TimeoutError):
        return False
    return answer.status == 200


def named_state(values: Mapping[str, Raw]) -> tuple[str, str] | None:
    """Return collection and id that a body continues, if it does."""
    for member, collection in COLLECTION_OF.items():
        value = values.get(member)
        if value is None:
            continue
        try:
            found = msgspec.json.decode(value)
        except msgspec.MsgspecError:
            continue
        if isinstance(found, dict):
            found = found.get("id")
        if isinstance(found, str) and found:
            return collection, found
    return None
