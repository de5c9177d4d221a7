"""Clients' keys end at the router, and the servers' key never comes out of it."""

from __future__ import annotations

from threading import Event

import pytest

from tests.proxy.pool import SERVER_KEY, ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body
from tests.proxy.scripted_server import LAST_CHUNK, PATIENCE_S, Call, chunk, stream_head, whole

pytestmark = pytest.mark.e2e

CLIENT_KEY = "sk-client-0815"
STARS = "*" * len(SERVER_KEY)
ESCAPED = SERVER_KEY.replace("/", "\\/")


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech", "/v1/files/file-1"])
@pytest.mark.parametrize(
    "header",
    ["Authorization: Bearer {}", "X-Api-Key: {}", "api-key: {}", "x-goog-api-key: {}", "Ocp-Apim-Subscription-Key: {}"],
)
def test_key_of_a_client_is_replaced_by_that_of_the_server(pool: ScriptedPool, path: str, header: str) -> None:
    assert pool.post(path, chat_body(), header.format(CLIENT_KEY)).status == 200

    for call in pool.calls:
        assert CLIENT_KEY.encode() not in call.head + call.body
        assert [value for name, value in call.headers if name.lower() == "authorization"] == [f"Bearer {SERVER_KEY}"]


def test_key_of_the_server_is_blotted_out_of_headers_of_any_answer(pool: ScriptedPool) -> None:
    pool.answers(b"{}", 200, f"x-echo: Bearer {SERVER_KEY}, twice {SERVER_KEY}")

    assert pool.post(CHAT, chat_body()).header("x-echo") == f"Bearer {STARS}, twice {STARS}"


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 503])
@pytest.mark.parametrize("framing", ["length", "chunks", "split chunks", "close"])
def test_key_of_the_server_is_blotted_out_of_refusals(pool: ScriptedPool, path: str, status: int, framing: str) -> None:
    body = f'{{"error":"invalid key {SERVER_KEY}, {ESCAPED}"}}'.encode()
    cut = body.index(SERVER_KEY.encode()) + 5

    def script(call: Call) -> None:
        head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\n"
        if framing == "length":
            call.send(whole(body, status))
        elif framing == "close":
            call.send(f"{head}connection: close\r\n\r\n".encode() + body)
            call.cut()
        else:
            call.send(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            for part in [body] if framing == "chunks" else [body[:cut], body[cut:]]:
                call.send(chunk(part))
            call.send(LAST_CHUNK)

    pool.on(script)

    answer = pool.post(path, chat_body())

    assert (answer.status, answer.is_whole) == (status, True)
    assert answer.body == body.replace(SERVER_KEY.encode(), STARS.encode()).replace(
        ESCAPED.encode(), ("*" * len(ESCAPED)).encode()
    )


def test_halves_of_a_key_in_parts_of_a_refusal_are_blotted_out(pool: ScriptedPool) -> None:
    """The client has what stands before the key when the second half is sent."""
    text = b"x" * 200 + SERVER_KEY.encode() + b"y" * 200
    came = Event()

    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 401 Said\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(text[:205]))
        assert came.wait(PATIENCE_S)
        call.send(chunk(text[205:]) + LAST_CHUNK)

    pool.on(script)
    with pool.client() as client:
        client.ask("POST", CHAT, chat_body())
        answer = client.head()
        client.next_chunk(answer)
        came.set()
        while client.next_chunk(answer):
            pass

    assert answer.body == text.replace(SERVER_KEY.encode(), STARS.encode())


def test_answer_that_is_well_is_not_looked_through(pool: ScriptedPool) -> None:
    """A model may write such words; only what a server writes by itself holds its key."""
    pool.says(stream_head() + chunk(f"data: {SERVER_KEY}\n\n".encode()) + LAST_CHUNK)

    assert SERVER_KEY.encode() in pool.post(CHAT, chat_body(stream=True)).body


@pytest.mark.parametrize(
    "before", [b"", b"HTTP/1.1 500 Said\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
)
def test_key_of_the_server_is_in_no_answer_and_no_log_where_the_server_repeats_its_request(
    pool: ScriptedPool, before: bytes
) -> None:
    """The log is looked at when the pool has ended (``conftest.py``)."""
    pool.on(lambda call: call.cut(before + call.head + call.body))

    answer = pool.post(CHAT, chat_body(), "x-padding: " + "x" * 300)

    assert SERVER_KEY.encode() not in answer.body
    assert SERVER_KEY not in str(answer.headers)
