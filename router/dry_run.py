"""`POST /v1/route`: where a request would go now, and why, without sending it anywhere.

The body is that of a chat or text completion, or ``{"model": ..., "token_ids": [...]}``. It is checked, rendered and
tokenized as the real one would be, its media are loaded as for the real one and let go of; then the selector is asked
on a dry run, which books, sends and records nothing.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Raw, Struct

from poolgrid.frontend.errors import invalid, refused
from poolgrid.frontend.media.loader import MediaLoader
from poolgrid.frontend.openapi import ROUTE_REQUEST, ROUTE_STATUSES, error_answers
from poolgrid.frontend.preparation import Preparation
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.prompts import tokenize
from poolgrid.frontend.request_body import BodyReader
from poolgrid.frontend.request_ids import RequestIds
from poolgrid.frontend.schema import parse
from poolgrid.frontend.sequences import sequences_of
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.inference.ports import Refused
from poolgrid.router.service import RouterService
from poolgrid.wire.answers import DryRun


class RouteBody(Struct, kw_only=True):
    """What tells which kind of body it is; what else it holds is looked at as the real request's would be."""

    messages: Raw = Raw()
    token_ids: Raw = Raw()
    prompt: Raw = Raw()


_decoder = msgspec.json.Decoder(RouteBody)

DRY_RUN_PREFIX = "dry-run-"
"""Begins the request id of a dry run without ``x-request-id``: ties and samples are drawn from it."""


def add_route_endpoint(app: FastAPI, service: RouterService) -> None:
    """Add ``POST /v1/route`` to an application that ``create_app`` made."""
    bodies: BodyReader = app.state.bodies
    preparation: Preparation = app.state.preparation
    tokenization: TokenizationPool = app.state.tokenization
    media: MediaLoader = app.state.media
    request_ids = RequestIds(DRY_RUN_PREFIX)

    @app.post("/v1/route", tags=["router"], responses=error_answers(ROUTE_STATUSES), openapi_extra=ROUTE_REQUEST)
    async def route(request: Request) -> dict[str, Any]:
        """Say where a request would go now and why; nothing is dispatched or reserved."""
        body = await bodies.read(request)
        job = _job(preparation, body)
        with closing(media.lease()) as lease:
            # The hashes of blocks depend on the bytes of media, so there is no telling a prefix without them.
            job.items = await media.load(job.media, lease, None)
            prompts = await tokenization.run(len(body), partial(tokenize, job))
            given = request.headers.get("x-request-id")
            wanted = request_ids.wanted(None if given is None else given.encode("latin-1"))
            count = len(prompts) * job.choices_per_prompt
            ids = request_ids.of_sequences(wanted, count)
            try:
                routes = [service.preview(each).explanation() for each in sequences_of(job, prompts, ids)]
            except Refused as refusal:
                raise refused(refusal) from None
        return DryRun(routes=routes).to_json()


def _job(preparation: Preparation, body: bytes) -> PreparedRequest:
    fields = parse(_decoder, body)
    if fields.messages:
        return preparation.chat(body)
    if fields.token_ids:
        if fields.prompt:
            raise invalid("token_ids", "token_ids and prompt are both given: allowed is one of them")
        named = msgspec.json.decode(body)
        named["prompt"] = named.pop("token_ids")
        body = msgspec.json.encode(named)
    return preparation.completion(body)
