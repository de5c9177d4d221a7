"""What becomes of a request whose server refuses it, is busy, or breaks off."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body
from tests.proxy.scripted_server import ANSWER, LAST_CHUNK, PATIENCE_S, Call, chunk, serve_plainly, stream_head, whole

pytestmark = pytest.mark.e2e

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def first_does(first: Callable[[Call], None], pool: ScriptedPool, then: bytes) -> None:
    """Have the first call fail, and answer all others."""
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            first(call)
        else:
            call.send(then)

    pool.on(script)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500])
def test_refusal_is_the_clients_as_the_server_wrote_it(pool: ScriptedPool, path: str, status: int) -> None:
    body = b'{ "error": {"message":"no \\u00e9", "code":%d} }\n' % status
    pool.answers(body, status, "x-why: odd", "retry-after: 7")

    for more in ({}, {"stream": True}):
        answer = pool.post(path, chat_body(prompt="hi", input="hi", **more))

        assert (answer.status, answer.body, answer.header("x-why")) == (status, body, "odd")
        assert answer.header("retry-after") == "7"
    assert len(pool.calls) == 2


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_a_busy_server_refuses_goes_to_the_other(pool: ScriptedPool, status: int, stream: bool) -> None:
    then = stream_head() + chunk(EVENT) + LAST_CHUNK if stream else whole(ANSWER)
    first_does(lambda call: call.send(whole(b"full", status, "retry-after: 1")), pool, then)

    answer = pool.post(CHAT, chat_body(stream=stream))

    assert (answer.status, answer.body, answer.is_whole) == (200, EVENT if stream else ANSWER, True)
    assert len({call.body for call in pool.calls}) == 1
    assert sorted(len(each.calls) for each in pool.servers) == [1, 1]


@pytest.mark.parametrize("status", [429, 503])
def test_request_that_no_server_has_room_for_ends_with_the_words_of_one(pool: ScriptedPool, status: int) -> None:
    body = b'{"error":"full \\u00e9"}'
    pool.answers(body, status, "retry-after: 1", "x-why: odd")

    answer = pool.post(CHAT, chat_body())

    assert (answer.status, answer.body, answer.is_whole) == (status, body, True)
    assert (answer.header("retry-after"), answer.header("x-why")) == ("1", "odd")
    assert {len(each.calls) > 0 for each in pool.servers} == {True}


BREAKS: dict[str, Callable[[Call], None]] = {
    "without a byte": Call.cut,
    "by a reset": Call.reset,
    "within the head": lambda call: call.cut(b"HTTP/1.1 200 OK\r\nconte"),
    "with no HTTP": lambda call: call.cut(b"SSH-2.0-OpenSSH\r\n\r\n"),
}


@pytest.mark.parametrize("fails", BREAKS.values(), ids=BREAKS.keys())
@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech"])
def test_connection_that_breaks_before_the_answer_moves_the_request(
    pool: ScriptedPool, path: str, fails: Callable[[Call], None]
) -> None:
    first_does(fails, pool, whole(ANSWER))

    answer = pool.post(path, chat_body())

    assert (answer.status, answer.body) == (200, ANSWER)
    assert {call.body for call in pool.calls} == {chat_body()}
    assert len(pool.calls) >= 2


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech"])
def test_request_that_breaks_each_server_ends_with_an_error_after_some_tries(pool: ScriptedPool, path: str) -> None:
    pool.on(Call.cut)

    answer = pool.post(path, chat_body())

    assert answer.status in (422, 502, 503)
    assert answer.json()["error"]["code"] in ("workers_lost", "server_lost", "no_worker")
    assert 2 <= len(pool.calls) <= 12


def openai_error(event: bytes) -> Any:
    return json.loads(event.partition(b"data: ")[2])["error"]["code"]


def anthropic_error(event: bytes) -> Any:
    found = json.loads(event.partition(b"data: ")[2])
    assert found["type"] == "error"
    return found["error"]["code"]


CALLS_OF = {CHAT: 4, "/v1/completions": 4, "/v1/odd/stream": 1}
"""Of a stream that each server breaks off: it may move three times. The event is none of the other APIs."""

APIS = {
    "chat": (CHAT, openai_error),
    "completions": ("/v1/completions", openai_error),
    "messages": ("/v1/messages", anthropic_error),
    "responses": ("/v1/responses", openai_error),
    "a path that is no work": ("/v1/odd/stream", openai_error),
}


@pytest.mark.parametrize("break_off", [Call.cut, Call.reset], ids=["ended", "reset"])
@pytest.mark.parametrize("tail", [b"", b'data: {"choi'], ids=["between events", "within an event"])
@pytest.mark.parametrize(("path", "code_of"), APIS.values(), ids=APIS.keys())
def test_stream_that_breaks_off_at_each_server_ends_with_an_error_in_the_form_of_its_api(
    pool: ScriptedPool, path: str, code_of: Callable[[bytes], Any], tail: bytes, break_off: Callable[[Call], None]
) -> None:
    def script(call: Call) -> None:
        call.send(stream_head() + chunk(EVENT + tail))
        assert came.wait(PATIENCE_S)
        break_off(call)

    came = Event()
    pool.on(script)
    with pool.client() as client:
        client.ask("POST", path, chat_body(stream=True, prompt="hi", input="hi"))
        answer = client.head()
        client.next_chunk(answer)
        came.set()
        client.read_until_it_breaks(answer)

    *events, last, rest = answer.body.split(b"\n\n")
    assert (answer.status, answer.is_whole, rest) == (200, False, b"")
    assert events[0] == EVENT.removesuffix(b"\n\n")
    assert last.startswith(b"event: error\ndata: ")
    assert code_of(last) == "server_lost"
    calls = CALLS_OF.get(path, 2)
    # Behind a global router each of its moves is to a router that moves the request too.
    assert calls <= len(pool.calls) <= calls * (2 if pool.is_global else 1)


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "connection: close"])
def test_stream_to_a_client_of_http_1_0_that_breaks_off_ends_with_an_error(pool: ScriptedPool, framing: str) -> None:
    """nginx asks so by default. The end of the connection is the end of an answer then, so it alone shows nothing."""
    is_chunked = "chunked" in framing

    def script(call: Call) -> None:
        call.send(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode())
        call.send(chunk(EVENT + b"data: {") if is_chunked else EVENT + b"data: {")
        assert came.wait(PATIENCE_S)
        call.reset()

    came = Event()
    pool.on(script)
    body = chat_body(stream=True)
    with pool.client() as client:
        client.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = client.head()
        client.until(b"\n\n")
        came.set()
        last, end = client.rest().split(b"\n\n")[-2:]

    assert (answer.status, answer.header("transfer-encoding"), end) == (200, None, b"")
    assert openai_error(last) == "server_lost"


@pytest.mark.parametrize("head", [b"content-length: 1000", b"transfer-encoding: chunked"])
def test_whole_answer_that_breaks_off_does_not_look_whole(pool: ScriptedPool, head: bytes) -> None:
    pool.says(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + head + b"\r\n\r\n" + chunk(b'{"a":1}'))

    for path in (CHAT, "/v1/audio/speech"):
        assert not pool.post(path, chat_body()).is_whole


def test_kept_connection_that_its_server_closes_costs_no_request(pool: ScriptedPool) -> None:
    """Answered once more on another connection, by the same or the other server."""
    for _ in range(8):
        pool.on(serve_plainly)
        assert pool.post(CHAT, chat_body()).status == 200
        for each in pool.servers:
            each.drop_idle()
        assert pool.post(CHAT, chat_body()).status == 200
    assert len(pool.calls) == 16
