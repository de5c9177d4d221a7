"""A client that leaves frees its server, and one that does not read holds its server back."""

from __future__ import annotations

from threading import Event

import pytest

from tests.e2e.processes import becomes, metric, sum_of
from tests.proxy.pool import GROWTH_BYTES_MAX, ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body
from tests.proxy.scripted_server import ANSWER, LAST_CHUNK, PATIENCE_S, Call, chunk, stream_head, whole

pytestmark = pytest.mark.e2e

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LEFT = "poolgrid_frontend_client_disconnects_total"
BEGINNINGS = {
    "nothing": b"",
    "half of a head": b"HTTP/1.1 200 OK\r\nconte",
    "the head of a stream": stream_head(),
    "an event": stream_head() + chunk(EVENT),
    "half of an event": stream_head() + b"%x\r\n" % len(EVENT) + EVENT[:20],
    "half of an answer": whole(ANSWER)[:-20],
    "an answer without end": b"HTTP/1.1 200 OK\r\n\r\n" + ANSWER,
    "half of a refusal": whole(b"full" * 10, 503)[:-20],
}


@pytest.mark.parametrize("reset", [False, True], ids=["ends", "resets"])
@pytest.mark.parametrize("path", [CHAT, "/v1/odd"])
@pytest.mark.parametrize("came", BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_client_that_leaves_ends_its_request_at_the_server(
    pool: ScriptedPool, came: bytes, path: str, reset: bool
) -> None:
    called, left = Event(), Event()

    def script(call: Call) -> None:
        call.send(came)
        called.set()
        call.wait_until_left()
        left.set()

    pool.on(script)
    before = sum_of(pool.metrics(), LEFT)
    client = pool.client()
    client.ask("POST", path, chat_body(stream=b"event-stream" in came))
    assert called.wait(PATIENCE_S)
    assert metric(pool.url, "poolgrid_frontend_in_flight_requests") == 1
    client.leave(reset)

    assert left.wait(PATIENCE_S)
    becomes(pool.running, 0.0)
    assert sum_of(pool.metrics(), LEFT) == before + 1
    assert len(pool.calls) == 1


def test_client_that_leaves_before_its_request_is_whole_reaches_no_server(pool: ScriptedPool) -> None:
    with pool.client() as client:
        client.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
        becomes(pool.running, 1.0)
    becomes(pool.running, 0.0)

    assert pool.calls == []


PIECE = EVENT.replace(b'"a"', b'"%b"' % (b"a" * 4000)) * 60
PIECES = 400
"""Far more than the sockets of one hop and the router may keep: a socket receives up to 32 MB."""


@pytest.mark.parametrize("kind", ["stream", "stream without counts", "length", "close"])
def test_client_that_does_not_read_holds_its_server_back_and_no_other_client(pool: ScriptedPool, kind: str) -> None:
    streamed = "stream" in kind
    pieces = PIECES * 2 if pool.is_global else PIECES
    total = len(PIECE) * pieces
    held, go_on = Event(), Event()
    taken: list[tuple[int, bool]] = []

    def script(call: Call) -> None:
        if call.header("x-slow") is None:
            call.send(whole(ANSWER))
            return
        length = f"content-length: {total}\r\n" if kind == "length" else ""
        call.send(stream_head() if streamed else f"HTTP/1.1 200 OK\r\n{length}\r\n".encode())
        piece = chunk(PIECE) if streamed else PIECE
        count, is_held = call.fill(piece, pieces)
        taken.append((count, is_held))
        held.set()
        assert go_on.wait(PATIENCE_S)
        call.fill_on(piece, pieces - 1 - count // len(piece))
        if streamed:
            call.send(LAST_CHUNK)
        elif kind == "close":
            call.cut()

    pool.on(script)
    before = pool.memory_bytes()
    with pool.client(receive_buffer=64 * 1024) as client:
        options = {"include_usage": True} if kind == "stream" else {}
        client.ask("POST", CHAT, chat_body(stream=streamed, stream_options=options), "x-slow: 1")
        assert held.wait(PATIENCE_S)
        [(count, is_held)] = taken
        assert is_held, f"the router took all of {count} bytes"
        assert count < total // 2
        assert pool.memory_bytes() - before < GROWTH_BYTES_MAX
        for _ in range(4):
            assert pool.post(CHAT, chat_body()).body == ANSWER
        go_on.set()
        answer = client.answer()

    assert (answer.is_whole, len(answer.body)) == (True, total)
    assert answer.body == PIECE * pieces
    assert pool.memory_bytes() - before < GROWTH_BYTES_MAX


def test_connection_to_the_server_is_used_again_after_each_kind_of_answer(pool: ScriptedPool) -> None:
    """Else each request costs a connection, of which both sides have a bounded number."""
    answers = [whole(ANSWER), whole(b"no", 404), stream_head() + chunk(EVENT) + LAST_CHUNK, whole(b"", 204)]
    made_before = sum(each.connections_made for each in pool.servers)
    for each in answers * 4:
        pool.on(lambda call, each=each: call.send(each))  # type: ignore[misc]
        assert pool.post("/v1/odd", b"{}").is_whole

    # As many as there are servers, where none is kept from before.
    assert sum(each.connections_made for each in pool.servers) - made_before <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_client_of_http_1_0_gets_an_answer_without_chunks(pool: ScriptedPool, stream: bool) -> None:
    pool.says(stream_head() + chunk(EVENT) + chunk(EVENT) + LAST_CHUNK if stream else whole(ANSWER))
    body = chat_body(stream=stream)
    with pool.client() as client:
        client.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = client.answer()

    assert (answer.status, answer.header("transfer-encoding")) == (200, None)
    assert answer.body == (EVENT * 2 if stream else ANSWER)


def test_requests_that_follow_on_one_connection_are_answered_in_order(pool: ScriptedPool) -> None:
    pool.on(lambda call: call.send(whole(call.body)))
    bodies = [chat_body(number=number) for number in range(5)]
    with pool.client() as client:
        for body in bodies:
            client.ask("POST", CHAT, body)
        assert [client.answer().body for _ in bodies] == bodies
