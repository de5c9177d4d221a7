"""What a client writes reaches the server, and what the server writes reaches the client, byte for byte."""

from __future__ import annotations

import gzip
import json
from threading import Event

import pytest

from tests.e2e.processes import metric
from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body
from tests.proxy.scripted_server import ANSWER, LAST_CHUNK, Call, chunk, stream_head, whole

pytestmark = pytest.mark.e2e

BODIES = {
    "unknown fields": b'{"model":"tiny","messages":[{"role":"user","content":"hi","x":{"y":[1]}}],"z_vendor":{"a":null}}',  # noqa: E501
    "white space": b'\n {\t"model" :  "tiny" ,\r\n "messages":[ {"role":"user" , "content":"hi"} ]  }\n\n',
    "spellings of numbers": b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"top_p":1.0,"seed":9007199254740993,'  # noqa: E501
    b'"a":1E2,"b":-0.0,"c":0.1000,"d":123456789012345678901234567890}',
    "escapes": b'{"model":"tiny","messages":[{"role":"user","content":"\\u00e9\\/\\ud83d\\ude80 \xc3\xa9"}],"\\u0078":"\\u0000"}',  # noqa: E501
    "half of a surrogate pair": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d"}]}',
    "order of keys": b'{"z":1,"messages":[{"content":"hi","role":"user"}],"a":{"z":1,"a":2},"model":"tiny"}',
    "repeated keys": b'{"model":"x","messages":[{"role":"user","content":"hi"}],"a":1,"model":"tiny","a":2}',
    "NaN": b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"x":NaN,"y":-Infinity}',
    "no JSON": b'{"model":"tiny","messages":[',
    "no object": b"[1, 2]",
    "no text": b"\xff\xfe\x00",
    "messages of another kind": b'{"model":"tiny","messages":{"a":1}}',
    "an unknown model": b'{"model":"none","messages":[{"role":"user","content":"hi"}]}',
    "no model": b'{"messages":[{"role":"user","content":"hi"}]}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_body_of_a_request_reaches_the_server_as_it_is(pool: ScriptedPool, body: bytes) -> None:
    pool.answers(b"{}")

    assert pool.post(CHAT, body).status == 200

    call = pool.only_call()
    assert (call.body, call.target) == (body, CHAT)


def test_headers_of_a_request_reach_the_server_in_order_but_those_of_one_connection(pool: ScriptedPool) -> None:
    sent = ["X-Two: 1", "x-two: 2", "Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-empty:"]
    one_connection = ["connection: x-hop", "x-hop: 1", "keep-alive: timeout=5", "te: trailers", "expect: 100-continue"]

    assert pool.post(CHAT, chat_body(), *sent, *one_connection, "cookie: a=b; c=d").status == 200

    call = pool.only_call()
    names = ("x-two", "traceparent", "x-empty", "cookie")
    assert [pair for pair in call.headers if pair[0].lower() in names] == [
        ("x-two", "1"),
        ("x-two", "2"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-empty", ""),
        ("cookie", "a=b; c=d"),
    ]
    assert not {"x-hop", "keep-alive", "te", "expect", "transfer-encoding"} & {name for name, _ in call.headers}
    assert call.header("host") == call.server.url.removeprefix("http://")


def test_body_that_comes_in_chunks_reaches_the_server_with_a_length(pool: ScriptedPool) -> None:
    body = chat_body()
    with pool.client() as client:
        client.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (body[:1], body[1:20], body[20:]):
            client.write(chunk(piece))
        client.write(LAST_CHUNK)
        assert client.answer().status == 200

    call = pool.only_call()
    assert (call.body, call.header("content-length"), call.header("transfer-encoding")) == (body, str(len(body)), None)


def test_body_of_a_client_that_compresses_reaches_the_server_inflated(pool: ScriptedPool) -> None:
    assert pool.post(CHAT, gzip.compress(chat_body()), "content-encoding: gzip").status == 200

    call = pool.only_call()
    assert (call.body, call.header("content-encoding")) == (chat_body(), None)


def test_query_and_spelling_of_a_path_reach_the_server_as_they_are(pool: ScriptedPool) -> None:
    pool.answers(b"{}")
    targets = ["/v1/odd/%41%2Fb;c=d/?q=a%20b&&x=%zz", "/v1//other///", "/V1/Chat/Completions", "/v1/x?"]
    for target in targets:
        assert pool.post(target, b"{}").status == 200

    assert sorted(call.target for call in pool.calls) == sorted(each.removesuffix("?") for each in targets)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/files", "/v1/images/edits"])
def test_form_with_a_file_reaches_the_server_as_it_is(pool: ScriptedPool, path: str) -> None:
    pool.answers(b"{}")
    form = (
        b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--b0\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa9.wav"\r\nContent-Type: audio/wav\r\n\r\n'  # noqa: E501
        + bytes(range(256)) * 400
        + b"\r\n--b0\r\ncontent-disposition: form-data; name=x; y=z\r\n\r\n--b\r\n--b0--\r\nepilogue"
    )
    kind = 'multipart/form-data; boundary="b0"'

    assert pool.post(path, form, f"content-type: {kind}").status == 200

    call = pool.only_call()
    assert (call.body, call.header("content-type")) == (form, kind)


def test_body_of_megabytes_passes_both_ways(pool: ScriptedPool) -> None:
    body = chat_body(padding="x" * (12 << 20))
    pool.on(lambda call: call.send(whole(call.body)))

    answer = pool.post(CHAT, body)

    assert (answer.status, answer.body == body) == (200, True)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_method_reaches_the_server(pool: ScriptedPool, method: str) -> None:
    pool.answers(b"made", 201, "x-made: 1", kind="text/x-odd; a=b")

    answer = pool.call(method, "/v1/odd", b"" if method in ("POST", "PUT", "PATCH") else None, "x-script: 1")

    assert (answer.status, answer.body, answer.header("x-made")) == (201, b"made", "1")
    assert answer.header("content-type") == "text/x-odd; a=b"
    assert [call.method for call in pool.calls] == [method]


def test_answer_to_head_has_the_length_of_what_it_leaves_out(pool: ScriptedPool) -> None:
    pool.says(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 512\r\n\r\n")

    answer = pool.call("HEAD", "/v1/odd", None, "x-script: 1")

    assert (answer.status, answer.header("content-length"), answer.body) == (200, "512", b"")


def test_preflight_of_a_browser_is_answered_by_the_server(pool: ScriptedPool) -> None:
    allowed = ("access-control-allow-origin: https://a", "access-control-allow-methods: POST", "vary: Origin")
    pool.answers(b"OK", 200, *allowed, kind="text/plain")

    asked = ("origin: https://a", "access-control-request-method: POST")
    answer = pool.call("OPTIONS", CHAT, None, *asked)

    assert (answer.status, answer.header("access-control-allow-origin")) == (200, "https://a")


ANSWERS = {
    "odd JSON": b'{ "vendor": {"z":1,"a":[null,1.0,1e3]},\n"logprob":-Infinity,"n":9007199254740993,"t":"\\u00e9\\/" }\n',  # noqa: E501
    "no JSON": b"\xff\xfe\x00 not JSON",
    "empty": b"",
    "of megabytes": b"x" * (3 << 20),
}


@pytest.mark.parametrize("body", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech"])
def test_whole_answer_reaches_the_client_as_it_is(pool: ScriptedPool, body: bytes, path: str) -> None:
    pool.answers(body, 200, "x-z: 1", "X-A: 2", "x-z: 3", "set-cookie: a=b", "set-cookie: c=d", "server: engine")

    answer = pool.post(path, chat_body())

    assert (answer.status, answer.body, answer.is_whole) == (200, body, True)
    names = ("x-z", "x-a", "set-cookie", "server", "content-type", "content-length")
    assert [pair for pair in answer.headers if pair[0] in names] == [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        *(("x-z", "1"), ("x-a", "2"), ("x-z", "3"), ("set-cookie", "a=b"), ("set-cookie", "c=d"), ("server", "engine")),
    ]


@pytest.mark.parametrize("status", [200, 201, 202, 204, 302, 307, 304, 402, 451, 500, 504, 599])
def test_status_reaches_the_client(pool: ScriptedPool, status: int) -> None:
    """Of a path that is no work of the engine's books; a redirect is not followed."""
    body = b"" if status in (204, 304) else b"said"
    pool.says(whole(body, status, "location: http://127.0.0.1:9/x"))

    answer = pool.post("/v1/audio/speech", b"{}")

    assert (answer.status, answer.body, answer.header("location")) == (status, body, "http://127.0.0.1:9/x")


def test_compressed_answer_stays_compressed(pool: ScriptedPool) -> None:
    packed = gzip.compress(ANSWER)
    pool.answers(packed, 200, "content-encoding: gzip", "vary: accept-encoding")

    answer = pool.post(CHAT, chat_body(), "accept-encoding: gzip")

    assert (answer.body, answer.header("content-encoding")) == (packed, "gzip")


EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"caf\xc3\xa9"},"finish_reason":null}]}\n\n'
STREAMS = {
    "comments": b": a comment\n\n" + EVENT + b":\n\n:  two\n: lines\n\ndata: [DONE]\n\n",
    "CRLF": EVENT.replace(b"\n", b"\r\n") * 2 + b"data: [DONE]\r\n\r\n",
    "unknown fields": b"id: 7\nretry: 10\nx-field: y\n" + EVENT + b"event: odd\ndata: no JSON\n\ndata: [DONE]\n\n",
    "several lines of data": b"data: {\ndata: }\n\n" + EVENT + b"data: [DONE]\n\n",
    "no end mark": EVENT * 3,
    "no line end": EVENT + b"data: x",
    "no events": b"\x00\xff" * 50,
    "an event of a megabyte": b'data: {"x":"' + b"y" * (1 << 20) + b'"}\n\ndata: [DONE]\n\n',
}


@pytest.mark.parametrize("cut", [1, 7, 1000, 1 << 30], ids=lambda cut: f"chunks of {cut}")
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_stream_reaches_the_client_as_it_is_wherever_it_is_cut(pool: ScriptedPool, stream: bytes, cut: int) -> None:
    cut = max(cut, len(stream) // 2000)
    pieces = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    packets = b"".join(map(chunk, pieces))
    # Chunks and packets do not end at the same places.
    size = max(3, len(packets) // 40)

    def script(call: Call) -> None:
        call.send(stream_head("cache-control: no-cache"))
        for at in range(0, len(packets), size):
            call.send(packets[at : at + size])
        call.send(LAST_CHUNK)

    pool.on(script)
    for body in (chat_body(stream=True), chat_body(stream=True, stream_options={"include_usage": True})):
        answer = pool.post(CHAT, body)
        assert (answer.status, answer.is_whole) == (200, True)
        assert answer.body == stream
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("coding", ["3;x=y\r\n", "003\r\n", "3 \r\n", "3\n"])
def test_chunk_lines_in_other_spellings_are_read(pool: ScriptedPool, coding: str) -> None:
    trailer = "0\r\nx-trailer: 1\r\n\r\n"
    pool.says(stream_head() + f"{coding}: a\r\n1\r\n\n\r\n1\r\n\n\r\n{trailer}".encode())

    answer = pool.post(CHAT, chat_body(stream=True))

    assert (answer.body, answer.is_whole) == (b": a\n\n", True)


def test_each_event_is_passed_before_the_next_one_comes(pool: ScriptedPool) -> None:
    with pool.client() as client:

        def script(call: Call) -> None:
            call.send(stream_head())
            for number in range(3):
                call.send(chunk(b"data: {}\n\n"))
                assert passed[number].wait(60)
            call.send(LAST_CHUNK)

        passed = [Event() for _ in range(3)]
        pool.on(script)
        client.ask("POST", CHAT, chat_body(stream=True))
        answer = client.head()
        for each in passed:
            assert client.next_chunk(answer) == b"data: {}\n\n"
            each.set()
        assert client.next_chunk(answer) == b""


COUNTS = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"x": 1}])
def test_counts_that_a_client_did_not_ask_for_are_asked_for_and_taken_out_again(
    pool: ScriptedPool, path: str, options: dict[str, object] | None
) -> None:
    pool.says(stream_head() + chunk(EVENT) + chunk(COUNTS) + chunk(DONE) + LAST_CHUNK)
    before = metric(pool.url, "poolgrid_frontend_output_tokens_total")
    body = chat_body(stream=True, prompt="hi", **({} if options is None else {"stream_options": options}))

    answer = pool.post(path, body)

    assert (answer.body, answer.is_whole) == (EVENT + DONE, True)
    got = json.loads(pool.only_call().body)
    assert got.pop("stream_options") == {**(options or {}), "include_usage": True}
    assert got == {name: value for name, value in json.loads(body).items() if name != "stream_options"}
    assert metric(pool.url, "poolgrid_frontend_output_tokens_total") == before + 2


def test_all_but_the_counts_cut_in_stays_as_the_client_wrote_it(pool: ScriptedPool) -> None:
    body = b'{ "stream" : true ,"model":"tiny", "seed":1.0,"messages":[{"role":"user","content":"\\u00e9"}] }\n'
    pool.says(stream_head() + chunk(DONE) + LAST_CHUNK)

    assert pool.post(CHAT, body).body == DONE

    cut_in = b'"stream_options":{"include_usage":true},'
    assert pool.only_call().body.replace(cut_in, b"") == body
    assert cut_in in pool.only_call().body


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
        (CHAT, {"stream": True, "stream_options": "of another kind"}),
        (CHAT, {"stream": False}),
        ("/v1/messages", {"stream": True, "max_tokens": 4}),
        ("/v1/responses", {"stream": True, "input": "hi"}),
    ],
)
def test_nothing_is_cut_in_where_the_client_asked_or_the_api_has_no_such_option(
    pool: ScriptedPool, path: str, more: dict[str, object]
) -> None:
    pool.says(stream_head() + chunk(EVENT) + chunk(COUNTS) + chunk(DONE) + LAST_CHUNK)

    answer = pool.post(path, chat_body(**more))

    assert answer.body == EVENT + COUNTS + DONE
    assert pool.only_call().body == chat_body(**more)


def test_models_of_all_servers_are_one_list_of_their_own_cards(pool: ScriptedPool) -> None:
    listed = pool.call("GET", "/v1/models")
    one = pool.call("GET", "/v1/models/adapter-b")

    first, second = pool.servers
    by_id = {card["id"]: card for card in (*second.cards(), *first.cards())}
    assert {card["id"]: card for card in listed.json()["data"]} == by_id
    assert pool.call("GET", "/v1/models").body == listed.body
    assert one.json() == second.cards()[1]
    assert pool.call("GET", "/v1/models/none").status == 404
    head = pool.call("HEAD", "/v1/models")
    assert (head.status, head.body, head.header("content-length")) == (200, b"", listed.header("content-length"))
