"""Requests that come before a router has seen its workers: they wait for that, and are refused when it does not come.

A router that starts knows no worker for a moment, because its journal is read, links are opened, or workers have not
joined yet. Without a wait the clients of a router that was started again would be refused by one that serves them a
moment later.

Rules
    1. Requests of the API that tenants use wait until the router is ready for the first time, for ``FIRST_VIEW_S``
       after its start at most. Then nothing waits here any more: a router that loses its workers refuses at once.
    2. What waits is bounded by the connections of the server; no body is read meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from poolgrid.server.frontend.access.gate import is_path_of_tenants
from poolgrid.server.process.tasks import Restart, supervised

FIRST_VIEW_S = 10.0
"""Workers that live greet a router again within seconds; clients and balancers give up after 30 s or later."""

LOOK_S = 0.005
"""Between two looks at whether the router is ready, at its start alone."""

Serve = Callable[[Any, Any, Any], Awaitable[None]]

Ready = Callable[[], str | None]


class FirstView:
    """The application of a router's server."""

    def __init__(self, app: Serve, ready: Ready, then: Callable[[], None]) -> None:
        """``then`` is called once the wait is over: with what the first requests can do without."""
        self._app = app
        self._ready = ready
        self._then = then
        self._over = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = supervised(self._watch, "first view of the workers", Restart())

    def end(self) -> None:
        """Let nothing wait any more."""
        self._over.set()
        if self._watching is not None:
            self._watching.cancel()

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Return what serves one request."""
        if self._over.is_set() or not is_path_of_tenants(scope.get("path", "")):
            return self._app(scope, receive, send)
        return self._later(scope, receive, send)

    async def _later(self, scope: Any, receive: Any, send: Any) -> None:
        await self._over.wait()
        await self._app(scope, receive, send)

    async def _watch(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_VIEW_S):
                while self._ready() is not None:  # noqa: ASYNC110 - a look at several states, at the start alone
                    await asyncio.sleep(LOOK_S)
        self._over.set()
        self._then()
