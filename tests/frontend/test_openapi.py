"""The OpenAPI page is true: what it describes is what the server does, on cases that schemathesis makes up from it.

``POOLGRID_SCHEMATHESIS_CASES`` sets the cases per operation and kind, for a long run; CI takes few.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.types import Receive, Scope, Send

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel, StreamDelta
from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.kernel.wire.hashing import unpack_tokens
from poolgrid.kernel.wire.requests import TokenLogprobs
from poolgrid.kernel.wire.tasks import TASK_ROLES, TaskResult
from poolgrid.server.frontend.api_endpoint import absent_endpoint, installed_endpoints
from poolgrid.server.frontend.chat_endpoint import CHAT
from poolgrid.server.frontend.openapi import OWN
from tests.frontend.fake_backend import FakeBackend, Step, speak, with_logprobs
from tests.frontend.server import application

CASES = int(os.environ.get("POOLGRID_SCHEMATHESIS_CASES", "6"))
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/images/generations", "POST"),
    ("/v1/images/{image_id}/content", "GET"),
    ("/v1/videos", "POST"),
    ("/v1/videos", "GET"),
    ("/v1/videos/{video_id}", "GET"),
    ("/v1/videos/{video_id}", "DELETE"),
    ("/v1/videos/{video_id}/content", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{model_id}", "GET"),
    ("/live", "GET"),
    ("/ping", "GET"),
    ("/version", "GET"),
    ("/ready", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]
SERVED_OPERATIONS = [(path, method) for path, method in OPERATIONS if not absent_endpoint(path)]


def talk(request: InferenceRequest) -> list[Step]:
    if request.task is not None:
        return [[StreamDelta(b"", finish_reason="stop", result=TaskResult((b"\0\0\x80?",), "image/png", 1))]]
    steps = speak("Hello, world!")
    if request.sampling.logprobs is not None:
        steps = with_logprobs(steps, request.sampling.logprobs)
    if request.sampling.prompt_logprobs is not None:  # the prompt is repeated, with log probabilities
        first = steps[0]
        assert isinstance(first, list)
        prompt = unpack_tokens(request.token_ids)
        first[0].prompt_logprobs = tuple(TokenLogprobs(token, -0.25, ((token, -0.25),)) for token in prompt[1:])
    return steps


SERVED = [
    EndpointRow(endpoint=f"poolgrid.{role}.generate", model="tiny", role=role, workers=1, ready=1, instances=[])
    for role in ("aggregated", "prefill", "decode", "encode", "embedding", "image", "video")
]
MODEL = ServedModel("tiny", 1_700_000_000, 262_144, ("tiny-lora",), tasks=tuple(TASK_ROLES))
SERVER = application(FakeBackend(talk, served=(MODEL,)), endpoints=lambda: SERVED)


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.preparation.CHOICES_MAX", 4)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve; one application for all cases, which no case starts or ends."""
    if scope["type"] != "lifespan":
        await SERVER(scope, receive, send)
        return
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_endpoint_is_described_and_every_description_tried() -> None:
    described = {(path, method.upper()) for path, methods in SERVER.openapi()["paths"].items() for method in methods}
    assert described == set(SERVED_OPERATIONS)


def test_no_answer_is_described_under_the_name_of_a_body() -> None:
    apis = [OWN, *(endpoint.description for endpoint in (CHAT, *installed_endpoints()))]
    _, components = msgspec.json.schema_components([body for api in apis for body in api.bodies])
    assert not {name for api in apis for name in api.answers} & components.keys()


CASES_OF = [
    pytest.param(path, method, mode, id=f"{method} {path}: {mode.value}")
    for path, method in SERVED_OPERATIONS
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if method == "POST" or mode is GenerationMode.POSITIVE  # nothing that a GET takes could be wrong
]


@pytest.mark.parametrize(("path", "method", "mode"), CASES_OF)
def test_the_server_does_what_its_description_says(path: str, method: str, mode: GenerationMode) -> None:
    operation = SCHEMA[path][method]
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def holds(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else nearly every case ends at a model that does not exist
        if case.query and case.query.get("model") is not None:
            case.query["model"] = "tiny"
        case.call_and_validate(checks=checks if mode is GenerationMode.POSITIVE else [*checks, negative_data_rejection])

    holds()
