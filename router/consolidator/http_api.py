"""Health and metrics of a consolidator that runs alone."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from router.consolidator.service import ConsolidatorService

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


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
                    "reason": self._service.trouble if self._service.stalled else "",
                    "degraded": self._service.trouble,
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
