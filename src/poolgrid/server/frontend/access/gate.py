"""Authorization of HTTP requests by API key and path.

Every path has one of three classes. A path without a class needs an operator's key, so a new endpoint is closed by
default. Without ``--api-keys`` no gate is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.frontend.access.meter import limit_headers
from poolgrid.server.frontend.access.tenants import Caller, WatchedKeyFile
from poolgrid.server.frontend.errors import dialect_of, refused
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.request_body import RequestIds
from poolgrid.server.http.browser_requests import is_preflight
from poolgrid.server.process.clock import Clock

CALLER: Final = "poolgrid.caller"
"""Key of the ``Caller`` in the ASGI scope; absent without API keys and on open paths."""


class PathClass(Enum):
    """Who may ask for a path."""

    OPEN = "any client"
    TENANT = "a tenant's key"
    OPERATOR = "an operator's key"


OPEN_PATHS: Final = frozenset({"/live", "/ready", "/health", "/ping", "/version", "/openapi.json"})
PAGE_PATH: Final = "/ui"
"""The files of the fleet page, with everything below. A browser that follows a link carries no key; what the page shows
comes from paths that need one."""

PAGE_FOLDER: Final = PAGE_PATH + "/"

METRICS_PATH: Final = "/metrics"
TENANT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/models",
    "/v1/embeddings",
    "/v1/images",
    "/v1/videos",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
)
"""With everything below them."""

GATE: Final = "gate"
"""Value of the ``endpoint`` label for requests that were refused before any endpoint saw them."""


def path_class(path: str, metrics_need_key: bool) -> PathClass:
    """Return who may ask for a path."""
    if path in OPEN_PATHS:
        return PathClass.OPEN
    if path == METRICS_PATH and not metrics_need_key:
        return PathClass.OPEN
    if is_path_of_tenants(path):
        return PathClass.TENANT
    if path == PAGE_PATH or path.startswith(PAGE_FOLDER):
        return PathClass.OPEN
    return PathClass.OPERATOR


def is_path_of_tenants(path: str) -> bool:
    """Return whether a path is part of the API that tenants use."""
    return path.startswith(TENANT_PATHS) and any(path == each or path.startswith(each + "/") for each in TENANT_PATHS)


class GateKeys(NamedTuple):
    """What a gate judges by."""

    watched: WatchedKeyFile
    metrics: FrontendMetrics
    clock: Clock
    metrics_need_key: bool
    request_ids: RequestIds


class AccessGate:
    """ASGI middleware: authenticates, counts requests in and out, and puts the ``Caller`` into the scope."""

    def __init__(
        self, app: ASGIApp, keys: GateKeys, classify: Callable[[Scope, bool], PathClass] | None = None
    ) -> None:
        """``classify`` returns who may send a request, given its scope and whether metrics need a key; by default that
        is decided by ``path_class``."""
        self._app = app
        self._classify = classify or _class_of
        self._keys, self._metrics, self._clock, self._metrics_need_key, self._request_ids = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or refuse it."""
        if scope["type"] != "http" or is_preflight(scope["method"], scope["headers"]):
            await self._app(scope, receive, send)
            return
        tenants = self._keys.tenants()
        needed = self._classify(scope, self._metrics_need_key)
        if needed is PathClass.OPEN:
            await self._app(scope, receive, send)
            return
        caller: Caller | None = None
        try:
            caller = Caller(tenants.authenticate(key_of(scope), self._clock.wall_ms()))
            if needed is PathClass.OPERATOR and not caller.is_operator:
                raise Refused(
                    403,
                    "operator_only",
                    f"{scope['path']} needs an operator's key; tenant {caller.tenant} is none (operator: true)",
                )
            counted = needed is PathClass.TENANT and (scope["method"] == "POST" or is_upgrade(scope))
            if counted:
                caller.begin(self._clock.monotonic_ms())
        except Refused as refusal:
            await self._refuse(refusal, caller, scope, send)
            return
        scope[CALLER] = caller
        if not counted:
            await self._app(scope, receive, send)
            return
        tenant = self._metrics.tenant(caller.tenant)
        tenant.requests.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            caller.end(self._clock.monotonic_ms())
            prompt_tokens, output_tokens = caller.used
            tenant.prompt_tokens.inc(prompt_tokens)
            tenant.output_tokens.inc(output_tokens)

    async def _refuse(self, refusal: Refused, caller: Caller | None, scope: Scope, send: Send) -> None:
        error = refused(refusal)
        self._metrics.refused(error.code, caller.tenant if caller is not None else "")
        self._metrics.answered(GATE, error.status, False)
        dialect = dialect_of(scope["path"], scope["headers"])
        request_id = self._request_ids.wanted(_header(scope, b"x-request-id"))
        body = dialect.error_body(error, request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *dialect.headers(request_id),
            *([] if caller is None else limit_headers(caller.standing(self._clock.monotonic_ms()))),
            *error.headers,
        ]
        if error.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="poolgrid"'))
        # The body stays unread; the server skips it. Closing instead could reset the connection under the answer.
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        sent = body if scope["method"] != "HEAD" else b""
        await send({"type": "http.response.body", "body": sent, "more_body": False})


def _class_of(scope: Scope, metrics_need_key: bool) -> PathClass:
    return path_class(scope["path"], metrics_need_key)


def is_upgrade(scope: Scope) -> bool:
    """Return whether a request asks for another protocol, and so for a connection as long as its client likes."""
    return b"upgrade" in dict(scope["headers"])


def caller_of(scope: Scope) -> Caller | None:
    """Return whose request it is; ``None`` without API keys."""
    caller: Caller | None = scope.get(CALLER)
    return caller


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def key_of(scope: Mapping[str, Any]) -> bytes | None:
    """Return the key that a request carries: a bearer token, or ``x-api-key``."""
    found: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, token = value.strip().partition(b" ")
            if kind.lower() == b"bearer":
                return bytes(token.strip())
        elif name == b"x-api-key" and found is None:
            found = bytes(value.strip())
    return found
