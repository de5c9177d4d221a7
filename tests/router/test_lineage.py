"""Sessions are found by their prompts alone, and never one for another's."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.projection.lineage import (
    NOTHING,
    SAME_TAIL_MAX,
    STRIDE,
    Found,
    Lineage,
    anchor_of,
    answer_key,
    digest_of,
)
from poolgrid.kernel.wire.hashing import pack_tokens, path_of
from poolgrid.kernel.wire.sessions import SessionTurn

BLOCK = 4


class Pool:
    """A pool that knows no session ids, and programs that know which of them is theirs."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self.requests = 0

    def ask(self, prompt: Sequence[int], tenant: int = 0) -> tuple[str, Found, Sequence[int]]:
        """Dispatch a turn; return its session, what was found, and the prompt."""
        token_ids = pack_tokens(prompt)
        path = path_of(token_ids, BLOCK)
        found = self.lineage.find(tenant, path, token_ids, BLOCK)
        self.requests += 1
        session = found.session or f"s{self.requests}"
        if path:
            residual = digest_of(token_ids, len(path) * BLOCK, len(prompt))
            turn = SessionTurn(session, tenant, tail=path[-1], anchor=anchor_of(path), residual=residual)
            self.lineage.begin(f"r{self.requests}", turn, len(prompt))
        return session, found, prompt

    def answer(self, prompt: Sequence[int], answer: Sequence[int], request: int | None = None) -> list[int]:
        """End a turn, the last one unless another is named; return prompt and answer."""
        whole = [*prompt, *answer]
        begin = len(prompt) // BLOCK * BLOCK
        name = f"r{self.requests if request is None else request}"
        self.lineage.end(name, len(whole), digest_of(pack_tokens(whole), begin, len(whole)))
        return whole


def test_a_prompt_that_repeats_prompt_and_answer_continues_the_session() -> None:
    pool = Pool(Lineage())
    session, found, prompt = pool.ask(range(10))
    assert found == NOTHING
    said = pool.answer(prompt, [50, 51, 52])

    for turn in range(60):
        again, _, prompt = pool.ask([*said, *range(100 * turn, 100 * turn + 7)])
        assert again == session
        said = pool.answer(prompt, [turn] * (1 + turn % 9))


def test_what_begins_while_its_session_goes_on_is_a_child() -> None:
    pool = Pool(Lineage())
    session, _, prompt = pool.ask(range(10))
    assert pool.ask([*prompt, 60, 61, 1])[1] == Found(parent=session)
    said = pool.answer(prompt, [50, 51], 1)
    assert pool.ask([*said, 1])[1] == Found(session)
    assert pool.ask([*said, 2])[1] == Found(parent=session, sibling="r3")


def test_a_common_system_prompt_says_nothing() -> None:
    pool = Pool(Lineage())
    system = list(range(4 * BLOCK))
    for user in range(20):
        _, found, prompt = pool.ask([*system, 100 + user])
        assert found == NOTHING
        pool.answer(prompt, [7])
    assert pool.ask([*system, 300, 7, 8, 9, 10])[1] == NOTHING


def test_equal_prompts_with_equal_answers_are_told_apart_by_nothing() -> None:
    pool = Pool(Lineage())
    first, _, prompt = pool.ask(range(10))
    pool.answer(prompt, [50])
    pool.ask(range(10))
    said = pool.answer(prompt, [50])
    assert pool.ask([*said, 1])[1].session == "", "whose turn that is nobody knows"

    pool.ask(range(10))
    other = pool.answer(prompt, [60])
    assert pool.ask([*other, 1])[0] == f"s{pool.requests - 1}"
    assert first == "s1"


def test_tenants_do_not_find_each_other() -> None:
    pool = Pool(Lineage())
    _, _, prompt = pool.ask(range(10), tenant=1)
    said = pool.answer(prompt, [50])
    assert pool.ask([*said, 1], tenant=2)[1] == NOTHING
    assert pool.ask([*said, 1], tenant=1)[0] == "s1"


def test_the_longest_turn_decides_whose_next_one_a_prompt_is() -> None:
    pool = Pool(Lineage())
    _, _, prompt = pool.ask(range(4))
    pool.ask(range(4))
    pool.answer(prompt, [90], 2)
    said = pool.answer(prompt, [90, 90], 1)

    assert pool.ask([*said, 80])[1] == Found("s1")
    assert pool.ask([*said, 81])[1] == Found(parent="s1", sibling="r3"), "though the second turn is a beginning of it"


def test_where_one_of_two_equal_turns_was_continued_the_next_prompt_is_a_fork_of_the_other() -> None:
    pool = Pool(Lineage())
    _, _, prompt = pool.ask(range(4))
    said = pool.answer(prompt, [90])
    pool.ask([*said, 80])
    pool.ask(range(4))
    pool.answer(prompt, [90])

    assert pool.ask([*said, 81])[1] == Found(parent="s3")


def test_tails_are_bounded_and_forgotten_whole() -> None:
    lineage = Lineage(capacity=3)
    pool = Pool(lineage)
    for number in range(50):
        _, _, prompt = pool.ask(range(number, number + 9))
        pool.answer(prompt, [number])
    assert len(lineage) == 3
    same = Lineage()
    pool = Pool(same)
    for number in range(SAME_TAIL_MAX + 5):
        pool.ask([*range(8), number])
    assert len(same) == SAME_TAIL_MAX


def test_a_forgotten_turn_does_not_lend_its_next_one_to_an_equal_session() -> None:
    lineage = Lineage(capacity=2)
    pool = Pool(lineage)
    _, _, prompt = pool.ask(range(10))
    pool.answer(prompt, [50])
    pool.ask(range(10))
    said = pool.answer(prompt, [50])
    pool.ask(range(100, 120))
    assert pool.ask([*said, 1])[1].session == ""


def test_a_long_prompt_costs_one_lookup_in_a_stride_of_blocks() -> None:
    class Counted(list[int]):
        looked = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counted.looked += 1
            return super().__getitem__(at)

    lineage = Lineage()
    Pool(lineage).ask(range(1000, 1040))
    blocks = 1000
    lineage.find(0, Counted(range(blocks)), b"", BLOCK)
    assert Counted.looked <= blocks // STRIDE + 5


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_session_runs_two_prompts_of_which_none_continues_the_other(data: st.DataObject) -> None:
    """Programs with equal system prompts, first prompts and answers, forks among them; turns in any order.

    Of two attempts at one turn the first may be answered, and continued, while the second runs.
    """
    pool = Pool(Lineage())
    system = list(range(data.draw(st.integers(0, 3 * BLOCK))))
    said = [list(system) for _ in range(data.draw(st.integers(2, 5)))]
    """By program."""
    asked: dict[int, tuple[int, str, list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        program = data.draw(st.integers(0, len(said) - 1))
        if program in asked:
            request, _, prompt = asked.pop(program)
            if data.draw(st.integers(0, 5)) == 0:
                pool.lineage.withdraw(f"r{request}")
            else:
                answer = data.draw(st.lists(st.integers(90, 91), max_size=6))
                said[program] = pool.answer(prompt, answer, request)
            continue
        if len(said) < 8 and data.draw(st.integers(0, 4)) == 0:
            said.append(said[program])
        prompt = [*said[program], *data.draw(st.lists(st.integers(80, 81), min_size=1, max_size=9))]
        session, _, _ = pool.ask(prompt)
        assert all(other == prompt[: len(other)] for _, name, other in asked.values() if name == session)
        asked[program] = pool.requests, session, prompt


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=12))
def test_every_turn_of_a_lone_program_is_found(first: int, turns: list[tuple[int, int]]) -> None:
    pool = Pool(Lineage())
    session, _, prompt = pool.ask(range(BLOCK + first))
    for answer, further in turns:
        said = pool.answer(prompt, [90] * answer)
        again, _, prompt = pool.ask([*said, *range(further)])
        assert again == session


def test_an_answer_that_is_named_by_an_id_needs_no_equal_words() -> None:
    pool = Pool(Lineage())
    session, _, prompt = pool.ask(range(10))
    pool.answer(prompt, [50, 51])
    following = pack_tokens([*range(10), 70, 71, 72])
    path = path_of(following, BLOCK)

    pool.ask(range(10))  # another one's
    assert pool.lineage.find(0, path, following, BLOCK) == Found(parent="s2")
    assert pool.lineage.find(0, path, following, BLOCK, answer_key("r1")) == Found(session)
    assert pool.lineage.find(1, path, following, BLOCK, answer_key("r1")) == NOTHING

    stranger = pack_tokens([*range(30, 40), 70])
    assert pool.lineage.find(0, path_of(stranger, BLOCK), stranger, BLOCK, answer_key("r1")) == NOTHING


def test_a_turn_without_a_complete_answer_is_asked_again_in_its_session() -> None:
    pool = Pool(Lineage())
    session, _, prompt = pool.ask(range(10))
    said = pool.answer(prompt, [50, 51])
    assert pool.ask([*said, 1])[0] == session
    pool.lineage.withdraw(f"r{pool.requests}")

    assert pool.ask([*said, 1])[0] == session
    assert pool.ask([*said, 2])[1] == Found(parent=session, sibling=f"r{pool.requests - 1}")
