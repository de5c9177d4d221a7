"""Serve an application for a test: in this event loop over real sockets, in a thread, or without sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from poolgrid.frontend.app import Application, create_app
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.shared_state import SharedState
from poolgrid.http.http_protocol import DirectProtocol
from poolgrid.http.http_settings import HttpLimits
from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.inference.ports import InferenceBackend, ServedModel, TokenStream
from poolgrid.wire.answers import EndpointRow
from tests.frontend.fake_backend import TINY, FakeBackend

Http = str | type[DirectProtocol]
"""uvicorn's name of a protocol, or ours, which the routers serve with."""


def application(
    backend: InferenceBackend,
    *,
    registry: CollectorRegistry | None = None,
    models: dict[str, PromptModel] | None = None,
    ready: Callable[[], str | None] = lambda: None,
    endpoints: Callable[[], Sequence[EndpointRow]] = tuple,
    troubles: Callable[[], Sequence[str]] = tuple,
    shared: SharedState | None = None,
    **settings: Any,
) -> Application:
    return create_app(
        backend,
        {"tiny": TINY} if models is None else models,
        settings=FrontendSettings(**settings),
        registry=registry or CollectorRegistry(),
        ready=ready,
        endpoints=endpoints,
        troubles=troubles,
        shared=shared,
        id_prefix="id-",
    )


@asynccontextmanager
async def in_process(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that needs no server; at the end the application is closed, as whoever serves it does."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        try:
            yield client
        finally:
            await app.close()


class FrontEnd:
    """One application for tests that ask many times; each time another backend is behind it."""

    def __init__(self, runner: asyncio.Runner, client: httpx.AsyncClient, backend: _Changing) -> None:
        self._runner = runner
        self._client = client
        self._backend = backend

    def post(self, backend: InferenceBackend, path: str, **arguments: Any) -> httpx.Response:
        self._backend.now = backend
        return self._runner.run(self._client.post(path, **arguments))


class _Changing:
    """A backend that is another one each time."""

    def __init__(self) -> None:
        self.now: InferenceBackend = FakeBackend()

    async def submit(self, request: InferenceRequest) -> TokenStream:
        return await self.now.submit(request)

    def models(self) -> Sequence[ServedModel]:
        return self.now.models()


@contextmanager
def front_end(**settings: Any) -> Iterator[FrontEnd]:
    backend = _Changing()
    with asyncio.Runner() as runner:
        opened = AsyncExitStack()
        client = runner.run(opened.enter_async_context(in_process(application(backend, **settings))))
        try:
            yield FrontEnd(runner, client, backend)
        finally:
            runner.run(opened.aclose())


class _Server(uvicorn.Server):
    """Tells when it answers, and ends when it is told to and what is open has ended: nothing polls for either."""

    def __init__(self, app: FastAPI, http: Http) -> None:
        if not isinstance(http, str):
            http = http.serving(HttpLimits(), None)
        super().__init__(uvicorn.Config(app, log_level="warning", http=http, access_log=False, proxy_headers=False))
        self.answering = threading.Event()
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.answering.set()

    def end(self) -> None:
        """Have it end, from any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.002)
        await self.lifespan.shutdown()


def _bound_socket() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


@asynccontextmanager
async def served(app: FastAPI, http: Http = DirectProtocol) -> AsyncIterator[int]:
    """Serve in this event loop and yield the port."""
    with _bound_socket() as bound:
        bound.listen()
        server = _Server(app, http)
        task = asyncio.ensure_future(server.serve([bound]))
        try:
            # Connections wait in the socket's backlog until the server accepts them.
            yield bound.getsockname()[1]
        finally:
            server.end()
            await task


@contextmanager
def served_in_thread(app: FastAPI) -> Iterator[str]:
    """Serve in a thread of its own and yield the base URL, for clients that block."""
    with _bound_socket() as bound:
        server = _Server(app, DirectProtocol)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        try:
            assert server.answering.wait(10), "the server did not start"
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.end()
            thread.join(10)
            assert not thread.is_alive(), "the server did not stop"
