"""A turn asks for its blocks until its session is expected back from a tool, and as long as its client has it kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poolgrid.kernel.consolidation.session_table import IDLE_MAX_MS
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import SessionHint
from poolgrid.kernel.wire.events import RequestFinished, TurnBegan
from poolgrid.kernel.wire.requests import KvRetention
from poolgrid.kernel.wire.sessions import SessionTurn, TurnPlace, tenant_key
from poolgrid.server.router.session_naming import RETURN_MAX_MS, SHORT_TOKENS, SessionNaming
from tests.consolidator.test_kept_prompts import begin
from tests.consolidator.test_session_table import record, turn
from tests.frontend.inference_requests import like
from tests.router.fleet_builder import make_card
from tests.router.test_service import REQUEST


def return_ms(projection: Projection, session: str = "s", after_tool: bool = True) -> int:
    """Return how long the blocks of a session's next turn are to stay."""
    request = like(REQUEST, session=SessionHint(session, after_tool=after_tool))
    turn = SessionNaming(projection, lambda: 0).turn_of(request, [], 16)
    assert turn is not None
    return turn.return_ms


def kept(
    projection: Projection,
    budget: int,
    tokens: int = 100,
    session: str = "s",
    retention: KvRetention | None = None,
    keep_ms: int = 300_000,
    path: Sequence[int] = (1, 2, 3),
) -> tuple[int, int]:
    """Return how long the first how many tokens of a session's next prompt are to be kept."""
    hint = SessionHint(session, keep_ms=keep_ms)
    request = like(REQUEST, session=hint, token_ids=bytes(4 * tokens), tenant="acme", retention=retention)
    request.kept_tokens_max = budget
    turn = SessionNaming(projection, lambda: 20).turn_of(request, path, 16)
    assert turn is not None
    return turn.keep_ms, turn.keep_tokens


def test_a_later_turn_is_of_a_session_that_is_known_or_of_a_fork() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    naming = SessionNaming(projection, lambda: 0)

    def is_later(hint: SessionHint) -> bool | None:
        return naming.is_later(naming.turn_of(like(REQUEST, session=hint), [], 16))

    assert naming.is_later(None) is None
    assert not is_later(SessionHint("s"))
    assert is_later(SessionHint("s", parent="p"))
    turn(projection.sessions, "r1", 0, 10)
    assert is_later(SessionHint("s"))


def test_a_short_prompt_begins_a_session_only_with_a_name() -> None:
    naming = SessionNaming(Projection(PrefixIndex(), LoadLedger()), lambda: 0)
    short, longer = (like(REQUEST, token_ids=bytes(4 * tokens)) for tokens in (SHORT_TOKENS, SHORT_TOKENS + 1))

    assert naming.turn_of(short, [1], 16) is None
    assert naming.turn_of(longer, [1], 16) is not None
    assert naming.turn_of(like(short, session=SessionHint("s")), [1], 16) is not None


def test_blocks_stay_for_the_learned_pause_of_tools() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    table = projection.sessions
    turn(table, "r1", 0, 10)
    assert return_ms(projection) == 0, "no pause is known"
    turn(table, "r2", 410, 420, after_tool=True)

    assert return_ms(projection) == 400 + 4 * 200
    assert return_ms(projection, after_tool=False) == 0, "a person may come next"
    assert return_ms(projection, "unknown") == 0
    turn(table, "other", 500, 510, session="young")
    assert return_ms(projection, "young") == 400 + 4 * 200, "as after the tools of others"


def test_blocks_of_slow_tools_stay_no_longer_than_others() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    turn(projection.sessions, "r1", 0, 10)
    turn(projection.sessions, "r2", 10 + RETURN_MAX_MS, 20 + RETURN_MAX_MS, after_tool=True)

    assert return_ms(projection) == 0


def test_a_prompt_is_kept_as_far_as_its_tenants_budget_has_room() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    assert kept(projection, 0) == (0, 0), "no operator gave the tenant a budget"
    assert kept(projection, 1000) == (300_000, 99), "engines compute the last token again"
    assert kept(projection, 64) == (300_000, 64)
    assert kept(projection, 64, keep_ms=24 * IDLE_MAX_MS) == (IDLE_MAX_MS, 64), "as long as an idle session is known"
    assert kept(projection, 1000, retention=KvRetention()) == (0, 0), "what the request says itself counts"

    assert kept(projection, 1000, path=()) == (0, 0), "no whole block"

    begin(projection.sessions, "other", 0, 2, 50, 1000, tenant=tenant_key("acme"))
    assert kept(projection, 60, path=(7, 8, 9)) == (300_000, 10)
    assert kept(projection, 60, session="other", path=(7, 8, 9)) == (300_000, 10), "another prompt of the same session"
    assert kept(projection, 60) == (300_000, 60), "the prompt before is part of this one"
    assert kept(projection, 50, path=(7, 8, 9)) == (0, 0)
    begin(projection.sessions, "stranger", 0, 9, 900, 1000, tenant=tenant_key("stranger"))
    assert kept(projection, 1000) == (300_000, 99)


@pytest.mark.parametrize("sessions", ["one", "many"])
def test_prompts_that_come_at_once_or_one_after_the_other_are_kept_up_to_the_budget(sessions: str) -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    naming, table, tenant = SessionNaming(projection, lambda: 20), projection.sessions, tenant_key("acme")
    turns: list[SessionTurn] = []
    for number in range(40):
        name = "s" if sessions == "one" else f"s{number}"
        request = like(
            REQUEST,
            request_id=f"r{number}",
            session=SessionHint(name, keep_ms=300_000),
            token_ids=bytes(4 * 1000),
            tenant="acme",
        )
        request.kept_tokens_max = 2048
        named = naming.turn_of(request, [10 * number + 1, 10 * number + 2], 16)
        assert named is not None
        again = naming.turn_of(request, [10 * number + 1, 10 * number + 2], 16)
        assert again == named, "a request that is placed again is counted once"
        turns.append(named)
        if number % 2:  # the journal reports half of them at once
            table.apply(record(20, TurnBegan(f"r{number}", 1000, named)))

    assert sum(each.keep_tokens for each in turns) == 2048
    assert table.kept.tokens(tenant, 20) <= 2048


def test_the_turns_of_one_conversation_are_kept_one_in_the_other() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    naming, now_ms = SessionNaming(projection, lambda: 20), 20
    path: list[int] = []
    for number in range(1, 20):
        path = [*path, number]
        request = like(
            REQUEST,
            request_id=f"r{number}",
            session=SessionHint("s", keep_ms=300_000),
            token_ids=bytes(4 * 100 * number),
            tenant="acme",
        )
        request.kept_tokens_max = 2048
        named = naming.turn_of(request, path, 100)
        assert named is not None
        assert named.keep_tokens == 100 * number - 1
        assert named.repeats == (path[-2] if number > 1 else 0)
        projection.sessions.apply(record(now_ms, TurnBegan(f"r{number}", 100 * number, named)))
        projection.sessions.apply(record(now_ms, RequestFinished(f"r{number}", "stop")))


@pytest.mark.parametrize("takes_retention", [False, True])
def test_on_an_engine_without_retention_nothing_is_kept(takes_retention: bool) -> None:
    request = like(REQUEST)
    request.turn = SessionTurn("s", return_ms=5, keep_ms=300_000, keep_tokens=64)
    place = TurnPlace(common=3, prefix=9)
    SessionNaming.placed(request, make_card(takes_retention=takes_retention), place)

    assert request.turn == SessionTurn(
        "s", return_ms=5, keep_ms=300_000 * takes_retention, keep_tokens=64 * takes_retention, place=place
    )
