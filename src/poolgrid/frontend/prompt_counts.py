"""``/v1/messages/count_tokens`` and ``/v1/responses/input_tokens``: how long a prompt is, without answering it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request

from poolgrid.frontend.access.cache_domains import CacheDomains
from poolgrid.frontend.access.gate import caller_of
from poolgrid.frontend.access.tenants import Caller
from poolgrid.frontend.media.loader import MediaLoader
from poolgrid.frontend.preparation import Preparation
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.prompts import tokenize
from poolgrid.frontend.request_body import BodyReader
from poolgrid.frontend.tokenization import TokenizationPool

MESSAGES_COUNT_PATH = "/v1/messages/count_tokens"
RESPONSES_COUNT_PATH = "/v1/responses/input_tokens"


def add_count_endpoints(
    app: FastAPI,
    preparation: Preparation,
    prepare_response: Callable[[bytes, Caller | None], Awaitable[PreparedRequest]],
    tokenization: TokenizationPool,
    bodies: BodyReader,
    media: MediaLoader,
    domains: CacheDomains,
) -> None:
    """Add the endpoints to an application."""

    async def prompt_tokens(request: Request, raw: bytes, job: PreparedRequest) -> int:
        caller = caller_of(request.scope)
        if caller is not None:
            caller.check_model(job.body.model)
            if job.media:
                caller.check_feature("media")
        domains.claim(job, caller, request.headers.raw)
        with closing(media.lease()) as lease:
            job.items = await media.load(job.media, lease, job.domain, job.served.media.item_bytes_max)
            (prompt,) = await tokenization.run(len(raw), partial(tokenize, job))
        return prompt.isl

    @app.post(MESSAGES_COUNT_PATH, tags=["tokenizer"])
    async def count_tokens(request: Request) -> dict[str, Any]:
        """Return the number of tokens that a request's prompt has, its images included."""
        raw = await bodies.read(request)
        return {"input_tokens": await prompt_tokens(request, raw, preparation.counted_messages(raw))}

    @app.post(RESPONSES_COUNT_PATH, tags=["tokenizer"])
    async def count_input_tokens(request: Request) -> dict[str, Any]:
        """Return the number of tokens that a response's prompt has, its images included."""
        raw = await bodies.read(request)
        job = await prepare_response(raw, caller_of(request.scope))
        return {"object": "response.input_tokens", "input_tokens": await prompt_tokens(request, raw, job)}
