"""Conversations as clients send them, without ids: what continues a session, and what must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poolgrid.kernel.projection.echoes import echoes_of
from poolgrid.kernel.projection.lineage import Found, Lineage, anchor_of, digest_of, stem_of
from poolgrid.kernel.wire.hashing import pack_tokens, path_of
from poolgrid.kernel.wire.sessions import SessionTurn

BLOCK = 16
SYSTEM, USER, ASSISTANT, END, THINK, THOUGHT = range(1, 7)
"""Tokens that only a template writes."""

Words = list[int]


def words(name: object, count: int = 40) -> Words:
    """Return text that only an equal name has."""
    draw = Random(f"{name}")
    return [draw.randrange(100, 50_000) for _ in range(count)]


APP = words("you are an assistant", 100)
"""A system prompt that all have."""


class Answer:
    """One that is generated."""

    def __init__(self, pool: Pool, request_id: str, session: str, found: Found, prompt: Words) -> None:
        self.request_id, self.session, self.found, self.prompt = request_id, session, found, prompt
        self._pool = pool

    def ends(self, text: Words) -> Words:
        self._pool.end(self.request_id, self.prompt, text)
        return text

    def is_left(self) -> None:
        """Have its client leave."""
        self._pool.lineage.withdraw(self.request_id)


class Pool:
    """Names turns as a router does."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.requests = 0

    def ask(self, prompt: Words) -> Answer:
        token_ids = pack_tokens(prompt)
        path = path_of(token_ids, BLOCK)
        found = self.lineage.find(0, path, token_ids, BLOCK)
        self.requests += 1
        request_id, session = f"r{self.requests}", found.session or f"s{self.requests}"
        turn = SessionTurn(
            session,
            parent=found.parent,
            tail=path[-1],
            anchor=anchor_of(path),
            residual=digest_of(token_ids, len(path) * BLOCK, len(prompt)),
            sibling=found.sibling,
            stem=stem_of(token_ids, len(path) * BLOCK, len(prompt)),
        )
        self.lineage.begin(request_id, turn, len(prompt))
        return Answer(self, request_id, session, found, prompt)

    def end(self, request_id: str, prompt: Words, text: Words) -> None:
        path, whole = path_of(pack_tokens(prompt), BLOCK), pack_tokens([*prompt, *text])
        total = len(prompt) + len(text)
        echoes = echoes_of(pack_tokens(text), pack_tokens(prompt), path)
        self.lineage.end(request_id, total, digest_of(whole, len(path) * BLOCK, total), echoes)


def chat(*turns: Words, system: Words = APP) -> Words:
    """Return a prompt: a system prompt, and then what the user and the assistant said in turn."""
    said: Words = [SYSTEM, *system, END]
    for at, turn in enumerate(turns):
        said += [USER if at % 2 == 0 else ASSISTANT, *turn, END]
    return [*said, ASSISTANT]


def reasoned(name: str, count: int = 40) -> Words:
    return [THINK, *words(f"{name} thinks", 300), THOUGHT, *words(name, count)]


def visible(answer: Words) -> Words:
    return answer[answer.index(THOUGHT) + 1 :]


HELLO, MORE = words("hello"), words("more")
Case = Callable[[Pool], None]


def real_answers(pool: Pool) -> None:
    said = [HELLO]
    session = ""
    for turn in range(30):
        asked = pool.ask(chat(*said))
        session = session or asked.session
        assert asked.session == session
        said += [asked.ends(reasoned(f"answer {turn}")), words(turn)]


def histories_without_reasoning(pool: Pool) -> None:
    said, sessions = [HELLO], set()
    for turn in range(30):
        asked = pool.ask(chat(*said))
        sessions.add(asked.session)
        said += [visible(asked.ends(reasoned(f"answer {turn}"))), words(turn)]
    assert len(sessions) == 1


def templates_that_begin_the_reasoning(pool: Pool) -> None:
    said, sessions = [HELLO], list[str]()
    for turn in range(40):
        asked = pool.ask([*chat(*said), THINK, 99])
        sessions.append(asked.session)
        said += [visible(asked.ends(reasoned(f"answer {turn}")[2:])), words(turn, 20 + turn)]
    assert len(set(sessions)) <= 12, "if a block ends with these tokens, the next turn begins a session"


def trimmed_answers(pool: Pool) -> None:
    said, sessions = [HELLO], set()
    for turn in range(30):
        asked = pool.ask(chat(*said))
        sessions.add(asked.session)
        said += [asked.ends(words(f"answer {turn}"))[2:-3], words(turn)]
    assert len(sessions) == 1


def rewritten_answers(pool: Pool) -> None:
    said, sessions = [HELLO], set()
    for turn in range(30):
        asked = pool.ask(chat(*said))
        sessions.add(asked.session)
        asked.ends(words(f"answer {turn}"))
        said += [words(f"canned {turn}"), words(turn)]
    assert len(sessions) == 1


def a_retry_while_the_first_attempt_runs(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    later = chat(HELLO, first.ends(words("answer")), MORE)
    attempt, again = pool.ask(later), pool.ask(later)
    assert attempt.session == again.session == first.session
    answer = attempt.ends(words("of the first attempt"))
    again.ends(words("of the second attempt"))
    assert pool.ask(chat(HELLO, words("answer"), MORE, answer, words("next"))).session == first.session


def a_retry_whose_answer_was_complete(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    later = chat(HELLO, first.ends(words("answer")), MORE)
    pool.ask(later).ends(words("lost on its way"))
    again = pool.ask(later)
    answer = again.ends(words("another answer"))
    assert again.session == first.session
    assert pool.ask(chat(HELLO, words("answer"), MORE, answer, words("next"))).session == first.session


def a_retry_after_the_client_left(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    first.is_left()
    again = pool.ask(chat(HELLO))
    later = chat(HELLO, again.ends(words("answer")), MORE)
    attempt = pool.ask(later)
    attempt.is_left()
    assert first.session == again.session == attempt.session == pool.ask(later).session


def a_retry_of_a_turn_whose_history_is_rewritten(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    first.ends(words("answer"))
    later = chat(HELLO, words("canned"), MORE)
    assert pool.ask(later).session == pool.ask(later).session == first.session


def an_answer_that_was_stopped(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    first.is_left()
    assert pool.ask(chat(HELLO, words("the beginning of an answer"), MORE)).session == first.session


def an_edited_message(pool: Pool) -> None:
    first = pool.ask(chat(HELLO))
    answer = first.ends(words("answer"))
    said = [HELLO, answer, MORE]
    for turn in range(4):
        said += [pool.ask(chat(*said)).ends(words(f"answer {turn}")), words(turn)]
    for turn in (2, 0, 1):
        end = 3 + 2 * turn
        edited = pool.ask(chat(*said[: end - 1], words(f"edited {turn}")))
        assert edited.session == first.session
        assert pool.ask(chat(*said[: end - 1], words(f"edited {turn}"), edited.ends(MORE), MORE)).session == (
            first.session
        )
        pool.lineage.withdraw(f"r{pool.requests}")


def a_compacted_context(pool: Pool) -> None:
    said = [words("a long task", 2000)]
    first = pool.ask(chat(*said))
    said += [first.ends(words("answer")), words("summarize all that")]
    summary = pool.ask(chat(*said)).ends(reasoned("summary", 800))
    compacted = [[*words("the session continues from this summary:"), *visible(summary)[20:]]]
    for turn in range(3):
        asked = pool.ask(chat(*compacted))
        assert asked.session == first.session
        compacted += [asked.ends(words(f"answer {turn}")), words(turn)]


def reasoning_that_is_left_out_once_the_user_speaks(pool: Pool) -> None:
    said: list[Words] = [HELLO]
    first = pool.ask(chat(*said))
    shown: list[Words] = [HELLO]
    answer = first.ends(reasoned("call 0", 20))
    for turn in range(3):
        said, shown = [*said, answer, words(f"result {turn}")], [*shown, visible(answer), words(f"result {turn}")]
        asked = pool.ask(chat(*said))
        assert asked.session == first.session
        answer = asked.ends(reasoned(f"call {turn + 1}", 400))
    assert pool.ask(chat(*shown, visible(answer), words("thanks"))).session == first.session


def a_child_of_a_turn_that_runs(pool: Pool) -> None:
    parent = pool.ask(chat(HELLO))
    child = pool.ask([*chat(HELLO), *words("a task of its own")])
    assert child.found.session == ""
    assert child.found.parent == parent.session


def children_that_begin_at_once(pool: Pool) -> None:
    parent = pool.ask(chat(HELLO))
    said = [HELLO, parent.ends(words("three tasks"))]
    children = [pool.ask(chat(*said, words(f"task {child}"))) for child in range(3)]
    assert [each.found.parent for each in children] == ["", parent.session, parent.session]
    names: set[str] = set()
    for at, begun in enumerate(children):
        child, task, session = begun, [*said, words(f"task {at}")], begun.session
        for turn in range(3):
            task += [child.ends(words(f"answer {at} {turn}")), words(f"{at} {turn}")]
            child = pool.ask(chat(*task))
            if at or turn:
                assert child.session == session, "as before"
            else:
                assert child.found.parent == parent.session, "which begins a session of its own"
                session = child.session
        names.add(session)
        child.ends(words("done"))
    assert len({*names, parent.session}) == 4
    following = pool.ask(chat(*said, words("their results")))
    assert following.session == parent.session
    assert pool.ask(chat(*said, words("their results"), following.ends(words("all done")), MORE)).session == (
        parent.session
    )


SAME: list[Case] = [
    real_answers,
    histories_without_reasoning,
    templates_that_begin_the_reasoning,
    trimmed_answers,
    rewritten_answers,
    a_retry_while_the_first_attempt_runs,
    a_retry_whose_answer_was_complete,
    a_retry_after_the_client_left,
    a_retry_of_a_turn_whose_history_is_rewritten,
    an_answer_that_was_stopped,
    an_edited_message,
    a_compacted_context,
    reasoning_that_is_left_out_once_the_user_speaks,
    a_child_of_a_turn_that_runs,
    children_that_begin_at_once,
]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.__name__)
def test_a_session_is_found_again(case: Case) -> None:
    case(Pool())


def one_system_prompt(user: int) -> list[Words]:
    return [words(f"{user} asks"), words(f"{user} asks more")]


def one_template_with_a_few_words_of_each(user: int) -> list[Words]:
    return [[*words("Translate the following text:", 200), 7000 + user, *words("Answer in German.", 60)], [7000 + user]]


def the_same_examples_before_the_question(user: int) -> list[Words]:
    return [[*words("examples", 400), *words(user, 5)], words(f"{user} again", 5)]


def the_same_first_message(user: int) -> list[Words]:
    return [HELLO, words(f"{user} says")]


def a_document_that_answers_quote(user: int) -> list[Words]:
    return [[*words("document", 700), *words(user)], words(f"{user} continues")]


STRANGERS = [
    one_system_prompt,
    one_template_with_a_few_words_of_each,
    the_same_examples_before_the_question,
    the_same_first_message,
    a_document_that_answers_quote,
]


@pytest.mark.parametrize("messages", STRANGERS, ids=lambda messages: messages.__name__)
@pytest.mark.parametrize("sends", ["what was generated", "something else"])
@pytest.mark.parametrize("at_once", [False, True], ids=["after each other", "at once"])
def test_strangers_are_never_taken_for_each_other(
    messages: Callable[[int], list[Words]], sends: str, at_once: bool
) -> None:
    pool, owner = Pool(), dict[str, int]()

    def asks(user: int, prompt: Words) -> Answer:
        asked = pool.ask(prompt)
        assert owner.setdefault(asked.session, user) == user
        return asked

    def answer_of(user: int) -> Words:
        is_quote = messages is a_document_that_answers_quote
        return words("document", 700)[100:600] if is_quote else words("the same for all", 300 + user % 2)

    def goes_on(user: int, asked: Answer) -> None:
        first, then = messages(user)
        answer = asked.ends(answer_of(user))
        if sends != "what was generated":
            answer = answer[3:-3]
        asks(user, chat(first, answer, then)).ends(words(f"end {user}"))

    if at_once:
        for user, asked in enumerate([asks(user, chat(messages(user)[0])) for user in range(5)]):
            goes_on(user, asked)
    else:
        for user in range(5):
            goes_on(user, asks(user, chat(messages(user)[0])))


Action = st.sampled_from(["next", "next", "next", "stripped", "retry", "edit", "compact", "leave"])


@settings(max_examples=150, deadline=None)
@example([(0, "next", 0), (0, "next", 0), (0, "leave", 0), *[(1, "next", 0)] * 2, (1, "compact", 0)], 2, True)
@given(
    st.lists(st.tuples(st.integers(0, 5), Action, st.integers(0, 3)), min_size=1, max_size=60),
    st.integers(1, 3),
    st.booleans(),
)
def test_whatever_clients_do_no_session_has_turns_of_two(
    actions: Sequence[tuple[int, str, int]], first_messages: int, same_answers: bool
) -> None:
    """Users of one application, of whom some begin with the same message; none of them sees what others do.

    A turn whose client left has no owner, for nothing can follow it but its retry.
    """
    pool, owner = Pool(), dict[str, int]()
    said: dict[int, list[Words]] = {}
    running: dict[int, Answer] = {}
    taught = words("taught", 400)
    for at, (user, action, number) in enumerate(actions):
        asked = running.pop(user, None)
        history = said.setdefault(user, [words(f"first {user % first_messages}", 5)])
        if asked is not None:
            if action == "leave":
                asked.is_left()
                if len(history) == 1:
                    owner.pop(asked.session)
                continue
            if action == "retry":
                asked.is_left()
                if len(history) == 1:
                    owner.pop(asked.session)
            else:
                answer = asked.ends(taught if same_answers else words(f"answer {user} {number}", 250))
                history += [answer[4:] if action == "stripped" else answer, words(f"{user} {number} {at}", 9)]
                if action == "edit" and len(history) > 4:
                    del history[2 * (len(history) // 4) :]
                    history += [words(f"{user} edits {at}", 9)]
                elif action == "compact":
                    history[:] = [[*words("summary:"), *answer, user]]
        asked = running[user] = pool.ask(chat(*history))
        assert owner.setdefault(asked.session, user) == user
