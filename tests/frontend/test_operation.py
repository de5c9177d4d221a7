"""Health, models, metrics, the OpenAPI page, and that the documentation names all of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import poolgrid
from poolgrid.kernel.projection.load_ledger import OTHERS
from poolgrid.kernel.wire.answers import EndpointRow, InstanceRow
from poolgrid.kernel.wire.identifiers import dispatch_id, dispatch_of, name_of
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.request_body import RequestIds, base_name
from poolgrid.server.frontend.schema import ChatBody, CompletionBody, Nvext, refusals_of
from poolgrid.server.frontend.settings import FrontendSettings
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import application, in_process

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("http_api.md", "multimodal.md", "metrics.md"))
SETTINGS = (DOCS / "configuration.md").read_text(encoding="utf-8")


def get(path: str, backend: FakeBackend | None = None, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with in_process(application(backend or FakeBackend(), **options)) as client:
            return await client.get(path)

    return asyncio.run(go())


def test_a_process_that_is_not_ready_is_alive_and_says_what_is_missing() -> None:
    for path in ("/ready", "/health"):
        response = get(path, ready=lambda: "no worker has joined")
        assert response.status_code == 503
        assert response.json()["reason"] == "no worker has joined"
    assert get("/live", ready=lambda: "no worker has joined").status_code == 200
    assert get("/ready").status_code == 200
    assert get("/health").json() == {"status": "healthy", "models": ["tiny"], "endpoints": [], "served": []}


SERVED = [
    EndpointRow(endpoint="poolgrid.prefill.generate", model="tiny", role="prefill", workers=1, ready=0, instances=[]),
    EndpointRow(
        endpoint="poolgrid.decode.generate",
        model="tiny",
        role="decode",
        workers=1,
        ready=1,
        instances=[InstanceRow(worker_id="d0", dp_rank=0, state="ready")],
    ),
]


def test_health_has_what_dynamos_health_checks_look_for() -> None:
    encode = EndpointRow(endpoint="ns.encode.generate", model="m", role="encode", workers=1, ready=1, instances=[])
    own = EndpointRow(endpoint="ns.mine.generate", model="m", role="prefill", workers=1, ready=1, instances=[])
    response = get("/health", endpoints=lambda: [*SERVED, encode, own])
    assert '"status":"healthy"' in response.text
    assert re.search(r'"endpoints":\[[^]]*"dyn://dynamo\.tensorrt_llm\.generate"', response.text)
    assert response.json()["endpoints"] == [
        "dyn://poolgrid.decode.generate",
        "dyn://dynamo.tensorrt_llm.generate",
        "dyn://ns.encode.generate",
        "dyn://ns.tensorrt_llm_encode.generate",
        "dyn://ns.mine.generate",
    ], "endpoints without a ready worker are left out"
    missing = get("/health", ready=lambda: "no worker has joined")
    assert (missing.status_code, missing.json()["status"]) == (503, "unhealthy")


def test_health_names_the_endpoints_of_every_role() -> None:
    health = get("/health", endpoints=lambda: SERVED).json()
    assert [(row["endpoint"], row["role"], row["ready"]) for row in health["served"]] == [
        ("poolgrid.prefill.generate", "prefill", 0),
        ("poolgrid.decode.generate", "decode", 1),
    ]
    assert health["served"][1]["instances"] == [{"worker_id": "d0", "dp_rank": 0, "state": "ready"}]


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("role=decode", 200, None),
        ("role=decode&model=tiny", 200, None),
        ("model=tiny", 200, None),
        ("role=prefill", 503, "no prefill worker takes requests"),
        ("role=encode", 503, "no encode worker takes requests"),
        ("role=decode&model=other", 503, "no decode worker of model 'other' takes requests"),
        ("model=other", 503, "no worker of model 'other' takes requests"),
    ],
)
def test_readiness_can_be_asked_for_a_role_and_a_model(query: str, status: int, reason: str | None) -> None:
    response = get(f"/ready?{query}", endpoints=lambda: SERVED)
    assert response.status_code == status
    assert response.json().get("reason") == reason


def test_an_unknown_role_is_a_bad_request() -> None:
    assert get("/ready?role=prefil", endpoints=lambda: SERVED).status_code == 400


def test_models_are_listed_with_their_adapters() -> None:
    data = get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in data] == [("tiny", None), ("tiny-lora", "tiny")]
    assert {model["root"] for model in data} == {"tiny"}
    assert get("/v1/models/tiny").json() == data[0]
    assert get("/v1/models/tiny-lora").json() == data[1]
    assert get("/v1/models/org/model").json()["error"]["code"] == "model_not_found"


async def test_every_answer_has_a_name_and_head_is_get_without_a_body() -> None:
    async with in_process(application(FakeBackend())) as client:
        for path in ("/live", "/ready", "/health", "/ping", "/version", "/metrics", "/v1/models", "/openapi.json"):
            got, asked = await client.get(path), await client.head(path)
            assert (got.status_code, asked.status_code, asked.content) == (200, 200, b""), path
            assert got.headers["content-type"] == asked.headers["content-type"]
            assert got.headers["x-request-id"] != asked.headers["x-request-id"]
        assert (await client.head("/v1/nothing")).status_code == 404
        refused = await client.head("/v1/chat/completions")
        assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
        names = [(await client.get("/live", headers={"x-request-id": name})).headers["x-request-id"] for name in "a~"]
        assert names[0] == "a"
        assert names[1].startswith("id-"), "what no client may choose is replaced"


def test_ping_is_ready_and_version_says_which() -> None:
    assert get("/ping").json() == {"status": "ready"}
    assert get("/ping", ready=lambda: "no worker has joined").status_code == 503
    assert get("/version").json() == {"version": poolgrid.__version__}
    assert get("/openapi.json").json()["info"]["version"] == poolgrid.__version__


def test_no_page_of_the_server_loads_anything_from_elsewhere() -> None:
    assert get("/docs").status_code == get("/redoc").status_code == 404
    assert "http://" not in (text := get("/openapi.json").text)
    assert "https://" not in text


async def test_a_request_is_measured_once_and_its_tokens_are_counted() -> None:
    registry = CollectorRegistry()
    backend = FakeBackend(lambda request: speak("Hello, world!", cached_tokens=2))

    async with in_process(application(backend, registry=registry)) as client:
        body = {"model": "tiny", "prompt": "hi there", "n": 2, "stream": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "n": 0})).status_code == 400
        text = (await client.get("/metrics")).text
    isl, osl = len(TINY.encode("hi there")) // 4, len(TINY.encode("Hello, world!")) // 4
    expected = {
        'requests_total{endpoint="completions",status="200",streaming="true"}': 1,
        'requests_total{endpoint="completions",status="400",streaming="false"}': 1,
        'in_flight_requests{endpoint="completions"}': 0,
        'time_to_first_token_seconds_count{model="tiny"}': 2,
        'inter_token_latency_seconds_count{model="tiny"}': 2 * (osl - 1),
        'target_judgements_total{model="tiny",outcome="met",target="ttft"}': 2,
        'target_judgements_total{model="tiny",outcome="met",target="itl"}': 2,
        'target_seconds{target="ttft"}': 2,
        "input_sequence_tokens_sum": isl,
        "output_sequence_tokens_sum": 2 * osl,
        "prompt_tokens_total": 2 * isl,
        "cached_tokens_total": 4,
        "output_tokens_total": 2 * osl,
        "tokenization_seconds_count": 1,
        "tokenizations_pending": 0,
        "client_disconnects_total": 0,
    }
    for name, value in expected.items():
        assert f"poolgrid_frontend_{name} {float(value)}\n" in text


async def test_the_metrics_page_speaks_both_text_forms() -> None:
    async with in_process(application(FakeBackend())) as client:
        accepts = ("text/plain", "application/openmetrics-text; version=1.0.0")
        plain, openmetrics = [
            (await client.get("/metrics", headers={"accept": accept})).headers["content-type"] for accept in accepts
        ]
    assert plain.startswith("text/plain")
    assert openmetrics.startswith("application/openmetrics-text")


def test_the_openapi_description_lists_the_inference_endpoints_from_their_structs() -> None:
    description = get("/openapi.json").json()
    for path, struct in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        assert set(description["components"]["schemas"][name]["properties"]) == set(struct.__struct_fields__)
    assert {"/v1/models", "/health", "/live", "/ready", "/metrics"} <= set(description["paths"])


@pytest.mark.parametrize("name", sorted(FrontendSettings.model_fields))
def test_every_setting_is_documented(name: str) -> None:
    assert f"`--{name.replace('_', '-')}`" in SETTINGS


def test_every_metric_is_documented() -> None:
    for metric in FrontendMetrics(CollectorRegistry()).registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert re.search(rf"`{name}[`{{]", DOCUMENT), name


def test_every_field_is_documented() -> None:
    refused = {*refusals_of(ChatBody), *refusals_of(CompletionBody), *(f"nvext.{name}" for name in refusals_of(Nvext))}
    for name in {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *refused}:
        assert f"`{name}`" in DOCUMENT, name


def test_a_request_is_shown_by_the_name_that_its_client_chose_and_goes_by_an_id_of_its_own() -> None:
    ids = RequestIds("p-")
    assert ids.wanted(None) == "p-1"
    assert ids.wanted(b"mine") == "mine"
    assert ids.wanted(b"x" * 129) == "p-2"
    assert ids.wanted(b"new\r\nline") == "p-3"
    assert ids.wanted(b"mine~1") == "p-4", "the mark divides what is the client's from what is not"
    assert ids.of_sequences(ids.wanted(None), 2) == ["p-5-0", "p-5-1"], "what the front end made is unique already"
    assert type(ids.of_sequences(ids.wanted(None), 1)[0]) is str, "codecs take nothing else"
    one, two = ids.of_sequences("mine", 1), ids.of_sequences("mine", 2)
    assert one == ["mine~p-7"]
    assert two == ["mine-0~p-8", "mine-1~p-8"]
    assert [base_name(one), base_name(two), base_name(ids.of_sequences("mine-0", 1))] == ["mine", "mine", "mine-0"]
    for prefix in ("", "7", "a~"):
        with pytest.raises(ValueError, match="must begin with a letter"):
            RequestIds(prefix)


CLIENT_NAMES = st.lists(st.text("ab~-.019r", max_size=6).map(str.encode), min_size=2, max_size=12)


@given(CLIENT_NAMES)
def test_no_name_makes_a_request_or_one_of_its_dispatches_another_ones(headers: list[bytes]) -> None:
    """Two front ends, and clients that try each other's ids: `a~1` is never the second dispatch of another's `a`."""
    fronts = [RequestIds("ra"), RequestIds("rb")]
    headers = [*headers, *(f"{header.decode()}~1".encode() for header in headers)]
    named: list[str] = []
    for ids in fronts:
        for header in headers:
            for request_id in ids.of_sequences(ids.wanted(header), 2):
                legs = [dispatch_id(request_id, number) for number in range(3)]
                assert [dispatch_of(leg) for leg in legs] == [(request_id, number) for number in range(3)]
                assert {name_of(leg) for leg in legs} == {name_of(request_id)}
                named += legs
    assert len(named) == len(set(named))
    assert not [each for each in named if each.startswith(OTHERS)]
