"""``/ui`` and the streams behind it.

The files of the page are open to all clients: a browser that follows a link carries no key, and there is nothing in
them but the page. Everything that they show comes from ``/v1/fleet``, which needs an operator's key where there are
keys. The page asks for it and sends it as a header; it is never part of an address.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Header, Request, Response
from fastapi import Path as PathParameter
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from poolgrid.plugins.fleet_page.hub import FleetHub, FleetSource
from poolgrid.server.frontend.access.gate import PAGE_FOLDER, PAGE_PATH
from poolgrid.server.frontend.app import BODILESS
from poolgrid.server.frontend.description import error_answers
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import cancel_all, detached, unless

DIRECTORY = Path(__file__).parent / "static"

INDEX = "index.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What may lie in the directory; anything else there is not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Scripts and styles come from files of this directory alone, nothing is sent anywhere else, and no text becomes
markup: names of workers and requests are others' words."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}
"""``no-cache`` lets a browser keep a file and ask each time whether it still holds: an upgrade is seen at once."""


class Asset(NamedTuple):
    """One file."""

    body: bytes
    content_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Return the files by name; read on the first call."""
    found: dict[str, Asset] = {}
    for path in sorted(DIRECTORY.iterdir()):
        content_type = TYPES.get(path.suffix)
        if content_type is not None:
            body = path.read_bytes()
            found[path.name] = Asset(body, content_type, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
    return found


def asset(name: str) -> Asset:
    """Return a file of the page; raises ``RequestError`` 404."""
    found = assets().get(name)
    if found is None:
        raise RequestError(404, "not_found", f"the fleet page has no file {name[:80]!r}; it begins at /ui")
    return found


STREAM_PATH = "/v1/fleet/stream"
REQUEST_PATH = "/v1/fleet/requests/{request_id}"

RESUME_CHARS_MAX = 64

_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class EventStream(Response):
    """The stream of one viewer, which ends with the viewer or with the process."""

    media_type = "text/event-stream"

    def __init__(self, hub: FleetHub, resume: str) -> None:
        # Proxies that gather answers before they pass them on get a header not to.
        super().__init__(headers={**_NO_STORE, "x-accel-buffering": "no"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._hub = hub
        self._resume = resume

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope.get(BODILESS):  # no client would ever read it
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        left = asyncio.Event()
        watching = detached(_note_leaving(receive, left), "the leaving of a viewer")
        try:
            await unless(left, self._send(send), "the stream of a viewer")
        finally:
            await cancel_all([watching])

    async def _send(self, send: Send) -> None:
        frames = self._hub.frames(self._resume)
        try:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            await frames.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _note_leaving(receive: Receive, left: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the end of a body that there is none of
    left.set()


def open_fleet_page(opened: AsyncExitStack, app: FastAPI, source: FleetSource, clock: Clock) -> None:
    """Add the page to a router's application; open it after the server: its streams end before the server waits."""
    hub = FleetHub(source, clock)
    opened.callback(hub.close)
    add_fleet_page(app, hub, source)


def add_fleet_page(app: FastAPI, hub: FleetHub, source: FleetSource) -> None:
    """Add the page, its files and its streams to an application."""

    @app.get(PAGE_PATH, tags=["fleet page"], response_class=Response)
    async def page(request: Request) -> Response:
        """Return the fleet page: the pool live, for a browser. It loads nothing from elsewhere."""
        return _file(request, INDEX)

    @app.get(PAGE_FOLDER, include_in_schema=False)
    async def folder() -> Response:
        """Lead to the page, whose files are named relative to ``PAGE_PATH``; relative too, for proxies in front."""
        return RedirectResponse(f"..{PAGE_PATH}")

    @app.get(PAGE_PATH + "/{name}", tags=["fleet page"], response_class=Response, responses=error_answers(_NO_FILE))
    async def file(request: Request, name: str) -> Response:
        """Return a file of the fleet page."""
        return _file(request, name)

    # FastAPI takes the status it describes from the signature of a response class, where the route names none.
    @app.get(
        STREAM_PATH,
        tags=["fleet page"],
        status_code=200,
        response_class=EventStream,
        responses=error_answers(_NO_ROOM),
    )
    async def stream(
        last_event_id: Annotated[
            str,
            Header(max_length=RESUME_CHARS_MAX, description="Id of the last event that came; the rest is sent."),
        ] = "",
    ) -> EventStream:
        """Send what there is to see (`whole`), then what changes of it (`change`), as server-sent events."""
        hub.check_room()
        return EventStream(hub, last_event_id)

    @app.get(REQUEST_PATH, tags=["fleet page"], responses=error_answers(_NOT_KEPT))
    async def one_request(request_id: Annotated[str, PathParameter(max_length=256)]) -> dict[str, Any]:
        """Explain one request as `/v1/decisions/{request_id}` does, with the times of each of its legs."""
        found = await source.request(request_id)
        if found is None:
            raise RequestError(
                404, "decision_not_found", f"no decision about request {request_id!r} is kept", param="request_id"
            )
        return found


_NO_FILE = {"404": "The page has no such file"}
_NO_ROOM = {"503": "As many viewers look as may, or the process ends"}
_NOT_KEPT = {"404": "Not kept (any more)"}


def _file(request: Request, name: str) -> Response:
    found = asset(name)
    headers = {**HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.body, headers=headers, media_type=found.content_type)
