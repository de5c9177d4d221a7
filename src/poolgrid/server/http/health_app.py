"""The HTTP of a process without an OpenAI API: ``/live``, ``/started``, ``/ready``, ``/health``, ``/metrics``.

It decides nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HttpAnswer = tuple[int, str, bytes]
"""Status, content type, body."""


class Observed(Protocol):
    """What is shown of a process."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes work now."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether it does its work."""
        ...

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        ...


class HealthApp:
    """A plain ASGI application; what it shows may be given to it once it exists."""

    paths: tuple[str, ...] = ("/live", "/started", "/ready", "/health", "/metrics")
    """What it answers; a subclass that answers more names it."""

    def __init__(self, registry: CollectorRegistry, observed: Observed | None = None) -> None:
        self._registry = registry
        self._observed = observed
        self._starting: dict[str, str] = {"status": "starting"}

    def say_start(self, reason: str) -> None:
        """Show what the start waits for, until there is something to show."""
        self._starting = {"status": "starting", "reason": reason}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self.answer(scope["method"], scope["path"], scope.get("query_string", b""))
        await send_answer(scope, send, answer)

    def answer(self, method: str, path: str, query: bytes) -> HttpAnswer:
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET and HEAD are allowed\n"
        observed = self._observed
        if path == "/live":
            return 200, "application/json", b'{"status":"live"}'
        if path == "/started":
            started = observed is not None
            said = b'{"status":"started"}' if started else b'{"status":"starting"}'
            return 200 if started else 503, "application/json", said
        if path in ("/ready", "/health"):
            if observed is None:
                return (503 if path == "/ready" else 200), "application/json", msgspec.json.encode(self._starting)
            good = observed.is_ready if path == "/ready" else observed.is_healthy
            return 200 if good else 503, "application/json", msgspec.json.encode(observed.describe())
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        return 404, "text/plain", f"allowed are {', '.join(self.paths)}\n".encode()


async def send_answer(scope: Scope, send: Send, answer: HttpAnswer) -> None:
    """Send an answer, without its body to ``HEAD``."""
    status, content_type, body = answer
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
