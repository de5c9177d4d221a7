"""Which requests are turns of one conversation, by the blocks of their prompts, and which workers hold how much of it.

Rules
    1. A request continues a conversation when its path has the last whole block of an earlier one: what a client
       sends again, with more behind it. The latest such block counts. Else a conversation begins.
    2. Requests whose prompts share only a beginning (a system prompt) are of different conversations.
    3. At most ``capacity`` conversations are known; beyond it the one that was asked for longest ago is forgotten.

No text and no token is looked at or kept, only the sequence hashes that routing has anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.wire.identifiers import WorkerKey

CAPACITY = 256
"""Conversations known at a time; a page shows a few dozen."""

LOOK_BACK_BLOCKS = 4096
"""Blocks of a new path that are looked up, from its end: a turn adds fewer."""

HOLDERS_MAX = 16
"""Workers listed of one conversation: those that hold most."""

Held = tuple[WorkerKey, int, int]
"""A worker, the leading blocks that it holds, and the blocks that it held once and has lost."""


class Conversation:
    """One conversation, as its last turn left it."""

    __slots__ = ("_most", "block_size", "isl", "last_ms", "name", "path", "request_id", "turns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.path: Sequence[int] = ()
        """Sequence hashes of the whole blocks of its longest prompt."""
        self.block_size = 0
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
    """The conversations of one pool, latest last."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_last_block: OrderedDict[int, Conversation] = OrderedDict()
        self._begun = 0

    def turn(
        self, path: Sequence[int], request_id: str, isl: int, block_size: int, time_ms: int
    ) -> Conversation | None:
        """Take a request in and return its conversation; ``None`` for a prompt without a whole block."""
        if not path:
            return None
        known = self._by_last_block
        found: Conversation | None = None
        for at in range(len(path) - 1, max(-1, len(path) - 1 - LOOK_BACK_BLOCKS), -1):
            found = known.pop(path[at], None)
            if found is not None:
                break
        if found is None:
            self._begun += 1
            found = Conversation(f"c{self._begun}")
        known[path[-1]] = found
        found.path, found.request_id = path, request_id
        found.isl, found.block_size, found.last_ms = isl, block_size, time_ms
        found.turns += 1
        while len(known) > self._capacity:
            known.popitem(last=False)
        return found

    def latest(self, limit: int) -> list[Conversation]:
        """Return the conversations that were asked for last, latest first."""
        found: list[Conversation] = []
        for conversation in reversed(self._by_last_block.values()):
            if len(found) >= limit:
                break
            found.append(conversation)
        return found
