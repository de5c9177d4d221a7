"""A stream that another server continues is complete, and has each character once, wherever the first one broke off."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.continuation import ContinuationError, ContinuedStream, has_end, is_repeatable
from poolgrid.server.forwarding.event_filter import MAX_EVENT_BYTES, ApiForm
from tests.forwarding.answer_streams import DONE, FORMS, Unit, answers, chat, event, folded, renamed, sizes, values_of


def continued(form: ApiForm, had: bytes, second: bytes, size: int = 0) -> bytes:
    """The client's stream."""
    if has_end(form, had):
        return had
    stream = ContinuedStream(form, had)
    pieces = [second[at : at + size] for at in range(0, len(second), size)] if size else [second]
    passed = b"".join(map(stream.feed, pieces))
    stream.finish()
    return had + passed


@pytest.mark.parametrize("name", FORMS)
@given(units=answers(), first=sizes, second=sizes, cut=st.integers(0, 100), size=st.sampled_from([0, 0, 1, 7, 100]))
def test_stream_cut_at_any_event_is_the_undisturbed_one(
    name: str, units: list[Unit], first: list[int], second: list[int], cut: int, size: int
) -> None:
    form, write = FORMS[name]
    events = write(units, first, 1)
    had = b"".join(events[: cut % (len(events) + 1)])

    got = continued(form, had, b"".join(write(units, second, 2)), size)

    undisturbed = b"".join(events) if had else b"".join(write(units, second, 2))
    assert folded(renamed(got), form) == folded(renamed(undisturbed), form)
    if had and form is not ApiForm.MESSAGES:
        assert {each["id"] for each in values_of(got) if "id" in each} <= {"chatcmpl-s1", "cmpl-s1"}
    if had and form is ApiForm.RESPONSES:
        assert {each["response"]["id"] for each in values_of(got) if "response" in each} == {"resp-s1"}
        items = [each["item"] for each in values_of(got) if each["type"] == "response.output_item.added"]
        last = values_of(got)[-1]["response"]
        assert ([each["id"] for each in last["output"]], last["created_at"]) == ([each["id"] for each in items], 1)
    if form is ApiForm.RESPONSES:
        numbers = [each["sequence_number"] for each in values_of(got)]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("name", FORMS)
@given(units=answers(), cuts=st.lists(st.integers(0, 100), min_size=2, max_size=4), size=sizes)
def test_stream_that_breaks_repeatedly_is_the_undisturbed_one(
    name: str, units: list[Unit], cuts: list[int], size: list[int]
) -> None:
    form, write = FORMS[name]
    undisturbed = write(units, [1], 1)
    got = b"".join(undisturbed[: max(1, cuts[0] % len(undisturbed))])

    for cut in cuts[1:]:
        events = write(units, size, 2)
        if not has_end(form, got):
            got += ContinuedStream(form, got).feed(b"".join(events[: cut % len(events)]))
    got = continued(form, got, b"".join(write(units, size, 2)))

    assert folded(renamed(got), form) == folded(b"".join(undisturbed), form)


@pytest.mark.parametrize("name", FORMS)
@given(units=answers(), first=sizes, second=sizes, cut=st.integers(1, 100), at=st.integers(0, 100))
def test_answer_that_differs_within_what_the_client_has_ends_the_stream(
    name: str, units: list[Unit], first: list[int], second: list[int], cut: int, at: int
) -> None:
    form, write = FORMS[name]
    events = write(units, first, 1)
    had = b"".join(events[: cut % len(events)])
    other = [*units]
    if other:
        at %= len(other)
        other[at] = (other[at][0], "x" + other[at][1][1:])
    stream = ContinuedStream(form, had)
    got = b""
    try:
        got = stream.feed(b"".join(write(other, second, 2)))
        stream.finish()
    except ContinuationError:
        return

    # It differs only behind what the client has.
    assert folded(renamed(had + got), form) == folded(renamed(b"".join(write(other, first, 2))), form)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kept", [1, 3, 5])
def test_answer_that_ends_before_what_the_client_has_ends_the_stream(name: str, kept: int) -> None:
    form, write = FORMS[name]
    units = [("content", each) for each in "abcdefgh"]
    had = b"".join(write(units, [1], 1)[:-3])

    for second in (write(units[:kept], [1], 2), write(units, [1], 2)[:kept]):
        with pytest.raises(ContinuationError):
            continued(form, had, b"".join(second))


def test_new_text_before_the_rest_of_what_the_client_has_ends_the_stream() -> None:
    had = b"".join(chat([("content", "ab")], [1], 1)[:2])

    with pytest.raises(ContinuationError, match="differs"):
        continued(ApiForm.CHAT, had, b"".join(chat([("reasoning", "r"), ("content", "ab")], [1], 2)))


def test_choices_are_continued_each_by_itself() -> None:
    def stream(order: str, server: int) -> list[bytes]:
        head = {"id": f"cmpl-s{server}", "created": server}
        return [
            event({**head, "choices": [{"index": int(each), "text": "abcdef"[order[:at].count(each)]}]})
            for at, each in enumerate(order)
        ]

    got = continued(ApiForm.CHAT, b"".join(stream("0010", 1)), b"".join(stream("110001110100", 2)))

    for index in (0, 1):
        chunks = [each["choices"][0] for each in values_of(got)]
        assert "".join(each["text"] for each in chunks if each["index"] == index) == "abcdef"


def test_event_that_has_nothing_of_the_clients_passes_byte_for_byte_but_for_the_ids() -> None:
    had = event({"id": "a", "created": 1, "choices": [{"index": 0, "text": "x"}]})
    odd = b': note\nid: 7\ndata: { "id" : "%b", "created":%d, "choices":[{"index":0,"text":"\\u00e9"}], "n": 1e0 }\n\n'

    stream = ContinuedStream(ApiForm.CHAT, had)
    stream.feed(event({"id": "b", "created": 2, "choices": [{"index": 0, "text": "x"}]}))

    assert stream.feed(odd % (b"b", 2)) == odd % (b"a", 1)
    assert stream.feed(b": busy\n\n") == b": busy\n\n"
    assert stream.feed(DONE) == DONE


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_any_line_end_of_the_second_stream_is_read(line_end: bytes, size: int) -> None:
    units = [("content", each) for each in ("ab", "cd", "ef")]
    events = chat(units, [1], 1)
    second = b"".join(chat(units, [2], 2)).replace(b"\n", line_end)

    got = continued(ApiForm.CHAT, b"".join(events[:3]), second, size)

    plain = got.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert folded(plain) == folded(b"".join(events))


def test_halves_of_surrogate_pairs_and_numbers_beyond_json_pass() -> None:
    def stream(server: int) -> list[bytes]:
        return [
            b'data: {"id":"%d","choices":[{"index":0,"text":"%b","x":NaN}]}\n\n' % (server, text)
            for text in (b"\\ud83d", b"a", b"\\ude00b", b"c")
        ]

    first, second = stream(1), stream(2)
    joined = second[0] + second[1].replace(b'"a"', b'"a\\ude00bc"')

    got = continued(ApiForm.CHAT, b"".join(first[:2]), joined)

    assert "".join(each["choices"][0]["text"] for each in values_of(got)) == "\ud83da\ude00bc"


UNFIT = {
    "an error event": event({"error": {"message": "x"}}),
    "an event that is no JSON": b"data: x\n\n",
    "an unknown event": event({"some": "thing"}),
    "a member that cannot be compared": event({"choices": [{"index": 0, "delta": {"audio": {"data": "a"}}}]}),
    "a part of an event": b'data: {"choi',
}


@pytest.mark.parametrize("had", UNFIT.values(), ids=UNFIT.keys())
def test_stream_whose_events_are_not_all_understood_is_not_continued(had: bytes) -> None:
    with pytest.raises(ContinuationError):
        ContinuedStream(ApiForm.CHAT, had)


@pytest.mark.parametrize("second", list(UNFIT.values())[:4], ids=list(UNFIT)[:4])
def test_event_that_is_not_understood_in_place_of_the_clients_ends_the_stream(second: bytes) -> None:
    had = b"".join(chat([("content", "ab")], [1], 1)[:2])

    with pytest.raises(ContinuationError):
        ContinuedStream(ApiForm.CHAT, had).feed(second)


def test_error_of_the_second_server_behind_what_the_client_has_passes() -> None:
    events = chat([("content", "ab"), ("content", "cd")], [1], 1)
    stream = ContinuedStream(ApiForm.CHAT, b"".join(events[:2]))
    stream.feed(b"".join(events[:2]))

    error = event({"error": {"message": "out of memory"}})
    assert stream.feed(error) == error


def test_endless_event_ends_the_stream() -> None:
    stream = ContinuedStream(ApiForm.CHAT, chat([("content", "ab")], [1], 1)[0])

    with pytest.raises(ContinuationError, match="bytes"):
        stream.feed(b"data: " + b"x" * MAX_EVENT_BYTES)


@pytest.mark.parametrize("name", FORMS)
def test_stream_whose_end_the_client_has_is_whole(name: str) -> None:
    form, write = FORMS[name]
    events = write([("content", "ab")], [1], 1)

    assert has_end(form, b"".join(events))
    assert has_end(form, events[-1].replace(b"\n", b"\r\n"))
    assert not has_end(form, b"".join(events[:-1]))
    assert not has_end(form, b"")


@pytest.mark.parametrize("name", FORMS)
def test_start_of_a_stream_has_no_output(name: str) -> None:
    form, write = FORMS[name]
    events = write([("content", "ab")], [1], 1)

    assert not ContinuedStream(form, b"").has_output
    assert ContinuedStream(form, events[0]).has_output is (name == "completion")
    assert ContinuedStream(form, b"".join(events[:-1])).has_output


@pytest.mark.parametrize(
    ("body", "is_alike"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-9}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": None}, False),
        ({"temperature": "0"}, False),
        ({"temperature": -1}, False),
        ({"seed": 7}, True),
        ({"temperature": 1, "seed": 0}, True),
        ({"seed": None}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
    ],
)
def test_answer_without_sampling_or_with_a_seed_is_repeatable(body: dict[str, Any], is_alike: bool) -> None:
    values = msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])

    assert is_repeatable(values) is is_alike
