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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from poolgrid.wire.events import (
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
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.limits import SESSION_FOOTPRINTS_MAX, SESSION_TAILS_MAX
from poolgrid.wire.request_ids import request_of
from poolgrid.wire.sessions import NO_GAPS, Footprint, Gap, SessionRecord, SessionsSnapshot, Tail, Turn, TurnEnding

CAPACITY: Final = 8192
"""Sessions of a pool, about a kilobyte each; far more than fit into the KV caches of a hundred workers."""

IDLE_MAX_MS: Final = 3_600_000
"""An hour: the longest that providers keep a prompt cached by default."""

GAP_MAX_MS: Final = 600_000
"""A longer gap counts as this: a person left, which does not predict the next gap."""

ENDINGS: Final = tuple(TurnEnding)
_PLACE: Final = {ending: place for place, ending in enumerate(TurnEnding)}
_GOES_ON: Final = frozenset(("prefilled", "encoded", "migrated"))
"""Finish reasons of a dispatch after which another one continues its turn."""

SessionKey = tuple[int, str]
"""Tenant and name."""

_NO_TURNS: Final[Mapping[str, Turn]] = {}

_replace = msgspec.structs.replace


class SessionTable:
    """The sessions of one pool."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._sessions: dict[SessionKey, SessionRecord] = {}
        """In the order in which they were last used."""
        self._of_tenant: dict[int, dict[str, None]] = {}
        """The same order for each tenant."""
        self._turns: dict[str, Turn] = {}
        """Running turns, by dispatch."""
        self._running: dict[SessionKey, dict[str, Turn]] = {}
        """The same by session."""
        self.gaps: tuple[Gap, Gap, Gap] = NO_GAPS
        """Of all sessions together, for those that have none of their own yet."""

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionRecord]:
        """Return the sessions, the one used longest ago first."""
        return iter(self._sessions.values())

    def get(self, tenant: int, name: str) -> SessionRecord | None:
        return self._sessions.get((tenant, name))

    def latest(self, limit: int) -> list[SessionRecord]:
        """Return the sessions that were used last, the latest first."""
        found: list[SessionRecord] = []
        for session in reversed(self._sessions.values()):
            if len(found) >= limit:
                break
            found.append(session)
        return found

    @property
    def turns(self) -> Mapping[str, Turn]:
        """Return the running turns of all sessions, by dispatch."""
        return self._turns

    def running_of(self, session: SessionRecord) -> list[Turn]:
        """Return the running turns of a session."""
        return list(self._running.get((session.tenant, session.name), _NO_TURNS).values())

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
        return session.gaps[place] if session.gaps[place].count else self.gaps[place]

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
        """Fold the next record in."""
        for event in record.events:
            effect = _EFFECTS.get(type(event))
            if effect is not None:
                effect(self, record, event)

    def _began(self, record: JournalRecord, event: TurnBegan) -> None:
        given, now_ms = event.turn, record.recorded_ms
        key = (given.tenant, given.session)
        request_id = request_of(event.request_id)
        session = self._sessions.get(key)
        is_same = session is not None and session.request_id == request_id
        self._withdraw([event.request_id])
        if is_same:
            self._withdraw([each for each in self._running.get(key, _NO_TURNS) if request_of(each) == request_id])
        session = self._sessions.get(key)
        if session is None:
            self._make_room(now_ms)
            session = SessionRecord(given.session, given.tenant, given.parent, now_ms, now_ms)
        if not is_same and not session.running and session.ending:
            session = self._after_gap(
                session, TurnEnding.TOOL if given.after_tool else TurnEnding(session.ending), now_ms
            )
        tails = session.tails
        if given.anchor and not (is_same and tails):
            tail = Tail(request_id, given.tail, given.anchor, event.isl, given.residual)
            tails = (*tails, tail)[-SESSION_TAILS_MAX:]
        turn = Turn(event.request_id, given.tenant, given.session, record.worker_id, record.dp_rank, given.tail)
        self._add(turn)
        self._keep(
            _replace(
                session,
                last_ms=now_ms,
                turns=session.turns + (not is_same),
                running=session.running + 1,
                request_id=request_id,
                isl=event.isl,
                cached_tokens=session.cached_tokens if is_same else 0,
                tails=tails,
            )
        )

    def _withdraw(self, dispatch_ids: Iterable[str]) -> None:
        """Forget turns that another dispatch replaces."""
        for dispatch_id in dispatch_ids:
            turn = self._take(dispatch_id)
            if turn is not None and (session := self._sessions.get((turn.tenant, turn.session))) is not None:
                self._sessions[turn.tenant, turn.session] = _replace(session, running=max(0, session.running - 1))

    def _add(self, turn: Turn) -> None:
        self._turns[turn.request_id] = turn
        self._running.setdefault((turn.tenant, turn.session), {})[turn.request_id] = turn

    def _take(self, dispatch_id: str) -> Turn | None:
        """Remove a turn and return it, if it is known."""
        turn = self._turns.pop(dispatch_id, None)
        if turn is not None:
            key = (turn.tenant, turn.session)
            of_session = self._running[key]
            del of_session[dispatch_id]
            if not of_session:
                del self._running[key]
        return turn

    def _after_gap(self, session: SessionRecord, kind: TurnEnding, now_ms: int) -> SessionRecord:
        gap_ms = min(GAP_MAX_MS, max(0, now_ms - session.ended_ms))
        place = _PLACE[kind]
        own, of_all = list(session.gaps), list(self.gaps)
        own[place], of_all[place] = own[place].after(gap_ms), of_all[place].after(gap_ms)
        self.gaps = (of_all[0], of_all[1], of_all[2])
        habit = session.habit if kind is TurnEnding.LENGTH else kind
        return _replace(session, gaps=(own[0], own[1], own[2]), habit=habit)

    def _started(self, record: JournalRecord, event: RequestStarted) -> None:
        turn = self._turns.get(event.request_id)
        if turn is not None:
            turn.blocks, turn.cached_tokens = event.active_blocks, event.cached_tokens

    def _progressed(self, record: JournalRecord, event: RequestProgressed) -> None:
        turn = self._turns.get(event.request_id)
        if turn is not None:
            turn.blocks = event.active_blocks

    def _finished(self, record: JournalRecord, event: RequestFinished) -> None:
        turn = self._turns.get(event.request_id)
        # Dispatches are unique in a pool, workers included.
        if turn is not None and event.reason not in _GOES_ON:
            if event.cached_tokens is not None:
                turn.cached_tokens = event.cached_tokens
            self._end(turn, event.reason, record.recorded_ms)

    def _end(self, turn: Turn, reason: str, now_ms: int) -> None:
        self._take(turn.request_id)
        session = self._sessions.get((turn.tenant, turn.session))
        if session is None:
            return
        left = session.footprints
        if turn.blocks:
            left = tuple(each for each in left if (each.worker_id, each.dp_rank) != (turn.worker_id, turn.dp_rank))[
                : SESSION_FOOTPRINTS_MAX - 1
            ]
            left = (Footprint(turn.worker_id, turn.dp_rank, turn.blocks, turn.tail), *left)
        running = max(0, session.running - 1)
        is_latest = request_of(turn.request_id) == session.request_id
        self._keep(
            _replace(
                session,
                last_ms=now_ms,
                running=running,
                cached_tokens=turn.cached_tokens if is_latest else session.cached_tokens,
                ended_ms=session.ended_ms if running else now_ms,
                ending=session.ending if running else reason if reason in ENDINGS else "",
                footprints=left,
            )
        )

    def _answered(self, record: JournalRecord, event: TurnEnded) -> None:
        answer = event.answer
        key = (answer.tenant, answer.session)
        session = self._sessions.get(key)
        if session is not None:
            tails = [
                _replace(each, total=answer.total, digest=answer.digest)
                if each.request_id == answer.request_id
                else each
                for each in session.tails
            ]
            self._sessions[key] = _replace(session, tails=tuple(tails))

    def _lost(self, record: JournalRecord, event: object) -> None:
        """Forget what was on a worker that left, or begins again."""
        for turn in [each for each in self._turns.values() if (each.worker_id, each.dp_rank) == record.worker]:
            turn.blocks = 0
            self._end(turn, "lost", record.recorded_ms)
        self._cleared(record, event)

    def _cleared(self, record: JournalRecord, event: object) -> None:
        worker = (record.worker_id, record.dp_rank)
        for key, session in self._sessions.items():
            if any((each.worker_id, each.dp_rank) == worker for each in session.footprints):
                left = tuple(each for each in session.footprints if (each.worker_id, each.dp_rank) != worker)
                self._sessions[key] = _replace(session, footprints=left)

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _keep(self, session: SessionRecord) -> None:
        """Enter a session as the one used last."""
        key = (session.tenant, session.name)
        self._sessions.pop(key, None)
        self._sessions[key] = session
        names = self._of_tenant.get(session.tenant)
        if names is None:
            names = self._of_tenant[session.tenant] = {}
        names.pop(session.name, None)
        names[session.name] = None

    def _make_room(self, now_ms: int) -> None:
        sessions = self._sessions
        while sessions:
            tenant, name = next(iter(sessions))
            if sessions[tenant, name].last_ms + IDLE_MAX_MS > now_ms:
                break
            self._forget(tenant, name)
        if len(sessions) >= self._capacity:
            tenant = max(self._of_tenant, key=lambda each: (len(self._of_tenant[each]), each))
            self._forget(tenant, next(iter(self._of_tenant[tenant])))

    def _forget(self, tenant: int, name: str) -> None:
        """Forget a session with its running turns, of which some may have lost their end with their worker's events."""
        del self._sessions[tenant, name]
        for dispatch_id in self._running.pop((tenant, name), _NO_TURNS):
            del self._turns[dispatch_id]
        names = self._of_tenant[tenant]
        del names[name]
        if not names:
            del self._of_tenant[tenant]

    # -- snapshots -------------------------------------------------------------------------------------------------

    def freeze(self) -> SessionsSnapshot:
        """Return the table as it stays whatever is applied later."""
        return SessionsSnapshot(
            list(self._sessions.values()), [_replace(each) for each in self._turns.values()], self.gaps
        )

    def load(self, snapshot: SessionsSnapshot) -> None:
        """Replace all by a snapshot; a larger one than fits keeps its latest sessions."""
        self._sessions.clear()
        self._of_tenant.clear()
        for session in snapshot.sessions[-self._capacity :]:
            self._keep(session)
        self._turns.clear()
        self._running.clear()
        for turn in snapshot.turns:
            self._add(_replace(turn))
        self.gaps = snapshot.gaps


_EFFECTS: Final[Mapping[type[Any], Callable[[SessionTable, JournalRecord, Any], None]]] = {
    TurnBegan: SessionTable._began,
    TurnEnded: SessionTable._answered,
    RequestStarted: SessionTable._started,
    RequestProgressed: SessionTable._progressed,
    RequestFinished: SessionTable._finished,
    CacheCleared: SessionTable._cleared,
    WorkerJoined: SessionTable._lost,
    WorkerLeft: SessionTable._lost,
}
