"""`POST /v1/route`: where a request would go now, and why, without sending it anywhere.

The body is that of a chat or text completion, or ``{"model": ..., "token_ids": [...]}``. It is checked, rendered and
tokenized as the real one would be, its media are loaded as for the real one and let go of; then the selector is asked
on a dry run, which books, sends and records nothing.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
from fastapi import FastAPI, Request

from frontend.body_shape import check_shape
from frontend.errors import RequestError, invalid, refused
from frontend.media.loader import MediaLoader
from frontend.ports import Refused
from frontend.preparation import Job, Preparation
from frontend.request_ids import RequestIds
from frontend.tokenization import TokenizationPool
from router.service import RouterService

DRY_RUN_PREFIX = "dry-run-"
"""Begins the request id of a dry run without ``x-request-id``: ties and samples are drawn from it."""


def add_route_endpoint(app: FastAPI, service: RouterService, max_body_bytes: int, max_body_values: int) -> None:
    """Add ``POST /v1/route`` to an application that ``create_app`` made."""
    preparation: Preparation = app.state.preparation
    tokenization: TokenizationPool = app.state.tokenization
    media: MediaLoader = app.state.media
    request_ids = RequestIds(DRY_RUN_PREFIX)

    @app.post(
        "/v1/route",
        tags=["router"],
        responses={404: {"description": "No such model"}, 429: {"description": "It would wait"}},
    )
    async def route(request: Request) -> dict[str, Any]:
        """Say where a request would go now and why; nothing is dispatched or reserved."""
        body = await _body(request, max_body_bytes)
        await check_shape(body, max_body_values, tokenization)
        job = _job(preparation, body)
        with closing(media.lease()) as lease:
            # The hashes of blocks depend on the bytes of media, so there is no telling a prefix without them.
            job.items = await media.load(job.media, lease, None)
            prompts = await tokenization.run(len(body), job.tokenize)
            given = request.headers.get("x-request-id")
            wanted = request_ids.wanted(None if given is None else given.encode("latin-1"))
            count = len(prompts) * job.choices_per_prompt
            ids = request_ids.of_sequences(wanted, count)
            try:
                routes = [service.preview(each).explanation() for each in job.requests(prompts, ids)]
            except Refused as refusal:
                raise refused(refusal) from None
        return {"dry_run": True, "routes": routes}


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise RequestError(413, "body_too_large", f"reading the request body: allowed are at most {limit} bytes")
    return bytes(body)


def _job(preparation: Preparation, body: bytes) -> Job:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"reading the request body: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("body", "the body is not an object: allowed are the fields of a chat or text completion")
    if "messages" in fields:
        return preparation.chat(body)
    if "token_ids" in fields:
        if "prompt" in fields:
            raise invalid("token_ids", "token_ids and prompt are both given: allowed is one of them")
        fields["prompt"] = fields.pop("token_ids")
        body = msgspec.json.encode(fields)
    return preparation.completion(body)
