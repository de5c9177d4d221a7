"""The last decisions of all processes that share a port: whichever of them is asked answers for all.

Each process decides for the connections that came to it, and keeps its own decisions. A question goes to the others
over the group's sockets; who does not answer is left out. A process that is alone asks nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from poolgrid.process.process_group import GroupMember, LoopAnswer

log = logging.getLogger(__name__)

NEWEST = "newest-decisions"
ABOUT = "decisions-about"


class GroupDecisions:
    """What ``/v1/decisions`` and ``/v1/decisions/{request_id}`` answer."""

    def __init__(
        self,
        newest: Callable[[int], dict[str, Any]],
        about: Callable[[str], dict[str, Any] | None],
        member: GroupMember | None = None,
    ) -> None:
        """``newest`` returns this process's last decisions as a list object whose rows have ``time_ms``, newest first;
        ``about`` what it knows of a request, or ``None``."""
        self._newest = newest
        self._about = about
        self._member = member

    async def newest(self, limit: int) -> dict[str, Any]:
        """Return the last decisions of all processes, newest first."""
        listed = self._newest(limit)
        for others in await self._ask(f"{NEWEST} {limit}"):
            listed["data"] += others["data"]
        listed["data"] = sorted(listed["data"], key=lambda row: -row["time_ms"])[:limit]
        return listed

    async def about(self, request_id: str) -> dict[str, Any] | None:
        """Return what the process knows that decided about a request; ``None`` when none of them does."""
        known = self._about(request_id)
        if known is None:
            told = await self._ask(f"{ABOUT} {msgspec.json.encode(request_id).decode()}")
            known = next(filter(None, told), None)
        return known

    def answers(self) -> dict[str, LoopAnswer]:
        """Return what the others may ask this process."""
        return {
            NEWEST: lambda limit: msgspec.json.encode(self._newest(int(limit))),
            ABOUT: lambda request_id: msgspec.json.encode(self._about(msgspec.json.decode(request_id, type=str))),
        }

    async def _ask(self, question: str) -> list[dict[str, Any]]:
        if self._member is None:
            return []
        place = self._member.place
        others = [index for index in range(place.size) if index != place.index]
        told = await asyncio.gather(*(self._ask_one(self._member, index, question) for index in others))
        return [each for each in told if each is not None]

    async def _ask_one(self, member: GroupMember, index: int, question: str) -> dict[str, Any] | None:
        try:
            said = await member.ask_member(index, question)
        except OSError as error:
            log.warning("asking HTTP process %d for its decisions: %s; they are left out", index, error)
            return None
        # Nothing is said by one that died while it answered.
        answer: dict[str, Any] | None = msgspec.json.decode(said) if said else None
        return answer
