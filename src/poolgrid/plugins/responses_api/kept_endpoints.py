"""Responses that are kept, asked for by their id: show one, forget it, list what it was asked with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request, Response

from poolgrid.plugins.responses_api.kept import Item, KeptResponses, decoded
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.errors import RequestError, quoted
from poolgrid.server.frontend.list_page import PAGE_MAX, page_of

RESPONSE_PATH = "/v1/responses/{response_id}"
ITEMS_PATH = "/v1/responses/{response_id}/input_items"
COMPACT_PATH = "/v1/responses/compact"


def add_kept_response_endpoints(app: FastAPI, kept: KeptResponses, owner_of: Callable[[Request], Owner | None]) -> None:
    """Add the endpoints to an application."""

    @app.get(RESPONSE_PATH, tags=["responses"])
    async def get_response(request: Request, response_id: str) -> Response:
        """Return a response that is kept."""
        owner = owner_of(request)
        found = None if kept.store is None or owner is None else await kept.store.response(owner, response_id)
        if found is None:
            raise _not_found(response_id)
        return Response(found, media_type="application/json")

    @app.delete(RESPONSE_PATH, tags=["responses"])
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        """Forget a response; conversations can no longer continue it, or what followed it."""
        owner = owner_of(request)
        if kept.store is None or owner is None or not await kept.store.forget(owner, response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(ITEMS_PATH, tags=["responses"])
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List what a response was asked with: its own input, and before it the conversation that it continued."""
        owner = owner_of(request)
        conversation = (
            None if kept.store is None or owner is None else await kept.store.conversation(owner, response_id)
        )
        if conversation is None:
            raise _not_found(response_id)
        items: list[Item] = []
        for entry in conversation:
            items += decoded(entry.input)
            if entry is not conversation[-1]:
                items += decoded(entry.output)
        return Response(msgspec.json.encode(page_of(items, limit, order, after)), media_type="application/json")

    @app.post(COMPACT_PATH, include_in_schema=False)
    async def compact() -> None:
        """Refuse: the path would be taken for the id of a response otherwise."""
        raise RequestError(
            404,
            "not_found",
            f"POST {COMPACT_PATH}: conversations are not compacted here; ask the model for a summary with "
            "/v1/responses and continue from it",
        )


def _not_found(response_id: str) -> RequestError:
    return RequestError(
        404,
        "not_found",
        f"no response {quoted(response_id)} is kept here: it never was, it was deleted, or there was no more room",
        param="response_id",
    )
