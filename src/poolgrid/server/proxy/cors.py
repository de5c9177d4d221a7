"""CORS of forwarded paths: the servers' own, or in its place the router's (``cors_allow_origins``), never both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poolgrid.server.frontend.app import cors_options
from poolgrid.server.http.browser_requests import foreign_origin, is_from_page, is_unasked

CORS_PREFIX: Final = b"access-control-"

ORIGIN: Final = b"origin"


class RouterCors:
    """Answers preflights itself, and writes its headers in place of the servers'."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._inner = CORSMiddleware(self._without_servers, **cors_options(origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._inner(scope, receive, send)

    async def _without_servers(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _without_cors(message["headers"])}
            await send(message)

        await self._app(scope, receive, passed)


def _without_cors(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers without those of CORS, and without ``Origin`` in ``Vary``, which is added again."""
    kept = [pair for pair in headers if not pair[0].startswith(CORS_PREFIX) and pair[0] != b"vary"]
    varied = [each.strip() for name, value in headers if name == b"vary" for each in value.split(b",")]
    others = [each for each in varied if each.lower() != ORIGIN]
    return [*kept, (b"vary", b", ".join(others))] if others else kept


def cors_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a server's answer by which a browser decides whether a page may read it."""
    return [pair for pair in headers if pair[0].startswith(CORS_PREFIX) or pair[0] == b"vary"]


def unasked_page(scope: Scope, origins: Collection[str]) -> str:
    """Return which foreign page sent a request about which no server was asked; empty when none did, or it may."""
    headers = scope["headers"]
    if "*" in origins or not is_from_page(headers) or not is_unasked(scope["method"], headers):
        return ""
    return foreign_origin(headers, origins)
