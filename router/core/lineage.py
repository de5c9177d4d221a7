"""Which session a prompt continues, where no client says so: by the prompts and answers before it.

Rules
    1. A prompt that begins with all tokens of an earlier prompt and of its complete answer, and has more behind them,
       continues that turn's session, unless the session has continued already, or several sessions are the same up to
       there.
    2. A prompt that begins with an earlier prompt, or with an earlier turn that its session continued from, is a fork:
       a session of its own whose parent is known. Any other prompt begins a session.
    3. Tokens are compared by XXH3-64 behind the last whole block, blocks by their sequence hashes; so two prompts are
       taken for equal only where they are. Tenants are apart.
    4. Tails are found by every ``STRIDE``-th block of a path from its end on; only where such an *anchor* is known the
       blocks behind it are looked up. So a prompt costs one look-up in ``STRIDE`` blocks.
    5. At most ``capacity`` tails are known, and ``SAME_TAIL_MAX`` behind the same block; the oldest goes. A lost tail
       makes a continuing prompt a session of its own, never another one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from poolgrid.wire.events import TurnBegan
from poolgrid.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.wire.request_ids import name_of, request_of
from poolgrid.wire.sessions import SessionsSnapshot, Tail

CAPACITY: Final = 32_768
"""Four turns of each session that ``SessionTable`` knows; some 10 MB."""

SAME_TAIL_MAX: Final = 32
"""Turns whose prompts have the same last whole block, which only prompts that add less than a block have."""

STRIDE: Final = 16
"""Blocks between two anchors."""


class Found(NamedTuple):
    """What a prompt says of its session."""

    session: str = ""
    """The session that it continues; empty = it begins one."""
    parent: str = ""
    """The session that it forks from."""


NOTHING: Final = Found()


class Known(msgspec.Struct, eq=False):
    """The end of one turn."""

    tenant: int
    session: str
    at: Tail
    """As its prompt left it."""
    total: int
    """Tokens of prompt and answer; 0 while the answer is not complete."""
    digest: int
    """As in ``Tail``."""
    before: Known | None
    """The turn that it continued, while it is the latest."""
    is_latest: bool = True
    """Whether its session has not continued from here."""


class Lineage:
    """The turns of a pool that later prompts may continue."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_request: OrderedDict[str, Known] = OrderedDict()
        """Oldest first. In a dict that loses its first entries, finding the next first one takes ever longer."""
        self._by_tail: dict[int, list[Known]] = {}
        self._anchors: dict[int, int] = {}
        """How many tails an anchor stands for."""
        self._latest: dict[tuple[int, str], Known] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def find(self, tenant: int, path: Sequence[int], token_ids: bytes, block_size: int, answer: int = 0) -> Found:
        """Return the session that a prompt continues or forks from.

        ``answer`` is the key of an answer that the prompt names by an id in it, as results of tool calls do: its words
        in the prompt need not be those that were generated, as templates leave out reasoning and write calls their way.
        """
        if not self._anchors:
            return NOTHING
        if answer:
            for _, behind in self._turns_in(path):
                for known in reversed(behind):
                    if known.tenant == tenant and answer_key(known.at.request_id) == answer:
                        return Found(known.session) if known.is_latest else Found(parent=known.session)
        for place, behind in self._turns_in(path):
            found = _match(behind, tenant, token_ids, (place + 1) * block_size)
            if found is not NOTHING:
                return found
        return NOTHING

    def _turns_in(self, path: Sequence[int]) -> Iterator[tuple[int, list[Known]]]:
        """Yield the turns whose prompts' last whole block is in a path, by its place, from the end on."""
        anchors, by_tail = self._anchors, self._by_tail
        end = len(path)
        for first in anchor_places(end):
            if path[first] in anchors:
                for place in range(min(end, next_anchor(first)) - 1, first - 1, -1):
                    behind = by_tail.get(path[place])
                    if behind is not None:
                        yield place, behind
                end = first

    def begin(self, tenant: int, session: str, at: Tail) -> None:
        """Note a turn that was dispatched; one that is known already is not noted again."""
        by_request = self._by_request
        if at.request_id in by_request:
            return
        key = (tenant, session)
        before = self._latest.get(key)
        known = Known(tenant, session, at, at.total, at.digest, before)
        if before is not None:
            before.is_latest, before.before = False, None
        self._latest[key] = by_request[at.request_id] = known
        behind = self._by_tail.get(at.tail)
        if behind is None:
            self._by_tail[at.tail] = [known]
        else:
            behind.append(known)
            if len(behind) > SAME_TAIL_MAX:
                self._forget(behind[0])
        self._anchors[at.anchor] = self._anchors.get(at.anchor, 0) + 1
        if len(by_request) > self._capacity:
            self._forget(next(iter(by_request.values())))

    def begin_turn(self, event: TurnBegan) -> None:
        """Note a turn of the pool's journal, of whichever router."""
        turn, request_id = event.turn, request_of(event.request_id)
        if turn.anchor and request_id not in self._by_request:
            self.begin(turn.tenant, turn.session, Tail(request_id, turn.tail, turn.anchor, event.isl, turn.residual))

    def end(self, request_id: str, total: int, digest: int) -> None:
        """Note the complete answer of a turn."""
        known = self._by_request.get(request_id)
        if known is not None and not known.total:
            known.total, known.digest = total, digest

    def withdraw(self, request_id: str) -> None:
        """Forget a turn that has no complete answer: its client asks again from the turn before."""
        known = self._by_request.get(request_id)
        if known is None or known.total:
            return
        before = known.before
        if before is not None and self._latest.get((known.tenant, known.session)) is known:
            self._latest[known.tenant, known.session] = before
            before.is_latest = before.at.request_id in self._by_request
        self._forget(known)

    def load(self, snapshot: SessionsSnapshot) -> None:
        """Note the turns of a snapshot that are not known."""
        for session in snapshot.sessions:
            for tail in session.tails:
                self.begin(session.tenant, session.name, tail)
                self.end(tail.request_id, tail.total, tail.digest)  # of one that was known already

    def _forget(self, known: Known) -> None:
        at = known.at
        del self._by_request[at.request_id]
        behind = self._by_tail[at.tail]
        behind.remove(known)
        if not behind:
            del self._by_tail[at.tail]
        count = self._anchors[at.anchor] - 1
        if count:
            self._anchors[at.anchor] = count
        else:
            del self._anchors[at.anchor]
        key = (known.tenant, known.session)
        if self._latest.get(key) is known:
            del self._latest[key]
            # Its next turn would be taken for that of another session with the same prompt.
            for other in behind:
                if other.tenant == known.tenant and (other.at.isl, other.at.residual) == (at.isl, at.residual):
                    other.is_latest = False


def _match(behind: Sequence[Known], tenant: int, token_ids: bytes, begin: int) -> Found:
    """Return what a prompt is to turns whose prompts' last whole block ends before token ``begin``."""
    tokens = len(token_ids) // TOKEN_BYTES
    digests: dict[int, int] = {}
    longest = 0
    continued: Known | None = None
    forked: Known | None = None
    for known in behind:
        if known.tenant != tenant:
            continue
        at, total = known.at, known.total
        if at.isl < total < tokens and _repeats(token_ids, begin, total, known.digest, digests):
            if not known.is_latest:
                forked = known
            elif total >= longest:
                # Of several that end there, nobody knows whose turn it is.
                continued, longest = known if total > longest else None, total
        elif at.isl <= tokens and _repeats(token_ids, begin, at.isl, at.residual, digests):
            forked = known
    if longest:
        return NOTHING if continued is None else Found(continued.session)
    return NOTHING if forked is None else Found(parent=forked.session)


def _repeats(token_ids: bytes, begin: int, end: int, digest: int, digests: dict[int, int]) -> bool:
    """Tell whether tokens have a digest; ``digests`` are those of ends that were asked for before."""
    found = digests.get(end)
    if found is None:
        found = digests[end] = digest_of(token_ids, begin, end)
    return found == digest


def answer_key(request_id: str) -> int:
    """Return what ids of the first tool call in a request's answer have in them."""
    return stable_u64(f"{name_of(request_id)}/0/0")


def digest_of(token_ids: bytes | bytearray | memoryview, begin: int, end: int) -> int:
    """Return XXH3-64 of the tokens from ``begin`` to ``end``."""
    return xxh3_64_intdigest(memoryview(token_ids)[TOKEN_BYTES * begin : TOKEN_BYTES * end])


def anchor_of(path: Sequence[int]) -> int:
    """Return the anchor of a prompt with at least one whole block."""
    return path[next(anchor_places(len(path)))]


def anchor_places(blocks: int) -> Iterator[int]:
    """Yield the places of anchors in a path of so many blocks, from its end: each ``STRIDE``-th, then 7, 3, 1, 0."""
    place = blocks // STRIDE * STRIDE
    while place:
        yield place - 1
        place -= STRIDE
    step = STRIDE // 2
    while step:
        if step <= blocks:
            yield step - 1
        step //= 2


def next_anchor(place: int) -> int:
    """Return the first place behind an anchor that has another one."""
    return place + STRIDE if place + 1 >= STRIDE else 2 * place + 1
