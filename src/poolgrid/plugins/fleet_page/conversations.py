"""Which workers hold how much of the last prompt of each session.

At most ``capacity`` sessions are known; beyond it the one that was asked for longest ago is forgotten. No text and no
token is looked at or kept, only the sequence hashes that routing has anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.wire.identifiers import WorkerKey

CAPACITY = 256
"""Sessions known at a time; a page shows a few dozen."""

HOLDERS_MAX = 16
"""Workers listed of one conversation: those that hold most."""

Held = tuple[WorkerKey, int, int]
"""A worker, the leading blocks that it holds, and the blocks that it held once and has lost."""


class Conversation:
    """One conversation, as its last turn left it."""

    __slots__ = ("_most", "isl", "last_ms", "name", "path", "request_id", "turns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.path: Sequence[int] = ()
        """Sequence hashes of the whole blocks of its last prompt."""
        self.isl = 0
        """Prompt tokens of the last turn."""
        self.turns = 0
        self.last_ms = 0
        """Unix time of the last turn."""
        self.request_id = ""
        """The last turn."""
        self._most: dict[WorkerKey, int] = {}
        """The most blocks that each worker was seen with."""

    def holders(self, index: PrefixIndex) -> list[Held]:
        """Return the workers and how much of it each holds now, most first; those that lost all of it come last."""
        found: list[Held] = []
        most = self._most
        for depth, mask in index.find(self.path):
            left = mask
            while left and len(found) < HOLDERS_MAX:
                bit = left & -left
                left ^= bit
                worker = index.worker(bit.bit_length() - 1)
                before = most.get(worker, 0)
                found.append((worker, depth, max(0, before - depth)))
                if depth > before:
                    most[worker] = depth
        listed = {worker for worker, _, _ in found}
        if len(found) < HOLDERS_MAX:
            found += [(worker, 0, blocks) for worker, blocks in most.items() if worker not in listed]
        if len(most) > 2 * HOLDERS_MAX:
            self._most = {worker: blocks for worker, blocks in most.items() if worker in listed}
        return found[:HOLDERS_MAX]


class Conversations:
    """The sessions of one pool as their requests show them, latest last."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[tuple[int, str], Conversation] = OrderedDict()

    def turn(self, request: RoutingRequest, path: Sequence[int], time_ms: int) -> str:
        """Take a request in and return its session's name; empty for one of no session, or without a whole block."""
        if not request.session or not path:
            return ""
        key = (request.tenant, request.session)
        found = self._known.pop(key, None) or Conversation(request.session)
        self._known[key] = found
        found.path, found.isl, found.last_ms = path, request.isl, time_ms
        found.turns += found.request_id != request.request_id
        found.request_id = request.request_id
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return found.name

    def latest(self, limit: int) -> list[Conversation]:
        """Return the conversations that were asked for last, latest first."""
        return list(islice(reversed(self._known.values()), limit))
