"""A turn in a loop of tool calls asks for its blocks until its session is expected back."""

from __future__ import annotations

from poolgrid.inference.inference_request import SessionHint
from poolgrid.router.core.load_ledger import LoadLedger
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.projection import Projection
from poolgrid.router.session_naming import RETURN_MAX_MS, SessionNaming
from tests.consolidator.test_session_table import turn
from tests.frontend.inference_requests import like
from tests.router.test_service import REQUEST


def return_ms(projection: Projection, session: str = "s", after_tool: bool = True) -> int:
    """Return how long the blocks of a session's next turn are to stay."""
    request = like(REQUEST, session=SessionHint(session, after_tool=after_tool))
    return SessionNaming(projection).turn_of(request, [], 16).return_ms


def test_a_later_turn_is_of_a_session_that_is_known_or_of_a_fork() -> None:
    projection = Projection(PrefixIndex(), LoadLedger())
    naming = SessionNaming(projection)

    def is_later(hint: SessionHint) -> bool:
        return naming.is_later(naming.turn_of(like(REQUEST, session=hint), [], 16))

    assert not naming.is_later(None)
    assert not is_later(SessionHint("s"))
    assert is_later(SessionHint("s", parent="p"))
    turn(projection.sessions, "r1", 0, 10)
    assert is_later(SessionHint("s"))


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
