"""The sessions of a pool as a fold over its journal: turns, footprints in blocks, gaps, and what runs.

Routers and the consolidator fold the same records, so the table is the same everywhere at an offset.

Rules
    1. ``TurnBegan`` names the session of a dispatch. A dispatch of a request that is the session's latest turn (a
       further leg, a migration) is the same turn on another worker.
    2. A turn is over when its request finished on the worker of its last dispatch, other than for another leg, or when
       that worker left. When the last running turn of a session is over, its gap begins.
    3. A footprint is what the session's last turn on a worker occupied when it was over. It goes when the worker's
       cache is cleared or the worker leaves; evictions show in the prefix index (``Footprint.tail``) and in
       ``cached_tokens`` of the next turn.
    4. At most ``capacity`` sessions are known. Beyond it the tenant with the most loses the one that it used longest
       ago. A session that was not used for ``IDLE_MAX_MS`` goes when another one comes.
    5. A session with one turn is kept as the events of that turn (``_OnlyTurn``). Its record is made when it is read,
       or when a second turn begins: most requests belong to no program, and no other turn follows.
    6. At most ``RUNNING_MAX`` turns of a session run; beyond it the oldest is not followed any more.
    7. What a client has kept counts until its time is over, or the last footprint of the session goes that kept it. It
       counts also when the session is forgotten: engines keep it all the same.

How many prompt tokens the clients of each tenant have kept at a time.

A prompt is known by its last whole block, which names all before it: the same prompt counts once, whatever sessions
keep it. One that begins with an earlier one (``SessionTurn.repeats``) takes its place. All others count by themselves,
also those of one session, and what two have in common twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Any, Final

import msgspec

from poolgrid.kernel.wire.events import (
    CacheCleared,
    JournalRecord,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    TurnBegan,
    TurnEnded,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey, request_of
from poolgrid.kernel.wire.limits import SESSION_FOOTPRINTS_MAX, SESSION_TAILS_MAX
from poolgrid.kernel.wire.sessions import (
    NO_GAPS,
    Footprint,
    Gap,
    KeptPrompt,
    SessionRecord,
    SessionsSnapshot,
    SessionTurn,
    Tail,
    Turn,
    TurnAnswer,
    TurnEnding,
)

SessionKey = tuple[int, str]
"""Tenant and name."""

DUE_SPARE: Final = 64
"""Entries of the heap beyond two for each prompt, after which it is rebuilt."""


PROMPTS_MAX: Final = 65_536
"""Kept prompts of a pool, a hundred bytes each; beyond it the one that ends first counts no more."""


class KeptPrompts:
    """Sums by tenant. An entry that has ended is removed at the next read, by the reader's time."""

    def __init__(self, prompts_max: int = PROMPTS_MAX) -> None:
        self._prompts_max = prompts_max
        self._prompts: dict[tuple[int, int], KeptPrompt] = {}
        """By tenant and tail, in the order in which they were kept."""
        self._tokens: dict[int, int] = {}
        """Sums by tenant."""
        self._of_session: dict[SessionKey, dict[int, None]] = {}
        self._due: list[tuple[int, int, int]] = []
        """A heap of ends, with tenant and tail; one that its prompt has moved on from counts for nothing."""

    def __iter__(self) -> Iterator[KeptPrompt]:
        return iter(self._prompts.values())

    def keep(self, turn: SessionTurn, now_ms: int) -> None:
        """Take note of what a turn has kept from now on."""
        tokens, until_ms = turn.keep_tokens, now_ms + turn.keep_ms
        for tail in {turn.repeats, turn.tail}:
            before = self._prompts.get((turn.tenant, tail))
            if before is not None:
                if before.until_ms > now_ms:
                    tokens, until_ms = max(tokens, before.tokens), max(until_ms, before.until_ms)
                self._remove(before)
        self.add(KeptPrompt(turn.tenant, turn.session, turn.tail, tokens, until_ms))

    def add(self, prompt: KeptPrompt) -> None:
        """Enter a prompt whose block none has kept."""
        tenant, tail = prompt.tenant, prompt.tail
        self._prompts[tenant, tail] = prompt
        self._tokens[tenant] = self._tokens.get(tenant, 0) + prompt.tokens
        key = (tenant, prompt.session)
        tails = self._of_session.get(key)
        if tails is None:
            tails = self._of_session[key] = {}
        tails[tail] = None
        heappush(self._due, (prompt.until_ms, tenant, tail))
        if len(self._due) > 2 * len(self._prompts) + DUE_SPARE:
            self._due = [(each.until_ms, each.tenant, each.tail) for each in self]
            heapify(self._due)
        while len(self._prompts) > self._prompts_max:
            self._end_next()

    def drop(self, tenant: int, session: str) -> None:
        """Forget what a session has kept, if it has anything."""
        for tail in list(self._of_session.get((tenant, session), ())):
            self._remove(self._prompts[tenant, tail])

    def _remove(self, prompt: KeptPrompt) -> None:
        tenant, key = prompt.tenant, (prompt.tenant, prompt.session)
        del self._prompts[tenant, prompt.tail]
        self._tokens[tenant] -= prompt.tokens
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        tails = self._of_session[key]
        del tails[prompt.tail]
        if not tails:
            del self._of_session[key]

    def _end_next(self) -> None:
        until_ms, tenant, tail = heappop(self._due)
        prompt = self._prompts.get((tenant, tail))
        if prompt is not None and prompt.until_ms == until_ms:
            self._remove(prompt)

    def tokens(self, tenant: int, now_ms: int) -> int:
        """Return the tokens that a tenant has kept at a time (Unix)."""
        while self._due and self._due[0][0] <= now_ms:
            self._end_next()
        return self._tokens.get(tenant, 0)

    def begins(self, tenant: int, path: Sequence[int]) -> KeptPrompt | None:
        """Return the longest prompt that a tenant has kept and that a path begins with."""
        if tenant not in self._tokens:
            return None
        prompts = self._prompts
        return next((prompts[tenant, block] for block in reversed(path) if (tenant, block) in prompts), None)


CAPACITY: Final = 8192
"""Sessions of a pool, about a kilobyte each; far more than fit into the KV caches of a hundred workers."""

IDLE_MAX_MS: Final = 3_600_000
"""An hour: the longest that providers keep a prompt cached by default."""

GAP_MAX_MS: Final = 600_000
"""A longer gap counts as this: a person left, which does not predict the next gap."""

ENDINGS: Final = frozenset(map(str, TurnEnding))
_PLACE: Final = {ending: place for place, ending in enumerate(TurnEnding)}
_GOES_ON: Final = frozenset(("prefilled", "encoded", "migrated"))
"""Finish reasons of a dispatch after which another one continues its turn."""

_Rank = tuple[str, int]
"""A worker's id and rank: a plain tuple, which is made in a fifth of the time."""

RUNNING_MAX: Final = 64
"""Turns of one session that run at a time: a program with many branches has dozens, and each takes a tenth of a
kilobyte."""

SHARES_SPARE: Final = 64
"""Entries of the heap of tenants beyond two for each, after which it is rebuilt."""

_copy = msgspec.structs.replace


class _OnlyTurn(msgspec.Struct, eq=False, gc=False):
    """The events of a session's first turn, while there is no other."""

    began: TurnBegan
    turn: Turn
    began_ms: int
    last_ms: int
    is_over: bool = False
    ending: str = ""
    answer: TurnAnswer | None = None

    def record(self) -> SessionRecord:
        """Return the session's record."""
        given, turn, isl, is_over = self.began.turn, self.turn, self.began.isl, self.is_over
        request_id = request_of(turn.request_id)
        tails: tuple[Tail, ...] = ()
        if given.anchor:
            tail, answer = _tail_of(request_id, given, isl), self.answer
            tails = (tail if answer is None else _answered(tail, answer),)
        footprints: tuple[Footprint, ...] = ()
        if is_over and turn.blocks:
            footprints = (_left_by(turn),)
        return SessionRecord(
            given.session,
            given.tenant,
            given.parent,
            self.began_ms,
            self.last_ms,
            1,
            0 if is_over else 1,
            request_id,
            isl,
            turn.cached_tokens if is_over else 0,
            self.last_ms if is_over else 0,
            self.ending,
            footprints=footprints,
            tails=tails,
            priority=0 if given.place is None else given.place.priority,
        )


class _Entry(msgspec.Struct, eq=False, gc=False):
    """A session of the table."""

    running: dict[str, Turn]
    """By dispatch, the oldest first."""
    only: _OnlyTurn | None = None
    whole: SessionRecord | None = None
    """The record, from when it was first wanted on."""
    is_shared: bool = False
    """Whether a snapshot has the record, too."""

    @property
    def record(self) -> SessionRecord:
        """Return the record to be read."""
        if self.whole is None:
            assert self.only is not None, "a session has either"
            self.whole, self.only = self.only.record(), None
        return self.whole

    def own(self) -> SessionRecord:
        record = self.record
        if self.is_shared:
            self.whole = record = _copy(record)
            self.is_shared = False
        return record

    @property
    def last_ms(self) -> int:
        return self.record.last_ms if self.only is None else self.only.last_ms


class SessionTable:
    """The sessions of one pool."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[SessionKey, _Entry] = OrderedDict()
        """In the order in which they were last used."""
        self._of_tenant: dict[int, OrderedDict[str, None]] = {}
        """The same order for each tenant, since there were several; empty before."""
        self._shares: list[tuple[int, int]] = []
        """A heap of how many sessions tenants have, at most; both numbers negated."""
        self._turns: dict[str, Turn] = {}
        """Running turns, by dispatch."""
        self._turns_on: dict[_Rank, dict[str, Turn]] = {}
        """The same by worker."""
        self._left_on: dict[_Rank, dict[SessionKey, None]] = {}
        """Sessions with a footprint, by worker: a cache that is cleared costs what was in it."""
        self.gaps: tuple[Gap, Gap, Gap] = NO_GAPS
        """Of all sessions together, for those that have none of their own yet."""
        self.kept = KeptPrompts()
        """What clients have kept, summed up by tenant."""

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionRecord]:
        """Return the sessions, the one used longest ago first; like all records here, to be read at once."""
        return (entry.record for entry in self._sessions.values())

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    def get(self, tenant: int, name: str) -> SessionRecord | None:
        entry = self._sessions.get((tenant, name))
        return None if entry is None else entry.record

    def latest(self, limit: int) -> list[SessionRecord]:
        """Return the sessions that were used last, the latest first."""
        return [entry.record for entry in islice(reversed(self._sessions.values()), limit)]

    @property
    def turns(self) -> Mapping[str, Turn]:
        return self._turns

    def running_of(self, session: SessionRecord) -> list[Turn]:
        entry = self._sessions.get((session.tenant, session.name))
        return [] if entry is None else list(entry.running.values())

    def state(self, session: SessionRecord) -> str:
        """Return ``running``, ``waiting`` (all its running turns wait in their engines) or ``idle``."""
        running = self.running_of(session)
        if not running:
            return "idle"
        return "running" if any(turn.blocks for turn in running) else "waiting"

    def blocks_of(self, session: SessionRecord) -> dict[WorkerKey, int]:
        """Return the session's footprint: blocks by worker, the worker of the latest turn first.

        A running turn counts with what it occupies now, and at least with what the turn before left.
        """
        blocks = {WorkerKey(WorkerId(each.worker_id), each.dp_rank): each.blocks for each in session.footprints}
        for turn in self.running_of(session):
            key = WorkerKey(WorkerId(turn.worker_id), turn.dp_rank)
            blocks[key] = max(blocks.get(key, 0), turn.blocks)
        return blocks

    def home(self, session: SessionRecord) -> WorkerKey | None:
        """Return the worker of the session's latest turn; ``None`` when it has left or lost its cache."""
        for turn in self.running_of(session):
            if request_of(turn.request_id) == session.request_id:
                return WorkerKey(WorkerId(turn.worker_id), turn.dp_rank)
        if not session.footprints:
            return None
        first = session.footprints[0]
        return WorkerKey(WorkerId(first.worker_id), first.dp_rank)

    def expected_gap(self, session: SessionRecord) -> Gap:
        """Return the gap that is expected after the session's latest turn; its ``count`` is 0 when nothing is known.

        A turn that stopped may have ended in a tool call, which only the next turn shows: it is taken for what the gap
        before it was.
        """
        place = _PLACE[TurnEnding.LENGTH if session.ending == TurnEnding.LENGTH else session.habit]
        own = session.gaps[place]
        return own if own.count else self.gaps[place]

    def return_ms(self, session: SessionRecord, now_ms: int) -> int | None:
        """Return the expected time until the next turn, 0 for one that runs or is overdue; ``None`` = unknown.

        ``now_ms`` is Unix time.
        """
        if session.running:
            return 0
        gap = self.expected_gap(session)
        if not gap.count or not session.ended_ms:
            return None
        return max(0, session.ended_ms + gap.mean_ms - now_ms)

    # -- folding ---------------------------------------------------------------------------------------------------

    def apply(self, record: JournalRecord) -> None:
        for event in record.events:
            effect = _EFFECTS.get(type(event))
            if effect is not None:
                effect(self, record, event)

    # Each takes an event and its record, for those who look at each event of a record anyway.

    def began(self, record: JournalRecord, event: TurnBegan) -> None:
        given, now_ms, dispatch_id = event.turn, record.recorded_ms, event.request_id
        key = (given.tenant, given.session)
        if given.keep_tokens:
            self.kept.keep(given, now_ms)
        if dispatch_id in self._turns:
            self._withdraw(dispatch_id)
        turn = Turn(dispatch_id, given.tenant, given.session, record.worker_id, record.dp_rank, given.tail)
        place = given.place
        if place is not None:
            turn.common, turn.prefix = place.common, place.prefix
            for each in place.displaced:
                if (lost := self._sessions.get(each)) is not None:
                    lost.own().is_displaced = True
        entry = self._sessions.get(key)
        if entry is None:
            self._make_room(now_ms)
            entry = _Entry({}, _OnlyTurn(event, turn, now_ms, now_ms))
            self._run(entry, turn)
            self._add(key, entry)
            return
        request_id = request_of(dispatch_id)
        self._keep(key)
        session = entry.own()
        is_same = session.request_id == request_id
        if is_same:
            for before in [each for each in entry.running if request_of(each) == request_id]:
                self._withdraw(before)
        else:
            if not session.running:
                waited_ms = 0 if place is None else place.waited_ms
                session.pause_ms = max(0, now_ms - waited_ms - session.last_ms)
            if session.ending and not session.running:
                kind = TurnEnding.TOOL if given.after_tool else TurnEnding(session.ending)
                self._learn_gap(session, kind, now_ms)
            session.request_id = request_id
            session.turns += 1
            session.cached_tokens = 0
        if given.anchor and not (is_same and session.tails):
            tail = _tail_of(request_id, given, event.isl)
            # The answer before can be found by its echoes no more.
            earlier = [_copy(each, echoes=()) if each.echoes else each for each in session.tails]
            session.tails = (*earlier, tail)[-SESSION_TAILS_MAX:]
        at = next(reversed(entry.running.values()), None) or next(iter(session.footprints), None)
        if at is not None and (at.worker_id, at.dp_rank) == (turn.worker_id, turn.dp_rank):
            turn.common, turn.prefix = at.common, at.prefix
        if place is not None:
            session.priority, session.is_displaced = place.priority, False
        if len(entry.running) >= RUNNING_MAX:
            self._withdraw(next(iter(entry.running)))
        self._run(entry, turn)
        session.last_ms, session.isl = now_ms, event.isl
        session.running += 1

    def _withdraw(self, dispatch_id: str) -> None:
        session = self._take(self._turns[dispatch_id]).own()
        session.running = max(0, session.running - 1)

    def _take(self, turn: Turn) -> _Entry:
        """Remove a running turn and return its session, which is known as long as it has one."""
        entry = self._sessions[turn.tenant, turn.session]
        del entry.running[turn.request_id]
        self._stop(turn)
        return entry

    def _run(self, entry: _Entry, turn: Turn) -> None:
        entry.running[turn.request_id] = self._turns[turn.request_id] = turn
        worker = (turn.worker_id, turn.dp_rank)
        on_worker = self._turns_on.get(worker)
        if on_worker is None:
            on_worker = self._turns_on[worker] = {}
        on_worker[turn.request_id] = turn

    def _stop(self, turn: Turn) -> None:
        del self._turns[turn.request_id]
        worker = (turn.worker_id, turn.dp_rank)
        on_worker = self._turns_on[worker]
        del on_worker[turn.request_id]
        if not on_worker:
            del self._turns_on[worker]

    def _leave(self, key: SessionKey, worker: _Rank) -> None:
        """Note that a session has a footprint on a worker."""
        left = self._left_on.get(worker)
        if left is None:
            left = self._left_on[worker] = {}
        left[key] = None

    def _lift(self, key: SessionKey, worker: _Rank) -> None:
        """Note that a session has none there any more."""
        left = self._left_on[worker]
        del left[key]
        if not left:
            del self._left_on[worker]

    def _learn_gap(self, session: SessionRecord, kind: TurnEnding, now_ms: int) -> None:
        gap_ms = min(GAP_MAX_MS, max(0, now_ms - session.ended_ms))
        place = _PLACE[kind]
        session.gaps, self.gaps = _with_gap(session.gaps, place, gap_ms), _with_gap(self.gaps, place, gap_ms)
        if kind is not TurnEnding.LENGTH:
            session.habit = kind

    def started(self, record: JournalRecord, event: RequestStarted) -> None:
        turn = self._turns.get(event.request_id)
        if turn is not None:
            turn.blocks, turn.cached_tokens = event.active_blocks, event.cached_tokens

    def progressed(self, record: JournalRecord, event: RequestProgressed) -> None:
        turn = self._turns.get(event.request_id)
        if turn is not None:
            turn.blocks = event.active_blocks

    def finished(self, record: JournalRecord, event: RequestFinished) -> None:
        turn = self._turns.get(event.request_id)
        # Dispatches are unique in a pool, workers included.
        if turn is not None and event.reason not in _GOES_ON:
            if event.cached_tokens is not None:
                turn.cached_tokens = event.cached_tokens
            self._end(turn, event.reason, record.recorded_ms)

    def _end(self, turn: Turn, reason: str, now_ms: int) -> None:
        entry = self._take(turn)
        self._keep((turn.tenant, turn.session))
        only = entry.only
        if only is not None:
            only.last_ms, only.is_over = now_ms, True
            only.ending = reason if reason in ENDINGS else ""
            if turn.blocks:
                self._leave((turn.tenant, turn.session), (turn.worker_id, turn.dp_rank))
            return
        session = entry.own()
        if turn.blocks:
            key, worker, left = (turn.tenant, turn.session), (turn.worker_id, turn.dp_rank), session.footprints
            if left and (left[0].worker_id, left[0].dp_rank) == worker:
                left = left[1:]  # no worker has two
            else:
                left = tuple([each for each in left if (each.worker_id, each.dp_rank) != worker])
                for each in left[SESSION_FOOTPRINTS_MAX - 1 :]:
                    self._lift(key, (each.worker_id, each.dp_rank))
                left = left[: SESSION_FOOTPRINTS_MAX - 1]
                self._leave(key, worker)
            session.footprints = (_left_by(turn), *left)
        session.last_ms = now_ms
        session.running = running = max(0, session.running - 1)
        if request_of(turn.request_id) == session.request_id:
            session.cached_tokens = turn.cached_tokens
        if not running:
            session.ended_ms = now_ms
            session.ending = reason if reason in ENDINGS else ""

    def answered(self, record: JournalRecord, event: TurnEnded) -> None:
        answer = event.answer
        entry = self._sessions.get((answer.tenant, answer.session))
        if entry is None:
            return
        request_id, only = answer.request_id, entry.only
        if only is not None:
            if request_of(only.turn.request_id) == request_id:
                only.answer = answer
            return
        tails = [_answered(each, answer) if each.request_id == request_id else each for each in entry.record.tails]
        entry.own().tails = tuple(tails)

    def lost(self, record: JournalRecord, event: object) -> None:
        """Forget what was on a worker that left, or begins again."""
        for turn in list(self._turns_on.get((record.worker_id, record.dp_rank), {}).values()):
            turn.blocks = 0
            self._end(turn, "lost", record.recorded_ms)
        self.cleared(record, event)

    def cleared(self, record: JournalRecord, event: object) -> None:
        worker = (record.worker_id, record.dp_rank)
        for key in self._left_on.pop(worker, ()):
            entry = self._sessions[key]
            if entry.only is not None:
                entry.only.turn.blocks = 0
                self.kept.drop(*key)
                continue
            session = entry.own()
            left = tuple([each for each in session.footprints if (each.worker_id, each.dp_rank) != worker])
            session.footprints = left
            if not left:
                self.kept.drop(*key)

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _add(self, key: SessionKey, entry: _Entry) -> None:
        """Enter a session as the one used last."""
        sessions, of_tenant = self._sessions, self._of_tenant
        sessions[key] = entry
        if of_tenant:
            self._count(*key)
        elif len(sessions) > 1 and next(iter(sessions))[0] != key[0]:
            for each in sessions:
                self._count(*each)

    def _count(self, tenant: int, name: str) -> None:
        """Count a session as its tenant's, of several."""
        names = self._of_tenant.get(tenant)
        if names is None:
            names = self._of_tenant[tenant] = OrderedDict()
        names[name] = None
        shares, share = self._shares, (-len(names), -tenant)
        if shares and shares[0] == share:
            return
        heappush(shares, share)
        if len(shares) > 2 * len(self._of_tenant) + SHARES_SPARE:
            shares[:] = [(-len(names), -tenant) for tenant, names in self._of_tenant.items()]
            heapify(shares)

    def _keep(self, key: SessionKey) -> None:
        self._sessions.move_to_end(key)
        if self._of_tenant:
            self._of_tenant[key[0]].move_to_end(key[1])

    def _make_room(self, now_ms: int) -> None:
        sessions = self._sessions
        while sessions:
            key, oldest = next(iter(sessions.items()))
            if oldest.last_ms + IDLE_MAX_MS > now_ms:
                if len(sessions) >= self._capacity:
                    self._forget(key if not self._of_tenant else self._largest_tenants_oldest())
                return
            self._forget(key)

    def _largest_tenants_oldest(self) -> SessionKey:
        """Return the session used longest ago of the tenant with the most, the highest number of several."""
        shares = self._shares
        while True:
            negated, tenant = shares[0]
            names = self._of_tenant.get(-tenant)
            if names is None:
                heappop(shares)
            elif len(names) < -negated:
                heapreplace(shares, (-len(names), tenant))
            else:
                return -tenant, next(iter(names))

    def _forget(self, key: SessionKey) -> None:
        """Forget a session with its running turns, of which some may have lost their end with their worker's events."""
        entry = self._sessions.pop(key)
        for turn in entry.running.values():
            self._stop(turn)
        only = entry.only
        if only is None:
            for each in entry.record.footprints:
                self._lift(key, (each.worker_id, each.dp_rank))
        elif only.is_over and only.turn.blocks:
            self._lift(key, (only.turn.worker_id, only.turn.dp_rank))
        if not self._of_tenant:
            return
        tenant, name = key
        names = self._of_tenant[tenant]
        del names[name]
        if not names:
            del self._of_tenant[tenant]

    # -- snapshots -------------------------------------------------------------------------------------------------

    def freeze(self) -> SessionsSnapshot:
        for entry in self._sessions.values():
            entry.is_shared = True
        turns = [_copy(each) for each in self._turns.values()]
        return SessionsSnapshot(list(self), turns, self.gaps, list(self.kept))

    def load(self, snapshot: SessionsSnapshot) -> None:
        """Replace all by a snapshot; a larger one than fits keeps its latest sessions."""
        for held in (self._sessions, self._of_tenant, self._turns, self._turns_on, self._left_on):
            held.clear()
        self._shares.clear()
        self.kept = KeptPrompts()
        for session in snapshot.sessions[-self._capacity :]:
            key = (session.tenant, session.name)
            self._add(key, _Entry({}, whole=session, is_shared=True))
            for each in session.footprints:
                self._leave(key, (each.worker_id, each.dp_rank))
        for turn in snapshot.turns:
            entry = self._sessions.get((turn.tenant, turn.session))
            if entry is not None:
                self._run(entry, _copy(turn))
        for prompt in snapshot.kept:
            self.kept.add(prompt)
        self.gaps = snapshot.gaps


def _tail_of(request_id: str, turn: SessionTurn, isl: int) -> Tail:
    return Tail(request_id, turn.tail, turn.anchor, isl, turn.residual, stem=turn.stem)


def _left_by(turn: Turn) -> Footprint:
    return Footprint(turn.worker_id, turn.dp_rank, turn.blocks, turn.tail, turn.common, turn.prefix)


def _answered(tail: Tail, answer: TurnAnswer) -> Tail:
    return _copy(tail, total=answer.total, digest=answer.digest, echoes=answer.echoes)


def _with_gap(gaps: tuple[Gap, Gap, Gap], place: int, gap_ms: int) -> tuple[Gap, Gap, Gap]:
    more = list(gaps)
    more[place] = more[place].after(gap_ms)
    return more[0], more[1], more[2]


_EFFECTS: Final[Mapping[type[Any], Callable[[SessionTable, JournalRecord, Any], None]]] = {
    TurnBegan: SessionTable.began,
    TurnEnded: SessionTable.answered,
    RequestStarted: SessionTable.started,
    RequestProgressed: SessionTable.progressed,
    RequestFinished: SessionTable.finished,
    CacheCleared: SessionTable.cleared,
    WorkerJoined: SessionTable.lost,
    WorkerLeft: SessionTable.lost,
}
