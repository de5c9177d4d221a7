"""Which session a prompt continues, where no client names it: by the prompts and answers before it.

Rules
    1. A prompt that begins with all tokens of an earlier prompt and of its complete answer, and has more behind them,
       continues that turn's session. The longest such turn decides. So does one that begins with the prompt alone, as
       histories leave out reasoning or are rewritten, if that turn is its session's latest, is over, and no other
       session has had the same prompt. The last two tokens need not be there if the new prompt ends with them, too.
    2. If the session has continued from that turn already, the prompt is an edit, and continues the session if nothing
       of it runs. Otherwise it is a fork: a session of its own whose parent is known. If the turn that runs continues
       the same turn, both are children: what continues it is a session of its own, and the next turn of the parent
       continues the parent's session.
    3. A prompt that equals an earlier one is a retry, and continues its session, if the turns before it are of that
       session alone, or if the earlier one was given up. The first prompts of two users may be equal: then the second
       is a fork.
    4. A prompt that repeats words of a session's latest answer (``projection.echoes``) continues that session if it is
       shorter than the prompt of that answer: the context was compacted.
    5. Tokens are compared by XXH3-64 behind the last whole block, blocks by their sequence hashes; so two prompts are
       taken for equal only where they are. Tenants are apart.
    6. Tails are found by every ``STRIDE``-th block of a path from its end on; only where such an *anchor* is known the
       blocks behind it are looked up. So a prompt costs one look-up in ``STRIDE`` blocks.
    7. At most ``capacity`` tails are known, and ``SAME_TAIL_MAX`` behind the same block; the oldest goes. A lost tail
       makes a continuing prompt a session of its own, never another one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.projection.echoes import heard_in
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.kernel.wire.identifiers import name_of, request_of
from poolgrid.kernel.wire.sessions import SessionsSnapshot, SessionTurn

CAPACITY: Final = 32_768
"""Four turns of each session that ``SessionTable`` knows; some 10 MB."""

SAME_TAIL_MAX: Final = 32
"""Turns whose prompts have the same last whole block, which only prompts that add less than a block have."""

ECHOES_HEARD_MIN: Final = 3
"""Of one answer, in a prompt that shares no turn with it."""

SAME_ECHO_MAX: Final = 4
"""Answers with the same words; a phrase that more have says nothing, and the oldest goes."""

HEADER_TOKENS: Final = 2
"""Which templates of reasoning models put behind a prompt only while its answer is generated: ``<think>``, newline."""

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
    sibling: str = ""
    """The request of the parent that runs and continues the same turn."""


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
    is_first: bool = False
    """Whether its prompt may be no more than what users have in common."""
    is_over: bool = False
    is_given_up: bool = False
    """Whether it is the first of its session and has no complete answer: its client left."""
    is_twin: bool = False
    """Whether another session has had the same prompt."""
    is_branch: bool = False
    """Whether it is the first of several children of ``before``, from which its session continues."""
    origin: Known | None = None
    """The turn that it and its siblings continue, while it runs."""
    branches: int = 0
    """Turns that run and have it as their origin."""
    echoes: tuple[int, ...] = ()


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
        self._echoes: dict[int, tuple[Known, ...]] = {}
        """Latest turns, by the echoes of their answers."""

    def __len__(self) -> int:
        return len(self._by_request)

    # -- reading ---------------------------------------------------------------------------------------------------

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
                        return self._after(known)
        found = self._by_beginning(tenant, path, token_ids, block_size)
        if not found.session and self._echoes and path:
            found = self._by_echoes(tenant, path, token_ids, found.parent) or found
        return found

    def latest(self, tenant: int, session: str) -> Known | None:
        """Return the last turn of a session."""
        return self._latest.get((tenant, session))

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

    def _by_beginning(self, tenant: int, path: Sequence[int], token_ids: bytes, block_size: int) -> Found:
        """Return what a prompt is to the turns that it begins with."""
        equal: list[Known] = []
        for place, behind in self._turns_in(path):
            own = [known for known in behind if known.turn.tenant == tenant]
            same, answered, begun = _match(own, token_ids, (place + 1) * block_size)
            equal += same
            if answered or begun:
                if equal:
                    return self._again(equal, answered or begun)
                return self._after_answer(answered) if answered else self._after_prompt(begun)
        return self._again(equal, ()) if equal else NOTHING

    def _again(self, equal: Sequence[Known], before: Sequence[Known]) -> Found:
        """Return what a prompt is that earlier ones equal; ``before`` are the turns that it continues."""
        for known in equal:
            if known.is_given_up and known.is_latest:
                return Found(known.turn.session)
        sessions = {known.turn.session for known in before}
        if len(sessions) == 1 and not any(known.is_twin for known in before):
            for known in reversed(equal):
                turn = known.turn
                if (turn.session in sessions or turn.parent in sessions) and (known.is_latest or self._is_idle(known)):
                    return Found(turn.session)
        return Found(parent=equal[-1].turn.session)

    def _after_answer(self, ends: Sequence[Known]) -> Found:
        """Return what a prompt is that begins with the same prompts and answers as some turns."""
        known = next((each for each in reversed(ends) if each.is_latest), ends[-1])
        if len({each.turn.session for each in ends}) == 1:
            return self._after(known)
        # It is unknown whose turn it is. Of one that none has continued from it is at least a fork.
        return Found(parent=known.turn.session)

    def _after(self, known: Known) -> Found:
        """Return what a prompt is that continues a turn, from which its session may have continued already."""
        session = known.turn.session
        if known.is_branch:
            return Found(parent=session)
        if known.is_latest and not known.branches:
            return Found(session)
        if not known.is_latest and not known.is_twin and self._is_idle(known):
            return Found(session)
        return self._fork(known)

    def _after_prompt(self, begun: Sequence[Known]) -> Found:
        """Return what a prompt is that begins with the same prompts as some turns, but with none of their answers."""
        known = begun[-1]
        if len(begun) == 1 or len({each.turn.session for each in begun}) == 1:
            known = next((each for each in reversed(begun) if each.is_latest), known)
            if (known.is_over and not known.is_twin) if known.is_latest else not known.is_first:
                return self._after(known)
        return self._fork(known)

    def _fork(self, known: Known) -> Found:
        """Return a fork of a turn, with its sibling: the turn with which its session continued, while that runs."""
        turn = known.turn
        latest = self._latest.get((turn.tenant, turn.session))
        is_sibling = latest is not None and latest.before is known and (known.branches or not latest.is_over)
        return Found(parent=turn.session, sibling=latest.request_id if latest is not None and is_sibling else "")

    def _is_idle(self, known: Known) -> bool:
        """Return whether no turn of a session is known to run; ``known`` is any of it."""
        latest = self._latest.get((known.turn.tenant, known.turn.session))
        if latest is None:
            return False
        if latest.is_branch:
            return latest.before is None or not latest.before.branches
        return all(each.is_over for each in self._attempts(latest))

    def _attempts(self, known: Known) -> list[Known]:
        """Return the turns of a session that have the same prompt as one of it, itself included."""
        return [
            each
            for each in self._by_tail.get(known.turn.tail, ())
            if _has_same_prompt(each, known) and each.turn.session == known.turn.session
        ]

    def _by_echoes(self, tenant: int, path: Sequence[int], token_ids: bytes, parent: str) -> Found | None:
        """Return the session whose latest answer stands in a prompt; ``None`` if it is none, or any of several."""
        heard: dict[Known, int] = {}
        for echo in heard_in(token_ids, path):
            for known in self._echoes.get(echo, ()):
                heard[known] = heard.get(known, 0) + 1
        tokens = len(token_ids) // TOKEN_BYTES
        sessions = {
            known.turn.session
            for known, count in heard.items()
            if known.turn.tenant == tenant
            and known.is_latest
            and not known.is_twin
            and not known.branches
            and self._is_idle(known)
            and (known.turn.session == parent or (count >= ECHOES_HEARD_MIN and tokens < known.isl))
        }
        return Found(sessions.pop()) if len(sessions) == 1 else None

    # -- folding ---------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, turn: SessionTurn, isl: int) -> None:
        """Note a turn that was dispatched; one that is known already is not noted again."""
        anchor, tail, key = turn.anchor, turn.tail, (turn.tenant, turn.session)
        if not anchor or request_id in self._by_request:
            return
        before = self._latest.get(key)
        known = Known(request_id, turn, isl, before, is_first=before is None)
        if before is not None:
            if _has_same_prompt(before, known):
                known.before, before.before = before.before, None  # either may get the answer that is continued
                before.is_given_up = False
            else:
                self._go_on(before)
        behind = self._by_tail.get(tail, ())
        for other in behind:
            if other.turn.session != turn.session and _has_same_prompt(other, known):
                other.is_twin = known.is_twin = True
        self._latest[key] = self._by_request[request_id] = known
        behind = self._by_tail[tail] = (*behind, known)
        if len(behind) > SAME_TAIL_MAX:
            self._forget(behind[0])
        self._anchors[anchor] = self._anchors.get(anchor, 0) + 1
        if turn.sibling:
            self._branch(known)
        if len(self._by_request) > self._capacity:
            self._forget(next(iter(self._by_request.values())))

    def end(self, request_id: str, total: int, digest: int, echoes: tuple[int, ...] = ()) -> None:
        known = self._by_request.get(request_id)
        if known is not None and not known.total:
            known.total, known.digest, known.is_given_up = total, digest, False
            self._be_over(known)
            known.echoes = echoes
            if known.is_latest:
                self._hear(known)

    def withdraw(self, request_id: str) -> None:
        """Forget a turn that has no complete answer: its client asks again from the turn before.

        A first turn is kept: its client asks again.
        """
        known = self._by_request.get(request_id)
        if known is None or known.is_over:
            return
        self._be_over(known)
        before = known.before
        key = (known.turn.tenant, known.turn.session)
        if self._latest.get(key) is known:
            others = [each for each in self._attempts(known) if each is not known]
            if others:
                self._latest[key] = other = others[-1]
                other.before, other.is_given_up = before, before is None and other.is_over and not other.total
            elif before is None:
                known.is_given_up = True
                return
            else:
                self._latest[key] = before
                at = before.before if before.is_branch else before
                if at is not None and at.request_id in self._by_request:
                    at.is_latest = True
                    self._hear(at)
        self._forget(known)

    def load(self, snapshot: SessionsSnapshot) -> None:
        running = {request_of(turn.request_id) for turn in snapshot.turns}
        for session in snapshot.sessions:
            for tail in session.tails:
                name, tenant, parent = session.name, session.tenant, session.parent
                of = SessionTurn(
                    name,
                    tenant,
                    parent,
                    tail=tail.tail,
                    anchor=tail.anchor,
                    residual=tail.residual,
                    stem=tail.stem,
                )
                self.begin(tail.request_id, of, tail.isl)
                if tail.total:
                    self.end(tail.request_id, tail.total, tail.digest, tail.echoes)
                elif tail.request_id not in running:
                    self.withdraw(tail.request_id)

    def _go_on(self, before: Known) -> None:
        """Note that a session continues from its latest turn."""
        for each in self._attempts(before):
            each.is_latest = False
            self._drop_echoes(each)
        before.is_latest = False
        if not before.is_branch:
            before.before = None
        elif before.before is not None:
            before.before.is_latest = False

    def _branch(self, known: Known) -> None:
        """Note a turn that continues the same turn as another one that runs: both are children."""
        first = self._by_request.get(known.turn.sibling)
        at = None if first is None else first.before
        if first is None or at is None or not (first.is_latest or first.is_branch):
            return
        if not first.is_branch:
            first.is_branch = True
            at.is_latest = True
            if not first.is_over:
                first.origin = at
                at.branches += 1
        known.origin = at
        at.branches += 1

    def _be_over(self, known: Known) -> None:
        known.is_over = True
        if known.origin is not None:
            known.origin.branches -= 1
            known.origin = None

    def _hear(self, known: Known) -> None:
        for echo in known.echoes:
            self._echoes[echo] = (*self._echoes.get(echo, ()), known)[-SAME_ECHO_MAX:]

    def _drop_echoes(self, known: Known) -> None:
        for echo in known.echoes:
            left = tuple([each for each in self._echoes.get(echo, ()) if each is not known])
            if left:
                self._echoes[echo] = left
            else:
                self._echoes.pop(echo, None)

    def _forget(self, known: Known) -> None:
        turn = known.turn
        self._drop_echoes(known)
        if not known.is_over:
            self._be_over(known)
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
                if _has_same_prompt(other, known):
                    other.is_latest = False


def _has_same_prompt(one: Known, other: Known) -> bool:
    """Tell whether two turns have equal prompts, of which the last whole blocks are."""
    return (one.isl, one.turn.residual, one.turn.tenant, one.turn.tail) == (
        other.isl,
        other.turn.residual,
        other.turn.tenant,
        other.turn.tail,
    )


def _match(behind: Sequence[Known], token_ids: bytes, begin: int) -> tuple[list[Known], list[Known], list[Known]]:
    """Return the turns whose prompts equal a prompt, the longest with whose answers it begins, and with whose prompts.

    The last whole blocks of all their prompts end before token ``begin`` of it.
    """
    tokens = len(token_ids) // TOKEN_BYTES
    digests: dict[int, int] = {}
    equal: list[Known] = []
    ends: list[Known] = []
    begun: list[Known] = []
    longest = most = 0
    for known in behind:
        total, isl = known.total, known.isl
        if isl < total < tokens and total >= longest and _repeats(token_ids, begin, total, known.digest, digests):
            ends, longest = [*ends, known] if total == longest else [known], total
        if most > isl:
            continue
        if isl <= tokens and _repeats(token_ids, begin, isl, known.turn.residual, digests):
            if isl == tokens:
                equal.append(known)
                continue
        elif isl - HEADER_TOKENS >= tokens or not known.turn.stem or known.turn.stem != stem_of(token_ids, begin, isl):
            continue
        begun, most = [*begun, known] if isl == most else [known], isl
    return equal, ends, begun


def stem_of(token_ids: bytes, begin: int, isl: int) -> int:
    """Return the stem of a prompt with so many tokens; 0 if it has none behind token ``begin``."""
    end = isl - HEADER_TOKENS
    if end < begin:
        return 0
    seed = int.from_bytes(token_ids[-TOKEN_BYTES * HEADER_TOKENS :], "little")
    return xxh3_64_intdigest(token_ids[TOKEN_BYTES * begin : TOKEN_BYTES * end], seed)


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
