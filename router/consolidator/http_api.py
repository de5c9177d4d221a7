"""Health and metrics of a consolidator that runs alone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from router.consolidator.service import ConsolidatorService

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def bind_http(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; the port is known before the server starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"binding http_port: {host}:{port} cannot be used ({error}); choose a free port, or 0") from error
    return listener


class HealthApp:
    """ASGI: ``/live`` (the process answers), ``/ready`` and ``/health`` (it takes events), ``/metrics``."""

    def __init__(self, service: ConsolidatorService, registry: CollectorRegistry) -> None:
        self._service = service
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        status, kind = 200, "application/json"
        if path == "/metrics":
            body, kind = generate_latest(self._registry), CONTENT_TYPE_LATEST
        elif path == "/live":
            body = b'{"status":"live"}'
        elif path in ("/ready", "/health"):
            ready = self._service.ready
            status = 200 if ready else 503
            body = json.dumps(
                {
                    "status": "ready" if ready else "journal unavailable" if self._service.stalled else "starting",
                    "consolidator_id": self._service.consolidator_id,
                    "offset": self._service.offset,
                    "workers": len(self._service.core.pool.workers),
                    "degraded_sources": [source.name for source in self._service.sources() if source.degraded],
                }
            ).encode()
        else:
            status, body = 404, b'{"error":"not found; there are /health, /live, /ready and /metrics"}'
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process, which decides in what order its parts end."""
        yield


class HealthServer:
    """uvicorn on a bound socket, started and stopped within a running loop."""

    def __init__(self, app: HealthApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))

    async def stop(self) -> None:
        """Stop answering."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()
