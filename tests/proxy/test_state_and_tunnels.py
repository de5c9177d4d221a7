"""What only one server has is asked of that server, and a websocket passes bytes both ways."""

from __future__ import annotations

import contextlib
import json
import re
from urllib.parse import quote

import pytest

from tests.proxy.pool import SERVER_KEY, ScriptedPool
from tests.proxy.raw_client import chat_body
from tests.proxy.scripted_server import Call, ScriptedServer, whole

pytestmark = pytest.mark.e2e


def knows(server: ScriptedServer, *ids: str) -> None:
    """Have a server answer for these ids, and refuse all others."""

    def script(call: Call) -> None:
        path = call.target.partition("?")[0]
        named = json.loads(call.body or b"{}").get("previous_response_id")
        has = named in ids if named else any(f"/{each}" in path for each in ids)
        call.send(whole(b'{"id":"made"}') if has else whole(b'{"error":"unknown"}', 404))

    server.script = script


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("collection", ["/v1/responses", "/v1/files", "/v1/batches"])
def test_id_that_this_router_has_not_seen_is_found_at_the_server_that_has_it(
    pool: ScriptedPool, collection: str, at: int
) -> None:
    name = f"id_{collection[-3:]}_{at}"
    knows(pool.servers[1 - at])
    knows(pool.servers[at], name)

    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/content?x=1")):
        answer = pool.call(method, f"{collection}/{name}{rest}", b"{}" if method == "POST" else None)
        assert (answer.status, answer.body) == (200, b'{"id":"made"}')
        assert pool.servers[at].calls[-1].target == f"{collection}/{name}{rest}"
    assert len(pool.servers[1 - at].calls) <= 1


@pytest.mark.parametrize("at", [0, 1])
def test_response_that_continues_another_goes_to_the_server_that_has_it(pool: ScriptedPool, at: int) -> None:
    knows(pool.servers[1 - at])
    knows(pool.servers[at], f"resp_{at}")

    for _ in range(3):
        body = chat_body(input="and then?", previous_response_id=f"resp_{at}")
        assert pool.post("/v1/responses", body).status == 200
        assert pool.servers[at].calls[-1].body == body


def test_id_that_no_server_has_is_not_found_after_each_was_asked(pool: ScriptedPool) -> None:
    for each in pool.servers:
        knows(each)

    answer = pool.call("GET", "/v1/files/file_none")

    assert answer.status == 404
    assert "'file_none'" in answer.json()["error"]["message"]
    assert [len(each.calls) for each in pool.servers] == [1, 1]


def test_id_in_a_path_of_another_case_is_asked_for_as_the_client_wrote_it(pool: ScriptedPool) -> None:
    knows(pool.servers[0])
    knows(pool.servers[1], "file_aB")

    answer = pool.call("GET", "/v1/Files/file_aB/content")
    assert (answer.status, answer.body) == (200, b'{"id":"made"}')
    assert [call.target for call in pool.servers[0].calls] == ["/v1/Files/file_aB"]
    *asked, last = [call.target for call in pool.servers[1].calls]
    assert (set(asked), last) == ({"/v1/Files/file_aB"}, "/v1/Files/file_aB/content")  # once for each router


@pytest.mark.parametrize("collection", ["/v1/files", "/V1/Files"])
def test_id_made_under_a_path_of_any_case_is_remembered(pool: ScriptedPool, collection: str) -> None:
    name = f"made_in{collection.replace('/', '_')}"
    pool.answers(f'{{"id":"{name}"}}'.encode())

    assert pool.post(collection, b'{"input":"x"}').status == 200
    [maker] = [each for each in pool.servers if each.calls]
    pool.call("GET", f"{collection}/{name}")
    asked = [target for each in pool.servers for target in each.targets if target.endswith(name)]
    assert asked == [f"GET {collection}/{name}"]
    assert asked[0] in maker.targets


@pytest.mark.parametrize(
    "name", ["x HTTP/1.1\r\nhost: a\r\n\r\nPOST /sleep", "a/../../sleep", "a b?c#d", "\u00e9\u4e00%2f"]
)
def test_id_of_a_body_stays_one_segment_of_the_path_that_servers_are_asked_for(pool: ScriptedPool, name: str) -> None:
    for each in pool.servers:
        knows(each)

    answer = pool.post("/v1/responses", chat_body(input="and then?", previous_response_id=name))

    assert answer.status == 404
    for each in pool.servers:
        targets = [f"{call.method} {call.target}" for call in each.calls]
        if pool.is_global:
            # The router of a pool gets it in a path, where it refuses some, and decodes what is encoded twice.
            assert all(re.fullmatch(r"GET /v1/responses/[\w%.-]+", target) for target in targets)
            assert not any("/.." in target for target in targets)
        else:
            assert targets == [f"GET /v1/responses/{quote(name, safe='')}"]


def test_answer_about_an_id_that_does_not_end_is_left(pool: ScriptedPool) -> None:
    def endless(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                call.send(b"x" * 65_536)
        call.is_left.set()

    knows(pool.servers[0])
    pool.servers[1].script = endless

    assert pool.call("GET", "/v1/files/file_none").status == 404
    assert pool.servers[1].calls[0].is_left.wait(60)


UPGRADE = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: YQ==")
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n"


def test_tunnel_passes_bytes_both_ways_and_ends_with_its_client(pool: ScriptedPool) -> None:
    def script(call: Call) -> None:
        call.send(SWITCH + b"first")
        while data := call.receive():
            call.send(data)
        call.is_left.set()

    pool.on(script)
    data = bytes(range(256)) * 400
    with pool.client() as client:
        client.ask("GET", "/v1/realtime?model=tiny", None, *UPGRADE, "authorization: Bearer of-the-client")
        assert client.head().status == 101
        assert client.exactly(5) == b"first"
        client.write(data)
        assert client.exactly(len(data)) == data

    call = pool.only_call()
    assert call.is_left.wait(60)
    assert (call.header("upgrade"), call.header("authorization")) == ("websocket", f"Bearer {SERVER_KEY}")


def test_tunnel_ends_with_its_server(pool: ScriptedPool) -> None:
    pool.says(SWITCH + b"last")
    with pool.client() as client:
        client.ask("GET", "/v1/realtime", None, *UPGRADE)
        assert client.head().status == 101
        assert client.rest() == b"last"


@pytest.mark.parametrize("cut", [0, 70, 75, 200])
def test_refused_upgrade_comes_as_the_server_wrote_it_without_its_key(pool: ScriptedPool, cut: int) -> None:
    body = f"the key {SERVER_KEY} is wrong".encode()
    said = whole(body, 401, kind="text/plain")

    def script(call: Call) -> None:
        call.send(said[:cut])
        call.cut(said[cut:])

    pool.on(script)
    with pool.client() as client:
        client.ask("GET", "/v1/realtime", None, *UPGRADE)
        answer = client.answer("GET")

    assert answer.status == 401
    assert answer.body == body.replace(SERVER_KEY.encode(), b"*" * len(SERVER_KEY))
