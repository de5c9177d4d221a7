"""The fleet page of several processes that share a port: whichever a browser has come to, it shows what all of them do.

Rules
    1. What all see alike (workers, caches, pools) each process shows as it sees it. What one alone knows (its requests,
       its queue) it is asked for, over the group's sockets, as often as pictures are made.
    2. While nobody looks at any of them, nothing is asked. Who is asked begins to watch its requests, and stops
       ``LINGER_S`` after it was asked last.
    3. Pictures wait for nobody. A process that does not answer is left out, and the page says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from poolgrid.fleet_page.hub import LINGER_S, REST_FACTOR
from poolgrid.fleet_page.ports import Part, Picture, SharedFleetSource
from poolgrid.process.process_group import GroupMember, LoopAnswer
from poolgrid.process.tasks import Restart, supervised

log = logging.getLogger(__name__)

PART = "fleet-part"
REQUEST = "fleet-request"


class GroupFleetSource:
    """Implements ``poolgrid.fleet_page.ports.FleetSource`` over those of all members of a group."""

    def __init__(self, source: SharedFleetSource, member: GroupMember, interval_ms: float) -> None:
        """``interval_ms`` is the least time between two questions to the same process."""
        self._source = source
        self._member = member
        self._interval_s = interval_ms / 1000
        place = member.place
        self._others = [index for index in range(place.size) if index != place.index]
        self._parts: dict[int, Part] = {}
        self._silent: set[int] = set()
        self._following: list[asyncio.Task[None]] = []
        self._reasons = 0
        """Why the requests of this process are watched: somebody looks here, somebody looks at a sibling."""
        self._asked: asyncio.TimerHandle | None = None
        """Ends the second of them."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        return self._source.columns

    # -- for those who look here ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Somebody looks from now on."""
        self._watch()
        self._following = [
            supervised(partial(self._follow, index), f"fleet page of HTTP process {index}", Restart(limit=None))
            for index in self._others
        ]

    def end(self) -> None:
        """Nobody looks any more."""
        for task in self._following:
            task.cancel()
        self._following.clear()
        self._parts.clear()
        self._silent.clear()
        self._unwatch()

    async def look(self) -> Picture:
        """Return what there is to see now, of all processes that answer."""
        picture = await self._source.look(list(self._parts.values()))
        if self._silent:
            picture.values["totals"]["trouble"] = " ".join(
                filter(None, (picture.values["totals"]["trouble"], self._complaint()))
            )
        return picture

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return why a request went where it went, whichever process keeps it."""
        kept = self._source.kept(request_id)
        if kept is None:
            question = f"{REQUEST} {msgspec.json.encode(request_id).decode()}"
            answers = await asyncio.gather(*(self._ask(index, question) for index in self._others))
            kept = next(filter(None, answers), None)
        return None if kept is None else await self._source.complete(kept)

    async def reel(self, from_ms: int, to_ms: int, frames: int) -> bytes:
        """Return the pool between two times: its journal is the same for all."""
        return await self._source.reel(from_ms, to_ms, frames)

    async def _follow(self, index: int) -> None:
        now_s = asyncio.get_running_loop().time
        next_turn = -1
        while True:
            began_s = now_s()
            part = await self._ask_part(index, next_turn)
            if part is None:
                self._parts.pop(index, None)
                self._silent.add(index)
            else:
                self._silent.discard(index)
                next_turn = part.next_turn
                self._source.learn(part.turns)
                self._parts[index] = part
            await asyncio.sleep(max(self._interval_s, REST_FACTOR * (now_s() - began_s)))

    async def _ask_part(self, index: int, next_turn: int) -> Part | None:
        said = await self._ask(index, f"{PART} {next_turn}")
        try:
            return msgspec.msgpack.decode(said, type=Part) if said else None
        except msgspec.MsgspecError as error:
            log.warning("what HTTP process %d says of its requests cannot be read: %s", index, error)
            return None

    async def _ask(self, index: int, question: str) -> bytes:
        try:
            return await self._member.ask_member(index, question)
        except OSError as error:
            log.info("asking HTTP process %d for %s: %s", index, question.partition(" ")[0], error)
            return b""

    def _complaint(self) -> str:
        silent = ", ".join(map(str, sorted(self._silent)))
        return f"HTTP process {silent} of {self._member.place.size} does not answer: its requests are not shown."

    # -- for those who look at a sibling -------------------------------------------------------------------------------

    def answers(self) -> dict[str, LoopAnswer]:
        """Return what siblings may ask this process."""
        return {PART: self._tell_part, REQUEST: self._tell_request}

    def _tell_part(self, next_turn: str) -> bytes:
        if self._asked is None:
            self._watch()
        else:
            self._asked.cancel()
        self._asked = asyncio.get_running_loop().call_later(LINGER_S, self._forgotten)
        return msgspec.msgpack.encode(self._source.part(int(next_turn)))

    def _tell_request(self, request_id: str) -> bytes:
        return self._source.kept(msgspec.json.decode(request_id, type=str)) or b""

    def _forgotten(self) -> None:
        self._asked = None
        self._unwatch()

    def _watch(self) -> None:
        self._reasons += 1
        if self._reasons == 1:
            self._source.begin()

    def _unwatch(self) -> None:
        self._reasons -= 1
        if not self._reasons:
            self._source.end()


def one_queue(queues: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the queues of several processes (``poolgrid.wire.answers.QueueRow``) as one: all of it adds up, but for
    when to come back, which is the latest."""
    known = [queue["retry_after_s"] for queue in queues if queue["retry_after_s"] is not None]
    refused: dict[str, int] = {}
    for queue in queues:
        for code, count in queue["refused"].items():
            refused[code] = refused.get(code, 0) + count
    names = ("requests", "requests_max", "prompt_tokens", "prompt_tokens_max")
    added = {name: sum(queue[name] for queue in queues) for name in names}
    return {**added, "retry_after_s": max(known, default=None), "refused": refused}


def by_time(tables: Sequence[Mapping[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    """Return the requests of several processes as one table, oldest first; a row begins with its time."""
    if len(tables) == 1:
        return dict(tables[0])
    return dict(sorted((item for table in tables for item in table.items()), key=lambda item: item[1][0]))
