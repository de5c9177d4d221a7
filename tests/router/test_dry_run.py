"""``POST /v1/route`` reads its body within the limits of the endpoints whose requests it previews."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import pytest

from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.http_api import add_route_endpoint, add_router_endpoints
from tests.frontend.server import application, in_process
from tests.router.test_service import routed

PATHS = ("/v1/route", "/v1/completions", "/tokenize")


def posted(body: bytes, **headers: str) -> list[tuple[int, dict[str, str]]]:
    """Return what each of the paths says to a body."""

    async def go() -> list[httpx.Response]:
        async with routed() as router:
            app = application(router.service)
            add_route_endpoint(app.front, router.service)
            head = {"content-type": "application/json", **headers}
            async with in_process(app) as client:
                return [await client.post(path, content=body, headers=head) for path in PATHS]

    return [(answer.status_code, answer.json()["error"]) for answer in asyncio.run(go())]


def bomb() -> bytes:
    return gzip.compress(b'{"model": "tiny", "prompt": "' + bytes(2 * FrontendSettings().max_body_bytes) + b'"}', 9)


@cache
def many() -> bytes:
    numbers = b",".join(b"%d" % number for number in random.Random(1).randbytes(1_400_000))
    return b'{"model": "tiny", "prompt": [' + numbers + b"]}"


def nested(depth: int) -> bytes:
    return b'{"model": "tiny", "prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (bomb, {"content-encoding": "gzip"}, 413, "inflation_refused"),
        (many, {}, 413, "body_too_complex"),
        (lambda: gzip.compress(many(), 1), {"content-encoding": "gzip"}, 413, "body_too_complex"),
        (lambda: b" " * (1 + FrontendSettings().max_body_bytes), {}, 413, "body_too_large"),
        (lambda: gzip.compress(b"{}")[:-9], {"content-encoding": "gzip"}, 400, "invalid_encoding"),
        (lambda: b"{}", {"content-encoding": "br"}, 415, "unsupported_content_encoding"),
        (lambda: b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        pytest.param(
            *(lambda: nested(30_000), {}, 400, "invalid_json"),
            marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason="it reads so deep a field that nobody wants"),
        ),
        (lambda: nested(300_000), {}, 413, "body_too_complex"),
    ],
    ids=[
        "bomb",
        "1,400,000 values",
        "1,400,000 values in gzip",
        "long",
        "cut",
        "brotli",
        "text",
        "nested",
        "nested deeper",
    ],
)
def test_a_body_is_refused_as_it_is_elsewhere(
    body: Callable[[], bytes], headers: dict[str, str], status: int, code: str
) -> None:
    answers = posted(body(), **headers)

    assert [(said, error["code"]) for said, error in answers] == [(status, code)] * len(PATHS)
    assert len({json.dumps(error) for _, error in answers}) == 1, answers


def test_the_description_says_what_the_route_takes_and_how_parameters_are_refused() -> None:
    async def go() -> tuple[dict[str, Any], httpx.Response]:
        async with routed() as router:
            app = application(router.service)
            add_route_endpoint(app.front, router.service)
            add_router_endpoints(app, router.service, SystemClock(), list, list)
            async with in_process(app) as client:
                return (await client.get("/openapi.json")).json(), await client.get("/v1/decisions?limit=abc")

    description, refused = asyncio.run(go())
    route = description["paths"]["/v1/route"]["post"]
    kinds = route["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [kind.get("$ref", "").rpartition("/")[2] for kind in kinds] == ["ChatBody", "CompletionBody", ""]
    assert set(description["components"]["schemas"]) >= {"ChatBody", "CompletionBody", "Error"}
    assert {"400", "404", "413", "415", "429", "503"} <= set(route["responses"])
    assert "HTTPValidationError" not in json.dumps(description)
    for path in ("/v1/route", "/v1/decisions", "/v1/decisions/{request_id}"):
        for operation in description["paths"][path].values():
            wrong = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert wrong == {"$ref": "#/components/schemas/Error"}, path
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "limit"
