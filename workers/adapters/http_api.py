"""The worker's own HTTP: ``/live``, ``/ready``, ``/health``, ``/blocks``, ``/metrics``. It decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Observed(Protocol):
    """What the API shows."""

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent here."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether the engine does its work."""
        ...

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        ...

    def blocks(self, dp_rank: int) -> list[str]:
        """Return what a rank really holds, one line per block and tier.

        Raises ``NotImplementedError`` when the engine cannot tell, ``ValueError`` when there is no such rank.
        """
        ...


class HttpApi:
    """A plain ASGI application; what it shows is given to it once it exists."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._observed: Observed | None = None

    def show(self, observed: Observed) -> None:
        """Answer for this worker from now on."""
        self._observed = observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        status, content_type, body = self._route(scope["method"], scope["path"], scope.get("query_string", b""))
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _route(self, method: str, path: str, query: bytes) -> tuple[int, str, bytes]:
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET and HEAD are allowed\n"
        observed = self._observed
        if path == "/live":
            return 200, "text/plain", b"live\n"
        if path == "/ready":
            ready = observed is not None and observed.is_ready
            return (200, "text/plain", b"ready\n") if ready else (503, "text/plain", b"not ready\n")
        if path == "/health":
            state = {"status": "starting"} if observed is None else observed.describe()
            healthy = observed is None or observed.is_healthy
            return 200 if healthy else 503, "application/json", msgspec.json.encode(state)
        if path == "/blocks" and observed is not None:
            try:
                (dp_rank,) = parse_qs(query.decode("ascii", "replace")).get("dp_rank", ["0"])
                return 200, "text/plain", "\n".join(observed.blocks(int(dp_rank))).encode()
            except ValueError as error:
                return 400, "text/plain", f"reading dp_rank: {error}\n".encode()
            except NotImplementedError:
                return 501, "text/plain", b"this engine cannot say what its cache holds\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return 404, "text/plain", b"allowed are /live, /ready, /health, /blocks and /metrics\n"
