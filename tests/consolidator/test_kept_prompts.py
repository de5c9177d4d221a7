"""What clients have kept, as sums: equal to a naive model, and the same after a snapshot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.consolidator.core.session_table import DUE_SPARE, KeptPrompts, SessionTable
from poolgrid.wire.events import CacheCleared, RequestFinished, RequestStarted, TurnBegan
from poolgrid.wire.sessions import SessionTurn
from tests.consolidator.test_session_table import record

ACME = 7


def begin(table: SessionTable, session: str, at_ms: int, tokens: int, keep_ms: int, tenant: int = ACME) -> None:
    """Let a whole turn that is to be kept run."""
    request_id = f"{session}-{tenant}-{at_ms}"
    turn = SessionTurn(session, tenant, keep_ms=keep_ms, keep_tokens=tokens)
    table.apply(record(at_ms, TurnBegan(request_id, tokens + 1, turn), RequestStarted(request_id, tokens + 1, 0, 4)))
    table.apply(record(at_ms, RequestFinished(request_id, "stop")))


def test_a_session_counts_once_with_its_longest_prompt_until_its_time_is_over() -> None:
    table = SessionTable()
    begin(table, "a", 0, 100, 1000)
    begin(table, "a", 10, 150, 500)
    begin(table, "a", 20, 40, 100)
    begin(table, "b", 30, 60, 300)

    assert table.kept.others(ACME, "new", 40) == 210
    assert table.kept.others(ACME, "a", 40) == 60
    assert table.kept.others(8, "a", 40) == 0, "of another tenant"
    assert table.kept.others(ACME, "new", 330) == 150
    assert table.kept.others(ACME, "new", 1000) == 0

    begin(table, "a", 2000, 30, 1000)
    assert table.kept.others(ACME, "new", 2001) == 30, "what was kept before is over"


def test_a_cache_that_is_cleared_keeps_nothing() -> None:
    table = SessionTable()
    begin(table, "a", 0, 100, 1000)
    table.apply(record(5, CacheCleared()))

    assert table.kept.others(ACME, "new", 6) == 0


def test_a_session_that_is_forgotten_keeps_nothing_and_a_snapshot_all_that_is_left() -> None:
    table = SessionTable(capacity=3)
    for number in range(5):
        begin(table, f"s{number}", number, 100, 10_000)
    assert table.kept.others(ACME, "new", 10) == 300

    again = SessionTable()
    again.load(table.freeze())
    assert again.kept.others(ACME, "s4", 10) == 200
    assert again.kept.others(ACME, "new", 10_003) == 100


Deed = tuple[int, str, int, int, int]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from("abcde"), st.integers(0, 50), st.integers(1, 200), st.integers(0, 40)
        ),
        max_size=120,
    )
)
def test_sums_are_those_of_a_naive_model(deeds: list[Deed]) -> None:
    kept, naive, now_ms = KeptPrompts(), dict[tuple[int, str], tuple[int, int]](), 0
    for tenant, session, tokens, keep_ms, pause_ms in deeds:
        now_ms += pause_ms
        if tokens:
            kept.keep(tenant, session, tokens, now_ms + keep_ms)
            naive[tenant, session] = (tokens, now_ms + keep_ms)
        else:
            kept.drop(tenant, session)
            naive.pop((tenant, session), None)
        for of in (0, 1):
            alive = {name: n for (owner, name), (n, until) in naive.items() if owner == of and until > now_ms}
            assert kept.others(of, session, now_ms) == sum(alive.values()) - alive.get(session, 0)
            naive = {key: each for key, each in naive.items() if each[1] > now_ms}


def test_the_ends_that_are_remembered_are_few() -> None:
    kept = KeptPrompts()
    for number in range(10_000):
        kept.keep(1, "s", 10, 1_000_000 + number)

    assert len(kept._due) <= 2 + DUE_SPARE + 1
    assert kept.others(1, "other", 1_009_998) == 10
    assert kept.others(1, "other", 1_009_999) == 0
