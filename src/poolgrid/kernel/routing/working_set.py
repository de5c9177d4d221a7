"""Which sessions' KV the workers of a pool are to keep, and whether one more session fits as well.

Too many sessions on a pool evict each other: each comes back from its tool to an empty cache and is computed again.
So a pool keeps a *working set*, and turns of other sessions wait at the router.

Rules
    1. A session is a *member* from the turn that is booked for it on. It is *resident* while a turn of it runs, and for
       ``lease_ms`` afterwards. Its footprint counts on the worker of its last turn: the blocks of its prompt and
       output, less those that the worker held before its first turn there. Blocks that several share count once for
       each worker. A session asks for room in the same way: what a worker holds of its prompt is free of charge where a
       resident counts it. Blocks that no resident counts may be its own, of turns that a router has not seen.
    2. Turns of resident sessions always proceed. Where a grown footprint no longer fits, idle residents of that worker
       lose their place, the one that was used longest ago first, which is the order in which engines evict.
    3. A turn of another session needs a worker with room for its footprint within ``FILL_MAX``. Workers without room
       are *crowded* for it. Where all are, it waits; a footprint above a worker's size counts as that size. Idle
       residents of a lower priority give way to it. Once it has waited ``AGE_MS``, so does each idle session that has
       been resident that long: sessions without an end take turns.
    4. These turns never wait, and go where their policy sends them: the first of a session without a parent, which may
       be a single request; a small one (``SMALL_SHARE``); and one of whose blocks a worker still holds ``HELD_SHARE``,
       because they would be evicted while it waits.
    5. A subagent belongs to its parent's session: while that is resident, its turns proceed, to a worker with room.
    6. The lease is the 95th percentile of the pauses up to ``LEASE_MAX_MS``. Above ``LEASE_MIN_MS`` it is at most what
       a worker takes to compute what its running sessions hold, ``RUNNING_SHARE`` of its cache: computing a footprint
       again delays each of them by its prompt, and keeping it for longer than all these delays costs more turns of
       others. One lease serves all sessions, because engines evict by last use alone. A session whose last pause was
       longer than ``LEASE_MAX_MS`` has none: a person reads its answers. A new session is taken for what most are, and
       has none either where most requests are never followed by another.
    7. At most ``MEMBERS_MAX`` sessions are known. Beyond, the idle one that was used longest ago is forgotten.
    8. While no worker is filled above ``TIGHT_SHARE``, small turns are not looked at.

What a method does depends on its arguments and earlier calls. The caller records them, so a replay repeats each answer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey

TIGHT_SHARE: Final = 0.7
"""Below this fill nothing can be evicted by a session of less than the rest."""

FILL_MAX: Final = 0.95
"""Newcomers leave a twentieth free: residents grow from call to call."""

SMALL_SHARE: Final = 0.05
"""Of the smallest worker's blocks: what newcomers leave free."""

HELD_SHARE: Final = 0.5
"""Of its own blocks, without those that were there before its session."""

AGE_MS: Final = 105_000.0
"""A place changes hands at most this often: a footprint of 60,000 tokens takes 3 to 6 s to compute again, 6 % of it."""

LEASE_START_MS: Final = 10_000.0
"""95.1 % of the pauses of a published agent trace are shorter (vllm-router issue 285)."""
LEASE_MIN_MS: Final = 2_000.0
"""However quickly prompts are computed: networks and busy processes lengthen a pause."""
LEASE_MAX_MS: Final = 60_000.0
RUNNING_SHARE: Final = 0.5
"""What is taken to be of turns that run: agents of a published trace pause less than half of their time."""
LEASE_QUANTILE: Final = 0.95
LEASE_STEP: Final = 0.05
"""A pause above the lease lengthens it by about 5 %, one below shortens it by 0.25 %."""
SHARE_STEP: Final = 0.05
"""What the latest pause counts in the share of long ones, and a session in the share of those that return."""

MEMBERS_MAX: Final = 65_536
"""Sessions known at a time, 300 bytes each."""


SessionKey = tuple[int, str]
"""Tenant and name."""


class OfferedTurn(msgspec.Struct, frozen=True, gc=False):
    """A call of a session that asks for a worker."""

    session: SessionKey
    blocks: int
    """Of its prompt and its expected output."""
    priority: int = 0
    parent: SessionKey | None = None
    """The session that started it, for a subagent."""


class Admission(NamedTuple):
    """Whether a turn may go to a worker now."""

    admitted: bool
    crowded: tuple[WorkerKey, ...] = ()
    """Workers that it must leave alone: it would evict residents there. All of them, when it waits."""
    displaced: tuple[SessionKey, ...] = ()
    """Sessions that lost their places to it."""


ADMITTED: Final = Admission(True)


class CacheRoom(msgspec.Struct, eq=False):
    """The blocks of one worker."""

    capacity: int
    refill_ms: int
    """What computing so many blocks takes."""
    used: int = 0
    """By residents."""
    is_tight: bool = False
    shared: dict[int, list[int]] = {}
    """By last block, blocks that residents share and how many do."""


class Member(msgspec.Struct, eq=False, gc=False):
    """One session."""

    worker: WorkerKey
    room: CacheRoom | None
    """That of the worker."""
    priority: int
    parent: SessionKey | None
    is_slow: bool
    """Whether its last pause was longer than any lease."""
    since_ms: float
    """Since when it is resident."""
    used_ms: float
    has_returned: bool = False
    blocks: int = 0
    """Its own on ``worker``."""
    common: int = 0
    """Blocks that the worker held before the session's first turn there."""
    prefix: int = 0
    """Sequence hash of the last of them; 0 where its parent counts them, or there are none."""
    running: int = 0
    is_resident: bool = False


class WorkingSet:
    """The resident sessions of one pool."""

    def __init__(self, members_max: int = MEMBERS_MAX) -> None:
        self.lease_ms = LEASE_START_MS
        self.slow_share = 0.0
        """How many of the latest pauses were longer than any lease."""
        self.return_share = 1.0
        """How many new sessions had a second turn: each first end lowers it, each first return counts twice."""
        self._members_max = members_max
        self._rooms: dict[WorkerKey, CacheRoom] = {}
        self._least = 0
        """Capacity of the smallest worker."""
        self._tight = 0
        """Workers that are filled above ``TIGHT_SHARE``."""
        self._refill_ms = 0
        """Sum over the workers."""
        self.changes = 0
        """Grows when room may have come: a turn that waits is offered again then, or at ``next_ms``."""
        self._running: dict[SessionKey, Member] = {}
        self._idle: OrderedDict[SessionKey, Member] = OrderedDict()
        """Residents without a running turn, by last use."""
        self._away: OrderedDict[SessionKey, Member] = OrderedDict()
        """Sessions that lost their places, by when."""

    # -- workers ---------------------------------------------------------------------------------------------------

    def know(self, worker: WorkerKey, blocks: int, refill_ms: int) -> None:
        """Take note that a worker has room for so many blocks, and would compute them within ``refill_ms``."""
        room = self._rooms.get(worker)
        if room is None:
            room = self._rooms[worker] = CacheRoom(blocks, 0)
            self._least = min(each.capacity for each in self._rooms.values())
        elif room.capacity != blocks:
            room.capacity = blocks
            self._least = min(each.capacity for each in self._rooms.values())
        self._refill_ms += refill_ms - room.refill_ms
        room.refill_ms = refill_ms

    def clear(self, worker: WorkerKey) -> None:
        """Forget what a worker held for sessions that do not run: its cache was emptied."""
        for session in [session for session, member in self._idle.items() if member.worker == worker]:
            self._send_away(session)

    def leave(self, worker: WorkerKey) -> None:
        """Forget a worker and whose KV it held."""
        left = self._rooms.pop(worker, None)
        if left is None:
            return
        self._least = min((room.capacity for room in self._rooms.values()), default=0)
        self._refill_ms -= left.refill_ms
        self._tight -= left.is_tight
        self.changes += 1
        for members in (self._running, self._idle, self._away):
            for session in [session for session, member in members.items() if member.worker == worker]:
                del members[session]

    def workers(self) -> set[WorkerKey]:
        return set(self._rooms)

    def refill_ms(self, worker: WorkerKey) -> int:
        """Return what computing a cache full takes a worker; 0 where that is not known."""
        room = self._rooms.get(worker)
        return 0 if room is None else room.refill_ms

    @property
    def held_ms(self) -> float:
        """Return how long an idle session keeps its place now."""
        if not self._rooms:
            return self.lease_ms
        return min(self.lease_ms, max(LEASE_MIN_MS, RUNNING_SHARE * self._refill_ms / len(self._rooms)))

    # -- turns -----------------------------------------------------------------------------------------------------

    def is_free(self, blocks: int) -> bool:
        """Return whether a turn of so many blocks may go anywhere without ``offer``: nothing is crowded."""
        return not self._tight and (1.0 - TIGHT_SHARE) * self._least >= blocks

    def is_resident(self, session: SessionKey) -> bool:
        return session in self._running or session in self._idle

    def is_member(self, session: SessionKey) -> bool:
        return self._member(session) is not None

    def origin(self, session: SessionKey) -> tuple[int, int]:
        """Return the blocks that a worker held before a session's first turn there, and the hash of the last one."""
        member = self._member(session)
        return (0, 0) if member is None else (member.common, member.prefix)

    def learn_from(self, other: WorkingSet) -> None:
        """Take over what another one has learned of pauses."""
        self.lease_ms, self.slow_share, self.return_share = other.lease_ms, other.slow_share, other.return_share

    def offer(
        self,
        turn: OfferedTurn,
        workers: Sequence[WorkerKey],
        held: int,
        prefix: int,
        now_ms: float,
        waited_ms: float,
        is_behind: bool = False,
    ) -> Admission:
        """Return whether a turn may go to one of ``workers`` now.

        ``held`` are the leading blocks of its prompt that some worker holds, and ``prefix`` is the hash of the last of
        them. ``is_behind``: others have waited for room for long, and it takes none.
        """
        self._expire(now_ms)
        member = self._member(turn.session)
        if member is not None and member.is_resident:
            return Admission(True, (), self._shed(member, turn.blocks - member.common))
        parent = None if turn.parent is None else self._member(turn.parent)
        belongs = parent is not None and parent.is_resident
        if not belongs and self._never_waits(turn, member or parent, held):
            return ADMITTED
        if is_behind and not belongs:
            return Admission(False)
        common = held
        if member is not None:
            common, prefix = member.common, member.prefix
        home = parent.room if parent is not None and belongs else None

        def missing_in(room: CacheRoom) -> int:
            """Return the blocks that it lacks on a worker: it would add there what ``begin`` counts."""
            is_counted = room is home or prefix in room.shared
            return _missing(room, turn.blocks - common if is_counted else turn.blocks)

        crowded: list[WorkerKey] = []
        for worker in workers:
            room = self._rooms.get(worker)
            if room is not None and room.capacity and missing_in(room) > 0:
                crowded.append(worker)
        if len(crowded) < len(workers):
            return Admission(True, tuple(crowded)) if crowded else ADMITTED
        if belongs:
            return ADMITTED  # its parent waits for it, with all that it holds
        chosen: WorkerKey | None = None
        displaced: list[SessionKey] = []
        for worker in workers:
            givers = self._givers(worker, missing_in(self._rooms[worker]), turn, now_ms, waited_ms)
            if givers and (chosen is None or len(givers) < len(displaced)):
                chosen, displaced = worker, givers
        for session in displaced:
            self._send_away(session)
        others = tuple(worker for worker in workers if worker != chosen)
        return Admission(chosen is not None, others, tuple(displaced))

    def _never_waits(self, turn: OfferedTurn, known: Member | None, held: int) -> bool:
        """Tell whether a turn of a session without a place goes anywhere; ``known`` is its session, or its parent."""
        if (known is None and turn.parent is None) or turn.blocks <= SMALL_SHARE * self._least:
            return True
        own = turn.blocks - (0 if known is None else known.common)
        return turn.blocks - held <= (1.0 - HELD_SHARE) * own

    def next_ms(self) -> float:
        return next(iter(self._idle.values())).used_ms + self.held_ms if self._idle else math.inf

    def shared_prefix(self, turn: OfferedTurn, worker: WorkerKey, prefix: int) -> int:
        """Return the hash of the last block that a worker holds of a prompt; 0 if the session's parent counts it."""
        parent = None if turn.parent is None else self._member(turn.parent)
        is_counted = parent is not None and parent.is_resident and parent.worker == worker
        return 0 if is_counted else prefix

    def begin(
        self,
        turn: OfferedTurn,
        worker: WorkerKey,
        common: int,
        prefix: int,
        now_ms: float,
        waited_ms: float = 0.0,
    ) -> None:
        """Note that a turn goes to a worker that holds its ``common`` leading blocks, with this ``shared_prefix``.

        What a worker holds of a session's first prompt there is taken for what others have brought.
        """
        if self._idle:
            self._expire(now_ms)
        session = turn.session
        member = self._running.get(session)
        if member is None:
            member = self._idle.pop(session, None) or self._away.pop(session, None)
            if member is None:
                room, is_slow = self._rooms.get(worker), self.slow_share > 0.5
                member = Member(worker, room, turn.priority, turn.parent, is_slow, now_ms, now_ms)
                self._running[session] = member
                member.common, member.prefix = common, prefix
                member.blocks, member.running, member.is_resident = max(0, turn.blocks - common), 1, True
                self._count(member, 1)
                self._bound()
                return
            self._running[session] = member
            self._learn(member, now_ms - waited_ms - member.used_ms)
            if not member.is_resident:
                member.since_ms = now_ms
        if member.worker != worker:
            if member.is_resident:
                self._count(member, -1)
                member.is_resident = False
            member.worker, member.room = worker, self._rooms.get(worker)
            member.common, member.prefix = common, prefix
        member.running += 1
        member.priority = turn.priority
        member.used_ms = now_ms
        self._resize(member, max(0, turn.blocks - member.common))
        if not member.is_resident:
            member.is_resident = True
            self._count(member, 1)
        self._bound()

    def end(self, session: SessionKey, blocks: int | None, now_ms: float) -> None:
        """Note that a turn of a session is over; its prompt and output had ``blocks``, if that is known."""
        member = self._running.get(session)
        if member is None:
            return
        self._expire(now_ms)  # first, as for a router that asks before it reads of this end
        member.used_ms = now_ms
        if blocks is not None:
            self._resize(member, max(0, blocks - member.common))
        self.changes += 1  # an idle session may give way
        member.running -= 1
        if member.running:
            return
        del self._running[session]
        if not member.has_returned:
            self.return_share -= SHARE_STEP * self.return_share
        if member.is_slow or not (member.has_returned or self.return_share > 0.5):
            self._put_away(session, member)
        else:
            self._idle[session] = member
        if member.parent is not None and member.parent in self._idle:
            # Its parent continues once all subagents have answered.
            self._idle[member.parent].used_ms = now_ms
            self._idle.move_to_end(member.parent)

    def displace(self, sessions: Iterable[SessionKey]) -> None:
        """Take the places of idle sessions, for a turn that another router admitted."""
        for session in sessions:
            if session in self._idle:
                self._send_away(session)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget workers and sessions; what was learned of pauses stays."""
        for held in (self._rooms, self._running, self._idle, self._away):
            held.clear()
        self._least = self._tight = self._refill_ms = 0
        self.changes += 1

    def enter(
        self,
        turn: OfferedTurn,
        worker: WorkerKey,
        common: int,
        prefix: int,
        *,
        since_ms: float,
        used_ms: float,
        running: int,
        has_returned: bool,
        is_slow: bool,
        is_displaced: bool,
    ) -> None:
        """Enter a session as others know it; ``settle`` follows. ``turn`` has the blocks of its last turn."""
        room, own = self._rooms.get(worker), max(0, turn.blocks - common)
        member = Member(
            worker,
            room,
            turn.priority,
            turn.parent,
            is_slow,
            since_ms,
            used_ms,
            has_returned,
            own,
            common,
            prefix,
            running,
        )
        keeps_place = not (is_displaced or is_slow) and (has_returned or self.return_share > 0.5)
        member.is_resident = running > 0 or keeps_place
        members = self._running if running else self._idle if keeps_place else self._away
        members[turn.session] = member

    def settle(self, now_ms: float) -> None:
        """Count all sessions that were entered."""
        for members in (self._running, self._idle, self._away):
            for member in members.values():
                if member.is_resident:
                    self._count(member, 1)
                else:
                    member.blocks = 0
        self._expire(now_ms)
        self._bound()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """Return a copy of all that is known, as msgpack can have it."""
        members = [
            (*session, member.worker.worker_id, member.worker.dp_rank, member.priority, member.parent, member.is_slow,
             member.has_returned,
             member.blocks, member.common, member.prefix, member.running, member.is_resident, member.since_ms,
             member.used_ms)
            for members in (self._running, self._idle, self._away)
            for session, member in members.items()
        ]  # fmt: skip
        capacity = [
            (worker.worker_id, worker.dp_rank, room.capacity, room.refill_ms) for worker, room in self._rooms.items()
        ]
        return {
            "members": members,
            "capacity": capacity,
            "lease_ms": self.lease_ms,
            "shares": [self.slow_share, self.return_share],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``checkpoint`` returned, as msgpack decodes it."""
        self.reset()
        self.lease_ms, (self.slow_share, self.return_share) = state["lease_ms"], state["shares"]
        for worker_id, rank, blocks, refill_ms in state["capacity"]:
            self.know(WorkerKey(WorkerId(worker_id), rank), blocks, refill_ms)
        for tenant, name, worker_id, rank, priority, parent, is_slow, *counts in state["members"]:
            key = WorkerKey(WorkerId(worker_id), rank)
            of = None if parent is None else (parent[0], parent[1])
            *known, since_ms, used_ms = counts
            member = Member(key, self._rooms.get(key), priority, of, is_slow, since_ms, used_ms, *known)
            members = self._running if member.running else self._idle if member.is_resident else self._away
            members[tenant, name] = member
            if member.is_resident:
                self._count(member, 1)

    # -- places ----------------------------------------------------------------------------------------------------

    def _member(self, session: SessionKey) -> Member | None:
        return self._running.get(session) or self._idle.get(session) or self._away.get(session)

    def _count(self, member: Member, sign: int) -> None:
        """Count a resident on its worker (1), or no longer (-1)."""
        room, blocks = member.room, member.blocks
        if room is None:
            return
        if member.prefix:
            shared = room.shared.setdefault(member.prefix, [member.common, 0])
            blocks += shared[0] * (shared[1] == (sign < 0))
            shared[1] += sign
            if not shared[1]:
                del room.shared[member.prefix]
        self._use(room, sign * blocks)

    def _resize(self, member: Member, blocks: int) -> None:
        """Set the blocks of a member, which count if it is resident."""
        more = blocks - member.blocks
        if more:
            member.blocks = blocks
            if member.room is not None and member.is_resident:
                self._use(member.room, more)

    def _use(self, room: CacheRoom, blocks: int) -> None:
        room.used += blocks
        is_tight = room.used > TIGHT_SHARE * room.capacity
        if is_tight is not room.is_tight:
            room.is_tight = is_tight
            self._tight += 1 if is_tight else -1

    def _learn(self, member: Member, pause_ms: float) -> None:
        if not member.has_returned:
            member.has_returned = True
            self.return_share += 2 * SHARE_STEP * (1.0 - self.return_share)
        member.is_slow = pause_ms > LEASE_MAX_MS
        self.slow_share += SHARE_STEP * (member.is_slow - self.slow_share)
        if member.is_slow:
            return
        factor = LEASE_STEP * (LEASE_QUANTILE - (pause_ms <= self.lease_ms))
        self.lease_ms = min(LEASE_MAX_MS, max(LEASE_MIN_MS, self.lease_ms * (1.0 + factor)))

    def _expire(self, now_ms: float) -> None:
        while self._idle:
            session, member = next(iter(self._idle.items()))
            idle_ms = now_ms - member.used_ms
            if idle_ms <= LEASE_MIN_MS or idle_ms <= self.held_ms:
                return
            self._send_away(session)

    def _send_away(self, session: SessionKey) -> None:
        self._put_away(session, self._idle.pop(session))

    def _put_away(self, session: SessionKey, member: Member) -> None:
        member.is_resident = False
        self.changes += 1
        self._count(member, -1)
        member.blocks = 0
        self._away[session] = member

    def _bound(self) -> None:
        while len(self._running) + len(self._idle) + len(self._away) > self._members_max:
            if self._away:
                self._away.popitem(last=False)
            elif self._idle:
                self._send_away(next(iter(self._idle)))
            else:
                return  # each running turn has an entry in the load ledger, which is bounded

    def _shed(self, member: Member, own: int) -> tuple[SessionKey, ...]:
        """Make room for a resident that has grown, at the cost of idle ones."""
        worker, room = member.worker, member.room
        missing = 0 if room is None else room.used - member.blocks + own - room.capacity
        shed: list[SessionKey] = []
        if missing > 0:
            for session, each in self._idle.items():
                if each.worker == worker and each is not member:
                    shed.append(session)
                    missing -= each.blocks
                    if missing <= 0:
                        break
            for session in shed:
                self._send_away(session)
        return tuple(shed)

    def _givers(
        self, worker: WorkerKey, missing: int, turn: OfferedTurn, now_ms: float, waited_ms: float
    ) -> list[SessionKey]:
        """Return who would give way to a turn on a worker, the longest resident first; none where that is too few."""
        is_aged = waited_ms >= AGE_MS
        idle = [
            (member.since_ms, session, member.blocks)
            for session, member in self._idle.items()
            if member.worker == worker
            and (
                member.priority < turn.priority
                or (is_aged and member.priority == turn.priority and now_ms - member.since_ms >= AGE_MS)
            )
        ]
        givers: list[SessionKey] = []
        for _, session, blocks in sorted(idle):
            givers.append(session)
            missing -= blocks
            if missing <= 0:
                return givers
        return []


def _missing(room: CacheRoom, own: int) -> int:
    """Return the blocks that a newcomer with so many lacks on a worker; one above its size counts as that size."""
    most = int(FILL_MAX * room.capacity)
    return min(own, most) - (most - room.used)
