"""Usage that poolgrid asked for is out of the answer again, and every other byte is the server's."""

from __future__ import annotations

import json
import time
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poolgrid.server.forwarding.event_filter import (
    MAX_COUNT,
    MAX_EVENT_BYTES,
    MAX_OBJECTS,
    MAX_SLOW_BYTES,
    AnswerNotes,
    ApiForm,
    EventFilter,
    read_answer,
)
from tests.cases import for_each

DONE = b"data: [DONE]\n\n"

USAGE = {
    "prompt_tokens": 31,
    "total_tokens": 36,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any, name: str | None = None) -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + packed(value) + b"\n\n"


def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    return {**head, "choices": choices, **more}


def choice(text: str | None, finish: str | None = None, *, index: int = 0, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}


def run(data: bytes, takes_usage: bool, form: ApiForm = ApiForm.CHAT, size: int = 0) -> tuple[bytes, AnswerNotes]:
    """The whole stream through the filter, in pieces of ``size`` bytes or at once."""
    stream = EventFilter(form, takes_usage)
    pieces = [data[at : at + size] for at in range(0, len(data), size)] if size else [data]
    passed = b"".join(map(stream.feed, pieces)) + stream.finish()
    return passed, stream.notes


PAIRS = [
    pytest.param(
        event(chunk([choice("a", token_ids=[1, 22])])), event(chunk([choice("a", token_ids=[1, 22])])), id="token"
    ),
    pytest.param(event(chunk([], usage=USAGE)), b"", id="usage-only"),
    pytest.param(b'data: {"choices": [ ], "usage" : {"prompt_tokens": 3}}\n\n', b"", id="usage-only-with-spaces"),
    pytest.param(
        b'data: {"choices":[],\n: note\ndata: "usage":{"prompt_tokens":3}}\n\n', b"", id="usage-only-in-lines"
    ),
    pytest.param(event(chunk([], usage=None)), event(chunk([], usage=None)), id="no-choices-and-no-usage"),
    pytest.param(
        event(chunk([choice("a")], usage=USAGE)), event(chunk([choice("a")], usage=USAGE)), id="continuous-usage"
    ),
    pytest.param(
        event(chunk([choice("a", matched_stop=None)], usage=None)),
        event(chunk([choice("a", matched_stop=None)], usage=None)),
        id="sglang-writes-null-usage-unasked",
    ),
    pytest.param(
        event(chunk([choice('"choices":[],"usage":{"prompt_tokens":3}')])),
        event(chunk([choice('"choices":[],"usage":{"prompt_tokens":3}')])),
        id="a-text-like-a-member-stays",
    ),
    pytest.param(b'data: {"choices":[],"usage":{"a":1}\n\n', b'data: {"choices":[],"usage":{"a":1}\n\n', id="bad"),
    pytest.param(b": busy\n\n", b": busy\n\n", id="comment"),
    pytest.param(b"\n\n\n: a\n\n\n\n", b"\n\n\n: a\n\n\n\n", id="blank-lines"),
    pytest.param(DONE, DONE, id="done"),
    pytest.param(event({"error": {"message": "x"}}), event({"error": {"message": "x"}}), id="error"),
]


@pytest.mark.parametrize(("data", "passed"), PAIRS)
@for_each("size, line_end", product([0, 1, 7], [b"\n", b"\r\n", b"\r"]))
def test_what_poolgrid_asked_for_is_taken_out(data: bytes, passed: bytes, line_end: bytes, size: int) -> None:
    kept = event(chunk([choice("안녕")]))
    whole = (kept + data + kept).replace(b"\n", line_end)

    assert run(whole, True, size=size)[0] == (kept + passed + kept).replace(b"\n", line_end)


@pytest.mark.parametrize(("data", "passed"), PAIRS)
def test_an_event_without_its_blank_line_is_filtered_at_the_end(data: bytes, passed: bytes) -> None:
    if data.rstrip(b"\n"):
        assert run(data.rstrip(b"\n"), True)[0] == passed.rstrip(b"\n")


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A stream, and what is to come of it: of the events above, and of texts of any kind."""
    known = [pair.values for pair in PAIRS if pair.id != "blank-lines"]
    texts = st.text(max_size=12)
    sent, wanted = b"", b""
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            data = passed = event(chunk([choice(draw(texts), token_ids=[1])]))
        elif draw(st.integers(0, 5)) == 0:
            last = chunk([choice("z", "stop")])
            data, passed = (
                event(last) + event(chunk([], system_fingerprint="f", usage=USAGE)),
                event({**last, "system_fingerprint": "f"}),
            )
        else:
            data, passed = draw(st.sampled_from(known))  # type: ignore[assignment]
        sent, wanted = sent + data, wanted + passed
    return sent, wanted


@given(
    stream=streams(),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 2000), max_size=20),
)
def test_the_answer_does_not_depend_on_where_the_stream_is_split(
    stream: tuple[bytes, bytes], line_end: bytes, cuts: list[int]
) -> None:
    data, wanted = stream[0].replace(b"\n", line_end), stream[1].replace(b"\n", line_end)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events, whole = EventFilter(ApiForm.CHAT, True), EventFilter(ApiForm.CHAT, True)
    passed = b"".join(events.feed(data[a:b]) for a, b in pairwise(places)) + events.finish()

    assert passed == wanted
    assert whole.feed(data) + whole.finish() == wanted
    assert events.notes == whole.notes


@given(
    data=st.lists(
        st.sampled_from([b"\r", b"\n", b"data: ", b"data:", b":", b'{"choices":[]}', b"event: x", b"\xec", b'"usage"'])
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    form=st.sampled_from(ApiForm),
    takes_usage=st.booleans(),
)
@example(b'"usage"\rdata: {"choices":[]}', [], ApiForm.CHAT, True)
def test_any_bytes_without_what_was_asked_pass_as_they_are(
    data: bytes, cuts: list[int], form: ApiForm, takes_usage: bool
) -> None:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events = EventFilter(form, takes_usage)

    passed = b"".join(events.feed(data[a:b]) for a, b in pairwise(places)) + events.finish()
    assert passed == data


FINGERPRINTS = [
    pytest.param(
        [event(chunk([choice("b", "stop", stop_reason=None)], kv_transfer_params=None))],
        [event(chunk([choice("b", "stop", stop_reason=None)], system_fingerprint="vllm-1", kv_transfer_params=None))],
        id="put-back",
    ),
    pytest.param(
        [event(chunk([choice("b", "stop")])), b": note\n\n"],
        [event(chunk([choice("b", "stop")])), b": note\n\n"],
        id="another-event-between",
    ),
    pytest.param(
        [event(chunk([choice("b", "stop")], system_fingerprint="own"))],
        [event(chunk([choice("b", "stop")], system_fingerprint="own"))],
        id="there-already",
    ),
    pytest.param(
        [b'data: {"choices":[{"finish_reason":"stop",\ndata: "index":0}],\ndata: "x":1}\n\n'],
        [
            b'data: {"choices":[{"finish_reason":"stop",\ndata: "index":0}],"system_fingerprint":"vllm-1",\n'
            b'data: "x":1}\n\n'
        ],
        id="data-in-lines",
    ),
    pytest.param(
        [b'id: 7\ndata:{"choices":[{"finish_reason":"stop"}]} \nretry: 5\nodd\n\n'],
        [b'id: 7\ndata:{"choices":[{"finish_reason":"stop"}],"system_fingerprint":"vllm-1"} \nretry: 5\nodd\n\n'],
        id="other-fields-stay",
    ),
    pytest.param(
        [b'data: {"choices":\n: note\ndata: [{"finish_reason":"stop"}]}\n\n'],
        [b'data: {"choices":\ndata: [{"finish_reason":"stop"}],"system_fingerprint":"vllm-1"}\n: note\n\n'],
        id="a-comment-between-lines-of-data-stays",
    ),
]


@pytest.mark.parametrize(("events", "passed"), FINGERPRINTS)
@for_each("size, line_end", product([0, 1, 7], [b"\n", b"\r\n", b"\r"]))
def test_a_fingerprint_in_the_dropped_chunk_is_put_back(
    events: list[bytes], passed: list[bytes], line_end: bytes, size: int
) -> None:
    dropped = event(chunk([], usage=USAGE, system_fingerprint="vllm-1"))
    data = b"".join([event(chunk([choice("a")])), *events, dropped, DONE]).replace(b"\n", line_end)
    wanted = b"".join([event(chunk([choice("a")])), *passed, DONE]).replace(b"\n", line_end)

    assert run(data, True, size=size)[0] == wanted


def test_a_fingerprint_of_null_is_not_put_back() -> None:
    last, dropped = event(chunk([choice("b", "stop")])), event(chunk([], usage=USAGE, system_fingerprint=None))

    assert run(last + dropped, True)[0] == last


def test_blank_lines_behind_an_event_are_passed_at_once() -> None:
    events, data = EventFilter(ApiForm.CHAT, True), event(chunk([choice("a")]))

    assert events.feed(data + b"\n") == data + b"\n"
    assert events.is_between_events


def test_a_finish_reason_waits_for_one_event_only() -> None:
    last, dropped = event(chunk([choice("b", "stop")])), event(chunk([], usage=USAGE))
    events = EventFilter(ApiForm.CHAT, True)
    assert events.feed(last) == b""
    assert events.feed(dropped) == last
    assert events.feed(DONE) == DONE

    without_usage = EventFilter(ApiForm.CHAT, True)
    assert without_usage.feed(last) == b""
    assert without_usage.finish() == last

    unasked = EventFilter(ApiForm.CHAT)
    assert unasked.feed(last) == last


@pytest.mark.parametrize("takes_usage", [False, True])
def test_no_part_of_an_event_passes_before_it_is_whole(takes_usage: bool) -> None:
    events = EventFilter(ApiForm.CHAT, takes_usage)

    assert [events.feed(piece) for piece in (b"da", b"ta: x\n", b"\ndata: \xec", b"\x95")] == [
        *(b"", b"", b"data: x\n\n", b"")
    ]
    assert events.is_between_events
    assert events.finish() == b"data: \xec\x95"


GIVEN_UP = [
    pytest.param(ApiForm.CHAT, [event(chunk([choice("", "abort")])), DONE], "aborted", id="chat-abort"),
    pytest.param(ApiForm.CHAT, [event(chunk([{"index": 0, "text": "b", "finish_reason": "abort"}])), DONE], "aborted"),
    pytest.param(ApiForm.CHAT, [event({"error": {"message": "dead", "code": 500}}), DONE], "error", id="chat-error"),
    pytest.param(
        ApiForm.MESSAGES,
        [event({"type": "message_delta", "delta": {"stop_reason": None}}, "message_delta"), event({}, "message_stop")],
        "aborted",
        id="messages-abort",
    ),
    pytest.param(
        ApiForm.MESSAGES,
        [event({"type": "error", "error": {"type": "internal_error", "message": "dead"}}, "error")],
        "error",
        id="messages-error",
    ),
    *(
        pytest.param(form, [event({"error": {"message": "lost", "code": "server_lost"}}, "error")], "error")
        for form in ApiForm
    ),
]


@pytest.mark.parametrize("takes_usage", [False, True])
@pytest.mark.parametrize("size", [0, 7])
@pytest.mark.parametrize(("form", "events", "why"), GIVEN_UP)
def test_how_a_server_gives_up_is_withheld_until_the_end(
    form: ApiForm, events: list[bytes], why: str, size: int, takes_usage: bool
) -> None:
    before = event(chunk([choice("a")])) if form is ApiForm.CHAT else event({"type": "started"}, "started")
    data = before + b"".join(events)
    stream = EventFilter(form, takes_usage)

    pieces = [data[at : at + size] for at in range(0, len(data), size)] if size else [data]
    assert b"".join(map(stream.feed, pieces)) == before
    assert why in stream.given_up
    assert stream.finish() == b"".join(events)


@pytest.mark.parametrize(
    "last",
    [
        event(chunk([choice("", "stop")])),
        event({"error": {"message": "too long", "code": 400}}),
        event({"error": {"message": "odd", "code": "500"}}),
        event({"error": None}),
        event({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}, "error"),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, "message_delta"),
    ],
)
def test_ends_and_errors_of_a_request_are_not_withheld(last: bytes) -> None:
    for form in (ApiForm.CHAT, ApiForm.MESSAGES):
        stream = EventFilter(form)
        assert (stream.feed(last), stream.given_up) == (last, "")


def test_what_is_withheld_is_bounded() -> None:
    stream = EventFilter(ApiForm.CHAT)
    stream.feed(event({"error": {"code": 500}}))
    for _ in range(5):
        assert stream.feed(event({"x": "x" * (MAX_EVENT_BYTES // 2)})) == b""

    assert len(stream.finish()) <= MAX_EVENT_BYTES


def test_whole_events_pass_as_they_came() -> None:
    events, two = EventFilter(ApiForm.CHAT), event(chunk([choice("a")])) * 2

    assert events.feed(two[: len(two) // 2]) == two[: len(two) // 2]
    assert events.feed(two) == two


def test_a_whole_event_is_out_before_the_next_begins() -> None:
    events = EventFilter(ApiForm.CHAT, True)
    first = event(chunk([choice("a")]))

    assert events.feed(first + b"data: {") == first
    assert events.feed(b"}\n\n") == b"data: {}\n\n"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [30_000, MAX_EVENT_BYTES + 1, 4 * MAX_EVENT_BYTES])
def test_an_event_beyond_the_bound_passes_unparsed_and_unheld(size: int, line_end: bytes) -> None:
    text = "x" * (MAX_EVENT_BYTES + 70_000)
    large = event(chunk([], usage=USAGE, x=text)).replace(b"\n", line_end)
    small = event(chunk([], usage=USAGE)).replace(b"\n", line_end)
    wanted = b""
    data = large + small
    events = EventFilter(ApiForm.CHAT, True)

    passed = b""
    for at in range(0, len(data), size):
        passed += events.feed(data[at : at + size])
        assert events.is_between_events is passed.endswith(line_end * 2) or not passed
        held = min(at + size, len(data)) - len(passed)
        assert held <= MAX_EVENT_BYTES + len(small)
    assert passed + events.finish() == large + wanted


def test_an_event_within_the_bound_is_changed() -> None:
    text = "x" * (MAX_EVENT_BYTES - 400)

    assert run(event(chunk([], usage=USAGE, x=text)), True, size=30_000)[0] == b""


def test_a_long_event_costs_no_search_from_its_beginning_for_each_piece() -> None:
    data = b"data: " + b"x" * (MAX_EVENT_BYTES - 100) + b"\n\n"
    events = EventFilter(ApiForm.CHAT, True)
    pieces = [data[at : at + 512] for at in range(0, len(data), 512)]
    began = time.perf_counter()
    for piece in pieces:
        events.feed(piece)

    assert time.perf_counter() - began < 0.5, "from the beginning each time it takes seconds"


MESSAGES = [
    event(
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "stop_reason": None,
                "usage": {"input_tokens": 31, "output_tokens": 0},
            },
        },
        "message_start",
    ),
    event(
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        "content_block_start",
    ),
    event(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}, "content_block_delta"
    ),
    event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": 11,
                "output_tokens": 5,
                "cache_read_input_tokens": 16,
                "cache_creation_input_tokens": 4,
            },
        },
        "message_delta",
    ),
    event({"type": "message_stop"}, "message_stop"),
]

RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "error": None, "usage": None}
RESPONSE_USAGE = {
    "input_tokens": 31,
    "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
    "output_tokens": 5,
    "total_tokens": 36,
}


def responses(end: str, **more: Any) -> list[bytes]:
    names = ["response.created", "response.in_progress"]
    started = [event({"type": name, "sequence_number": n, "response": RESPONSE}, name) for n, name in enumerate(names)]
    delta = {"type": "response.output_text.delta", "sequence_number": 2, "item_id": "i", "delta": "a"}
    last = {**RESPONSE, "status": end, "usage": RESPONSE_USAGE, **more}
    name = f"response.{end}"
    return [*started, event(delta, "response.output_text.delta"), event({"type": name, "response": last}, name)]


STREAMS = [
    pytest.param(
        ApiForm.CHAT,
        [
            event(chunk([choice("", token_ids=None)], prompt_token_ids=[1, 2])),
            event(chunk([choice("a", token_ids=[3, 4])])),
            event(chunk([choice("b", "length", stop_reason=None, token_ids=[5])])),
            event(chunk([], usage=USAGE)),
            DONE,
        ],
        AnswerNotes("chatcmpl-1", 31, 16, 5),
        id="vllm-chat",
    ),
    pytest.param(
        ApiForm.CHAT,
        [event(chunk([choice("a")])), event(chunk([choice("b", "stop")]))],
        AnswerNotes("chatcmpl-1"),
        id="no-end-mark",
    ),
    pytest.param(
        ApiForm.CHAT,
        [event(chunk([choice("a")])), event({"error": {"message": "worker lost", "code": 500}}), DONE],
        AnswerNotes("chatcmpl-1"),
        id="error-in-a-stream",
    ),
    pytest.param(
        ApiForm.CHAT,
        [event({"object": "error", "message": "out of memory", "code": 500})],
        AnswerNotes(),
        id="flat-error",
    ),
    pytest.param(
        ApiForm.CHAT,
        [event({"error": "short"}), DONE],
        AnswerNotes(),
        id="error-of-a-string",
    ),
    pytest.param(
        ApiForm.CHAT,
        [
            event(chunk([choice("a")], usage={"prompt_tokens": -4})),
            event(chunk([choice("b")], usage={"prompt_tokens": "x"})),
            event(chunk([choice("c")], usage=[1])),
            event(chunk([choice("d")], usage={"prompt_tokens": 10**30})),
        ],
        AnswerNotes("chatcmpl-1"),
        id="odd-usage-is-unknown",
    ),
    pytest.param(ApiForm.MESSAGES, MESSAGES, AnswerNotes("msg_1", 31, 16, 5), id="messages"),
    pytest.param(
        ApiForm.MESSAGES,
        [*MESSAGES[:2], event({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, "error")],
        AnswerNotes("msg_1", 31, None, 0),
        id="messages-error",
    ),
    pytest.param(
        ApiForm.RESPONSES,
        responses("completed"),
        AnswerNotes("resp_1", 31, 16, 5),
        id="responses",
    ),
    pytest.param(
        ApiForm.RESPONSES,
        responses("incomplete", incomplete_details={"reason": "max_output_tokens"}),
        AnswerNotes("resp_1", 31, 16, 5),
        id="responses-incomplete",
    ),
    pytest.param(
        ApiForm.RESPONSES,
        responses("failed", error={"code": "server_error", "message": "no"}),
        AnswerNotes("resp_1", 31, 16, 5),
        id="responses-failed",
    ),
    pytest.param(
        ApiForm.RESPONSES,
        [*responses("completed")[:2], event({"type": "error", "code": "x", "message": "bad"}, "error"), DONE],
        AnswerNotes("resp_1"),
        id="responses-error-event",
    ),
]


@pytest.mark.parametrize("size", [0, 13])
@pytest.mark.parametrize(("form", "events", "notes"), STREAMS)
def test_a_stream_is_noted(form: ApiForm, events: list[bytes], notes: AnswerNotes, size: int) -> None:
    assert run(b"".join(events), True, form, size)[1] == notes


@pytest.mark.parametrize(("form", "events", "notes"), STREAMS)
def test_a_stream_of_which_nothing_was_asked_is_noted_and_passed(
    form: ApiForm, events: list[bytes], notes: AnswerNotes
) -> None:
    data = b"".join(events)

    assert run(data, False, form, size=5) == (data, notes)


ODD_ERRORS = [
    pytest.param(b'{"error":{"code":1e999}}', id="number-beyond-the-range"),
    pytest.param(b'{"error":{"a":"\xff"}}', id="no-utf-8"),
    pytest.param(b'{"error":"\xff"}', id="text-that-is-no-utf-8"),
    pytest.param(b'{"usage":{"a":"\xff","\xff":1e999},"response":{"error":{"code":1e999}}}', id="odd-usage"),
    pytest.param(b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
]


@pytest.mark.parametrize("form", ApiForm)
@pytest.mark.parametrize("takes_usage", [False, True])
@pytest.mark.parametrize("body", ODD_ERRORS)
def test_an_error_that_cannot_be_decoded_passes(form: ApiForm, takes_usage: bool, body: bytes) -> None:
    data = b"data: " + body + b"\n\n"

    assert run(data, takes_usage, form) == (data, AnswerNotes())
    assert read_answer(body) == AnswerNotes()


WHOLE = [
    pytest.param(
        packed({"id": "c", "choices": [choice("a", "stop", token_ids=[1, 2])], "usage": USAGE}),
        AnswerNotes("c", 31, 16, 5),
        id="chat",
    ),
    pytest.param(packed({"id": "c", "choices": [choice("a", "stop")]}), AnswerNotes("c"), id="no-usage"),
    pytest.param(
        b'{ "id":"c", "choices" : [ {"logprobs":{"a":-Infinity}, "finish_reason":"stop"} ] , '
        b'"usage": {"prompt_tokens":3}, "x":1.0 }\n',
        AnswerNotes("c", 3),
        id="minus-infinity",
    ),
    pytest.param(
        packed(
            {
                "id": "msg",
                "type": "message",
                "stop_reason": "tool_use",
                "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1},
            }
        ),
        AnswerNotes("msg", 7, 4, 1),
        id="messages",
    ),
    pytest.param(
        packed({"id": "resp", "status": "completed", "error": None, "usage": RESPONSE_USAGE}),
        AnswerNotes("resp", 31, 16, 5),
        id="responses",
    ),
    pytest.param(packed({"error": {"message": "no", "code": 400}}), AnswerNotes(), id="error"),
    pytest.param(b"RIFF\xff\xfe", AnswerNotes(), id="no-json"),
    pytest.param(b"[1,2]", AnswerNotes(), id="an-array"),
    pytest.param(b'{"choices":[' + b"[" * 100_000, AnswerNotes(), id="deep"),
    pytest.param(packed({"id": "c", "choices": [1]}), AnswerNotes(), id="odd-types"),
]


@pytest.mark.parametrize(("body", "notes"), WHOLE)
def test_a_whole_answer_is_noted(body: bytes, notes: AnswerNotes) -> None:
    assert read_answer(body) == notes


def test_the_event_of_a_token_costs_microseconds() -> None:
    """It takes 1 us; parsing would take 5 and more."""
    data = event(chunk([choice(" token", token_ids=[1234])]))
    took = []
    for _ in range(5):
        events = EventFilter(ApiForm.CHAT, True)
        began = time.perf_counter()
        for _ in range(1000):
            events.feed(data)
        took.append(time.perf_counter() - began)

    assert min(took) < 0.02


OBJECTS = b"{}," * (MAX_OBJECTS + 1)
COSTLY = {
    "choices": b'{"id":"a","choices":[%b{}],"usage":{"prompt_tokens":7}}' % OBJECTS,
    "choices and NaN": b'{"id":"a","choices":[%b{}],"usage":NaN}' % OBJECTS,
    "numbers that Python reads": b'{"id":"a","x":[%b1]}' % (b"NaN," * (MAX_SLOW_BYTES // 4)),
}


@pytest.mark.parametrize("data", COSTLY.values(), ids=COSTLY.keys())
def test_what_costs_too_much_to_read_is_passed_and_not_noted(data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    stream = EventFilter(ApiForm.CHAT, takes_usage=True)

    assert stream.feed(event) + stream.finish() == event
    assert (stream.notes.response_id, stream.notes.prompt_tokens) == (None, None)
    assert read_answer(data) == AnswerNotes()


def test_count_beyond_32_bits_is_unknown() -> None:
    for count, noted in ((MAX_COUNT, MAX_COUNT), (MAX_COUNT + 1, None)):
        assert read_answer(b'{"usage":{"prompt_tokens":%d}}' % count).prompt_tokens == noted
