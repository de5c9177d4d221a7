"""CORS by the setting of the router (``cors_allow_origins``), with API keys: in place of the servers' headers, once."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from poolgrid.server.frontend.access import key_file
from tests.e2e.processes import becomes
from tests.proxy.pool import ScriptedPool
from tests.proxy.raw_client import CHAT, Answer, chat_body
from tests.proxy.scripted_server import Call, chunk, serve_plainly, stream_head, whole

pytestmark = pytest.mark.e2e

FRONTS = ("router",)
"""Clients' keys are not those of pools: ``test_pools_with_keys.py``."""

PAGE = "https://page.example"
OTHER = "https://other.example"
ASKS = ("access-control-request-method: POST", "access-control-request-headers: authorization, content-type")
SERVERS = (
    "access-control-allow-origin: *",
    "Access-Control-Allow-Credentials: true",
    "access-control-expose-headers: x-a",
    "access-control-allow-private-network: true",
    "vary: Accept-Encoding, origin",
)
KEY = key_file.make_key()
BEARER = f"authorization: Bearer {KEY}"


@pytest.fixture(scope="module")
def pool_options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    tenant = key_file.Tenant(keys=(key_file.Key(key_file.hash_key(KEY)),), operator=True)
    key_file.write(keys, msgspec.structs.replace(key_file.new_document(), tenants={"page": tenant}))
    return f"api-keys={keys}", f"cors-allow-origins={PAGE}"


@pytest.fixture
def pool(module_pool: ScriptedPool) -> ScriptedPool:
    """Its requests need a key, also those of the harness."""
    becomes(lambda: httpx.get(f"{module_pool.url}/ready").status_code, 200)
    module_pool.on(serve_plainly)
    module_pool.forget()
    return module_pool


def cors_of(answer: Answer) -> list[tuple[str, str]]:
    return sorted(pair for pair in answer.headers if pair[0].startswith("access-control-") or pair[0] == "vary")


def allowed(answer: Answer) -> list[str]:
    return answer.all("access-control-allow-origin")


@pytest.mark.parametrize("target", [CHAT, "/v1/models", "/v1/odd", "/metrics", "/v1/workers"])
def test_preflight_is_answered_here_and_needs_no_key(pool: ScriptedPool, target: str) -> None:
    answer = pool.call("OPTIONS", target, None, f"origin: {PAGE}", *ASKS)
    assert (answer.status, allowed(answer)) == (200, [PAGE])
    assert answer.all("access-control-allow-credentials") == []

    answer = pool.call("OPTIONS", target, None, f"origin: {OTHER}", *ASKS)
    assert (answer.status, allowed(answer)) == (400, [])
    assert pool.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_headers_of_the_server_are_replaced(pool: ScriptedPool, stream: bool) -> None:
    def script(call: Call) -> None:
        call.send(
            stream_head(*SERVERS) + chunk(b"data: x\n\n") + b"0\r\n\r\n" if stream else whole(b"{}", 200, *SERVERS)
        )

    pool.on(script)
    answer = pool.post(CHAT, chat_body(stream=stream), BEARER, f"origin: {PAGE}")
    assert answer.status == 200
    exposed = answer.header("access-control-expose-headers") or ""
    assert "x-request-id" in exposed
    assert "x-a" not in exposed
    assert cors_of(answer) == [
        ("access-control-allow-origin", PAGE),
        ("access-control-expose-headers", exposed),
        ("vary", "Accept-Encoding, Origin"),
    ]

    for headers in ((BEARER, f"origin: {OTHER}"), (BEARER,)):
        others = pool.post(CHAT, chat_body(stream=stream), *headers)
        assert others.status == 200
        assert allowed(others) == others.all("access-control-allow-credentials") == []


def test_refusals_of_the_router_can_be_read_by_the_page(pool: ScriptedPool) -> None:
    answer = pool.post(CHAT, chat_body(), f"origin: {PAGE}")
    assert (answer.status, allowed(answer)) == (401, [PAGE])

    answer = pool.call("GET", "/v1/models", None, f"origin: {PAGE}", BEARER)
    assert (answer.status, allowed(answer)) == (200, [PAGE])


@pytest.mark.parametrize("headers", [(), ("content-length: 2",), ("transfer-encoding: chunked",)])
def test_what_is_no_preflight_needs_a_key(pool: ScriptedPool, headers: tuple[str, ...]) -> None:
    with pool.client() as client:
        client.ask("OPTIONS", CHAT, None, *(ASKS if headers else ()), *headers)
        client.write(b"{}" if "content-length: 2" in headers else b"0\r\n\r\n" if headers else b"")
        assert client.answer("OPTIONS").status == 401
    assert pool.calls == []


def test_form_of_an_allowed_page_reaches_a_server(pool: ScriptedPool) -> None:
    answer = pool.post(CHAT, chat_body(), BEARER, f"origin: {PAGE}", "content-type: text/plain")
    assert (answer.status, allowed(answer)) == (200, [PAGE])
