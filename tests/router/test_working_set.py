"""Which sessions a pool keeps, who waits, and for whom a place is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.routing import working_set
from poolgrid.kernel.routing.working_set import (
    AGE_MS,
    FILL_MAX,
    LEASE_MAX_MS,
    LEASE_MIN_MS,
    LEASE_START_MS,
    SMALL_SHARE,
    Admission,
    OfferedTurn,
    WorkingSet,
)
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
BLOCKS = 1000
REFILL_MS = 600_000
"""So slow to compute that pauses alone decide how long a place is kept."""


def turn(name: str, blocks: int = 400, priority: int = 0, parent: str = "unknown") -> OfferedTurn:
    """Return a turn that needs room: its session forked from one that is not known, so it is no first turn."""
    return OfferedTurn((1, name), blocks, priority, (1, parent) if parent else None)


def one_worker() -> WorkingSet:
    places = WorkingSet()
    places.know(A, BLOCKS, REFILL_MS)
    return places


def restarted() -> WorkingSet:
    """Two sessions are back after a restart of the router, with all that their worker still holds of them."""
    places = one_worker()
    for number, name in enumerate(("one", "two"), start=1):
        places.begin(turn(name), A, 390, BLOCKS * number + 389, 0.0)
        places.end((1, name), None, 0.0)
    return places


def run(places: WorkingSet, given: OfferedTurn, now_ms: float = 0.0, worker: WorkerKey = A, overlap: int = 0) -> None:
    """Have a turn run, and be over at once."""
    prefix = places.shared_prefix(given, worker, max(0, overlap - 1))
    places.begin(given, worker, overlap, prefix, now_ms)
    places.end(given.session, None, now_ms)


def offer(
    places: WorkingSet, given: OfferedTurn, now_ms: float = 0.0, waited_ms: float = 0.0, held: int = 0
) -> Admission:
    """Offer a turn whose first ``held`` blocks some worker holds; block N has the hash N in ``run``."""
    return places.offer(given, sorted(places.workers()), held, max(0, held - 1), now_ms, waited_ms)


def has_place(places: WorkingSet, name: str) -> bool:
    return places.is_resident((1, name))


def test_a_session_waits_while_the_places_of_others_leave_no_room() -> None:
    places = one_worker()
    for name in ("one", "two"):
        assert offer(places, turn(name)).admitted
        run(places, turn(name))

    assert offer(places, turn("three")) == Admission(False, (A,))
    assert offer(places, turn("three"), LEASE_START_MS + 1).admitted, "their leases are over"


def test_turns_of_resident_sessions_always_go_on() -> None:
    places = one_worker()
    run(places, turn("one"))
    run(places, turn("two"))

    assert offer(places, turn("one", 500)).admitted
    assert has_place(places, "one")
    assert not has_place(places, "three")


def test_a_resident_that_grows_takes_the_place_of_the_one_used_longest_ago() -> None:
    places = one_worker()
    for at, name in enumerate(("one", "two", "three")):
        run(places, turn(name, 300), float(at))

    assert offer(places, turn("three", 600), 3.0) == Admission(True, (), ((1, "one"),))
    assert not has_place(places, "one")


def test_blocks_that_several_sessions_share_count_once() -> None:
    places = one_worker()
    run(places, turn("first", 200))
    for name in ("second", "third", "fourth", "fifth"):
        assert offer(places, turn(name, 250), held=100).admitted, name
        run(places, turn(name, 250), overlap=100)

    assert not offer(places, turn("sixth", 250), held=100).admitted


def test_a_session_that_a_restarted_router_does_not_know_needs_room_for_all_of_its_blocks() -> None:
    places = restarted()

    assert not offer(places, turn("three"), held=150).admitted, "what its worker holds is of its own turns before"
    assert offer(places, turn("three"), LEASE_START_MS + 1, held=150).admitted, "the leases of the others are over"


def test_a_session_that_comes_back_needs_room_for_what_the_worker_held_before_it() -> None:
    places = one_worker()
    run(places, turn("first"), overlap=390)
    later_ms = LEASE_START_MS + 1
    for name in ("one", "two"):
        run(places, turn(name), later_ms)

    assert not offer(places, turn("first", 410), later_ms).admitted


def test_a_subagent_needs_no_room_at_its_parents_worker_for_what_its_parent_counts() -> None:
    places = one_worker()
    places.know(B, BLOCKS, REFILL_MS)
    run(places, turn("parent", 400))

    assert offer(places, turn("child", 900, parent="parent"), held=400) == Admission(True)
    assert offer(places, turn("stranger", 900), held=400) == Admission(True, (A,))


def test_blocks_of_a_parent_without_a_place_count_for_its_subagent() -> None:
    places = one_worker()
    run(places, turn("parent", 400))
    later_ms = LEASE_START_MS + 1
    run(places, turn("other", 400), later_ms)
    run(places, turn("child", 420, parent="parent"), later_ms, overlap=400)

    assert places._rooms[A].used == 400 + 420


def test_a_session_keeps_its_place_no_longer_than_its_worker_takes_to_compute_half_of_its_cache() -> None:
    places = one_worker()
    for name in ("one", "two"):
        run(places, turn(name))
    places.know(A, BLOCKS, 8_000)

    assert places.held_ms == 4_000.0
    assert not offer(places, turn("three"), 4_000.0).admitted
    assert offer(places, turn("three"), 4_001.0).admitted

    places.know(B, BLOCKS, 12_000)
    assert places.held_ms == 5_000.0, "of all workers in the mean"
    places.leave(A)
    assert places.held_ms == 6_000.0
    places.know(B, BLOCKS, 10)
    assert places.held_ms == LEASE_MIN_MS


def test_a_crowded_worker_is_left_alone_where_another_has_room() -> None:
    places = one_worker()
    places.know(B, BLOCKS, REFILL_MS)
    run(places, turn("one", 900))

    assert offer(places, turn("two")) == Admission(True, (A,))


def test_a_footprint_above_a_worker_is_admitted_once_that_is_empty() -> None:
    places = one_worker()
    run(places, turn("small", 100))

    assert not offer(places, turn("large", 5 * BLOCKS)).admitted
    assert offer(places, turn("large", 5 * BLOCKS), LEASE_START_MS + 1).admitted


def test_idle_sessions_of_a_lower_priority_give_way() -> None:
    places = one_worker()
    run(places, turn("low", 500))
    run(places, turn("high", 400, priority=1))

    assert offer(places, turn("urgent", 400, priority=1)) == Admission(True, (), ((1, "low"),))
    run(places, turn("urgent", 400, priority=1))
    assert not offer(places, turn("another", 500, priority=1)).admitted, "equals do not give way"


def test_a_running_session_never_gives_way() -> None:
    places = one_worker()
    places.begin(turn("low", 900), A, 0, 0, 0.0)

    assert not offer(places, turn("urgent", 400, priority=1), AGE_MS, AGE_MS).admitted


def test_who_waited_long_takes_the_place_of_who_had_it_long() -> None:
    places = one_worker()
    now_ms = 0.0
    while now_ms <= AGE_MS:  # it never pauses longer than its lease
        run(places, turn("endless", 900), now_ms)
        now_ms += LEASE_MIN_MS / 2
    run(places, turn("endless", 900), now_ms)

    assert not offer(places, turn("new", 200), now_ms, AGE_MS - 1).admitted
    assert offer(places, turn("new", 200), now_ms, AGE_MS) == Admission(True, (), ((1, "endless"),))


def full() -> WorkingSet:
    """Return a worker without room, whose only session never pauses longer than its lease."""
    places = one_worker()
    run(places, turn("endless", 900))
    return places


def test_first_turn_of_a_session_without_a_parent_never_waits() -> None:
    places = full()
    first = turn("shot", 900, parent="")

    assert offer(places, first) == Admission(True)
    run(places, first)
    places._send_away(first.session)
    run(places, turn("endless", 900))
    assert not offer(places, first).admitted, "its second turn does"


def test_small_turn_never_waits() -> None:
    places = full()
    most = int(SMALL_SHARE * BLOCKS)

    assert offer(places, turn("chat", most)) == Admission(True)
    assert not offer(places, turn("chat", most + 1)).admitted


def test_turn_of_whose_own_blocks_a_worker_holds_half_never_waits() -> None:
    places = one_worker()
    run(places, turn("back", 400), overlap=200)
    places._send_away((1, "back"))
    run(places, turn("endless", 900))

    assert offer(places, turn("back", 600), held=400) == Admission(True)
    assert not offer(places, turn("back", 600), held=399).admitted, "200 were there before it"
    assert offer(places, turn("fork", 600, parent="back"), held=400).admitted
    assert not offer(places, turn("fork", 600, parent="back"), held=399).admitted


def test_turn_behind_others_that_waited_long_takes_no_room() -> None:
    places = one_worker()
    run(places, turn("endless", 400))

    assert offer(places, turn("new", 300)).admitted
    assert not places.offer(turn("new", 300), (A,), 0, 0, 0.0, 0.0, is_behind=True).admitted
    assert places.offer(turn("endless", 500), (A,), 0, 0, 0.0, 0.0, is_behind=True).admitted
    assert places.offer(turn("child", 500, parent="endless"), (A,), 0, 0, 0.0, 0.0, is_behind=True).admitted


def test_a_subagent_goes_on_while_its_parent_has_its_place() -> None:
    places = one_worker()
    run(places, turn("parent", 900))

    assert offer(places, turn("child", 900, parent="parent"), held=850).admitted
    assert not offer(places, turn("stranger", 900), held=0).admitted
    places.begin(turn("child", 900, parent="parent"), A, 850, 0, 5000.0)
    places.end((1, "child"), 920, 9000.0)
    assert offer(places, turn("parent", 940), 9000.0 + LEASE_START_MS / 2).admitted
    assert has_place(places, "parent"), "its lease began again when its subagent answered"


def test_the_lease_covers_nearly_all_pauses_of_agents() -> None:
    places = one_worker()
    now_ms = 0.0
    for number in range(2000):
        run(places, turn("agent", 100), now_ms)
        now_ms += 20_000.0 if number % 50 == 0 else 300.0
    assert LEASE_MIN_MS <= places.lease_ms < 20_000.0

    for number in range(2000):
        run(places, turn("agent", 100), now_ms)
        now_ms += 20_000.0 if number % 10 == 0 else 300.0
    assert places.lease_ms > 15_000.0


def test_sessions_of_people_hold_no_place_between_their_turns() -> None:
    places = one_worker()
    for minute in range(1, 40):
        run(places, turn("person", 500), minute * (LEASE_MAX_MS + 1000.0))
        assert has_place(places, "person") == (minute == 1)

    run(places, turn("other person", 500), 1e9)
    assert not has_place(places, "other person"), "most pauses are long here"


def test_requests_that_nothing_follows_hold_no_place_once_they_are_over() -> None:
    places = one_worker()
    now_ms = 0.0
    for number in range(40):
        now_ms = number * 2 * LEASE_START_MS
        assert offer(places, turn(f"{number}", 900), now_ms).admitted
        run(places, turn(f"{number}", 900), now_ms)
    assert offer(places, turn("next", 900), now_ms).admitted

    for number in range(40):  # agents come, and return
        for call in range(2):
            run(places, turn(f"agent {number}", 10), now_ms + call)
    assert has_place(places, "agent 39")


def test_a_worker_that_left_holds_nothing() -> None:
    places = one_worker()
    places.begin(turn("one", 900), A, 0, 0, 0.0)
    places.leave(A)
    places.end((1, "one"), None, 1.0)
    places.know(A, BLOCKS, REFILL_MS)

    assert offer(places, turn("two", 900), 2.0).admitted


def test_at_most_so_many_sessions_are_known() -> None:
    places = WorkingSet(members_max=10)
    places.know(A, 10**6, REFILL_MS)
    for number in range(50):
        run(places, turn(f"{number}"), float(number))

    assert sum(places.is_member((1, f"{number}")) for number in range(50)) == 10
    assert places.is_member((1, "49"))


def test_small_turns_are_not_looked_at_while_workers_have_room() -> None:
    places = one_worker()
    assert places.is_free(200)
    assert not places.is_free(500)
    run(places, turn("one", 800))
    assert not places.is_free(1)


Deed = tuple[str, int, int, float]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"), st.integers(1, 700), st.integers(0, 2), st.floats(0.0, 2 * LEASE_START_MS)
        ),
        max_size=60,
    )
)
def test_places_add_up_to_what_members_hold_and_newcomers_never_overfill(deeds: list[Deed]) -> None:
    places = one_worker()
    places.know(B, BLOCKS, REFILL_MS)
    now_ms = 0.0
    running: list[tuple[int, str]] = []
    for name, blocks, kind, pause_ms in deeds:
        now_ms += pause_ms
        given = turn(name, blocks)
        if kind == 2 and running:
            places.end(running.pop(0), blocks, now_ms)
            continue
        was_resident = places.is_resident(given.session)
        found = offer(places, given, now_ms, kind * AGE_MS)
        assert set(found.crowded) == {A, B} or found.admitted
        if found.admitted:
            worker = next(each for each in (A, B) if each not in found.crowded)
            others = places._rooms[worker].used
            is_small = blocks <= SMALL_SHARE * BLOCKS
            assert was_resident or is_small or others + min(blocks, FILL_MAX * BLOCKS) <= FILL_MAX * BLOCKS + 1
            places.begin(given, worker, 0, 0, now_ms)
            running.append(given.session)
    for worker in (A, B):
        members = [*places._running.values(), *places._idle.values()]
        assert places._rooms[worker].used == sum(each.blocks for each in members if each.worker == worker)
        assert places._rooms[worker].is_tight == (places._rooms[worker].used > working_set.TIGHT_SHARE * BLOCKS)

    again = WorkingSet()
    again.restore(places.checkpoint())
    assert again.checkpoint() == places.checkpoint()
    for name in "abcdefgh":
        assert offer(again, turn(name), now_ms) == offer(places, turn(name), now_ms)


@pytest.mark.parametrize("is_aged", [False, True])
def test_the_fewest_sessions_give_way(is_aged: bool) -> None:
    places = one_worker()
    places.know(B, BLOCKS, REFILL_MS)
    for name in ("one", "two"):
        run(places, turn(name, 450), worker=A)
    run(places, turn("three", 900), worker=B)
    places.begin(turn("running", 1), B, 0, 0, 0.0)

    now_ms = LEASE_START_MS / 2
    found = places.offer(turn("urgent", 800, priority=not is_aged), (A, B), 0, 0, now_ms, 0.0)
    assert found == (Admission(False, (A, B)) if is_aged else Admission(True, (A,), ((1, "three"),)))
