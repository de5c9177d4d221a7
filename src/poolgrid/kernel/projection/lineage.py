"""Which session a prompt continues, where no client names it: by the prompts and answers before it.

Rules
    1. A prompt that begins with all tokens of an earlier prompt and of its complete answer, and has more behind them,
       continues that turn's session, unless the session has continued already, or several turns are the same up to
       there. The longest such turn decides.
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
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.kernel.wire.sessions import SessionsSnapshot, SessionTurn

CAPACITY: Final = 32_768
"""Four turns of each session that ``SessionTable`` knows; some 10 MB."""

SAME_TAIL_MAX: Final = 32
"""Turns whose prompts have the same last whole block, which only prompts that add less than a block have."""

STRIDE: Final = 16
"""Blocks between two anchors."""

SHORT_PLACES: Final = (7, 3, 1, 0)
"""Anchors before the first of these."""


class Found(NamedTuple):
    """The session of a prompt, by its text."""

    session: str = ""
    """The session that it continues; empty = it begins one."""
    parent: str = ""
    """The session that it forks from."""


NOTHING: Final = Found()


class Known(msgspec.Struct, eq=False, gc=False):
    """The end of one turn."""

    request_id: str
    turn: SessionTurn
    isl: int
    before: Known | None
    """The turn that it continued, while it is the latest."""
    total: int = 0
    digest: int = 0
    is_latest: bool = True
    """Whether its session has not continued from here."""


class Lineage:
    """The turns of a pool that later prompts may continue."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_request: OrderedDict[str, Known] = OrderedDict()
        """Oldest first. In a dict that loses its first entries, finding the next first one takes ever longer."""
        self._by_tail: dict[int, tuple[Known, ...]] = {}
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
                    if known.turn.tenant == tenant and answer_key(known.request_id) == answer:
                        session = known.turn.session
                        return Found(session) if known.is_latest else Found(parent=session)
        for place, behind in self._turns_in(path):
            found = _match(behind, tenant, token_ids, (place + 1) * block_size)
            if found is not NOTHING:
                return found
        return NOTHING

    def _turns_in(self, path: Sequence[int]) -> Iterator[tuple[int, Sequence[Known]]]:
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

    def latest(self, tenant: int, session: str) -> Known | None:
        """Return the last turn of a session."""
        return self._latest.get((tenant, session))

    def begin(self, request_id: str, turn: SessionTurn, isl: int) -> None:
        """Note a turn that was dispatched; one that is known already is not noted again."""
        anchor, tail, key = turn.anchor, turn.tail, (turn.tenant, turn.session)
        if not anchor or request_id in self._by_request:
            return
        before = self._latest.get(key)
        known = Known(request_id, turn, isl, before)
        if before is not None:
            before.is_latest, before.before = False, None
        self._latest[key] = self._by_request[request_id] = known
        behind = self._by_tail[tail] = (*self._by_tail.get(tail, ()), known)
        if len(behind) > SAME_TAIL_MAX:
            self._forget(behind[0])
        self._anchors[anchor] = self._anchors.get(anchor, 0) + 1
        if len(self._by_request) > self._capacity:
            self._forget(next(iter(self._by_request.values())))

    def end(self, request_id: str, total: int, digest: int) -> None:
        known = self._by_request.get(request_id)
        if known is not None and not known.total:
            known.total, known.digest = total, digest

    def withdraw(self, request_id: str) -> None:
        """Forget a turn that has no complete answer: its client asks again from the turn before."""
        known = self._by_request.get(request_id)
        if known is None or known.total:
            return
        before = known.before
        key = (known.turn.tenant, known.turn.session)
        if before is not None and self._latest.get(key) is known:
            self._latest[key] = before
            before.is_latest = before.request_id in self._by_request
        self._forget(known)

    def load(self, snapshot: SessionsSnapshot) -> None:
        for session in snapshot.sessions:
            for tail in session.tails:
                of = SessionTurn(
                    session.name, session.tenant, tail=tail.tail, anchor=tail.anchor, residual=tail.residual
                )
                self.begin(tail.request_id, of, tail.isl)
                self.end(tail.request_id, tail.total, tail.digest)

    def _forget(self, known: Known) -> None:
        turn = known.turn
        del self._by_request[known.request_id]
        behind = tuple([other for other in self._by_tail[turn.tail] if other is not known])
        if behind:
            self._by_tail[turn.tail] = behind
        else:
            del self._by_tail[turn.tail]
        count = self._anchors[turn.anchor] - 1
        if count:
            self._anchors[turn.anchor] = count
        else:
            del self._anchors[turn.anchor]
        key = (turn.tenant, turn.session)
        if self._latest.get(key) is known:
            del self._latest[key]
            # Its next turn would be taken for that of another session with the same prompt.
            for other in behind:
                same = other.turn
                if (same.tenant, same.residual, other.isl) == (turn.tenant, turn.residual, known.isl):
                    other.is_latest = False


def _match(behind: Sequence[Known], tenant: int, token_ids: bytes, begin: int) -> Found:
    """Return what a prompt is to turns whose prompts' last whole block ends before token ``begin``."""
    tokens = len(token_ids) // TOKEN_BYTES
    digests: dict[int, int] = {}
    longest = 0
    ends: list[Known] = []
    for known in behind:
        total = known.total
        if (
            total < tokens
            and total >= longest
            and total > known.isl
            and known.turn.tenant == tenant
            and _repeats(token_ids, begin, total, known.digest, digests)
        ):
            ends, longest = [*ends, known] if total == longest else [known], total
    if len(ends) == 1:
        session = ends[0].turn.session
        return Found(session) if ends[0].is_latest else Found(parent=session)
    if ends:
        # It is unknown whose turn it is. Of one that none has continued from it is at least a fork.
        latest = [known.turn.session for known in ends if known.is_latest]
        return Found(parent=latest[0]) if len(latest) == 1 else NOTHING
    for known in reversed(behind):
        isl, turn = known.isl, known.turn
        if isl <= tokens and turn.tenant == tenant and _repeats(token_ids, begin, isl, turn.residual, digests):
            return Found(parent=turn.session)
    return NOTHING


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
    return xxh3_64_intdigest(token_ids[TOKEN_BYTES * begin : TOKEN_BYTES * end])


def anchor_of(path: Sequence[int]) -> int:
    """Return the anchor of a prompt with at least one whole block."""
    blocks = len(path)
    return path[blocks // STRIDE * STRIDE - 1 if blocks >= STRIDE else SHORT_PLACES[-blocks.bit_length()]]


def anchor_places(blocks: int) -> Iterator[int]:
    """Return the places of anchors in a path of so many blocks, from its end: each ``STRIDE``-th, then 7, 3, 1, 0."""
    if blocks < STRIDE:
        return iter(SHORT_PLACES[-blocks.bit_length() :] if blocks else ())
    return chain(range(blocks // STRIDE * STRIDE - 1, 0, -STRIDE), SHORT_PLACES)


def next_anchor(place: int) -> int:
    """Return the first place behind an anchor that has another one."""
    return place + STRIDE if place + 1 >= STRIDE else 2 * place + 1
