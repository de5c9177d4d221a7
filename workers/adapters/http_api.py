"""The worker's own HTTP: that of every process, ``/blocks``, and for this machine alone ``/drain``."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.limits import DRAIN_TIMEOUT_MS_MAX
from poolgrid.server.http.browser_requests import SAFE_METHODS, is_from_page
from poolgrid.server.http.health_app import HealthApp, HttpAnswer, Receive, Scope, Send, send_answer

if TYPE_CHECKING:
    from poolgrid.server.workers.service import WorkerService


class HttpApi(HealthApp):
    """Says too what the engine's cache really holds; what it shows is given to it once it exists.

    ``POST /drain`` is for what ends the process on this machine (Kubernetes' ``preStop`` in the worker's own pod).
    There are no API keys here, and the port is open to all that check health, so nothing else is served; no web page
    either, which a browser on this machine may send requests for.
    """

    paths = (*HealthApp.paths, "/blocks", "/drain")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._worker: WorkerService | None = None

    def show(self, worker: WorkerService) -> None:
        self._observed = self._worker = worker

    def _ready_for(self, query: bytes) -> HttpAnswer | None:
        """Return what a probe gets that asks for another role or model than this worker's."""
        assert self._worker is not None
        state = self._worker.describe()
        for name, values in parse_qs(query.decode("utf-8", "replace")).items():
            if name in ("role", "model") and values != [state[name]]:
                said = f"this worker's {name} is {state[name]}, not {', '.join(values)}"
                return 503, "application/json", msgspec.json.encode({"status": "not ready", "reason": said})
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/drain":
            await send_answer(scope, send, self._drain(scope))
        else:
            await super().__call__(scope, receive, send)

    def _drain(self, scope: Scope) -> HttpAnswer:
        if scope["method"] != "POST":
            return 405, "text/plain", b"only POST is allowed\n"
        if is_from_page(scope["headers"]):
            # A browser on this machine is on this machine, whatever page it shows.
            return 403, "text/plain", b"draining is not for web pages: the request has Origin or Sec-Fetch-Site\n"
        if not is_from_here(scope):
            said = b"draining is for the worker's own machine; a router has POST /v1/workers/ID/drain\n"
            return 403, "text/plain", said
        if self._worker is None:
            return 503, "application/json", b'{"status":"starting"}'
        given = parse_qs(scope.get("query_string", b"").decode("ascii", "replace")).get("timeout_ms")
        timeout_ms = None
        if given is not None:
            number = given[0] if len(given) == 1 and given[0].isdecimal() else ""
            if not 0 < len(number) <= len(str(DRAIN_TIMEOUT_MS_MAX)) or int(number) > DRAIN_TIMEOUT_MS_MAX:
                wrong = f"timeout_ms is {', '.join(given)[:80]}, allowed are 0 to {DRAIN_TIMEOUT_MS_MAX}"
                return 400, "text/plain", f"{wrong}; nothing is drained\n".encode()
            timeout_ms = int(number)
        self._worker.drain(timeout_ms)
        return 202, "application/json", msgspec.json.encode(self._worker.describe())

    def answer(self, method: str, path: str, query: bytes) -> HttpAnswer:
        if path == "/ready" and query and self._worker is not None and method in ("GET", "HEAD"):
            return self._ready_for(query) or super().answer(method, path, query)
        if path != "/blocks" or self._worker is None or method not in ("GET", "HEAD"):
            return super().answer(method, path, query)
        try:
            (dp_rank,) = parse_qs(query.decode("ascii", "replace")).get("dp_rank", ["0"])
            return 200, "text/plain", "\n".join(self._worker.blocks(int(dp_rank))).encode()
        except ValueError as error:
            return 400, "text/plain", f"reading dp_rank: {error}\n".encode()
        except NotImplementedError:
            return 501, "text/plain", b"this engine cannot say what its cache holds\n"


def is_from_here(scope: Scope) -> bool:
    """Return whether a request comes from the machine (in a pod: from the pod) that it came to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    return ipaddress.ip_address(client[0]).is_loopback or (server is not None and client[0] == server[0])


SERVERS = "/v1/servers"

BODY_BYTES_MAX = 4096
"""Largest body of a request about one server: its URL has at most 2,048 characters."""

AnswerFollowed = Callable[[str, bytes, bytes], HttpAnswer]
"""Answers a request by its method, query and body."""


class FollowedApi:
    """Adds ``/v1/servers`` to the HTTP of a process whose workers come and go.

    There are no API keys here: what changes something is for this machine alone, and for no web page.
    """

    def __init__(self, app: HealthApp, answer: AnswerFollowed) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SERVERS:
            await self._app(scope, receive, send)
            return
        await send_answer(scope, send, await self._serve(scope, receive))

    async def _serve(self, scope: Scope, receive: Receive) -> HttpAnswer:
        method = scope["method"]
        if method not in SAFE_METHODS:
            if is_from_page(scope["headers"]):
                return 403, "text/plain", b"servers are not for web pages: the request has Origin or Sec-Fetch-Site\n"
            if not is_from_here(scope):
                return 403, "text/plain", b"servers are added and removed from the follower's own machine only\n"
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return 400, "text/plain", b"the request has ended before its body\n"
            body += message.get("body", b"")
            if len(body) > BODY_BYTES_MAX:
                return 413, "text/plain", f"the body exceeds {BODY_BYTES_MAX} bytes\n".encode()
            if not message.get("more_body", False):
                return self._answer(method, scope.get("query_string", b""), body)
