"""Paths that change or show a server reach none for clients, in any spelling."""

from __future__ import annotations

import pytest

from tests.forwarding.engine_routes import OPERATORS
from tests.proxy.pool import ScriptedPool

pytestmark = pytest.mark.e2e

SPELLINGS = [
    "{0}", "{0}/", "{0}//", "{0}?x=/v1/models", "{0};/v1", "{upper}", "{coded}", "{twice}", "//v1{0}", "/{0}",
    "/v1/..{0}", "/v1/%2e%2e{0}", "/v1/%252e%252e{0}", "/v1/..%2f{1}", "/v1/..;{0}", "/v1\\..\\{1}", "/v1/%5c..%5c{1}",
    "/./{1}", "{0}/.", "{0}/..;/v1/models", "{0}%00", "{0}%20", "{0}#x", "{0}%zz", "/%2f{1}", "http://host{0}",
]  # fmt: skip

OPENED = b"what only operators may see"


@pytest.fixture
def opened(pool: ScriptedPool) -> ScriptedPool:
    pool.answers(OPENED)
    return pool


def refused(pool: ScriptedPool, method: str, target: str, *headers: str) -> bool:
    """Ask, and return whether no server was asked and nothing shown; poolgrid has pages of its own at some paths."""
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    answer = pool.call(method, target, body, "x-script: 1", *headers)
    return pool.calls == [] and OPENED not in answer.body


@pytest.mark.parametrize("path", OPERATORS)
def test_path_of_operators_is_closed_for_every_method(opened: ScriptedPool, path: str) -> None:
    target = path.replace("{", "").replace("}", "")
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert refused(opened, method, target), method


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep", "/v1/kv_cache_hints", "/metrics", "/server_info"])
def test_no_spelling_opens_a_path_of_operators(opened: ScriptedPool, path: str) -> None:
    coded = "/" + "".join(f"%{ord(c):02x}" for c in path[1:])
    for each in SPELLINGS:
        target = each.format(path, path[1:], upper=path.upper(), coded=coded, twice=coded.replace("%", "%25"))
        assert refused(opened, "POST", target), target
        assert refused(opened, "GET", target), target


def test_offer_to_upgrade_opens_no_path_of_operators(opened: ScriptedPool) -> None:
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: YQ==")
    for target in ("/sleep", "/v1/load_lora_adapter", "/v1/..%2fsleep"):
        assert refused(opened, "GET", target, *upgrade)


@pytest.mark.parametrize("header", ["x-original-url", "x-rewrite-url", "x-forwarded-prefix", "x-http-method-override"])
def test_header_of_another_target_opens_no_path_of_operators(opened: ScriptedPool, header: str) -> None:
    assert refused(opened, "POST", "/sleep", f"{header}: /v1/chat/completions")


def test_refusal_names_the_path_and_its_reason(opened: ScriptedPool) -> None:
    answer = opened.post("/v1/load_lora_adapter", b"{}")

    assert answer.status == 403
    assert "/v1/load_lora_adapter" in answer.json()["error"]["message"]
    assert opened.post("/v1/../sleep", b"{}").status == 400
