"""Which workers hold how much of each session's last prompt."""

from __future__ import annotations

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.plugins.fleet_page.conversations import Conversations
from tests.router.fleet_builder import BLOCK_SIZE, Pool, stored

SYSTEM = [1, 2, 3]


def turn(known: Conversations, path: list[int], session: str, request_id: str = "r", tenant: int = 0) -> str:
    isl = len(path) * BLOCK_SIZE
    request = RoutingRequest(request_id, "m", isl, BLOCK_SIZE, len(path), session=session, tenant=tenant)
    return known.turn(request, path, len(path))


def test_the_requests_of_a_session_are_its_turns_and_its_legs_are_one() -> None:
    known = Conversations()

    assert [turn(known, [*SYSTEM, 10], "s", "r1"), turn(known, [*SYSTEM, 10, 11], "s", "r2")] == ["s", "s"]
    turn(known, [*SYSTEM, 10, 11], "s", "r2")

    [only] = known.latest(9)
    assert (only.turns, only.request_id, only.last_ms, list(only.path)) == (2, "r2", 5, [*SYSTEM, 10, 11])


def test_sessions_that_share_a_prompt_or_a_name_are_apart() -> None:
    known = Conversations()

    turn(known, SYSTEM, "one")
    turn(known, SYSTEM, "other")
    turn(known, SYSTEM, "one", tenant=7)

    assert [each.name for each in known.latest(9)] == ["one", "other", "one"]


def test_a_request_without_a_session_or_a_whole_block_is_of_no_conversation() -> None:
    known = Conversations()

    assert [turn(known, SYSTEM, ""), turn(known, [], "s")] == ["", ""]
    assert not known.latest(9)


def test_the_session_that_was_asked_for_longest_ago_is_forgotten_first() -> None:
    known = Conversations(capacity=2)
    for session in ("first", "second", "first", "third"):
        turn(known, [10], session)

    assert [each.name for each in known.latest(9)] == ["third", "first"]
    assert [each.name for each in known.latest(1)] == ["third"]


def test_holders_are_those_of_the_index_with_what_they_lost() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored([1, 2, 3, 4]))
    pool.say(b, stored([1, 2]))
    known = Conversations()
    turn(known, [1, 2, 3, 4, 5], "s")
    [conversation] = known.latest(1)

    assert conversation.holders(pool.projection.index) == [(a, 4, 0), (b, 2, 0)]

    pool.projection.index.remove(a, [4, 3])
    pool.projection.index.remove(b, [2, 1])
    assert conversation.holders(pool.projection.index) == [(a, 2, 2), (b, 0, 2)]
