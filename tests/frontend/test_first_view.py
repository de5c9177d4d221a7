"""Requests before a router's first view of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from poolgrid.server.frontend import first_view
from poolgrid.server.frontend.first_view import FirstView


class Router:
    """An application and its readiness, which a test sets."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.missing: str | None = "no worker takes requests"
        self.is_over = False
        self.first = FirstView(self._serve, lambda: self.missing, self._over)

    def _over(self) -> None:
        self.is_over = True

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.served.append(scope["path"])

    def ask(self, path: str) -> asyncio.Task[None]:
        async def asked() -> None:
            await self.first({"type": "http", "path": path}, None, None)

        return asyncio.create_task(asked())


@contextmanager
def starting() -> Iterator[Router]:
    router = Router()
    router.first.start()
    try:
        yield router
    finally:
        router.first.end()


async def test_requests_of_clients_wait_for_the_first_view_and_those_of_operators_and_probes_do_not() -> None:
    with starting() as router:
        waiting = [router.ask(path) for path in ("/v1/chat/completions", "/v1/models", "/v1/messages/count_tokens")]
        for path in ("/live", "/ready", "/metrics", "/v1/workers", "/v1/pool"):
            await router.ask(path)
        assert router.served == ["/live", "/ready", "/metrics", "/v1/workers", "/v1/pool"]
        assert not any(each.done() for each in waiting)
        assert not router.is_over

        router.missing = None
        await asyncio.gather(*waiting)
        assert len(router.served) == 8
        assert router.is_over

        router.missing = "no worker takes requests"
        await router.ask("/v1/models")
        assert len(router.served) == 9, "a router that loses its workers lets no request wait"


async def test_without_any_worker_they_wait_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_view, "FIRST_VIEW_S", 0.05)
    with starting() as router:
        began_s = asyncio.get_running_loop().time()
        await router.ask("/v1/models")
        assert asyncio.get_running_loop().time() - began_s >= 0.04
        assert router.served == ["/v1/models"]


async def test_a_router_that_ends_lets_nobody_wait() -> None:
    with starting() as router:
        waiting = router.ask("/v1/models")
        await asyncio.sleep(0)
        router.first.end()
        await asyncio.wait_for(waiting, 60)
        assert router.served == ["/v1/models"]
