"""``POST /v1/messages/count_tokens``: how long the prompt of a Messages request is, without answering it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from fastapi import FastAPI, Request

from poolgrid.api.access.cache_domains import CacheDomains
from poolgrid.api.access.gate import caller_of
from poolgrid.api.media.loader import MediaLoader
from poolgrid.api.preparation import Preparation
from poolgrid.api.request_body import BodyReader
from poolgrid.api.tokenization import TokenizationPool

COUNT_PATH = "/v1/messages/count_tokens"


def add_count_endpoint(
    app: FastAPI,
    preparation: Preparation,
    tokenization: TokenizationPool,
    bodies: BodyReader,
    media: MediaLoader,
    domains: CacheDomains,
) -> None:
    """Add the endpoint to an application."""

    @app.post(COUNT_PATH, tags=["tokenizer"])
    async def count_tokens(request: Request) -> dict[str, Any]:
        """Return the number of tokens that a request's prompt has, its pictures included."""
        raw = await bodies.read(request)
        job = preparation.counted_messages(raw)
        caller = caller_of(request.scope)
        if caller is not None:
            caller.check_model(job.body.model)
            if job.media:
                caller.check_feature("media")
        domains.claim(job, caller, request.headers.raw)
        with closing(media.lease()) as lease:
            job.items = await media.load(job.media, lease, job.domain, job.served.media.item_bytes_max)
            (prompt,) = await tokenization.run(len(raw), job.tokenize)
        return {"input_tokens": prompt.isl}
