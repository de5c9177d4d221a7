"""Which session a prompt continues, where no client names it: by the prompts and answers before it.

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
    """The session of a prompt, by its text."""

    session: str = ""
    """The session that it continues; empty = it begins one."""
    parent: str = ""
    """The session that it forks from."""


NOTHING: Final = Found()


class Known(msgspec.Struct, eq=False):
    """The end of one turn, as ``Tail`` with its session."""

    tenant: int
    session: str
    at: Tail
    is_latest: bool = True
    """Whether its session has not continued from here."""
    before: Known | None = None
    """The turn that it continued, while it is the latest."""


class Lineage:
    """The turns of a pool that later prompts may continue."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_request: dict[str, Known] = {}
        """Oldest first."""
        self._by_tail: dict[int, list[Known]] = {}
        self._anchors: dict[int, int] = {}
        """How many tails an anchor stands for."""
        self._latest: dict[tuple[int, str], Known] = {}
        self._by_answer: dict[int, Known] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def find(self, tenant: int, path: Sequence[int], token_ids: bytes, block_size: int, answer: int = 0) -> Found:
        """Return the session that a prompt continues or forks from.

        ``answer`` is the key of an answer that the prompt names by an id in it, as results of tool calls do: its words
        in the prompt need not be those that were generated, as templates leave out reasoning and write calls their way.
        """
        named = self._by_answer.get(answer) if answer else None
        if named is not None and named.tenant == tenant:
            place = named.at.isl // block_size - 1
            if place < len(path) and path[place] == named.at.tail:
                return Found(named.session) if named.is_latest else Found(parent=named.session)
        anchors, by_tail = self._anchors, self._by_tail
        if not anchors:
            return NOTHING
        end = len(path)
        for first in anchor_places(end):
            if path[first] not in anchors:
                continue
            for place in range(min(end, next_anchor(first)) - 1, first - 1, -1):
                behind = by_tail.get(path[place])
                if behind is not None:
                    found = _match(behind, tenant, token_ids, (place + 1) * block_size)
                    if found is not NOTHING:
                        return found
            end = first
        return NOTHING

    def begin(self, tenant: int, session: str, at: Tail) -> None:
        """Note a turn that was dispatched; one that is known already is not noted again."""
        if at.request_id in self._by_request:
            return
        before = self._latest.get((tenant, session))
        known = Known(tenant, session, at, before=before)
        if before is not None:
            before.is_latest, before.before = False, None
        self._by_answer[answer_key(at.request_id)] = known
        self._latest[tenant, session] = self._by_request[at.request_id] = known
        behind = self._by_tail.get(at.tail)
        if behind is None:
            behind = self._by_tail[at.tail] = []
        behind.append(known)
        self._anchors[at.anchor] = self._anchors.get(at.anchor, 0) + 1
        if len(behind) > SAME_TAIL_MAX:
            self._forget(behind[0])
        if len(self._by_request) > self._capacity:
            self._forget(next(iter(self._by_request.values())))

    def begin_turn(self, event: TurnBegan) -> None:
        """Note a turn of the pool's journal, of any router."""
        turn = event.turn
        if turn.anchor:
            at = Tail(request_of(event.request_id), turn.tail, turn.anchor, event.isl, turn.residual)
            self.begin(turn.tenant, turn.session, at)

    def end(self, request_id: str, total: int, digest: int) -> None:
        """Note the complete answer of a turn."""
        known = self._by_request.get(request_id)
        if known is not None and not known.at.total:
            known.at = msgspec.structs.replace(known.at, total=total, digest=digest)

    def withdraw(self, request_id: str) -> None:
        """Forget a turn that has no complete answer: its client asks again from the turn before."""
        known = self._by_request.get(request_id)
        if known is None or known.at.total:
            return
        before = known.before
        if before is not None and self._latest.get((known.tenant, known.session)) is known:
            self._latest[known.tenant, known.session] = before
            before.is_latest = before.at.request_id in self._by_request
        self._forget(known)

    def is_latest(self, tenant: int, session: str, request_id: str) -> bool:
        """Return whether a turn is the latest of its session, or the session has none that is known."""
        known = self._latest.get((tenant, session))
        return known is None or known.at.request_id == request_id

    def load(self, snapshot: SessionsSnapshot) -> None:
        """Note the turns of a snapshot that are not known."""
        for session in snapshot.sessions:
            for tail in session.tails:
                self.begin(session.tenant, session.name, tail)
                self.end(tail.request_id, tail.total, tail.digest)

    def _forget(self, known: Known) -> None:
        at = known.at
        del self._by_request[at.request_id]
        key = answer_key(at.request_id)
        if self._by_answer.get(key) is known:
            del self._by_answer[key]
        behind = self._by_tail[at.tail]
        behind.remove(known)
        if not behind:
            del self._by_tail[at.tail]
        count = self._anchors[at.anchor] - 1
        if count:
            self._anchors[at.anchor] = count
        else:
            del self._anchors[at.anchor]
        if self._latest.get((known.tenant, known.session)) is known:
            del self._latest[known.tenant, known.session]
            # Its next turn would be taken for that of another session with the same prompt.
            for other in behind:
                if other.tenant == known.tenant and (other.at.isl, other.at.residual) == (at.isl, at.residual):
                    other.is_latest = False


def _match(behind: Sequence[Known], tenant: int, token_ids: bytes, begin: int) -> Found:
    """Return what a prompt is to turns whose prompts' last whole block ends before token ``begin``."""
    tokens = len(token_ids) // TOKEN_BYTES
    digests: dict[int, int] = {}

    def repeats(end: int, digest: int) -> bool:
        if end > tokens:
            return False
        of_prompt = digests.get(end)
        if of_prompt is None:
            of_prompt = digests[end] = digest_of(token_ids, begin, end)
        return of_prompt == digest

    continued: list[Known] = []
    forked: Known | None = None
    for known in behind:
        if known.tenant != tenant:
            continue
        at = known.at
        if at.isl < at.total < tokens and repeats(at.total, at.digest):
            if known.is_latest:
                continued.append(known)
            else:
                forked = known
        elif repeats(at.isl, at.residual):
            forked = known
    if continued:
        longest = max(known.at.total for known in continued)
        ends = [known for known in continued if known.at.total == longest]
        return Found(ends[0].session) if len(ends) == 1 else NOTHING
    return NOTHING if forked is None else Found(parent=forked.session)


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
