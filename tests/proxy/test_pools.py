"""A global router in front of pools of engine servers: which pool serves, and what follows when one cannot."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import httpx
import psutil
import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.expectation import MODEL, expected_text
from tests.e2e.fleet import pools
from tests.e2e.processes import PATIENT, Process, becomes, metric, ready_workers
from tests.forwarding.answer_streams import chat, folded, renamed
from tests.proxy.pool import POOLS, SERVER_KEY, TWO_POOLS, ScriptedPool
from tests.proxy.raw_client import CHAT, RawClient, chat_body
from tests.proxy.scripted_server import ANSWER, LAST_CHUNK, PATIENCE_S, Call, chunk, serve_plainly, stream_head, whole
from tests.transport.test_tls import Files

pytestmark = pytest.mark.e2e

FRONTS = ("global router",)

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LONG = " ".join(str(number) for number in range(2000))


def router_of(pool: ScriptedPool, name: str) -> psutil.Process:
    """Return the process of a pool's router."""
    port = pools(pool.url)[name]["url"].rpartition(":")[2]
    (found,) = pool.up.children("router", "--port", port)
    return found


def is_back(pool: ScriptedPool) -> None:
    becomes(lambda: {row["state"] for row in pools(pool.url).values()}, {"available"})


@pytest.mark.parametrize(
    ("headers", "more", "name"),
    [
        ((), {}, "far"),
        (("x-ttft-target-ms: 100",), {}, "near"),
        ((), {"nvext": {"router": {"ttft_target": 100}}}, "near"),
        ((), {"prompt": LONG, "messages": [{"role": "user", "content": LONG}]}, "near"),
        (("x-ttft-target-ms: 100",), {"nvext": {"agent_hints": {"priority": 60}}}, "far"),
    ],
    ids=["short", "urgent by header", "urgent by body", "long", "priority"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
def test_the_grid_names_the_pool_whose_server_gets_the_clients_bytes(
    pool: ScriptedPool, path: str, headers: tuple[str, ...], more: dict[str, object], name: str
) -> None:
    body = chat_body(max_tokens=5, **{"prompt": "hi", **more})

    answer = pool.post(path, body, "x-request-id: chosen-by-me", *headers)

    assert (answer.status, answer.body) == (200, ANSWER)
    call = pool.only_call()
    assert call.server is pool.servers[POOLS.index(name)]
    assert (call.body, call.header("x-request-id")) == (body, "chosen-by-me")
    assert answer.all("x-request-id") == ["chosen-by-me"]
    assert answer.all("x-poolgrid-pool") == [name]
    (worker,) = answer.all("x-poolgrid-worker")
    (decision,) = answer.all("x-poolgrid-decision")
    how = "override" if "priority" in str(more) else "grid"
    assert decision.startswith(f"{how}-")
    record = httpx.get(f"{pool.url}/v1/decisions/chosen-by-me").json()
    assert (record["pools"], record["workers"], record["outcome"]) == ([name], [worker], "stop")
    assert (record["placements"][0]["how"], record["output_tokens"]) == (how, 2)
    assert decision == f"{how}-{record['placements'][0]['pool_reason']}"
    for asked in ("chosen-by-me", record["placements"][0]["dispatch_id"]):
        own = httpx.get(f"{pools(pool.url)[name]['url']}/v1/decisions/{asked}").json()
        assert own["attempts"][-1]["worker"] == worker


@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        ({"router": {"ttft_target": -1}}, "nvext.router.ttft_target"),
        ({"router": 5}, "nvext.router"),
        (5, "nvext"),
        ({"agent_hints": {"priority": 2**40}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"osl": "many"}}, "nvext.agent_hints.osl"),
    ],
)
def test_a_bad_hint_is_the_clients_error_and_reaches_no_server(pool: ScriptedPool, nvext: object, field: str) -> None:
    answer = pool.post(CHAT, chat_body(nvext=nvext))

    assert (answer.status, answer.json()["error"]["param"]) == (400, field)
    assert pool.calls == []


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech", "/v1/files"])
def test_what_routers_tell_each_other_reaches_no_server_and_no_client(pool: ScriptedPool, path: str) -> None:
    pool.answers(ANSWER, 200, "x-poolgrid-pool: mine", "x-poolgrid-hop: {}")

    answer = pool.post(path, chat_body(), 'x-poolgrid-hop: {"priority":100}', 'X-Poolgrid-Hop: {"tenant":"other"}')

    assert answer.status == 200
    assert b"x-poolgrid-hop" not in pool.only_call().head.lower()
    assert answer.all("x-poolgrid-hop") == []
    assert answer.all("x-poolgrid-pool") in (["near"], ["far"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/pool"),
        ("GET", "/v1/workers"),
        ("GET", "/v1/doctor"),
        ("GET", "/v1/sessions"),
        ("GET", "/V1/pool"),
        ("GET", "//v1/pool"),
        ("POST", "/v1/route"),
        ("POST", "/v1/workers/w/drain"),
        ("GET", "/v1/realtime/../pool"),
    ],
)
def test_paths_of_a_pools_router_are_closed_to_clients_of_the_global_router(
    pool: ScriptedPool, method: str, path: str
) -> None:
    answer = pool.call(method, path, b"{}" if method == "POST" else None, "x-script: 1")

    assert answer.status in (200, 400)
    if answer.status == 200:
        assert answer.body == ANSWER  # a server's
        assert pool.only_call().target == path
    else:
        assert pool.calls == []


def test_a_refusal_of_all_servers_of_all_pools_is_that_of_a_server(pool: ScriptedPool) -> None:
    pool.answers(b'{"error":"full"}', 429, "retry-after: 7", "x-why: odd")

    answer = pool.post(CHAT, chat_body())

    assert (answer.status, answer.body) == (429, b'{"error":"full"}')
    assert (answer.header("retry-after"), answer.header("x-why")) == ("7", "odd")
    assert [len(each.calls) for each in pool.servers] == [1, 1]


def test_a_pools_router_that_dies_costs_its_waiting_requests_nothing(pool: ScriptedPool) -> None:
    """What listens for it stays, so it is asked once more when it is back."""
    came = Event()

    def script(call: Call) -> None:
        if came.is_set():
            serve_plainly(call)
        else:
            came.set()
            call.wait_until_left()

    pool.on(script)
    with pool.client() as client:
        client.ask("POST", CHAT, chat_body())
        assert came.wait(PATIENCE_S)
        router_of(pool, "far").kill()
        answer = client.answer()

    assert (answer.status, answer.body) == (200, ANSWER)
    assert {call.body for call in pool.calls} == {chat_body()}
    assert pool.servers[1].calls[0].is_left.wait(PATIENCE_S)
    is_back(pool)


def test_a_stream_whose_pools_router_dies_is_continued(pool: ScriptedPool) -> None:
    units = [("content", each) for each in ("a", " b", " c")]
    events = chat(units, [1], 1)

    def script(call: Call) -> None:
        if len(pool.calls) == 1:
            call.send(stream_head() + b"".join(map(chunk, events[:2])))
            call.wait_until_left()
        else:
            call.send(stream_head() + b"".join(map(chunk, chat(units, [1], 2))) + LAST_CHUNK)

    pool.on(script)
    with pool.client() as client:
        client.ask("POST", CHAT, chat_body(stream=True, temperature=0, stream_options={"include_usage": True}))
        answer = client.head()
        while answer.body != b"".join(events[:2]):
            assert client.next_chunk(answer)
        router_of(pool, "far").kill()
        while client.next_chunk(answer):
            pass

    assert folded(renamed(answer.body)) == folded(b"".join(events))
    assert [len(each.calls) for each in pool.servers] == [1, 1]
    is_back(pool)


def test_a_stream_that_no_pool_continues_ends_with_an_error_when_its_pools_router_dies(pool: ScriptedPool) -> None:
    def script(call: Call) -> None:
        if len(pool.calls) == 1:
            call.send(stream_head() + chunk(EVENT))
            call.wait_until_left()
        else:
            call.send(whole(b'{"error":"no"}', 400))

    pool.on(script)
    with pool.client() as client:
        client.ask("POST", CHAT, chat_body(stream=True))
        answer = client.head()
        assert client.next_chunk(answer) == EVENT
        router_of(pool, "far").kill()
        client.read_until_it_breaks(answer)

    last = answer.body.removeprefix(EVENT)
    assert last.startswith(b"event: error\ndata: ")
    error = json.loads(last.partition(b"data: ")[2])["error"]
    assert error["code"] == "server_lost"
    assert "answered 400" in error["message"]
    is_back(pool)


def test_models_of_all_pools_are_one_list(pool: ScriptedPool) -> None:
    listed = pool.call("GET", "/v1/models").json()["data"]

    assert (listed[0]["id"], {card["id"] for card in listed}) == ("tiny", {"tiny", "adapter-a", "adapter-b"})
    assert pool.call("GET", "/v1/models/adapter-b").json()["parent"] == "tiny"


def test_requests_that_find_no_room_wait_at_the_global_router_and_not_at_a_pool(
    module_pool: ScriptedPool, tmp_path: Path
) -> None:
    """Another global router, in front of the same servers by pools of one place each."""
    servers = module_pool.servers
    document = tmp_path / "narrow.json"
    document.write_text(json.dumps(TWO_POOLS))
    narrow = [word for option in NARROW for word in ("--part-option", option)]
    fronts = [f"--engine-url={name}={each.url}" for name, each in zip(POOLS, servers, strict=True)]
    go_on = Event()

    def script(call: Call) -> None:
        assert go_on.wait(PATIENCE_S)
        call.send(whole(call.body))

    module_pool.begin()
    environment = {"POOLGRID_ENGINE_API_KEY": SERVER_KEY}
    model = ("--model-path", str(TINY_MODEL_PATH))
    with Process(
        "up", "--pools", str(document), "--port", "0", *fronts, *model, *narrow, environment=environment
    ) as up:
        up.wait_ready()
        for each in servers:
            each.script = script
        clients = [RawClient(up.url) for _ in range(6)]
        bodies = [chat_body(number=number) for number in range(6)]
        for client, body in zip(clients, bodies, strict=True):
            client.ask("POST", CHAT, body)
        becomes(lambda: metric(up.url, "poolgrid_global_router_queued_requests"), 4.0)
        becomes(lambda: sum(len(each.calls) for each in servers), 2)
        routers = [row["url"] for row in pools(up.url).values()]
        assert sum(metric(url, "poolgrid_router_queued_requests") for url in routers) == 0.0
        go_on.set()
        assert [client.answer().body for client in clients] == bodies
        for client in clients:
            client.leave()
        assert len(servers[0].calls) + len(servers[1].calls) == 6
        status, errors = up.stop()
        assert status == 0, errors
        assert "this is a bug" not in errors


NARROW = ("worker.max-batch-size=1", "router.worker-queue-factor=1")


def test_a_pool_with_workers_of_its_own_answers_beside_one_of_servers(
    module_pool: ScriptedPool, tmp_path: Path
) -> None:
    """Its router's own API does; nothing but the paths of clients is open there."""
    document = tmp_path / "mixed.json"
    document.write_text(json.dumps(TWO_POOLS))
    module_pool.begin()
    servers_url = pools(module_pool.url)["far"]["url"]
    with Process("up", "--port", "0", "--workers", "1", "--speedup", "50", *PATIENT) as own:
        urls = [f"--pool-url=near={own.wait_ready().url}", f"--pool-url=far={servers_url}"]
        with Process("global-router", "--config", str(document), "--port", "0", *urls) as front:
            url = front.wait_ready().url
            becomes(lambda: {row["state"] for row in pools(url).values()}, {"available"})
            prompt = MODEL.encode("hello")
            body = chat_body(prompt=list(memoryview(prompt).cast("I")), max_tokens=8)
            for stream in (False, True):
                answer = httpx.post(
                    f"{url}/v1/completions",
                    json={**json.loads(body), "messages": None, "stream": stream},
                    headers={"x-ttft-target-ms": "100"},
                )
                assert (answer.status_code, answer.headers["x-poolgrid-pool"]) == (200, "near"), answer.text
                assert answer.headers["x-poolgrid-worker"] == ready_workers(own.url)[0]
                if not stream:
                    assert answer.json()["choices"][0]["text"] == expected_text(prompt, 8)
            assert httpx.post(f"{url}/v1/completions", content=chat_body(prompt="hi")).content == ANSWER
            with RawClient(own.url) as client:
                client.ask("GET", "/v1/workers", None, "x-poolgrid-hop: {}")
                assert client.answer("GET").status == 503
            for process in (front, own):
                status, errors = process.stop()
                assert status == 0, errors
                assert "this is a bug" not in errors


def test_pools_are_reached_over_tls_by_the_authority_that_is_given(module_pool: ScriptedPool, tmp_path: Path) -> None:
    files = Files(tmp_path)
    document = tmp_path / "tls.json"
    stage = {**TWO_POOLS["aggregated"], "pools": [{"name": "far"}], "mapping": [[["far"], ["far"]], [["far"], ["far"]]]}
    document.write_text(json.dumps({**TWO_POOLS, "aggregated": stage}))
    module_pool.begin()
    server = module_pool.servers[1]
    pair = ("tls-certificate", files.certificate), ("tls-key", files.key)
    tls = [word for name, path in pair for word in ("--part-option", f"router.{name}={path}")]
    model = ("--model-path", str(TINY_MODEL_PATH))
    environment = {"POOLGRID_ENGINE_API_KEY": SERVER_KEY}
    with Process("up", "--engine-url", server.url, "--port", "0", *model, *tls, environment=environment) as up:
        url = up.wait_ready().url
        assert url.startswith("https://")
        config = ("--config", str(document), "--port", "0", f"--pool-url=far={url}", "--pool-ca", str(files.ca))
        with Process("global-router", *config, *model) as front:
            front.wait_ready()
            becomes(lambda: [row["state"] for row in pools(front.url).values()], ["available"])
            with RawClient(front.url) as client:
                for _ in range(3):
                    client.ask("POST", CHAT, chat_body())
                    assert client.answer().body == ANSWER
            assert len(server.calls) == 3
            for process in (front, up):
                status, errors = process.stop()
                assert status == 0, errors
