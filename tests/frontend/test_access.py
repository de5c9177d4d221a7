"""API keys, tenants, and every refusal: over real sockets, with its code in body, header and metric."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import Refused, ServedModel
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.gate import PathClass, key_of, path_class
from poolgrid.server.frontend.access.key_file import Key, KeyDocument, KeyFileError, Tenant, cache_salt
from poolgrid.server.frontend.access.meter import LIMIT_HEADERS, Rate, TokenBucket, limit_headers
from poolgrid.server.frontend.access.tenants import Tenants
from poolgrid.server.frontend.errors import REFUSAL_STATUSES
from poolgrid.server.frontend.media.references import STATUS_BY_CODE
from poolgrid.server.frontend.metrics import MODEL_LABELS_MAX, TENANT_LABELS_MAX, FrontendMetrics
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.process import instruments
from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.server import application

KEY = "pg-of-acme"
OTHER = "pg-of-other"
OPERATOR = "pg-of-operator"
OLD = "pg-that-expired"
SECRET = "5" * 64
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def keyed(key: str, **more: Any) -> Key:
    return Key(key_file.hash_key(key), **more)


def document(**acme: Any) -> KeyDocument:
    past = datetime.now(UTC) - timedelta(seconds=1)
    return KeyDocument(
        1,
        SECRET,
        {
            "acme": Tenant(keys=(keyed(KEY), keyed(OLD, expires=past)), **acme),
            "other": Tenant(keys=(keyed(OTHER),)),
            "ops": Tenant(keys=(keyed(OPERATOR),), operator=True),
        },
    )


class Served:
    def __init__(self, client: httpx.AsyncClient, registry: CollectorRegistry, backend: FakeBackend) -> None:
        self.client = client
        self.backend = backend
        self._registry = registry

    def metric(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0

    async def chat(self, key: str | None = KEY, **more: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.post("/v1/chat/completions", json={**BODY, **more}, headers=headers)

    def check_refusal(self, answer: httpx.Response, status: int, code: str) -> None:
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert answer.headers["x-poolgrid-refusal"] == code
        assert self.metric("poolgrid_frontend_refusals_total", code=code) == 1


@asynccontextmanager
async def running(path: Path | None, backend: FakeBackend | None = None, **settings: Any) -> Any:
    registry = CollectorRegistry()
    backend = backend or FakeBackend()
    app = application(backend, registry=registry, api_keys=path, **settings)
    server = HttpServer(app, "127.0.0.1", 0, "port")
    server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            yield Served(client, registry, backend)
    finally:
        await server.stop()
        await app.close()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def run(**acme: Any) -> Path:
        path = tmp_path / "keys.json"
        key_file.write(path, document(**acme))
        return path

    return run


# -- 401 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": f"Basic {KEY}"}, "missing_api_key"),
        ({"authorization": "Bearer pg-unknown"}, "invalid_api_key"),
        ({"authorization": f"Bearer {KEY[:-1]}"}, "invalid_api_key"),
        ({"x-api-key": "\xff"}, "invalid_api_key"),
        ({"authorization": f"Bearer {OLD}"}, "expired_api_key"),
    ],
)
async def test_without_a_good_key_nothing_is_read_or_run(
    write: Callable[..., Path], headers: dict[str, str], code: str
) -> None:
    async with running(write()) as service:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        answer = await service.client.post("/v1/chat/completions", content=b"x" * 3_000_000, headers=raw)

        service.check_refusal(answer, 401, code)
        assert answer.headers["x-request-id"]
        assert answer.headers["www-authenticate"] == 'Bearer realm="poolgrid"'
        assert service.backend.requests == []
        assert (await service.chat()).status_code == 200, "the next request is served"


async def test_a_key_may_come_in_either_header(write: Callable[..., Path]) -> None:
    async with running(write()) as service:
        assert (await service.chat()).status_code == 200
        answer = await service.client.post("/v1/chat/completions", json=BODY, headers={"X-API-Key": KEY})
        assert answer.status_code == 200
        assert [request.tenant for request in service.backend.requests] == ["acme", "acme"]
        assert service.metric("poolgrid_frontend_tenant_requests_total", tenant="acme") == 2
        assert service.metric("poolgrid_frontend_tenant_output_tokens_total", tenant="acme") > 0


# -- 403 ---------------------------------------------------------------------------------------------------------------


async def test_a_model_that_is_not_allowed_is_403_and_not_listed(write: Callable[..., Path]) -> None:
    async with running(write(models=("tiny-lora",))) as service:
        service.check_refusal(await service.chat(), 403, "model_not_allowed")
        assert service.metric("poolgrid_frontend_tenant_refusals_total", tenant="acme", code="model_not_allowed")
        assert (await service.chat(model="tiny-lora")).status_code == 200
        headers = {"authorization": f"Bearer {KEY}"}
        listed = (await service.client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in listed] == ["tiny-lora"]
        assert (await service.client.get("/v1/models/tiny", headers=headers)).status_code == 403


async def test_a_feature_that_is_not_allowed_is_403(write: Callable[..., Path]) -> None:
    async with running(write(features=("media",))) as service:
        service.check_refusal(await service.chat(logprobs=True), 403, "feature_not_allowed")
        assert service.backend.requests == []
        assert (await service.chat()).status_code == 200


async def test_operators_endpoints_are_403_for_tenants(write: Callable[..., Path]) -> None:
    async with running(write(), metrics_need_key=True) as service:
        tenant, operator = ({"authorization": f"Bearer {key}"} for key in (KEY, OPERATOR))
        service.check_refusal(await service.client.get("/v1/decisions", headers=tenant), 403, "operator_only")
        assert (await service.client.get("/v1/decisions", headers=operator)).status_code == 404
        assert (await service.client.get("/metrics", headers=tenant)).status_code == 403
        assert (await service.client.get("/metrics")).status_code == 401
        assert (await service.client.get("/metrics", headers=operator)).status_code == 200
        for path in ("/live", "/ready", "/health", "/ping", "/version", "/openapi.json"):
            assert (await service.client.get(path)).status_code == 200
            assert (await service.client.head(path)).status_code == 200
        assert (await service.client.head("/v1/decisions", headers=tenant)).status_code == 403
        assert (await service.client.options("/v1/chat/completions")).status_code == 401
        preflight = {"origin": "http://app", "access-control-request-method": "POST"}
        assert (await service.client.options("/v1/chat/completions", headers=preflight)).status_code == 405


# -- 413, 429, 503 -----------------------------------------------------------------------------------------------------


async def test_a_body_that_is_too_large_is_413() -> None:
    async with running(None, max_body_bytes=1024) as service:
        service.check_refusal(await service.chat(user="x" * 2000), 413, "body_too_large")


@pytest.mark.parametrize(
    ("status", "code", "message", "retry_after_s", "header"),
    [
        (429, "busy", "1024 requests are waiting", 7.2, "8"),
        (503, "no_worker", "every worker is draining", None, "5"),
        (503, "not_ready", "the router is rebuilding its state", None, "1"),
    ],
)
async def test_what_the_router_refuses_has_the_code_everywhere(
    status: int, code: str, message: str, retry_after_s: float | None, header: str | None
) -> None:
    # Made here: once raised it holds what it was raised in, and a parameter lives as long as the process.
    refusal = Refused(status, code, message, retry_after_s)

    async with running(None, FakeBackend(refusal=refusal)) as service:
        answer = await service.chat()
        service.check_refusal(answer, status, code)
        assert answer.headers.get("retry-after") == header


async def test_a_request_that_is_wrong_is_no_refusal() -> None:
    async with running(None) as service:
        answer = await service.chat(n=0)
        assert answer.status_code == 400
        assert "x-poolgrid-refusal" not in answer.headers


async def test_the_request_rate_is_429_with_the_time_until_the_next_one(write: Callable[..., Path]) -> None:
    async with running(write(requests_per_minute=2)) as service:
        assert [(await service.chat()).status_code for _ in range(2)] == [200, 200]
        answer = await service.chat()
        service.check_refusal(answer, 429, "rate_limited")
        assert 28 <= int(answer.headers["retry-after"]) <= 30
        assert (await service.chat(OTHER)).status_code == 200, "other tenants do not notice"


async def test_the_token_rate_counts_prompts_and_output_and_gives_back_what_was_not_run(
    write: Callable[..., Path],
) -> None:
    backend = FakeBackend(lambda request: speak("Hello, world! " * 20))
    async with running(write(tokens_per_minute=60), backend) as service:
        backend.refusal = Refused(503, "no_worker", "none")
        for _ in range(10):
            assert (await service.chat()).status_code == 503
        backend.refusal = None
        assert (await service.chat()).status_code == 200
        answer = await service.chat()
        service.check_refusal(answer, 429, "rate_limited")
        assert int(answer.headers["retry-after"]) > 60, "the output was more than a minute's worth"
        assert service.metric("poolgrid_frontend_tenant_prompt_tokens_total", tenant="acme") > 0


async def test_answers_say_how_much_of_the_limits_is_left(write: Callable[..., Path]) -> None:
    async with running(write(requests_per_minute=3, tokens_per_minute=6000)) as service:
        whole = await service.chat()
        streamed = await service.chat(stream=True)
        wrong = await service.chat(n=0)
        refused = await service.chat()
        assert [answer.status_code for answer in (whole, streamed, wrong, refused)] == [200, 200, 400, 429]
        for left, answer in enumerate((refused, wrong, streamed, whole)):
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert int(answer.headers["x-ratelimit-remaining-requests"]) == max(0, left - 1)
            assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
            assert re.fullmatch(r"(\d+m)?[\d.]+s|\d+ms", answer.headers["x-ratelimit-reset-requests"])
        isl = 6000 - int(whole.headers["x-ratelimit-remaining-tokens"])
        assert 5 < isl < 50
        listed = await service.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert listed.headers["x-ratelimit-limit-requests"] == "3"
        other = await service.chat(OTHER)
        assert not [name for name in other.headers if name.startswith("x-ratelimit")], "it has no limits"


@pytest.mark.parametrize(
    ("full_in_ms", "told"),
    [(-5.0, "0ms"), (12.4, "12ms"), (1500.0, "1.5s"), (20_000.0, "20s"), (360_000.0, "6m0s"), (61_500.0, "1m1.5s")],
)
def test_the_time_until_a_limit_is_whole_again_is_written_as_openai_does(full_in_ms: float, told: str) -> None:
    headers = dict(limit_headers([(Rate.REQUESTS, TokenBucket(1000.0 + full_in_ms, 60), 1000.0)]))

    assert headers[b"x-ratelimit-reset-requests"] == told.encode()
    assert {name.decode() for name in headers} <= set(LIMIT_HEADERS)


async def test_requests_in_flight_are_limited_and_leavers_give_up_their_place(write: Callable[..., Path]) -> None:
    never = asyncio.Event()
    backend = FakeBackend(lambda request: [never])
    async with running(write(concurrent_requests=1), backend) as service:
        first = asyncio.ensure_future(service.chat())
        await backend.submitted.wait()
        answer = await service.chat()
        service.check_refusal(answer, 429, "concurrency_limited")
        assert answer.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(120):
            await backend.streams[0].cancelled.wait()
        backend.script = lambda request: speak("Hello")
        async with asyncio.timeout(120):
            while (answer := await service.chat()).status_code == 429:
                pass
        assert answer.status_code == 200


# -- what a tenant's requests are given --------------------------------------------------------------------------------


async def test_priorities_are_capped_and_salts_never_shared(write: Callable[..., Path]) -> None:
    async with running(write(priority_max=1, weight=2.5)) as service:
        await service.chat(nvext={"agent_hints": {"priority": 9}})
        await service.chat(nvext={"agent_hints": {"priority": -3}}, cache_salt="mine")
        await service.chat(OTHER, cache_salt="mine")
        await service.chat(OTHER, cache_salt=cache_salt(bytes.fromhex(SECRET), "acme", ""))
        first, salted, other, prober = service.backend.requests

        assert [request.priority for request in (first, salted)] == [1, -3]
        assert first.tenant_weight == 2.5
        salts = {request.cache_salt for request in (first, salted, other, prober)}
        assert len(salts) == 4
        assert all(len(salt) == 32 for salt in salts)
        assert first.cache_salt == cache_salt(bytes.fromhex(SECRET), "acme", "")


def test_blocks_of_a_tenant_do_not_outlast_others_unless_it_may(write: Callable[..., Path]) -> None:
    wanted = {"kv_cache_retention_config": {"decode_retention_priority": 90}}

    async def run(given: int, **rules: Any) -> None:
        async with running(write(**rules)) as service:
            await service.chat(nvext=wanted)
            (request,) = service.backend.requests
            assert request.retention is not None
            assert request.retention.decode_priority == given

    asyncio.run(run(35))
    asyncio.run(run(70, retention_priority_max=70))


def test_a_salt_depends_on_secret_tenant_and_client_and_on_nothing_between_them() -> None:
    salts = {
        cache_salt(secret, tenant, client)
        for secret in (b"1" * 32, b"2" * 32)
        for tenant in ("a", "ab", 'a","')
        for client in ("", "b", '","b')
    }
    assert len(salts) == 18


@pytest.fixture
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.access.tenants.CHECK_MS", 0.0)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("looked_at_each_time")
async def test_a_changed_file_is_in_force_at_once_and_a_broken_one_changes_nothing(write: Callable[..., Path]) -> None:
    path = write(requests_per_minute=1000)
    async with running(path) as service:
        assert (await service.chat()).status_code == 200
        before = path.read_bytes()

        path.write_bytes(before[:-20])
        assert (await service.chat()).status_code == 200, "the old keys stay"
        assert service.metric("poolgrid_frontend_api_keys_stale") == 1
        assert service.metric("poolgrid_frontend_api_key_reloads_total", outcome="refused") == 1
        path.unlink()
        assert (await service.chat()).status_code == 200, "also without any file"

        changed = document()
        del changed.tenants["acme"]
        key_file.write(path, changed)
        assert (await service.chat()).status_code == 401
        assert (await service.chat(OTHER)).status_code == 200
        assert service.metric("poolgrid_frontend_api_keys_stale") == 0
        assert service.metric("poolgrid_frontend_api_key_reloads_total", outcome="loaded") == 1


@pytest.mark.usefixtures("looked_at_each_time")
async def test_what_was_used_goes_on_counting_over_a_reload(write: Callable[..., Path]) -> None:
    path = write(requests_per_minute=3)
    async with running(path) as service:
        for _ in range(3):
            assert (await service.chat()).status_code == 200
        key_file.write(path, document(requests_per_minute=4))
        assert [(await service.chat()).status_code for _ in range(2)] == [200, 429]


def test_a_file_is_written_whole_for_its_owner_only_and_holds_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key_file.write(path, document(models=("a", "b")))

    assert os.stat(path).st_mode & 0o777 == 0o600
    assert key_file.read(path).tenants["acme"].models == ("a", "b")
    assert KEY not in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.update(salt_secret="short"), "salt_secret: it must be 64 hexadecimal digits"),
        (lambda it: it.update(version=2), "$.version"),
        (lambda it: it["tenants"].update({"no name": {}}), "tenants.no name: a name has 1 to 64"),
        (lambda it: it["tenants"]["acme"].update(rate=1), "unknown field `rate` - at `$.tenants[...]`"),
        (lambda it: it["tenants"]["acme"].update(weight=0), "$.tenants[...].weight"),
        (lambda it: it["tenants"]["acme"].update(features=["x"]), "tenants.acme.features: 'x' is not known"),
        (lambda it: it["tenants"]["acme"]["keys"][0].update(hash=KEY), "tenants.acme.keys[0].hash: it must be sha256"),
        (
            lambda it: it["tenants"]["other"].update(keys=it["tenants"]["acme"]["keys"][:1]),
            "tenants.other.keys[0].hash: the same key is at tenants.acme.keys[0]",
        ),
        (lambda it: it["tenants"]["acme"]["keys"][0].update(expires="2030-01-01T00:00:00"), "timezone"),
    ],
)
def test_a_file_with_a_problem_is_refused_and_the_place_named(change: Callable[[Any], None], words: str) -> None:
    raw = json.loads(msgspec.json.encode(document()))
    change(raw)

    with pytest.raises(KeyFileError) as caught:
        key_file.parse(json.dumps(raw).encode(), "keys.json")
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_series_by_tenant_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    for number in range(3 * TENANT_LABELS_MAX):
        metrics.tenant(f"t{number}").requests.inc()
        metrics.refused("busy", f"t{number}")
    metrics.tenant("t0").requests.inc()
    samples = [sample for metric in registry.collect() for sample in metric.samples if "tenant" in sample.labels]

    assert len({sample.labels["tenant"] for sample in samples}) == TENANT_LABELS_MAX + 1
    name = "poolgrid_frontend_tenant_requests_total"
    assert registry.get_sample_value(name, {"tenant": "t0"}) == 2
    assert registry.get_sample_value(name, {"tenant": instruments.OTHER}) == 2 * TENANT_LABELS_MAX


def test_series_by_model_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    for number in range(3 * MODEL_LABELS_MAX):
        metrics.of_model(f"m{number}").ttft.observe(0.1)
    metrics.of_model("m0").ttft.observe(0.1)

    name = "poolgrid_frontend_time_to_first_token_seconds_count"
    counts = {model: registry.get_sample_value(name, {"model": model}) for model in ("m0", "m1", instruments.OTHER)}
    assert counts == {"m0": 2, "m1": 1, instruments.OTHER: 2 * MODEL_LABELS_MAX}


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_a_bucket_holds_a_minute_and_fills_at_its_rate() -> None:
    bucket = TokenBucket().resized(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0.0
    bucket = bucket.charged(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(30, 10_000.0) == pytest.approx(20.0)
    assert bucket.wait_s(60, 10_000_000.0) == 0.0
    assert bucket.wait_s(10_000, 10_000_000.0) == 0.0, "more than it can hold: when it is full"
    bucket = bucket.charged(180, 10_000_000.0)
    assert bucket.wait_s(1, 10_000_000.0) == pytest.approx(121.0), "and then the rest is owed"
    assert bucket.charged(-500, 10_000_000.0).wait_s(60, 10_000_000.0) == 0.0
    assert bucket.charged(-500, 10_000_000.0).charged(1, 10_000_000.0).wait_s(60, 10_000_000.0) == pytest.approx(1.0)


@pytest.mark.parametrize("per_minute", [7, 60, 601, 50_000])
def test_a_minutes_worth_is_given_to_the_last_whatever_the_uptime(per_minute: int) -> None:
    now_ms = 1e10 + 1 / 3
    bucket = TokenBucket().resized(per_minute, now_ms)
    for _ in range(per_minute):
        assert bucket.wait_s(1, now_ms) == 0.0
        bucket = bucket.charged(1, now_ms)
    assert bucket.wait_s(2, now_ms) == pytest.approx(120 / per_minute, abs=0.001)


# -- OpenAI's own client -----------------------------------------------------------------------------------------------


async def test_the_openai_client_understands_every_refusal(write: Callable[..., Path]) -> None:
    async with running(write(requests_per_minute=2, models=("tiny",))) as service:

        async def ask(key: str, model: str = "tiny") -> str | None:
            url = f"{str(service.client.base_url).rstrip('/')}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                answer = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "Hello"}]
                )
                return answer.choices[0].message.content

        assert await ask(KEY) == "Hello, world!"
        with pytest.raises(openai.AuthenticationError) as unknown:
            await ask("sk-other")
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError):
            await ask(KEY, "tiny-lora")
        with pytest.raises(openai.RateLimitError) as limited:
            await ask(KEY)
        assert int(limited.value.response.headers["retry-after"]) >= 1


# -- the contract is whole ---------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_every_refusal_in_the_code_is_in_the_table_and_no_other() -> None:
    pattern = re.compile(r"""\(\s*(401|403|413|429|503),\s*"(\w+)\"""")
    packages = [
        *("server/frontend", "server/router", "server/global_router", "server/serving", "kernel/requests"),
        *("plugins/fleet_page", "plugins/endpoint_picker"),
        *("plugins/messages_api", "plugins/responses_api", "plugins/tasks"),
    ]
    places = [(ROOT / "src" / "poolgrid" / package).resolve() for package in packages]
    raised = {
        (int(status), code)
        for place in places
        for path in place.rglob("*.py")
        for status, code in pattern.findall(path.read_text())
    }
    raised |= {(status, code) for code, status in STATUS_BY_CODE.items() if status in REFUSAL_STATUSES}
    page = (ROOT / "docs" / "http_api.md").read_text()
    table = page[page.index("### Refusals") : page.index("**After a stream began**")]
    told = {
        (int(status), code)
        for status, codes in re.findall(r"^\| (\d+) \| ([^|]*) \|", table, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", codes)
    }

    assert raised <= told
    assert raised == told or not all(place.exists() for place in places)


@given(
    headers=st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key"]), st.binary(max_size=60)), max_size=3)
)
def test_no_header_opens_the_door_or_breaks_it(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Refused) as caught:
        Tenants(document()).authenticate(key_of({"headers": headers}), 0.0)
    assert caught.value.status == 401


def test_a_key_is_taken_until_the_moment_it_expires() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    tenants = Tenants(KeyDocument(1, SECRET, {"a": Tenant(keys=(keyed(KEY, expires=moment),))}))
    wall_ms = moment.timestamp() * 1000

    assert tenants.authenticate(KEY.encode(), wall_ms - 1).name == "a"
    with pytest.raises(Refused, match="expired at 2030-01-01T00:00:00"):
        tenants.authenticate(KEY.encode(), wall_ms)


# -- no endpoint is open by accident -----------------------------------------------------------------------------------

ANYBODY_MAY = {"/live", "/ready", "/health", "/ping", "/version", "/metrics", "/openapi.json"}


def routes(app: FastAPI) -> set[str]:
    return {str(getattr(route, "path", "")) for route in app.router.routes}


def test_every_path_of_the_surface_is_in_the_class_it_should_be() -> None:
    app = application(FakeBackend(served=[ServedModel("tiny", 0, 100)]))

    for path in routes(app):
        expected = PathClass.OPEN if path in ANYBODY_MAY else PathClass.TENANT
        assert path_class(path, metrics_need_key=False) is expected, (
            f"say in src/poolgrid/server/frontend/access/gate.py who may ask {path}"
        )
    for path in ("/v1/workers", "/v1/pool", "/v1/config/reload", "/v1/modelsx", "/anything", "/v1/decisions/x"):
        assert path_class(path, metrics_need_key=False) is PathClass.OPERATOR


@pytest.mark.parametrize(("limit", "processes", "part"), [(None, 4, None), (10, 1, 10), (10, 4, 3), (1, 4, 1)])
def test_processes_that_share_a_port_divide_limits(limit: int | None, processes: int, part: int | None) -> None:
    tenant = Tenant(requests_per_minute=limit, tokens_per_minute=limit, concurrent_requests=limit, weight=3.0)
    divided = KeyDocument(1, SECRET, {"a": tenant}).divided(processes).tenants["a"]
    assert (divided.requests_per_minute, divided.tokens_per_minute, divided.concurrent_requests) == (part,) * 3
    assert divided.weight == 3.0
