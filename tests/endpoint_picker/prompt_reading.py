"""Read bodies as for an engine that gets them unchanged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel
from poolgrid.server.frontend.access.tenants import CacheDomains
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.proxy.prompt_reading import PromptReader, PromptReading
from tests.frontend.fake_backend import TINY
from tests.frontend.inference_requests import fields_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a router?"}]}


class Backend:
    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 0, 4096, ("poet",))]

    async def submit(self, request: InferenceRequest) -> Any:
        raise AssertionError("nothing is sent")


def read(path: str, body: bytes | dict[str, Any]) -> PromptReading:
    async def whole() -> PromptReading:
        tokenization = TokenizationPool(1, 1, 10_000)
        preparation = Preparation(Backend(), {"tiny": TINY}, FrontendSettings())
        try:
            reader = PromptReader(preparation, tokenization, CacheDomains(isolate=False), 10_000)
            return await reader.read(path, body if isinstance(body, bytes) else json.dumps(body).encode(), "r")
        finally:
            tokenization.close()

    return asyncio.run(whole())


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = read(path, body).request
    assert request is not None
    return fields_of(request)


def text_of(reading: PromptReading) -> str:
    assert reading.request is not None, reading.why
    assert reading.isl == len(reading.request.token_ids) // 4
    return TINY.decode(reading.request.token_ids)
