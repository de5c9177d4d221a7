"""What clients have kept, as sums: equal to a naive model, and the same after a snapshot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.session_table import DUE_SPARE, KeptPrompts, SessionTable
from poolgrid.kernel.wire.events import CacheCleared, RequestFinished, RequestStarted, TurnBegan
from poolgrid.kernel.wire.sessions import KeptPrompt, SessionTurn
from tests.consolidator.test_session_table import record

ACME = 7


def begin(
    table: SessionTable,
    session: str,
    at_ms: int,
    tail: int,
    tokens: int,
    keep_ms: int,
    repeats: int = 0,
    tenant: int = ACME,
) -> None:
    """Let a whole turn that is to be kept run."""
    request_id = f"{session}-{tenant}-{at_ms}"
    turn = SessionTurn(session, tenant, tail=tail, keep_ms=keep_ms, keep_tokens=tokens, repeats=repeats)
    table.apply(record(at_ms, TurnBegan(request_id, tokens + 1, turn), RequestStarted(request_id, tokens + 1, 0, 4)))
    table.apply(record(at_ms, RequestFinished(request_id, "stop")))


def test_a_prompt_counts_once_and_one_that_begins_with_it_takes_its_place() -> None:
    table = SessionTable()
    begin(table, "a", 0, 1, 100, 1000)
    begin(table, "a", 10, 2, 150, 500, repeats=1)
    begin(table, "b", 20, 2, 120, 100)
    assert table.kept.tokens(ACME, 40) == 150
    begin(table, "b", 30, 3, 60, 300)

    assert table.kept.tokens(ACME, 40) == 210
    assert table.kept.tokens(8, 40) == 0, "of another tenant"
    assert table.kept.tokens(ACME, 330) == 150
    assert table.kept.tokens(ACME, 1000) == 0

    begin(table, "a", 2000, 4, 30, 1000, repeats=2)
    assert table.kept.tokens(ACME, 2001) == 30, "what was kept before is over"


def test_other_prompts_of_one_session_count_by_themselves() -> None:
    table = SessionTable()
    for number in range(1, 41):
        begin(table, "s", number, number, 1024, 10_000)

    assert table.kept.tokens(ACME, 50) == 40 * 1024
    assert table.kept.begins(ACME, [7, 8, 99]) == KeptPrompt(ACME, "s", 8, 1024, 10_008)
    assert table.kept.begins(ACME, [99]) is None
    assert table.kept.begins(8, [7]) is None


def test_a_cache_that_is_cleared_keeps_nothing() -> None:
    table = SessionTable()
    begin(table, "a", 0, 1, 100, 1000)
    begin(table, "a", 1, 2, 100, 1000)
    begin(table, "b", 2, 3, 100, 1000)
    table.apply(record(5, CacheCleared()))

    assert table.kept.tokens(ACME, 6) == 0


def test_what_a_forgotten_session_kept_counts_until_its_time_is_over_also_after_a_snapshot() -> None:
    table = SessionTable(capacity=3)
    for number in range(1, 6):
        begin(table, f"s{number}", number, number, 100, 10_000)
    assert len(table) == 3
    assert table.kept.tokens(ACME, 10) == 500

    again = SessionTable()
    again.load(table.freeze())
    assert again.kept.tokens(ACME, 10_003) == table.kept.tokens(ACME, 10_003) == 200


Deed = tuple[int, str, int, int, int, int, int]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from("abc"),
            st.integers(1, 6),
            st.integers(0, 6),
            st.integers(0, 50),
            st.integers(1, 200),
            st.integers(0, 40),
        ),
        max_size=120,
    )
)
def test_sums_are_those_of_a_naive_model(deeds: list[Deed]) -> None:
    kept, naive, now_ms = KeptPrompts(), dict[tuple[int, int], tuple[str, int, int]](), 0
    for tenant, session, tail, repeats, tokens, keep_ms, pause_ms in deeds:
        now_ms += pause_ms
        naive = {key: each for key, each in naive.items() if each[2] > now_ms}
        if tokens:
            turn = SessionTurn(session, tenant, tail=tail, keep_ms=keep_ms, keep_tokens=tokens, repeats=repeats)
            kept.keep(turn, now_ms)
            before = [naive.pop((tenant, each)) for each in {tail, repeats} if (tenant, each) in naive]
            most = max([tokens, *(each[1] for each in before)])
            naive[tenant, tail] = (session, most, max([now_ms + keep_ms, *(each[2] for each in before)]))
        else:
            kept.drop(tenant, session)
            naive = {key: each for key, each in naive.items() if (key[0], each[0]) != (tenant, session)}
        for of in (0, 1):
            assert kept.tokens(of, now_ms) == sum(each[1] for key, each in naive.items() if key[0] == of)
        assert {(each.tenant, each.tail) for each in kept} == naive.keys()


def test_the_ends_and_the_prompts_that_are_remembered_are_few() -> None:
    kept = KeptPrompts(prompts_max=50)
    for number in range(10_000):
        kept.keep(SessionTurn("s", 1, tail=7, keep_ms=1_000_000, keep_tokens=10), number)

    assert len(kept._due) <= 2 + DUE_SPARE + 1
    assert kept.tokens(1, 1_009_998) == 10
    assert kept.tokens(1, 1_009_999) == 0

    for number in range(100):
        kept.keep(SessionTurn("s", 1, tail=number, keep_ms=1_000_000, keep_tokens=10), number)
    assert kept.tokens(1, 1000) == 500
