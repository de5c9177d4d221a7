"""Sessions as a fold: turns, footprints, gaps, bounds, and equal tables wherever the same records are applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.consolidation import session_table
from poolgrid.kernel.consolidation.session_table import GAP_MAX_MS, IDLE_MAX_MS, RUNNING_MAX, SessionTable
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import (
    AnyEvent,
    CacheCleared,
    JournalRecord,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    TurnBegan,
    TurnEnded,
    WorkerLeft,
)
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import SESSION_FOOTPRINTS_MAX
from poolgrid.kernel.wire.sessions import Gap, SessionRecord, SessionTurn, TurnAnswer
from tests.counted_lines import CountedLines

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))


def record(at_ms: int, *events: AnyEvent, worker: WorkerKey = A, offset: int = 0) -> JournalRecord:
    return JournalRecord(offset, *worker, 1, offset, at_ms, at_ms, list(events))


def began(request_id: str, session: str = "s", *, tenant: int = 0, after_tool: bool = False) -> TurnBegan:
    return TurnBegan(request_id, 100, SessionTurn(session, tenant, after_tool=after_tool))


def turn(
    table: SessionTable,
    request_id: str,
    from_ms: int,
    to_ms: int,
    blocks: int = 4,
    *,
    session: str = "s",
    reason: str = "stop",
    tenant: int = 0,
    worker: WorkerKey = A,
    after_tool: bool = False,
) -> SessionRecord:
    """Apply a whole turn and return its session."""
    start = RequestStarted(request_id, 100, 16, blocks)
    table.apply(record(from_ms, began(request_id, session, tenant=tenant, after_tool=after_tool), start, worker=worker))
    table.apply(record(to_ms, RequestFinished(request_id, reason), worker=worker))
    found = table.get(tenant, session)
    assert found is not None
    return found


def test_a_turn_waits_until_its_engine_starts_it_and_leaves_its_blocks() -> None:
    table = SessionTable()

    table.apply(record(0, began("r")))
    waiting = table.latest(1)[0]
    assert (waiting.running, waiting.turns, table.state(waiting)) == (1, 1, "waiting")

    table.apply(record(5, RequestStarted("r", 100, 32, 7), RequestProgressed("r", 9)))
    running = table.latest(1)[0]
    assert table.state(running) == "running"
    assert table.blocks_of(running) == {A: 9}
    assert table.home(running) == A
    assert table.return_ms(running, 7) == 0

    table.apply(record(10, RequestFinished("r", "stop")))
    idle = table.latest(1)[0]
    assert table.state(idle) == "idle"
    assert (idle.running, idle.cached_tokens, idle.ended_ms) == (0, 32, 10)
    assert table.blocks_of(idle) == {A: 9}
    assert table.home(idle) == A
    assert not table.turns


def test_gaps_are_learned_by_how_the_turn_before_ended() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 10)
    turn(table, "r2", 110, 120, after_tool=True)
    turn(table, "r3", 5_120, 5_130, reason="length")
    session = turn(table, "r4", 5_140, 5_150)

    assert [gap.mean_ms for gap in session.gaps] == [100, 5_000, 10]
    assert session.habit == "stop"
    assert table.return_ms(session, 5_150) == 5_000
    assert table.return_ms(session, 20_000) == 0

    other = turn(table, "r5", 30_000, 30_010, session="new")
    assert table.return_ms(other, 30_010) == 5_000, "a session without gaps is expected like others"


def test_a_session_that_calls_tools_is_expected_back_as_after_a_tool_call() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 10)
    session = turn(table, "r2", 60, 70, after_tool=True)

    assert table.return_ms(session, 70) == 50


def test_no_gap_follows_a_turn_that_was_cancelled_and_a_long_one_is_cut() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 10, reason="cancelled")
    assert turn(table, "r2", 500, 510).gaps == (Gap(), Gap(), Gap())

    away = turn(table, "r3", 510 + 3 * GAP_MAX_MS, 511 + 3 * GAP_MAX_MS)
    assert away.gaps[1].mean_ms == GAP_MAX_MS


def test_a_further_dispatch_of_a_turn_is_the_same_turn_on_another_worker() -> None:
    table = SessionTable()
    table.apply(record(0, began("r"), RequestStarted("r", 100, 0, 6)))
    table.apply(record(5, RequestFinished("r", "prefilled")))
    table.apply(record(6, began("r~1"), RequestStarted("r~1", 100, 96, 7), worker=B))
    session = table.latest(1)[0]
    assert (session.turns, session.running) == (1, 1)
    assert table.home(session) == B

    table.apply(record(9, RequestFinished("r~1", "stop"), worker=B))
    assert table.latest(1)[0].running == 0


def test_parallel_turns_end_their_session_together() -> None:
    table = SessionTable()
    table.apply(record(0, began("r1"), began("r2")))
    table.apply(record(5, RequestFinished("r1", "stop")))
    assert table.latest(1)[0].running == 1
    assert table.latest(1)[0].ended_ms == 0
    table.apply(record(8, RequestFinished("r2", "length")))
    assert (table.latest(1)[0].ended_ms, table.latest(1)[0].ending) == (8, "length")


def test_what_a_worker_held_goes_with_it() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 10, worker=A)
    turn(table, "r2", 20, 30, worker=B)
    table.apply(record(40, began("r3"), RequestStarted("r3", 1, 0, 1)))

    table.apply(record(50, WorkerLeft("gone")))
    session = table.latest(1)[0]
    assert (session.running, session.ending) == (0, "")
    assert table.blocks_of(session) == {B: 4}

    table.apply(record(60, CacheCleared(), worker=B))
    assert table.blocks_of(table.latest(1)[0]) == {}
    assert table.home(table.latest(1)[0]) is None


def test_the_latest_workers_footprints_are_kept() -> None:
    table = SessionTable()
    for number in range(SESSION_FOOTPRINTS_MAX + 3):
        turn(table, f"r{number}", number, number, worker=WorkerKey(WorkerId(f"w{number}")))

    kept = list(table.blocks_of(table.latest(1)[0]))
    assert len(kept) == SESSION_FOOTPRINTS_MAX
    assert kept[0].worker_id == f"w{SESSION_FOOTPRINTS_MAX + 2}"


def test_tenants_with_the_same_name_for_a_session_have_two() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 1, tenant=1)
    assert turn(table, "r2", 2, 3, tenant=2).turns == 1
    assert len(table) == 2


def test_a_tenant_that_begins_sessions_without_end_loses_its_own() -> None:
    table = SessionTable(capacity=4)
    turn(table, "q", 0, 1, session="quiet", tenant=1)
    for number in range(10):
        turn(table, f"r{number}", 2, 3, session=f"s{number}", tenant=2)

    assert {session.name for session in table} == {"quiet", "s7", "s8", "s9"}


def test_sessions_age_out() -> None:
    table = SessionTable()
    turn(table, "r1", 0, 1)
    turn(table, "r2", IDLE_MAX_MS + 2, IDLE_MAX_MS + 3, session="new")

    assert [session.name for session in table] == ["new"]


EVENTS = st.one_of(
    st.builds(
        lambda request, dispatch, session, tenant, tool: TurnBegan(
            request + dispatch, 50, SessionTurn(session, tenant, "", tool, 7, 8, 9)
        ),
        st.sampled_from(["p", "q", "r"]),
        st.sampled_from(["", "~1"]),
        st.sampled_from(["s", "t", "u", "v"]),
        st.integers(0, 1),
        st.booleans(),
    ),
    st.builds(RequestStarted, st.sampled_from(["p", "q~1", "r"]), st.just(50), st.integers(0, 50), st.integers(0, 9)),
    st.builds(RequestProgressed, st.sampled_from(["p", "q~1"]), st.integers(0, 9)),
    st.builds(
        RequestFinished,
        st.sampled_from(["p", "p~1", "q", "q~1", "r"]),
        st.sampled_from(["stop", "length", "cancelled", "prefilled"]),
    ),
    st.builds(
        lambda request, tenant, session: TurnEnded(TurnAnswer(request, tenant, session, 60, 5)),
        st.sampled_from(["p", "q"]),
        st.integers(0, 1),
        st.sampled_from(["s", "t"]),
    ),
    st.just(CacheCleared()),
    st.just(WorkerLeft("gone")),
)
RECORDS = st.lists(
    st.tuples(st.integers(0, IDLE_MAX_MS // 2), st.sampled_from([A, B]), st.lists(EVENTS, max_size=4)), max_size=25
)


def stream(steps: Iterable[tuple[int, WorkerKey, list[AnyEvent]]]) -> list[JournalRecord]:
    found: list[JournalRecord] = []
    now_ms = 0
    for offset, (later_ms, worker, events) in enumerate(steps):
        now_ms += later_ms
        found.append(record(now_ms, *events, worker=worker, offset=offset))
    return found


@given(RECORDS, st.integers(0, 25))
def test_a_snapshot_and_what_follows_it_give_what_all_records_give(
    steps: Sequence[tuple[int, WorkerKey, list[AnyEvent]]], cut: int
) -> None:
    whole, before, after = SessionTable(3), SessionTable(3), SessionTable(3)
    records = stream(steps)
    for each in records:
        whole.apply(codec.journal_record.decode(codec.journal_record.encode(each)))
    for each in records[:cut]:
        before.apply(each)
    after.load(before.freeze())
    for each in records[cut:]:
        after.apply(each)

    assert after.freeze() == whole.freeze()
    assert len(whole) <= 3
    for session in whole:
        assert session.running == len(whole.running_of(session))


def test_an_event_costs_the_same_however_many_turns_run_and_sessions_are_known() -> None:
    most: list[dict[str, int]] = []
    for others in (100, 3000):
        table, work = SessionTable(), CountedLines([session_table])
        for number in range(others):
            turn(table, f"other{number}", number, number, session=f"other{number}", worker=B)
            table.apply(record(number, began(f"waits{number}", f"waits{number}"), worker=B))
        for number in range(2 * RUNNING_MAX):
            work.count(table.began, record(others), began(f"q{number}"))
        work.count(table.finished, record(others), RequestFinished(f"q{2 * RUNNING_MAX - 1}", "stop"))
        for number in range(2 * RUNNING_MAX):
            work.count(table.began, record(others), began(f"again~{number}"))
        work.count(table.cleared, record(others), CacheCleared())
        work.count(table.lost, record(others), WorkerLeft(""))
        most.append(work.most)

    assert most[0] == most[1]


def test_a_session_follows_so_many_running_turns_and_forgets_the_oldest() -> None:
    table = SessionTable()
    for number in range(RUNNING_MAX + 5):
        table.apply(record(number, began(f"q{number}"), RequestStarted(f"q{number}", 100, 0, 1 + number)))

    session = table.get(0, "s")
    assert session is not None
    assert (session.running, session.turns, len(table.turns)) == (RUNNING_MAX, RUNNING_MAX + 5, RUNNING_MAX)
    assert "q4" not in table.turns
    table.apply(record(900, RequestFinished("q4", "stop")))
    assert session.footprints == ()
    for number in range(5, RUNNING_MAX + 5):
        table.apply(record(1000 + number, RequestFinished(f"q{number}", "stop")))
    assert (session.running, session.ended_ms, len(table.turns)) == (0, 1000 + RUNNING_MAX + 4, 0)
    assert len(session.footprints) == 1
    table.apply(record(2000, WorkerLeft("")))
    assert session.footprints == ()


@given(st.data())
def test_footprints_and_turns_are_known_by_their_workers_whatever_happens(data: st.DataObject) -> None:
    table, workers = SessionTable(capacity=6), [WorkerKey(WorkerId(f"w{number}")) for number in range(12)]
    ends: list[AnyEvent] = [CacheCleared(), WorkerLeft("")]
    for step in range(data.draw(st.integers(1, 40))):
        worker = data.draw(st.sampled_from(workers))
        request_id = data.draw(st.sampled_from(["p", "q", "q~1", "r", "s~2", "t", "u"]))
        what = data.draw(st.integers(0, 5))
        if what <= 1:
            session = data.draw(st.sampled_from("abcdefgh"))
            table.apply(record(step, began(request_id, session), RequestStarted(request_id, 9, 0, 3), worker=worker))
        elif what <= 3:
            table.apply(record(step, RequestFinished(request_id, "stop"), worker=worker))
        elif what == 4:
            table.apply(record(step, data.draw(st.sampled_from(ends)), worker=worker))
        else:
            other = SessionTable(capacity=6)
            other.load(table.freeze())
            table = other
        running = {dispatch: (each.worker_id, each.dp_rank) for dispatch, each in table.turns.items()}
        assert {d: rank for rank, turns in table._turns_on.items() for d in turns} == running
        left = {(p.worker_id, p.dp_rank, s.name) for s in table for p in s.footprints}
        assert {(*rank, name) for rank, keys in table._left_on.items() for _, name in keys} == left
        assert all(table._turns_on.values()), "a worker without turns is not kept"
        assert all(table._left_on.values()), "a worker without footprints is not kept"
