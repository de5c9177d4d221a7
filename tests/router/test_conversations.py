"""Which requests are turns of one conversation, and who holds how much of it."""

from __future__ import annotations

from poolgrid.router.core.conversations import LOOK_BACK_BLOCKS, Conversation, Conversations
from tests.router.fleet_builder import BLOCK_SIZE, Pool, stored

SYSTEM = [1, 2, 3]


def turn(conversations: Conversations, path: list[int], request_id: str = "r", time_ms: int = 0) -> Conversation:
    found = conversations.turn(path, request_id, len(path) * BLOCK_SIZE, BLOCK_SIZE, time_ms)
    assert found is not None
    return found


def test_a_prompt_that_goes_on_from_an_earlier_one_is_its_next_turn() -> None:
    known = Conversations()

    first = turn(known, [*SYSTEM, 10], "r1", 5)
    second = turn(known, [*SYSTEM, 10, 11, 12], "r2", 9)

    assert second is first
    assert (first.turns, first.request_id, first.last_ms, list(first.path)) == (2, "r2", 9, [*SYSTEM, 10, 11, 12])


def test_conversations_that_share_a_system_prompt_alone_are_apart() -> None:
    known = Conversations()

    one, other = turn(known, [*SYSTEM, 10]), turn(known, [*SYSTEM, 20])

    assert one.name != other.name
    assert turn(known, [*SYSTEM, 20, 21]) is other
    assert turn(known, [*SYSTEM, 10, 11]) is one


def test_a_prompt_without_a_whole_block_is_of_no_conversation() -> None:
    assert Conversations().turn([], "r", 3, BLOCK_SIZE, 0) is None


def test_the_conversation_that_was_asked_for_longest_ago_is_forgotten_first() -> None:
    known = Conversations(capacity=2)
    first, second = turn(known, [10]), turn(known, [20])
    turn(known, [10, 11])

    third = turn(known, [30])

    assert [each.name for each in known.latest(9)] == [third.name, first.name]
    assert turn(known, [20, 21]).name != second.name


def test_a_turn_that_adds_more_than_is_looked_at_begins_a_new_conversation() -> None:
    known = Conversations()
    first = turn(known, [10])

    assert turn(known, [10, *range(100, 100 + LOOK_BACK_BLOCKS)]) is not first


def test_holders_are_those_of_the_index_and_what_they_lost_is_said() -> None:
    pool = Pool()
    a, b = pool.join("a", "b")
    pool.say(a, stored([1, 2, 3, 4]))
    pool.say(b, stored([1, 2]))
    known = Conversations()
    conversation = turn(known, [1, 2, 3, 4, 5])

    assert conversation.holders(pool.projection.index) == [(a, 4, 0), (b, 2, 0)]

    pool.projection.index.remove(a, [4, 3])
    pool.projection.index.remove(b, [2, 1])
    assert conversation.holders(pool.projection.index) == [(a, 2, 2), (b, 0, 2)]
