"""A global router and routers of pools that all have API keys: what each hop gets to know of a client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from poolgrid.kernel.wire.sessions import tenant_key
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, Tenant, cache_salt
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import PATIENT, Process, becomes
from tests.proxy.pool import POOLS, SERVER_KEY, TWO_POOLS
from tests.proxy.raw_client import CHAT, Answer, RawClient, chat_body
from tests.proxy.scripted_server import ANSWER, PATIENCE_S, Call, ScriptedServer, whole

pytestmark = pytest.mark.e2e

ACME, OPS, OF_GLOBAL_ROUTER = "pg-acme-of-clients", "pg-ops-of-operators", "pg-global-router-of-pools"


def keyed(key: str, **more: Any) -> Tenant:
    return Tenant(keys=(Key(key_file.hash_key(key)),), **more)


def write_keys(path: Path, **tenants: Tenant) -> str:
    """Write a file of keys; return its secret."""
    document = msgspec.structs.replace(key_file.new_document(), tenants=tenants)
    path.write_bytes(msgspec.json.encode(document))
    path.chmod(0o600)
    return document.salt_secret


@dataclass
class KeyedFleet:
    """The processes, and what clients and servers of them see."""

    url: str
    pools: dict[str, Process]
    servers: dict[str, ScriptedServer]
    secret: str
    """Of the global router's keys."""

    def call(self, method: str, target: str, body: bytes | None, *headers: str, url: str = "") -> Answer:
        with RawClient(url or self.url) as client:
            client.ask(method, target, body, *headers)
            return client.answer(method)

    def post(self, target: str, body: bytes, *headers: str, url: str = "") -> Answer:
        return self.call("POST", target, body, *headers, url=url)

    def only_call(self) -> Call:
        (call,) = [call for each in self.servers.values() for call in each.calls]
        return call


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedFleet]:
    directory = tmp_path_factory.mktemp("keyed")
    acme = keyed(ACME, priority_max=5, requests_per_minute=1000, models=("tiny",), features=())
    secret = write_keys(directory / "clients.json", acme=acme, ops=keyed(OPS, operator=True))
    of_pools = {"global": keyed(OF_GLOBAL_ROUTER, operator=True), "acme": keyed(ACME), "ops": keyed(OPS, operator=True)}
    write_keys(directory / "pools.json", **of_pools)
    (directory / "key").write_text(OF_GLOBAL_ROUTER)
    (directory / "document.json").write_text(json.dumps(TWO_POOLS))
    model = ("--model-path", str(TINY_MODEL_PATH))
    servers = {name: ScriptedServer(str(TINY_MODEL_PATH)) for name in POOLS}
    with ExitStack() as opened:
        for each in servers.values():
            opened.callback(each.close)
        pools: dict[str, Process] = {}
        for name, server in servers.items():
            options = ("--port", "0", "--api-keys", str(directory / "pools.json"), *model, *PATIENT)
            environment = {"POOLGRID_ENGINE_API_KEY": SERVER_KEY}
            pools[name] = Process("up", "--engine-url", server.url, *options, environment=environment)
            opened.enter_context(pools[name])
        urls = [f"--pool-url={name}={pool.wait_ready().url}" for name, pool in pools.items()]
        keys = ("--api-keys", str(directory / "clients.json"), "--pool-api-key", str(directory / "key"))
        config = ("--config", str(directory / "document.json"), "--port", "0")
        front = opened.enter_context(Process("global-router", *config, *urls, *keys, *model))
        yield KeyedFleet(front.wait_ready().url, pools, servers, secret)
        for process in (front, pools["near"]):  # the other is killed by the last test
            status, errors = process.stop()
            assert status == 0, errors
            assert "this is a bug" not in errors


@pytest.fixture
def fleet(module_fleet: KeyedFleet) -> KeyedFleet:
    for each in module_fleet.servers.values():
        each.script = None
    states = {"available"}
    becomes(lambda: {row["state"] for row in rows(module_fleet)}, states)
    for each in module_fleet.servers.values():
        each.calls.clear()
        each.targets.clear()
    return module_fleet


def rows(fleet: KeyedFleet) -> list[dict[str, Any]]:
    answer = httpx.get(f"{fleet.url}/v1/pools", headers={"authorization": f"Bearer {OPS}"})
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


CLIENT, OPERATOR = f"authorization: Bearer {ACME}", f"authorization: Bearer {OPS}"


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/speech", "/v1/files/file-1"])
def test_no_key_but_the_servers_own_reaches_a_server(fleet: KeyedFleet, path: str) -> None:
    answer = fleet.post(path, chat_body(), CLIENT)

    assert answer.status == 200
    for server in fleet.servers.values():
        for call in server.calls:
            assert not any(key.encode() in call.head + call.body for key in (ACME, OPS, OF_GLOBAL_ROUTER))
            assert call.header("authorization") == f"Bearer {SERVER_KEY}"


def test_keys_of_both_hops_are_blotted_out_of_a_refusal(fleet: KeyedFleet) -> None:
    body = f'{{"error":"{SERVER_KEY} {OF_GLOBAL_ROUTER}"}}'.encode()
    for each in fleet.servers.values():
        each.script = lambda call: call.send(whole(body, 400))

    answer = fleet.post(CHAT, chat_body(), CLIENT)

    assert answer.status == 400
    assert not any(key.encode() in answer.body for key in (SERVER_KEY, OF_GLOBAL_ROUTER))


def test_the_tenants_part_of_the_caches_is_that_of_the_global_router(fleet: KeyedFleet) -> None:
    assert fleet.post(CHAT, chat_body(cache_salt="mine", prompt_cache_key="talk"), CLIENT).status == 200

    call = fleet.only_call()
    assert json.loads(call.body)["cache_salt"] == cache_salt(bytes.fromhex(fleet.secret), "acme", "mine")

    def sessions() -> list[tuple[str, str]]:
        answer = httpx.get(f"{fleet.pools['far'].url}/v1/sessions", headers={"authorization": f"Bearer {OPS}"})
        return [(each["session"], each["tenant"]) for each in answer.json()["data"]]

    becomes(sessions, [("talk", f"{tenant_key('acme'):016x}")])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (chat_body(model="other"), "model_not_allowed"),
        (chat_body(logprobs=True), "feature_not_allowed"),
    ],
)
def test_what_a_tenant_may_not_use_is_refused_before_any_pool_is_asked(
    fleet: KeyedFleet, body: bytes, code: str
) -> None:
    answer = fleet.post(CHAT, body, CLIENT)

    assert (answer.status, answer.json()["error"]["code"]) == (403, code)
    assert not any(each.calls for each in fleet.servers.values())


def test_limits_that_an_answer_shows_are_the_tenants_at_the_global_router(fleet: KeyedFleet) -> None:
    answer = fleet.post(CHAT, chat_body(), CLIENT)

    assert answer.all("x-ratelimit-limit-requests") == ["1000"]
    assert fleet.post(CHAT, chat_body(), OPERATOR).all("x-ratelimit-limit-requests") == []


@pytest.mark.parametrize(
    ("key", "hop", "status"),
    [
        (CLIENT, '{"priority":100}', 403),
        (OPERATOR, '{"priority":"high"}', 400),
        (OPERATOR, '{"tenant":"%s"}' % ("x" * 65), 400),
        (OPERATOR, "{", 400),
        (OPERATOR, '{"tenant":"acme","priority":7,"later":1}', 200),
        ("authorization: Bearer pg-unknown", "{}", 401),
    ],
)
def test_a_pool_believes_holders_of_an_operators_key_alone(fleet: KeyedFleet, key: str, hop: str, status: int) -> None:
    answer = fleet.post(CHAT, chat_body(), key, f"x-poolgrid-hop: {hop}", url=fleet.pools["near"].url)

    assert answer.status == status
    assert len(fleet.servers["near"].calls) == (status == 200)


@pytest.mark.parametrize("target", ["/v1/workers", "/v1/decisions", "/metrics", "/v1/doctor"])
def test_paths_of_a_pools_router_are_closed_to_what_a_global_router_forwards(fleet: KeyedFleet, target: str) -> None:
    near = fleet.pools["near"].url
    assert fleet.call("GET", target, None, OPERATOR, url=near).body != ANSWER
    fleet.servers["near"].targets.clear()

    assert fleet.call("GET", target, None, OPERATOR, "x-poolgrid-hop: {}", "x-script: 1", url=near).body == ANSWER
    assert f"GET {target}" in fleet.servers["near"].targets


@pytest.mark.parametrize(("key", "status"), [(CLIENT, 403), (OPERATOR, 200)])
def test_operators_of_the_global_router_reach_the_servers_paths_of_operators(
    fleet: KeyedFleet, key: str, status: int
) -> None:
    assert fleet.post("/sleep", b"{}", key).status == status

    assert sum(len(each.calls) for each in fleet.servers.values()) == (status == 200)


def test_a_pool_that_is_gone_costs_no_request_and_shows_as_down(fleet: KeyedFleet) -> None:
    """The last of these tests: the pool stays away."""

    def script(call: Call) -> None:
        fleet.pools["far"].kill()
        call.wait_until_left()

    fleet.servers["far"].script = script

    with RawClient(fleet.url) as client:
        client.ask("POST", CHAT, chat_body(), OPERATOR, "x-request-id: moved")
        answer = client.answer()

    assert (answer.status, answer.body, answer.header("x-poolgrid-pool")) == (200, ANSWER, "near")
    record = httpx.get(f"{fleet.url}/v1/decisions/moved", headers={"authorization": f"Bearer {OPS}"}).json()
    assert [(each["pool"], each["how"]) for each in record["placements"]] == [("far", "grid"), ("near", "fallback")]
    assert fleet.servers["far"].calls[0].is_left.wait(PATIENCE_S)
    for _ in range(4):
        answer = fleet.post(CHAT, chat_body(), CLIENT)
        assert (answer.status, answer.header("x-poolgrid-pool")) == (200, "near")
    becomes(lambda: [row["state"] for row in rows(fleet)], ["available", "down"])
    assert fleet.post("/v1/audio/speech", b"{}", CLIENT).status == 200
