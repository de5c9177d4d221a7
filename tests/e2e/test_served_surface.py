"""Every path of docs/http_api.md and of ``/openapi.json``, asked of the commands as they are started by default.

Other tests build applications with the parts that they need. A default command has all parts, the fleet page among
them, and a fault of one part can break a path of another. ``make lowest`` runs this file with the lowest versions of
all dependencies that ``pyproject.toml`` allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.api_endpoint import absent_endpoint
from tests.e2e.processes import Process, eventually, ready_workers, running_pool

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
GRID = ROOT / "pool_configs" / "short_and_long.json"
COMMANDS = ("up", "router", "global-router")
ONLY_A_ROUTER = ("/v1/pool", "/v1/workers", "/v1/route", "/v1/sessions")
"""Beginnings of paths in docs/http_api.md that a global router does not serve."""

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Hello"},
    "/tokenize": {"model": "tiny", "prompt": "Hello"},
    "/detokenize": {"model": "tiny", "tokens": [1]},
    "/v1/route": CHAT,
}
BODIES = {path: body for path, body in BODIES.items() if not absent_endpoint(path)}
TASKS = [path for path in ("/v1/embeddings", "/v1/images/generations", "/v1/videos") if not absent_endpoint(path)]
"""No worker here serves them."""
NO_ROUTE = (": Not Found", ": Method Not Allowed")
"""What the server answers where no operation is."""

VALUES = {"model_id": "tiny", "name": "main.js", "dp_rank": "0"}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Start a pool, a router without workers and a global router before the pool; yields their URLs."""
    with ExitStack() as running:
        up = running.enter_context(running_pool(workers=1))
        router = running.enter_context(Process("router", "--port", "0").wait_ready())
        urls = [word for name in ("short", "long") for word in ("--pool-url", f"{name}={up.url}")]
        front = running.enter_context(
            Process("global-router", "--port", "0", "--config", str(GRID), *urls).wait_ready()
        )
        eventually("the worker is ready", lambda: len(ready_workers(up.url)) == 1)
        eventually("the fleet serves", lambda: httpx.get(f"{front.url}/ready").status_code == 200)
        yield dict(zip(COMMANDS, (up.url, router.url, front.url), strict=True))
        for process in (router, front):
            status, errors = process.stop()
            assert status == 0, errors
            assert "Traceback" not in errors


def documented(page: str) -> set[str]:
    """Return the paths that a page names in backticks, with ``{}`` for parameters."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("\n## Request fields")[0]
    spans = [span.partition("?")[0] for span in re.findall(r"`([^`\n]+)`", text)]
    found = [re.search(r"(?:^|(?:GET|POST|DELETE) )(/(?!var/)[A-Za-z0-9_./{}-]*)$", span) for span in spans]
    return {shape(match[1]) for match in found if match is not None}


def shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_documented_path_is_described_by_the_served_openapi_document(
    servers: dict[str, str], command: str
) -> None:
    answer = httpx.get(f"{servers[command]}/openapi.json")
    assert answer.status_code == 200, answer.text
    described = {shape(path) for path in answer.json()["paths"]}

    expected = documented("http_api.md") - {"/openapi.json"}
    assert len(expected) > 20
    expected = {path for path in expected if not absent_endpoint(path)}
    if command == "global-router":
        expected = {path for path in expected if not path.startswith(ONLY_A_ROUTER)} | documented("global_router.md")
        expected -= {"/v1/fleet", "/v1/pool"}  # one needs names, the other is asked of the pools' routers
        assert "/v1/config/rollback" in expected
    assert not expected - described


@pytest.mark.parametrize("command", COMMANDS)
def test_every_described_operation_answers_with_a_described_status(servers: dict[str, str], command: str) -> None:
    url = servers[command]
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    wrong: list[str] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, operations in paths.items():
            for method, operation in operations.items():
                status, text = ask(client, method.upper(), path)
                # A router without workers has nobody to generate.
                allowed = set(operation["responses"]) - ({"500"} if command == "router" else {"500", "503"})
                if str(status) not in allowed or any(refusal in text for refusal in NO_ROUTE):
                    wrong.append(f"{method.upper()} {path}: {status} {text[:200]}")
    assert not wrong


def ask(client: httpx.Client, method: str, path: str) -> tuple[int, str]:
    """Return status and body of a request that the operation takes; a stream is left at its first bytes."""
    filled = re.sub(r"\{(\w+)(?::path)?\}", lambda match: VALUES.get(match[1], "unknown"), path)
    body = BODIES.get(path)
    with client.stream(method, filled, json=body) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer.status_code, next(answer.iter_text())
        return answer.status_code, answer.read().decode()


def test_a_router_without_workers_has_started_and_is_not_ready(servers: dict[str, str]) -> None:
    for command, status in (("up", 200), ("global-router", 200), ("router", 503)):
        assert httpx.get(f"{servers[command]}/live").status_code == 200
        for path in ("/ready", "/ping", "/health"):
            assert httpx.get(f"{servers[command]}{path}").status_code == status, (command, path)


@pytest.mark.parametrize("command", COMMANDS)
def test_head_is_answered_wherever_get_is(servers: dict[str, str], command: str) -> None:
    with httpx.Client(base_url=servers[command], timeout=60) as client:
        for path in ("/openapi.json", "/live", "/version", "/health", "/metrics", "/v1/models", "/ui", "/v1/decisions"):
            head, got = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (got.status_code, b""), path


EVIL = "http://evil.example"
FOREIGN = (
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": EVIL, "sec-fetch-site": "cross-site", "content-type": "text/plain"},
)


def changing(url: str) -> list[tuple[str, str]]:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    return [
        (method.upper(), re.sub(r"\{\w+\}", "w0", path))
        for path, operations in paths.items()
        for method in operations
        if method != "get" and (method != "post" or path not in (*BODIES, *TASKS) or path == "/v1/route")
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_web_page_of_another_origin_changes_nothing(servers: dict[str, str], command: str) -> None:
    url = servers[command]
    operations = changing(url)
    assert ("POST", "/v1/config/reload" if command == "global-router" else "/v1/workers/w0/drain") in operations
    assert absent_endpoint("/v1/responses") or ("DELETE", "/v1/responses/w0") in operations
    with httpx.Client(base_url=url) as client:
        for method, path in operations:
            for headers in FOREIGN:
                for spelling in (path, f"{path}/"):
                    answer = client.request(method, spelling, headers=headers)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin"), path
                    assert "--cors-allow-origins" in answer.json()["error"]["message"]
            for headers in ({"origin": url}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
                if not path.endswith("/drain"):
                    assert client.request(method, path, headers=headers).status_code != 403, path


def test_a_web_page_cannot_have_a_browser_send_a_prompt_unasked(servers: dict[str, str]) -> None:
    """A POST whose body has a type that a page may send, or none, is not read."""
    with httpx.Client(base_url=servers["up"]) as client:
        for path in (*BODIES, *TASKS):
            content = json.dumps(BODIES.get(path, {"model": "tiny", "input": "Hello", "prompt": "Hello"}))
            for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
                headers = {"origin": EVIL, **({} if content_type is None else {"content-type": content_type})}
                answer = client.post(path, content=content, headers=headers)
                assert answer.status_code == (403 if path == "/v1/route" else 415), (path, content_type)
            status = client.post(path, content=content).status_code
            assert status == (404 if path in TASKS else 200), "clients without a browser may leave it out"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_rebound_name_is_refused_on_every_path(servers: dict[str, str], command: str) -> None:
    url = servers[command]
    port = url.rpartition(":")[2]
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    with httpx.Client(base_url=url) as client:
        for path, operations in paths.items():
            for method in operations:
                answer = client.request(method, path, headers={"host": f"evil.example:{port}"}, json=BODIES.get(path))
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host"), path
        for host in ("localhost", "LOCALHOST.:1", "pool.localhost", "127.0.0.2:9", "[::1]:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
    assert httpx.get(f"{url}/health", headers={"host": ""}).status_code == 403, "the first request of a connection"


def test_the_parts_behind_a_pool_refuse_rebound_names_and_web_pages(servers: dict[str, str]) -> None:
    (worker,) = httpx.get(f"{servers['up']}/v1/workers").json()["data"]
    with httpx.Client(base_url=worker["http_endpoint"]) as client:
        for path in ("/live", "/blocks", "/metrics"):
            assert client.get(path, headers={"host": "evil.example"}).status_code == 403
        for headers in ({"origin": EVIL}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
            assert client.post("/drain", headers=headers).status_code == 403
    assert ready_workers(servers["up"]) == [worker["worker_id"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_with_a_slash_at_its_end_is_served_without_a_redirect(servers: dict[str, str], command: str) -> None:
    with httpx.Client(base_url=servers[command], headers={"x-forwarded-proto": "https"}) as client:
        for path in ("/v1/models/", "/live/", "/v1/decisions/", "/openapi.json/"):
            assert client.get(path).status_code == client.head(path).status_code == 200, path
        if command != "router":
            for path, body in BODIES.items():
                if path != "/v1/route" or command == "up":
                    assert client.post(f"{path}/", json=body).status_code == 200, path
        page = client.get("/ui/")
        assert (page.status_code, page.headers["location"]) == (307, "../ui"), "its files are relative to /ui"


def test_the_first_picture_of_the_fleet_page_counts_every_request(servers: dict[str, str]) -> None:
    """More requests than the picture has rows for: the counts by second are of all."""
    with httpx.Client(base_url=servers["up"], timeout=60) as client:
        for _ in range(13):
            body = {"model": "tiny", "prompt": ["Hello"] * 20, "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
        # A picture may be as old as the page's interval when another viewer left just before.
        eventually("the picture is new", lambda: _first_picture(client)["values"]["totals"]["decisions"] > 240)
        picture = _first_picture(client)
    table = picture["tables"]["seconds"]
    assert table["columns"] == ["requests", "prompt_tokens", "found_tokens", "moves"]
    assert sum(row[1] for row in table["rows"]) == picture["values"]["totals"]["decisions"]
    assert len(picture["tables"]["requests"]["rows"]) == 240


def _first_picture(client: httpx.Client) -> dict[str, Any]:
    """Return what a page that opens is sent first."""
    text = ""
    with client.stream("GET", "/v1/fleet/stream") as answer:
        for part in answer.iter_text():
            text += part
            if "\n\n" in text:
                break
    data = next(line for line in text.splitlines() if line.startswith("data:"))
    picture: dict[str, Any] = json.loads(data.removeprefix("data:"))
    return picture
