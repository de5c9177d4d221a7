"""Token ids that poolgrid asked for are out of the answer again, those of the prompt are noted, and every other byte is
the server's."""

from __future__ import annotations

import time
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.event_filter import (
    MAX_EVENT_BYTES,
    AnswerNotes,
    ApiForm,
    EventFilter,
    TakenIds,
    cut_answer,
)
from poolgrid.server.forwarding.prompt_ids import IDS_MAX
from tests.cases import for_each
from tests.forwarding.test_event_filter import DONE, USAGE, choice, chunk, event, packed

NULL, ABSENT, EXTENSION = TakenIds.NULL, TakenIds.ABSENT, TakenIds.EXTENSION


def run(data: bytes, ids: TakenIds, size: int = 0, takes_usage: bool = True) -> tuple[bytes, AnswerNotes]:
    """The whole stream through the filter, in pieces of ``size`` bytes or at once."""
    stream = EventFilter(ApiForm.CHAT, takes_usage, ids)
    pieces = [data[at : at + size] for at in range(0, len(data), size)] if size else [data]
    passed = b"".join(map(stream.feed, pieces)) + stream.finish()
    return passed, stream.notes


PAIRS = [
    pytest.param(
        event(chunk([choice("a", token_ids=[1, 22])])),
        event(chunk([choice("a", token_ids=None)])),
        NULL,
        id="vllm-token",
    ),
    pytest.param(
        event(
            chunk([choice("a", "stop", stop_reason=None, token_ids=[1], weight_versions=None)], kv_transfer_params=None)
        ),
        event(
            chunk(
                [choice("a", "stop", stop_reason=None, token_ids=None, weight_versions=None)], kv_transfer_params=None
            )
        ),
        NULL,
        id="vllm-last-token",
    ),
    pytest.param(
        event(chunk([choice("", token_ids=None)], prompt_token_ids=[1, 2, 3], prompt_text=None)),
        event(chunk([choice("", token_ids=None)], prompt_token_ids=None, prompt_text=None)),
        NULL,
        id="vllm-first-event",
    ),
    pytest.param(event(chunk([choice(None, token_ids=[7])])), b"", NULL, id="vllm-event-for-ids-only"),
    pytest.param(
        event(chunk([choice(None, "stop", stop_reason=None, token_ids=[7])])),
        event(chunk([choice(None, "stop", stop_reason=None, token_ids=None)])),
        NULL,
        id="vllm-end-without-text",
    ),
    pytest.param(
        event(chunk([choice("a", token_ids=[1]), choice("b", index=1, token_ids=[2])])),
        event(chunk([choice("a", token_ids=None), choice("b", index=1, token_ids=None)])),
        NULL,
        id="two-choices-in-a-chunk",
    ),
    pytest.param(
        event(
            chunk(
                [
                    {
                        "index": 0,
                        "text": "a",
                        "logprobs": None,
                        "finish_reason": None,
                        "stop_reason": None,
                        "prompt_token_ids": [9],
                        "token_ids": [1],
                    }
                ]
            )
        ),
        event(
            chunk(
                [
                    {
                        "index": 0,
                        "text": "a",
                        "logprobs": None,
                        "finish_reason": None,
                        "stop_reason": None,
                        "prompt_token_ids": None,
                        "token_ids": None,
                    }
                ]
            )
        ),
        NULL,
        id="vllm-completions-first",
    ),
    pytest.param(
        event(chunk([choice("a", token_ids=[1])], kv_transfer_params={"token_ids": [5]})),
        event(chunk([choice("a", token_ids=None)], kv_transfer_params={"token_ids": [5]})),
        NULL,
        id="ids-of-another-object-stay",
    ),
    pytest.param(
        event(chunk([choice('"finish_reason":null,"token_ids":[1]', token_ids=[1])])),
        event(chunk([choice('"finish_reason":null,"token_ids":[1]', token_ids=None)])),
        NULL,
        id="a-text-like-a-member-stays",
    ),
    pytest.param(
        event({"prompt_token_ids": [9], **chunk([choice("a", token_ids=[1])])}),
        event({"prompt_token_ids": None, **chunk([choice("a", token_ids=None)])}),
        NULL,
        id="ids-before-the-choices",
    ),
    pytest.param(
        event(chunk([choice(None, token_ids=[1])])),
        event(chunk([choice(None)])),
        ABSENT,
        id="sglang-event-without-text",
    ),
    pytest.param(
        event(chunk([choice("a", matched_stop=None, token_ids=[1, 2])])),
        event(chunk([choice("a", matched_stop=None)])),
        ABSENT,
        id="sglang-completions-token",
    ),
    pytest.param(
        event(chunk([choice("a", matched_stop=None, token_ids=[1], prompt_token_ids=[3])], usage=None)),
        event(chunk([choice("a", matched_stop=None)], usage=None)),
        ABSENT,
        id="sglang-completions-first",
    ),
    pytest.param(event(chunk([], usage=None, sglext={"input_ids": [1]})), b"", EXTENSION, id="sglang-ids"),
    pytest.param(
        event(chunk([], usage=None, sglext={"routed_experts": "x", "input_ids": [1]})),
        event(chunk([], usage=None, sglext={"routed_experts": "x"})),
        EXTENSION,
        id="sglang-ids-next-to-what-the-client-asked",
    ),
    pytest.param(
        event(chunk([], sglext={"input_ids": [1], "output_ids": [[2]]})),
        event(chunk([], sglext={"output_ids": [[2]]})),
        EXTENSION,
        id="sglang-ids-of-the-prompt-only",
    ),
    pytest.param(
        b'data: {"choices":[{"finish_reason":null,\ndata: "token_ids":[1,\ndata: 2]}]}\n\n',
        b'data: {"choices":[{"finish_reason":null,\ndata: "token_ids":null}]}\n\n',
        NULL,
        id="data-in-lines",
    ),
    pytest.param(
        b'id: 7\ndata:{"choices":[{"token_ids":[1]}]} \nretry: 5\nodd\n\n',
        b'id: 7\ndata:{"choices":[{"token_ids":null}]} \nretry: 5\nodd\n\n',
        NULL,
        id="other-fields-stay",
    ),
    pytest.param(
        b'data: {"choices":\n: note\ndata: [{"token_ids":[1]}]}\n\n',
        b'data: {"choices":\ndata: [{"token_ids":null}]}\n: note\n\n',
        NULL,
        id="a-comment-between-lines-of-data-stays",
    ),
    pytest.param(
        b'data: {"choices":[{"token_ids":[1]}\n\n', b'data: {"choices":[{"token_ids":[1]}\n\n', NULL, id="bad"
    ),
]


@pytest.mark.parametrize(("data", "passed", "ids"), PAIRS)
@for_each("takes_usage, size, line_end", product([False, True], [0, 1, 7], [b"\n", b"\r\n", b"\r"]))
def test_ids_are_taken_out_of_a_stream(
    data: bytes, passed: bytes, ids: TakenIds, line_end: bytes, size: int, takes_usage: bool
) -> None:
    kept = event(chunk([choice("안녕")]))
    whole = (kept + data + kept).replace(b"\n", line_end)

    assert run(whole, ids, size, takes_usage)[0] == (kept + passed + kept).replace(b"\n", line_end)


@pytest.mark.parametrize(("data", "passed", "ids"), PAIRS)
def test_an_event_without_its_blank_line_is_cut_at_the_end(data: bytes, passed: bytes, ids: TakenIds) -> None:
    assert run(data.rstrip(b"\n"), ids)[0] == passed.rstrip(b"\n")


@pytest.mark.parametrize(("data", "passed", "ids"), PAIRS)
def test_ids_that_were_not_asked_for_stay(data: bytes, passed: bytes, ids: TakenIds) -> None:
    assert run(data, TakenIds.NONE)[0] == data


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bytes, TakenIds]:
    """A stream, what is to come of it, and what was asked for: of the events above, and of texts of any kind."""
    ids = draw(st.sampled_from([NULL, ABSENT, EXTENSION]))
    known = [pair.values for pair in PAIRS if pair.values[2] is ids]
    sent, wanted = b"", b""
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()) and ids is not EXTENSION:
            text, listed = draw(st.text(max_size=12)), draw(st.lists(st.integers(0, 300_000), min_size=1, max_size=3))
            left: dict[str, Any] = {"token_ids": None} if ids is NULL else {}
            data, passed = event(chunk([choice(text, token_ids=listed)])), event(chunk([choice(text, **left)]))
        elif draw(st.integers(0, 5)) == 0:
            last = chunk([choice("z", "stop")])
            data = event(last) + event(chunk([], system_fingerprint="f", usage=USAGE))
            passed = event({**last, "system_fingerprint": "f"})
        else:
            data, passed = draw(st.sampled_from(known))[:2]  # type: ignore[assignment]
        sent, wanted = sent + data, wanted + passed
    return sent, wanted, ids


@given(
    stream=streams(),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 2000), max_size=20),
)
def test_the_answer_does_not_depend_on_where_the_stream_is_split(
    stream: tuple[bytes, bytes, TakenIds], line_end: bytes, cuts: list[int]
) -> None:
    data, wanted, ids = stream[0].replace(b"\n", line_end), stream[1].replace(b"\n", line_end), stream[2]
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events, whole = EventFilter(ApiForm.CHAT, True, ids), EventFilter(ApiForm.CHAT, True, ids)
    passed = b"".join(events.feed(data[a:b]) for a, b in pairwise(places)) + events.finish()

    assert passed == wanted
    assert whole.feed(data) + whole.finish() == wanted
    assert events.notes == whole.notes


STREAMS = [
    pytest.param(
        NULL,
        [
            event(chunk([choice("", token_ids=None)], prompt_token_ids=[1, 2])),
            event(chunk([choice("b", "length", stop_reason=None, token_ids=[5])])),
            event(chunk([], usage=USAGE)),
            DONE,
        ],
        AnswerNotes("chatcmpl-1", 31, 16, 5, b"[1,2]"),
        id="vllm-chat",
    ),
    pytest.param(
        ABSENT,
        [
            event(chunk([choice("a", matched_stop=None, token_ids=[1], prompt_token_ids=[3])])),
            event(chunk([choice("b", index=1, matched_stop=None, token_ids=[1], prompt_token_ids=[3])])),
        ],
        AnswerNotes("chatcmpl-1", prompt_token_ids=b"[3]"),
        id="sglang-completions",
    ),
    pytest.param(
        EXTENSION,
        [event(chunk([choice("a", "stop")])), event(chunk([], usage=None, sglext={"input_ids": [4, 5]})), DONE],
        AnswerNotes("chatcmpl-1", prompt_token_ids=b"[4,5]"),
        id="sglang-chat",
    ),
    pytest.param(NULL, [event(chunk([choice("a", token_ids=[1])])), DONE], AnswerNotes("chatcmpl-1"), id="not-shown"),
]


@pytest.mark.parametrize("size", [0, 13])
@pytest.mark.parametrize(("ids", "events", "notes"), STREAMS)
def test_ids_of_the_prompt_are_noted(ids: TakenIds, events: list[bytes], notes: AnswerNotes, size: int) -> None:
    assert run(b"".join(events), ids, size)[1] == notes


WHOLE = [
    pytest.param(
        NULL,
        packed(
            {"id": "c", "choices": [choice("a", "stop", token_ids=[1, 2])], "usage": USAGE, "prompt_token_ids": [7]}
        ),
        packed({"id": "c", "choices": [choice("a", "stop", token_ids=None)], "usage": USAGE, "prompt_token_ids": None}),
        AnswerNotes("c", 31, 16, 5, b"[7]"),
        id="vllm-chat",
    ),
    pytest.param(
        ABSENT,
        packed({"id": "c", "choices": [choice("a", "stop", prompt_token_ids=[7], token_ids=[1, 2])]}),
        packed({"id": "c", "choices": [choice("a", "stop")]}),
        AnswerNotes("c", prompt_token_ids=b"[7]"),
        id="sglang-completions",
    ),
    pytest.param(
        EXTENSION,
        packed({"id": "c", "choices": [choice("a", "stop")], "sglext": {"input_ids": [7]}}),
        packed({"id": "c", "choices": [choice("a", "stop")]}),
        AnswerNotes("c", prompt_token_ids=b"[7]"),
        id="sglang-chat",
    ),
    pytest.param(
        EXTENSION,
        packed({"id": "c", "sglext": {"a": 1, "input_ids": [7]}, "choices": []}),
        packed({"id": "c", "sglext": {"a": 1}, "choices": []}),
        AnswerNotes("c", prompt_token_ids=b"[7]"),
        id="sglang-chat-beside-another",
    ),
    pytest.param(
        NULL,
        b'{ "id":"c", "choices" : [ {"logprobs":{"a":-Infinity}, "token_ids": [1, 2 ] , "finish_reason":"stop"} ] , '
        b'"usage": {"prompt_tokens":3}, "x":1.0 }\n',
        b'{ "id":"c", "choices" : [ {"logprobs":{"a":-Infinity}, "token_ids": null , "finish_reason":"stop"} ] , '
        b'"usage": {"prompt_tokens":3}, "x":1.0 }\n',
        AnswerNotes("c", 3),
        id="minus-infinity",
    ),
    pytest.param(NULL, packed({"error": {"message": "no", "code": 400}}), None, AnswerNotes(), id="error"),
    pytest.param(NULL, b'RIFF\xff\xfetoken_ids"', None, AnswerNotes(), id="no-json"),
    pytest.param(NULL, b'["token_ids"]', None, AnswerNotes(), id="an-array"),
    pytest.param(NULL, b'{"token_ids":[1],"choices":[' + b"[" * 100_000, None, AnswerNotes(), id="deep"),
    pytest.param(NULL, packed({"id": "c", "choices": [1], "token_ids": "x"}), None, AnswerNotes(), id="odd-types"),
    pytest.param(EXTENSION, packed({"id": "c", "sglext": [1]}), None, AnswerNotes("c"), id="odd-extension"),
    pytest.param(
        TakenIds.NONE, packed({"id": "c", "prompt_token_ids": [7]}), None, AnswerNotes("c"), id="not-asked-for"
    ),
]


@pytest.mark.parametrize(("ids", "body", "passed", "notes"), WHOLE)
def test_a_whole_answer_is_cut_and_noted(ids: TakenIds, body: bytes, passed: bytes | None, notes: AnswerNotes) -> None:
    assert cut_answer(body, ids) == (body if passed is None else passed, notes)


@pytest.mark.parametrize("ids", TakenIds)
def test_the_longest_list_of_ids_fits_into_an_event(ids: TakenIds) -> None:
    listed = [234_567] * IDS_MAX
    shown = {"sglext": {"input_ids": listed}} if ids is EXTENSION else {"prompt_token_ids": listed}
    data = event(chunk([choice("a")], **shown))

    assert len(data) < MAX_EVENT_BYTES
    assert (run(data, ids, 60_000)[0] == data) is (ids is TakenIds.NONE)


def test_the_event_of_a_token_costs_microseconds() -> None:
    """It takes 2 us; parsing would take 5 and more."""
    data = event(chunk([choice(" token", token_ids=[1234])]))
    took = []
    for _ in range(5):
        events = EventFilter(ApiForm.CHAT, True, NULL)
        began = time.perf_counter()
        for _ in range(1000):
            events.feed(data)
        took.append(time.perf_counter() - began)

    assert min(took) < 0.02
