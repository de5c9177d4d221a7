"""What a client has of a stream is kept within bounds, and read only to continue it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.continuation import ContinuationError
from poolgrid.server.forwarding.event_filter import AnswerNotes, ApiForm, EventFilter
from poolgrid.server.forwarding.kept_stream import KEPT_BYTES_MAX, KeptStream, forget_longest
from poolgrid.server.forwarding.text_continuation import CHAT
from tests.forwarding.answer_streams import FORMS, Unit, answers, chat, folded, renamed, sizes

TEXT = [("content", each) for each in ("Hel", "lo", "!")]
REST = [("content", each) for each in (" all", "!")]
OTHER = [("content", "Hi")]
DIFFERS = ContinuationError("it differs")


def kept(had: list[bytes], **fields: Any) -> KeptStream:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    stream = KeptStream(ApiForm.CHAT, CHAT, values, len)
    for each in had:
        stream.keep(each)
    return stream


def test_another_answer_continues_the_stream() -> None:
    undisturbed = chat(TEXT, [1], 1)
    stream = kept(undisturbed[:3])
    assert not stream.is_continued

    stream.begin()
    rest = stream.rest(b"".join(chat(TEXT, [2], 2))) + stream.rest(b"", is_end=True)

    assert stream.is_continued
    assert folded(renamed(b"".join(undisturbed[:3]) + rest)) == folded(b"".join(undisturbed))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("takes_usage", [False, True])
@given(
    units=answers(),
    first=sizes,
    second=sizes,
    cut=st.integers(0, 10_000),
    sizes_read=st.sampled_from([1, 7, 100, 9999]),
)
def test_stream_cut_at_any_byte_is_the_undisturbed_one(
    name: str, takes_usage: bool, units: list[Unit], first: list[int], second: list[int], cut: int, sizes_read: int
) -> None:
    """From the server's bytes to the client's, as the proxy passes them."""
    form, write = FORMS[name]
    data, again = b"".join(write(units, first, 1)), b"".join(write(units, second, 2))
    cut %= len(data) + 1
    plain, broken, other = (EventFilter(form, takes_usage) for _ in range(3))
    undisturbed = plain.feed(data) + plain.finish()
    stream = KeptStream(form, CHAT, {}, len)

    got = b""
    for at in range(0, cut, sizes_read):
        passed = broken.feed(data[at : min(cut, at + sizes_read)])
        stream.keep(passed)
        got += passed
    assert broken.is_between_events
    if not stream.has_end:
        stream.begin()
        for at in range(0, len(again), sizes_read):
            got += stream.rest(other.feed(again[at : at + sizes_read]))
        got += stream.rest(other.finish(), is_end=True)

    assert folded(renamed(got), form) == folded(renamed(undisturbed), form)


def test_answer_that_differs_is_asked_to_continue_a_sampled_text() -> None:
    had = chat(TEXT, [1], 1)[:3]
    stream = kept(had, temperature=1)
    stream.begin()
    with pytest.raises(ContinuationError) as differs:
        stream.rest(b"".join(chat(OTHER, [1], 2)))

    body = stream.continue_text(differs.value, "vllm", b'{"messages":[]}')
    rest = stream.rest(b"".join(chat(REST, [1], 2)), is_end=True)
    notes = AnswerNotes(prompt_tokens=20, completion_tokens=2)
    stream.correct(notes)

    assert json.loads(body)["messages"][-1] == {"role": "assistant", "content": "Hello"}
    assert folded(b"".join(had) + rest)["content"] == "Hello all!"
    assert notes == AnswerNotes(prompt_tokens=15, completion_tokens=7)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_answer_that_is_to_be_alike_and_differs_ends_the_stream(fields: dict[str, Any]) -> None:
    stream = kept(chat(TEXT, [1], 1)[:3], **fields)

    with pytest.raises(ContinuationError, match="it differs"):
        stream.continue_text(DIFFERS, "vllm", b"{}")


def test_text_that_is_not_continued_as_it_must_be_ends_the_stream() -> None:
    stream = kept(chat(TEXT, [1], 1)[:3])
    stream.begin()
    stream.continue_text(DIFFERS, "vllm", b"{}")

    with pytest.raises(ContinuationError, match="it differs"):
        stream.continue_text(DIFFERS, "vllm", b"{}")


def test_next_server_repeats_the_answer_again() -> None:
    had = chat(TEXT, [1], 1)[:3]
    stream = kept(had)
    stream.begin()
    stream.continue_text(DIFFERS, "vllm", b"{}")
    more = stream.rest(b"".join(chat(REST, [1], 2)[:2]))
    stream.keep(more)

    stream.begin()
    whole = [*TEXT[:2], *REST]
    rest = stream.rest(b"".join(chat(whole, [1], 3)), is_end=True)

    assert folded(b"".join(had) + more + rest)["content"] == "Hello all!"


def test_stream_beyond_the_bound_is_not_kept() -> None:
    stream = kept([b"x" * KEPT_BYTES_MAX])
    assert (stream.kept_bytes, stream.is_forgotten) == (KEPT_BYTES_MAX, False)

    stream.keep(b"x")

    assert (stream.kept_bytes, stream.is_forgotten) == (0, True)


@pytest.mark.parametrize("begins_first", [False, True])
def test_stream_that_was_forgotten_is_not_begun_again(begins_first: bool) -> None:
    """The sweep over all streams may forget it while another server computes."""
    stream = kept(chat(TEXT, [1], 1)[:3])
    if begins_first:
        stream.begin()
    stream.forget()
    if not begins_first:
        stream.begin()

    with pytest.raises(ContinuationError, match="too much"):
        stream.rest(b"".join(chat(TEXT, [1], 2)))
    with pytest.raises(ContinuationError, match="too much"):
        stream.continue_text(DIFFERS, "vllm", b"{}")


def test_stream_that_is_forgotten_while_it_is_continued_goes_to_its_end() -> None:
    undisturbed, second = chat(TEXT, [1], 1), chat(TEXT, [1], 2)
    stream = kept(undisturbed[:3])
    stream.begin()
    passed = stream.rest(b"".join(second[:2]))
    stream.forget()
    passed += stream.rest(b"".join(second[2:]), is_end=True)

    assert folded(renamed(b"".join(undisturbed[:3]) + passed)) == folded(b"".join(undisturbed))


def test_end_is_known_of_a_stream_that_is_not_kept() -> None:
    stream = kept(chat(TEXT, [1], 1))
    stream.forget()

    assert stream.has_end
    assert not kept(chat(TEXT, [1], 1)[:-1]).has_end


@pytest.mark.parametrize(("bound", "left"), [(100, [10, 40, 30, 20]), (99, [10, 0, 30, 20]), (25, [10, 0, 0, 0])])
def test_longest_streams_are_forgotten_when_all_together_are_too_much(bound: int, left: list[int]) -> None:
    streams = [kept([b"x" * each]) for each in (10, 40, 30, 20)]

    forget_longest(streams, bound)

    assert [each.kept_bytes for each in streams] == left
