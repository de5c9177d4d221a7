"""Serve an application for a test: in this event loop over real sockets, in a thread, or without sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import InferenceBackend, InferenceRequest, ServedModel, TokenStream
from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.server.frontend.api_endpoint import absent_endpoint
from poolgrid.server.frontend.app import Application, create_app
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.http.http_settings import HttpLimits
from poolgrid.server.process.settings import with_constants
from tests.frontend.fake_backend import TINY, FakeBackend


def application(
    backend: InferenceBackend,
    *,
    registry: CollectorRegistry | None = None,
    models: dict[str, PromptModel] | None = None,
    ready: Callable[[], str | None] = lambda: None,
    endpoints: Callable[[], Sequence[EndpointRow]] = tuple,
    troubles: Callable[[], Sequence[str]] = tuple,
    **settings: Any,
) -> Application:
    return create_app(
        backend,
        {"tiny": TINY} if models is None else models,
        settings=with_constants(FrontendSettings, settings),
        registry=registry or CollectorRegistry(),
        ready=ready,
        endpoints=endpoints,
        troubles=troubles,
        id_prefix="id-",
    )


async def skip_absent(request: httpx.Request) -> None:
    """Skip a test that asks for an API whose plug-in's folder is not there."""
    if plugin := absent_endpoint(request.url.path):
        pytest.skip(f"the plug-in {plugin!r} is absent")


@asynccontextmanager
async def in_process(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that needs no server; at the end the application is closed, as whoever serves it does."""
    hooks: dict[str, list[Callable[..., Any]]] = {"request": [skip_absent]}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", event_hooks=hooks) as client:
        try:
            yield client
        finally:
            await app.close()


def post_once(backend: InferenceBackend, path: str, **arguments: Any) -> httpx.Response:
    """Return the answer of an application that is asked this once; ``arguments`` are those of the client's ``post``."""

    async def go() -> httpx.Response:
        async with in_process(application(backend)) as client:
            return await client.post(path, **arguments)

    return asyncio.run(go())


def post_to_shared(
    backend: InferenceBackend | None, path: str, settings: dict[str, Any] | None = None, **arguments: Any
) -> httpx.Response:
    """Return an answer of the application that all requests of a module with the same settings share.

    Each brings its backend. An application takes 10 ms of CPU to make, several times as long as it takes to answer.
    """
    given = settings or {}
    models = given.get("models")
    of_models = None if models is None else tuple((name, id(model)) for name, model in models.items())
    key = (of_models, *((name, value) for name, value in given.items() if name != "models"))
    if key not in _shared:
        _shared[key] = _closing.enter_context(front_end(**given))
    return _shared[key].post(backend or FakeBackend(), path, **arguments)


_shared: dict[tuple[Any, ...], FrontEnd] = {}
_closing = ExitStack()


def close_shared_front_ends() -> None:
    """Close what `post_to_shared` made; called after each module of tests."""
    _shared.clear()
    _closing.close()


def prompt_of(backend: FakeBackend) -> str:
    """Return the text of the prompt that the first request brought."""
    token_ids = list(memoryview(backend.requests[0].token_ids).cast("I"))
    return TINY.tokenizer.decode(token_ids, skip_special_tokens=False)


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


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[int]:
    """Serve in this event loop and yield the port."""
    server = HttpServer(app, "127.0.0.1", 0, "port", stop_timeout_ms=10_000, limits=HttpLimits(hosts=("*",)))
    server.start()
    try:
        yield server.port
    finally:
        await server.stop()
        if isinstance(app, Application):
            await app.close()


@contextmanager
def served_in_thread(app: FastAPI) -> Iterator[str]:
    """Serve in a thread of its own and yield the base URL, for clients that block."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()

    async def serve() -> None:
        ending = asyncio.Event()
        async with served(app) as port:
            started.set_result((asyncio.get_running_loop(), ending, f"http://127.0.0.1:{port}"))
            await ending.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    loop, ending, url = started.result(10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
