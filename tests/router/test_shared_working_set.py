"""The routers of a pool have one working set, whoever admits, ends, dies or comes back."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.routing import working_set
from poolgrid.kernel.routing.inputs import Booked, RecordsArrived, SnapshotArrived, TurnOffered, WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.working_set import LEASE_MIN_MS, Member, SessionKey
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import (
    AnyEvent,
    JournalRecord,
    RequestFinished,
    RequestStarted,
    TurnBegan,
    WorkerJoined,
)
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router.policy_loading import make_state
from poolgrid.server.router.settings import RouterSettings
from tests.consolidator.journal_builder import FakeDisk
from tests.examples import examples
from tests.router.fleet_builder import BLOCK_SIZE, make_card, stored, worker_key

NAMES = ("a", "b")
BLOCKS = 200
BLOCKS_MAX = 100_000
CARD = make_card(total_kv_blocks=BLOCKS, max_batch_size=64)


class Pool:
    """Two routers over two workers; an event of a worker reaches a router when the router reads it."""

    def __init__(self, has_subagents: bool = True) -> None:
        self.has_subagents = has_subagents
        self.now_ms = 100_000.0
        self.journal = FileJournal(FakeDisk(), JournalSettings(segment_bytes=100_000))
        self.journal.recover(BLOCKS_MAX)
        self.records: list[JournalRecord] = []
        self.open: dict[str, tuple[int, WorkerKey]] = {}
        self.sessions: dict[str, str] = {}
        self.requests = 0
        for name in NAMES:
            self.say(worker_key(name), WorkerJoined(CARD))
        self.routers = [self.begun(), self.begun()]

    def begun(self) -> RouterState:
        """Return a router that begins with what the consolidator has."""
        state = make_state(with_constants(RouterSettings, {}))
        frozen = self.journal.recover(BLOCKS_MAX).freeze()
        load = state.projection.begin_load(frozen.offset, frozen.states(), frozen.visible_chains(), frozen.sessions)
        while load.step(1000):
            pass
        state.apply(SnapshotArrived(load, self.now_ms, int(self.now_ms)))
        return state

    def say(self, worker: WorkerKey, *events: AnyEvent) -> None:
        time_ms, seq = int(self.now_ms), len(self.records)
        record = JournalRecord(seq, worker.worker_id, worker.dp_rank, 1, seq, time_ms, time_ms, list(events))
        self.journal.append([codec.journal_record.encode(record)], time_ms)
        self.records.append(record)

    def read(self, router: int, records: int | None = None) -> None:
        """Have a router read so many records, or all."""
        state = self.routers[router]
        first = state.projection.next_offset
        due = self.records[first : len(self.records) if records is None else first + records]
        if due:
            state.apply(RecordsArrived(due, self.now_ms))

    def read_of(self, router: int, session: str) -> None:
        """Have a router read up to the last turn of a session: its client has the answer, which takes as long."""
        due = self.records[self.routers[router].projection.next_offset :]
        for at in range(len(due), 0, -1):
            if any(self.session_of(event) == session for event in due[at - 1].events):
                self.read(router, at)
                return

    def session_of(self, event: AnyEvent) -> str:
        match event:
            case TurnBegan(_, _, turn):
                return turn.session
            case RequestFinished(request_id):
                return self.sessions.get(request_id, "")
            case _:
                return ""

    def ask(self, router: int, session: int, blocks: int, waited_ms: float = 0.0) -> bool:
        """Have a turn begin, if it is admitted."""
        state, path = self.routers[router], [*range(1, 5), *range(1000 * (session + 1), 1000 * (session + 1) + blocks)]
        self.requests += 1
        request_id, isl = f"{router}-{self.requests}", BLOCK_SIZE * len(path) + 3
        name, parent, priority = f"s{session}", "s0" if session == 1 and self.has_subagents else "", session % 2
        routing = RoutingRequest(request_id, "m", isl, BLOCK_SIZE, len(path) + 1, priority, session=name, parent=parent)
        time_ms = int(self.now_ms)
        admission = state.apply(TurnOffered(routing, path, self.now_ms, time_ms, waited_ms=waited_ms))
        if not admission.admitted:
            return False
        crowded = dict.fromkeys(admission.crowded, "crowded")
        decision = state.apply(WorkerWanted(routing, path, self.now_ms, time_ms, crowded, queued_ms=waited_ms))
        if not isinstance(decision, Decision):
            return False
        card = state.projection.fleet.workers[decision.worker].card
        place = state.sessions.place_of(decision, card, path, admission.displaced)
        state.apply(Booked(decision, path, request_id, self.now_ms))
        turn = SessionTurn(name, parent=parent, place=place)
        self.say(
            decision.worker,
            TurnBegan(request_id, isl, turn),
            RequestStarted(request_id, isl, place.common * BLOCK_SIZE, len(path) + 1),
            stored(path),
        )
        self.open[request_id] = router, decision.worker
        self.sessions[request_id] = name
        return True

    def end(self, request_id: str, reason: str = "stop") -> None:
        _, worker = self.open.pop(request_id)
        self.say(worker, RequestFinished(request_id, reason))

    def replace(self, router: int) -> None:
        """Kill a router; its workers end its turns, and another one begins."""
        for request_id in [each for each, (of, _) in self.open.items() if of == router]:
            self.end(request_id, "cancelled")
        self.routers[router] = self.begun()

    def settle(self) -> None:
        for router, state in enumerate(self.routers):
            self.read(router)
            state.sessions.working_set._expire(self.now_ms)


def places(state: RouterState) -> dict[SessionKey, tuple[WorkerKey, int, int, int, int]]:
    """Return who has a place, where, and for which blocks."""
    known = state.sessions.working_set

    def told(member: Member) -> tuple[WorkerKey, int, int, int, int]:
        return member.worker, member.blocks, member.common, member.prefix, member.running

    return {session: told(member) for held in (known._running, known._idle) for session, member in held.items()}


def used(state: RouterState) -> dict[WorkerKey, int]:
    return {worker: room.used for worker, room in state.sessions.working_set._rooms.items()}


Action = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 9), st.integers(1, 90)),
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 9), st.integers(1, 90)),
    st.tuples(st.just("end"), st.integers(0, 30)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("pass"), st.sampled_from([1.0, 500.0, LEASE_MIN_MS + 1, 120_000.0])),
)


def play(pool: Pool, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    for action, *values in actions:
        if action == "ask":
            router, session, blocks = values
            if f"s{session}" in (pool.sessions[each] for each in pool.open):
                continue  # its calls follow each other
            pool.read_of(router, f"s{session}")
            pool.ask(router, session, blocks, waited_ms=110_000.0 if blocks % 9 == 0 else 0.0)
        elif action == "end" and pool.open:
            pool.end(list(pool.open)[values[0] % len(pool.open)])
        elif action == "read":
            pool.read(*values)
        elif action == "pass":
            pool.settle()  # what is on its way is so for milliseconds
            pool.now_ms += values[0]
    pool.settle()


def late_end(pause_ms: float) -> list[tuple]:  # type: ignore[type-arg]
    """A subagent that ends when its parent's place is over."""
    return [("ask", 0, 0, 1), ("ask", 0, 1, 1), ("end", 0), ("pass", pause_ms), ("end", 0)]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(Action, max_size=60))
@example([*late_end(LEASE_MIN_MS + 1), ("ask", 0, 2, 1)])
@example([*late_end(120_000.0), ("ask", 0, 0, 1)])
def test_two_routers_that_have_read_the_same_have_the_same_places(actions: list[tuple]) -> None:  # type: ignore[type-arg]
    pool = Pool()
    play(pool, actions)

    one, other = pool.routers
    assert places(one) == places(other)
    assert used(one) == used(other)
    assert one.sessions.working_set.lease_ms == other.sessions.working_set.lease_ms


BACK_UNREAD = (
    [
        ("ask", 0, 4, 69),
        ("end", 0),
        ("pass", 1.0),
        ("ask", 1, 2, 22),
        ("end", 0),
        ("ask", 0, 0, 3),
        ("end", 0),
        ("ask", 0, 4, 69),
        ("ask", 0, 0, 29),
        ("pass", 500.0),
        ("ask", 0, 1, 1),
        ("ask", 1, 3, 1),
    ],
    1,
    [("end", 0), ("end", 0), ("end", 0), ("ask", 1, 2, 1), ("end", 0), ("ask", 0, 0, 25), ("ask", 0, 3, 69)],
)
"""A session that is displaced while another router has its next turn."""


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(Action, max_size=40), st.integers(0, 1), st.lists(Action, max_size=20))
@example(*BACK_UNREAD)
def test_a_router_that_dies_gives_its_places_back_and_the_next_one_knows_the_others(
    before: list[tuple],  # type: ignore[type-arg]
    killed: int,
    after: list[tuple],  # type: ignore[type-arg]
) -> None:
    # How long a parent waits for subagents is not in a snapshot, nor what a router has learned of pauses and paces.
    pool = Pool(has_subagents=False)
    with patch.multiple(working_set, SHARE_STEP=0.0, LEASE_STEP=0.0, RUNNING_SHARE=0.0):
        play(pool, before)
        pool.replace(killed)
        pool.settle()
        one, other = pool.routers
        assert places(one) == places(other)
        assert used(one) == used(other)

        play(pool, after)
        assert places(one) == places(other)
        for request_id in list(pool.open):
            pool.end(request_id)
        pool.settle()
        pool.now_ms += 200_000.0
        pool.settle()
    assert places(one) == places(other) == {}
    assert set(used(one).values()) == set(used(other).values()) == {0}
