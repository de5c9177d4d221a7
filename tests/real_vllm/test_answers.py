"""The judge of transparency: what a router may not change is found, and what it may change is not."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.real_vllm.answers import Answer, compare, events, masked
from tests.real_vllm.surface import Case, by_endpoint, cases
from tests.real_vllm.transparency import Compared, Unequal, compared, summary

JSON = ("content-type", "application/json")
SSE = ("content-type", "text/event-stream; charset=utf-8")
ID, OTHER_ID = "chatcmpl-a915746d8d5b7e93", "chatcmpl-b0f122ddbb28b241"


def whole(text: str = "Hello", answer_id: str = ID, created: int = 1795930245) -> bytes:
    choice = f'{{"index":0,"message":{{"role":"assistant","content":"{text}"}},"finish_reason":"stop"}}'
    return (
        f'{{"id":"{answer_id}","object":"chat.completion","created":{created},"model":"tiny","choices":[{choice}],'
        '"usage":{"prompt_tokens":24,"total_tokens":28,"completion_tokens":4}}'
    ).encode()


def chunk(text: str, answer_id: str = ID, index: int = 0, finish: str = "null") -> bytes:
    choice = f'{{"index":{index},"delta":{{"content":"{text}"}},"finish_reason":{finish}}}'
    return f'data: {{"id":"{answer_id}","created":1795930245,"choices":[{choice}]}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"
STREAM = chunk("Hel") + chunk("lo") + chunk("", finish='"stop"') + DONE


def answered(body: bytes, *headers: tuple[str, str], status: int = 200, request_id: str = "") -> Answer:
    return Answer(status, headers or (JSON,), body, request_id)


def streamed(body: bytes, *more: tuple[str, str]) -> Answer:
    return answered(body, SSE, *more)


def test_ids_times_and_framing_may_differ() -> None:
    own = answered(whole(), JSON, ("date", "Sun"), ("content-length", "5"), ("vary", "Origin"))
    passed = answered(whole(answer_id=OTHER_ID, created=5), JSON, ("transfer-encoding", "chunked"), ("Vary", "Origin"))

    assert compare(own, passed) == []


@pytest.mark.parametrize(
    "changed",
    [
        whole("hello"),
        whole() + b"\n",
        whole()[:-1],
        whole().replace(b'"role":"assistant","content":"Hello"', b'"content":"Hello","role":"assistant"'),
        whole().replace(b'":', b'": '),
        whole().replace(b":24", b":24.0"),
        whole().replace(b'"model":"tiny",', b""),
        whole().replace(b'"tiny"', b'"tinier"'),
        json.dumps(json.loads(whole("é")), separators=(",", ":")).encode(),
        b"",
    ],
    ids=["text", "byte more", "byte less", "order", "spaces", "number", "field lost", "model", "escapes", "empty"],
)
def test_any_other_byte_of_a_whole_answer_is_a_difference(changed: bytes) -> None:
    original = whole("é") if b"\\u00e9" in changed else whole()

    (found,) = compare(answered(original), answered(changed))

    assert found.where.startswith("body")
    assert not found.timing


def test_an_id_that_was_the_same_twice_must_be_the_same_twice() -> None:
    twice = f'{{"id":"{ID}","request_id":"{ID}"}}'.encode()
    apart = f'{{"id":"{ID}","request_id":"{OTHER_ID}"}}'.encode()

    assert compare(answered(twice), answered(twice.replace(ID.encode(), OTHER_ID.encode()))) == []
    assert compare(answered(twice), answered(apart))
    assert compare(answered(apart), answered(twice))


def test_an_id_that_the_client_gave_is_kept() -> None:
    own = answered(whole(answer_id="chatcmpl-mine-1"), request_id="mine-1")

    assert compare(own, own) == []
    assert compare(own, answered(whole(answer_id=OTHER_ID), request_id="mine-1"))
    assert compare(own, answered(whole(answer_id="chatcmpl-r-mine-1"), request_id="mine-1"))


@pytest.mark.parametrize(
    "text", ['{"id":"tiny"}', '{"id":"my-model-7b-0123456789"}', '{"text":"chatcmpl-0123456789abcdef"}']
)
def test_names_and_texts_are_no_ids(text: str) -> None:
    assert masked(text.encode()) == text.encode()


def test_ids_inside_a_message_and_signatures_are_masked() -> None:
    own = b'{"message":"Response with id \'resp_bbfaff0ed73079ab\' not found.","signature":"' + b"0" * 32 + b'"}'
    other = own.replace(b"bbfaff0ed73079ab", b"a73d199e1f419965").replace(b"0" * 32, b"f" * 32)

    assert masked(own) == masked(other)
    assert masked(own) != own


@pytest.mark.parametrize(
    ("own", "passed"),
    [
        ([("vary", "Origin")], []),
        ([], [("cache-control", "no-cache")]),
        ([("vary", "Origin")], [("vary", "origin")]),
        ([("set-cookie", "a=1"), ("set-cookie", "b=2")], [("set-cookie", "a=1")]),
        ([("set-cookie", "a=1"), ("set-cookie", "b=2")], [("set-cookie", "b=2"), ("set-cookie", "a=1")]),
        ([("x-poolgrid-worker", "w0")], [("x-poolgrid-worker", "w1")]),
    ],
)
def test_headers_are_the_servers_own(own: list[tuple[str, str]], passed: list[tuple[str, str]]) -> None:
    (found,) = compare(answered(b"{}", JSON, *own), answered(b"{}", JSON, *passed))

    assert found.where.startswith("header ")


def test_a_receipt_of_the_router_is_allowed() -> None:
    assert compare(answered(b"{}"), answered(b"{}", JSON, ("x-poolgrid-worker", "vllm-0"))) == []


def test_a_status_is_the_servers_own() -> None:
    assert [each.where for each in compare(answered(b"{}", status=429), answered(b"{}", status=503))] == ["status"]


@pytest.mark.parametrize(
    "changed",
    [
        STREAM.replace(b"lo", b"LO"),
        STREAM[: -len(DONE)],
        STREAM + DONE,
        STREAM.replace(b"data: ", b"data:"),
        STREAM.replace(b"\n\n", b"\r\n\r\n"),
        STREAM[:-1],
        chunk("lo") + chunk("Hel") + chunk("", finish='"stop"') + DONE,
        STREAM.replace(b'"stop"', b'"length"'),
        STREAM.replace(DONE, b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n' + DONE),
        STREAM.replace(b'"created"', b'"token_ids":[1],"created"', 1),
        STREAM.replace(ID.encode(), OTHER_ID.encode(), 1),
        b"",
    ],
    ids=["text", "end", "twice", "space", "line-ends", "half-end", "order", "finish", "usage", "field", "id", "empty"],
)
def test_any_other_byte_of_a_stream_is_a_difference(changed: bytes) -> None:
    found = compare(streamed(STREAM), streamed(changed))

    assert found
    assert found[0].where.startswith("event")


@pytest.mark.parametrize("more", [b": keep-alive\n\n", b":\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'])
def test_what_fills_a_silence_is_allowed_between_events(more: bytes) -> None:
    assert compare(streamed(STREAM), streamed(more + STREAM.replace(DONE, more + DONE))) == []
    assert compare(streamed(more + STREAM), streamed(STREAM)), "the server's own comment is lost"


def test_tokens_that_are_cut_into_other_events_differ_only_in_timing() -> None:
    merged = chunk("Hello") + chunk("", finish='"stop"') + DONE

    (found,) = compare(streamed(STREAM), streamed(merged))
    (lost,) = compare(streamed(STREAM), streamed(merged.replace(b"Hello", b"Hell")))

    assert found.timing
    assert not lost.timing


def test_choices_that_take_turns_otherwise_differ_only_in_timing() -> None:
    one = chunk("a") + chunk("x", index=1) + chunk("b") + chunk("y", index=1) + DONE
    other = chunk("a") + chunk("b") + chunk("x", index=1) + chunk("y", index=1) + DONE
    mixed = chunk("a") + chunk("y", index=1) + chunk("b") + chunk("x", index=1) + DONE

    assert [each.timing for each in compare(streamed(one), streamed(other))] == [True]
    assert [each.timing for each in compare(streamed(one), streamed(mixed))] == [False]


def test_numbers_of_events_follow_from_their_cuts() -> None:
    def delta(text: str, number: int) -> bytes:
        return (
            b"event: response.output_text.delta\ndata: "
            + json.dumps({"delta": text, "output_index": 0, "sequence_number": number}).encode()
            + b"\n\n"
        )

    assert [each.timing for each in compare(streamed(delta("ab", 4)), streamed(delta("a", 4) + delta("b", 5)))] == [
        True
    ]


def test_events_keep_every_byte() -> None:
    for body in (
        STREAM,
        STREAM[:-1],
        STREAM.replace(b"\n\n", b"\r\n\r\n"),
        b"",
        b"data: x",
        b": c\n\ndata: 1\ndata: 2\n\n",
    ):
        assert b"".join(events(body)) == body


def test_there_are_enough_cases_of_every_kind() -> None:
    chosen = list(cases())
    names = [(each.endpoint, each.name) for each in chosen]

    assert len(names) == len(set(names)) >= 200
    counts = by_endpoint(chosen)
    assert all(
        counts[path] >= 20 for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
    )


@contextmanager
def answering(*bodies: bytes, status: int = 200) -> Iterator[str]:
    """Serve event streams, one body after the other and the last one from then on."""
    left = list(bodies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header(*SSE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


MERGED = STREAM.replace(chunk("Hel") + chunk("lo"), chunk("Hello"))
CASE = Case("plain", "/v1/chat/completions", b"{}")


def run(own: tuple[bytes, ...], passed: tuple[bytes, ...]) -> Compared:
    with answering(*own) as server, answering(*passed) as router:
        return compared(server, router, CASE)


def test_a_case_whose_cuts_differ_is_sent_again_until_they_are_equal() -> None:
    found = run((STREAM,), (MERGED, MERGED, STREAM))

    assert (found.differences, found.tries, found.unsteady) == ([], 3, False)


def test_cuts_that_always_differ_are_a_difference() -> None:
    (found,) = run((STREAM,), (MERGED,)).differences

    assert found.timing


def test_cuts_that_vary_at_the_server_too_are_counted_apart() -> None:
    other = STREAM.replace(chunk("lo"), chunk("l") + chunk("o"))
    found = run((STREAM, STREAM, MERGED, STREAM), (other,))

    assert (found.differences, found.recut, found.unsteady) == ([], True, False)
    assert run((STREAM, STREAM, MERGED, STREAM), (other.replace(b"Hel", b"hel"),)).differences, "its text is another"


def test_another_text_is_a_difference_at_once() -> None:
    found = run((STREAM,), (STREAM.replace(b"lo", b"LO"), STREAM))

    assert (len(found.differences), found.tries, found.unsteady) == (1, 1, False)


def test_a_server_that_differs_from_itself_is_named() -> None:
    found = run((STREAM, STREAM, STREAM.replace(b"lo", b"LO")), (STREAM.replace(b"lo", b"la"),))

    assert found.unsteady
    assert found.differences


def test_a_router_that_does_not_answer_is_a_difference() -> None:
    with answering(STREAM) as server:
        found = compared(server, "http://127.0.0.1:9", CASE)

    assert "status" in [each.where for each in found.differences]


def test_one_difference_fails_the_whole() -> None:
    good = run((STREAM,), (STREAM,))

    assert summary([good, good])["requests"] == 2
    with pytest.raises(Unequal, match="1 of 2"):
        summary([good, dataclasses.replace(good, differences=run((STREAM,), (b"",)).differences)])


def test_the_fingerprint_of_a_choice_may_be_missing_only_where_there_are_several() -> None:
    mark, printed = b'"finish_reason":"stop"', b'"finish_reason":"stop"}],"system_fingerprint":"vllm-0.32"'
    one = chunk("", finish='"stop"')
    several = one + chunk("", index=1, finish='"stop"') + DONE
    for body, is_found in ((one + DONE, True), (several, False)):
        server = body.replace(mark + b"}]", printed, 1)
        assert server != body
        assert bool(compare(answered(server, SSE), answered(body, SSE))) is is_found
