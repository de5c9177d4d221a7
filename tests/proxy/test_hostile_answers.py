"""An answer that is no HTTP, or too much of it, harms its own request at most."""

from __future__ import annotations

import gzip
import threading

import pytest

from tests.e2e.processes import becomes
from tests.proxy.pool import GROWTH_BYTES_MAX, ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body
from tests.proxy.scripted_server import ANSWER, LAST_CHUNK, Call, chunk, serve_plainly, stream_head, whole

pytestmark = pytest.mark.e2e

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
HOSTILE = {
    "a header without end": OK + b"x-long: " + b"y" * (4 << 20),
    "headers without end": OK + b"x: y\r\n" * 500_000,
    "a header of a megabyte": OK + b"x: " + b"y" * (1 << 20) + b"\r\ncontent-length: 2\r\n\r\n{}",
    "too short a body": OK + b"content-length: 100\r\n\r\n{}",
    "too long a body": OK + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
    "a length that is none": OK + b"content-length: -1\r\n\r\n{}",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "chunks that are none": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a chunk of exabytes": OK + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n",
    "another transfer coding": OK + b"transfer-encoding: gzip\r\n\r\n{}",
    "a length and chunks": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 100 + OK + b"content-length: 2\r\n\r\n{}",
    "a flood of interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 50_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "status 0": b"HTTP/1.1 0 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/1.0 without length": b"HTTP/1.0 200 OK\r\n\r\n{}",
    "zero bytes": b"\0" * 1000 + b"\r\n\r\n",
    "status 99": b"HTTP/1.1 099 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "status 600": b"HTTP/1.1 600 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "status 1000": b"HTTP/1.1 1000 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "a length with a plus": OK + b"content-length: +2\r\n\r\n{}",
    "a length with an underscore": OK + b"content-length: 0_2\r\n\r\n{}",
    "a list of lengths": OK + b"content-length: 2, 2\r\n\r\n{}",
    "an equal length twice": OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a length of 64 bits": OK + b"content-length: 18446744073709551615\r\n\r\n{}",
    "chunks and a length": OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": OK + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a chunk with a plus": OK + b"transfer-encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "a chunk with an underscore": OK + b"transfer-encoding: chunked\r\n\r\n0_2\r\n{}\r\n0\r\n\r\n",
    "a chunk extension without end": OK + b"transfer-encoding: chunked\r\n\r\n2;" + b"e" * (1 << 20),
    "trailers without end": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 500_000,
    "a line feed in a header": OK + b"x: a\nb: c\r\ncontent-length: 2\r\n\r\n{}",
    "a carriage return in a header": OK + b"x: a\rb: c\r\ncontent-length: 2\r\n\r\n{}",
    "a zero byte in a header": OK + b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}",
    "a folded header": OK + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
    "a header without a name": OK + b": a\r\ncontent-length: 2\r\n\r\n{}",
    "a blank in a header's name": OK + b"x : a\r\ncontent-length: 2\r\n\r\n{}",
    "an interim answer with a body": b"HTTP/1.1 103 Hints\r\ncontent-length: 2\r\n\r\n[]"
    + OK
    + b"content-length: 2\r\n\r\n{}",
    "half an event": stream_head() + chunk(b'data: {"a":'),
}


@pytest.mark.parametrize("path", [CHAT, "/v1/odd"])
@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE.keys())
def test_client_gets_the_answer_or_an_error_and_the_next_one_is_served(
    pool: ScriptedPool, said: bytes, path: str
) -> None:
    """The fixture sends the next request."""
    before = pool.memory_bytes()
    pool.says(said)

    answer = pool.post(path, chat_body())

    if answer.status in (422, 502, 503):
        assert answer.json()["error"]["code"] in ("workers_lost", "server_lost", "no_worker")
    else:
        assert answer.status == 200
        assert answer.body == b"{}" or not answer.is_whole
    assert pool.memory_bytes() - before < GROWTH_BYTES_MAX


FRAMED = {
    "with a length": whole(b"{}"),
    "in chunks": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "in chunks with a trailer": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n",
}
BEHIND = {
    "another answer": whole(b"[1]", 500, "x-second: 1"),
    "half an answer": whole(b"[1]")[:30],
    "no answer": b"SSH-2.0-OpenSSH\r\n\r\n",
    "a line end": b"\r\n",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/odd"])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
@pytest.mark.parametrize("framed", FRAMED.values(), ids=FRAMED.keys())
def test_what_follows_an_answer_is_no_part_of_it_and_of_no_other(
    pool: ScriptedPool, framed: bytes, behind: bytes, path: str
) -> None:
    pool.on(lambda call: call.send(framed + behind))
    for _ in range(3):
        answer = pool.post(path, chat_body())
        assert (answer.status, answer.body, answer.is_whole, answer.header("x-second")) == (200, b"{}", True, None)


@pytest.mark.parametrize(
    ("method", "status", "length"),
    [
        ("GET", 204, b""),
        ("GET", 204, b"content-length: 2\r\n"),
        ("GET", 304, b""),
        ("GET", 304, b"content-length: 2\r\n"),
        ("HEAD", 200, b"content-length: 2\r\n"),
        ("HEAD", 200, b"transfer-encoding: chunked\r\n"),
        ("HEAD", 200, b""),
    ],
)
def test_body_of_an_answer_that_has_none_is_in_no_answer(
    pool: ScriptedPool, method: str, status: int, length: bytes
) -> None:
    head = b"HTTP/1.1 %d Odd\r\netag: x\r\n%b\r\n" % (status, length)

    def script(call: Call) -> None:
        call.send(head)
        call.send(b"2\r\n{}\r\n0\r\n\r\n" if b"chunked" in length else b"{}")

    pool.on(script)
    for _ in range(3):
        answer = pool.call(method, "/v1/odd", None, "x-script: 1")
        assert (answer.status, answer.body, answer.is_whole, answer.header("etag")) == (status, b"", True, "x")
    pool.on(serve_plainly)
    assert pool.post(CHAT, chat_body()).body == ANSWER


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_answer_is_passed_as_it_is(pool: ScriptedPool, kind: str, stream: bool) -> None:
    """Nothing is inflated, and nothing is put into a compressed stream."""
    bomb = gzip.compress(b"\0" * (1 << 20), 9, mtime=0) * 256
    before = pool.memory_bytes()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-encoding: gzip\r\n" % kind.encode()
    framing = b"transfer-encoding: chunked\r\n\r\n" if stream else b"content-length: %d\r\n\r\n" % len(bomb)
    data = head + framing + (chunk(bomb) + LAST_CHUNK if stream else bomb)
    pool.on(lambda call: call.send(data))

    answer = pool.post(CHAT, chat_body(stream=stream))

    assert (answer.body, answer.header("content-encoding"), answer.is_whole) == (bomb, "gzip", True)
    assert pool.memory_bytes() - before < GROWTH_BYTES_MAX


@pytest.mark.parametrize("length", [1, 256, 257, 500_000])
def test_id_of_any_length_is_passed_and_only_a_short_one_is_remembered(pool: ScriptedPool, length: int) -> None:
    """What is remembered of an id is memory that the server would choose the size of."""
    body = b'{"id":"%b"}' % (b"i" * length)
    pool.answers(body)
    assert pool.post("/v1/responses", b'{"model":"tiny","input":"hi"}').body == body
    for each in pool.servers:
        each.targets.clear()

    pool.post("/v1/responses", b'{"model":"tiny","input":"hi","previous_response_id":"%b"}' % (b"i" * length))

    asked = [each for server in pool.servers for each in server.targets if each.startswith("GET /v1/responses/")]
    # To a pool's router, a target of this length is too long to be asked for.
    assert bool(asked) == (length > 256 and not (pool.is_global and length > 65_536))


@pytest.mark.parametrize("count", ["-1", "4294967296", "1" + "0" * 400, "1.5", '"7"', "NaN", "null", "[]"])
@pytest.mark.parametrize("stream", [False, True])
def test_impossible_count_is_passed_and_not_counted(pool: ScriptedPool, count: str, stream: bool) -> None:
    details = f'"prompt_tokens_details":{{"cached_tokens":{count}}}'
    usage = f'"usage":{{"prompt_tokens":{count},"completion_tokens":{count},{details}}}'
    body = f'{{"id":"a","choices":[{{"index":0,"finish_reason":"stop"}}],{usage}}}'.encode()
    said = b"data: " + body + b"\n\n" if stream else body
    pool.on(lambda call: call.send(stream_head() + chunk(said) + LAST_CHUNK if stream else whole(said)))
    before = pool.counted()

    answer = pool.post(CHAT, chat_body(stream=stream, stream_options={"include_usage": True} if stream else None))

    assert (answer.status, answer.body, answer.is_whole) == (200, said, True)
    becomes(pool.running, 0.0)
    prompt, cached, output = (after - was for after, was in zip(pool.counted(), before, strict=True))
    assert 0 < prompt < 100, "as the router has tokenized it"
    assert (cached, output) == (0, 0)


def test_others_are_answered_during_answers_without_end(pool: ScriptedPool) -> None:
    release = threading.Event()

    def script(call: Call) -> None:
        if b"endless" not in call.body:
            serve_plainly(call)
            return
        call.send(stream_head())
        while not release.is_set():
            call.send(chunk(b"data: x\n\n") * 100)

    pool.on(script)
    before = pool.memory_bytes()
    leavers = [pool.client() for _ in range(8)]
    try:
        for client in leavers:
            client.ask("POST", CHAT, chat_body(stream=True, x="endless"))
            client.head()
        for _ in range(20):
            assert pool.post(CHAT, chat_body()).body == ANSWER
        assert pool.memory_bytes() - before < GROWTH_BYTES_MAX
    finally:
        for client in leavers:
            client.leave()
        release.set()
