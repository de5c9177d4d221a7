"""The FastAPI application that both routers serve: the inference endpoints, models, health and metrics.

The two inference endpoints are plain ASGI applications routed in it; everything else is ordinary FastAPI. A router adds
its own endpoints (``/v1/workers``, ``/v1/decisions``) to the application that ``create_app`` returns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from poolgrid import __version__
from poolgrid.kernel.requests.inference import InferenceBackend, Refused, ServedModel
from poolgrid.kernel.wire.addresses import SCHEME
from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.server.frontend.access.gate import PAGE_FOLDER, AccessGate, GateKeys, caller_of, is_path_of_tenants
from poolgrid.server.frontend.access.meter import LIMIT_HEADERS, limit_headers
from poolgrid.server.frontend.access.tenants import CacheDomains, WatchedKeyFile
from poolgrid.server.frontend.api_endpoint import absent_endpoint, installed_endpoints
from poolgrid.server.frontend.chat_endpoint import CHAT
from poolgrid.server.frontend.errors import (
    ANTHROPIC,
    RequestError,
    dialect_of,
    invalid,
    quoted,
    refused,
    without_others,
)
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.guide_check import GuideCheck
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint, counted_tokens
from poolgrid.server.frontend.media.loader import MediaLoader, MediaMetrics
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.openapi import describe_inference
from poolgrid.server.frontend.preparation import Preparation, model_not_found
from poolgrid.server.frontend.prompt_model import PromptModels
from poolgrid.server.frontend.request_body import BodyReader, InflationLimits, RequestIds
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.frontend.tokenizer_endpoints import add_tokenizer_endpoints
from poolgrid.server.frontend.traffic import Traffic
from poolgrid.server.http.browser_requests import SAFE_METHODS, foreign_origin
from poolgrid.server.http.guard import SERVER_ENDS
from poolgrid.server.process.clock import Clock, SystemClock
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.process.plugins import ENDPOINTS
from poolgrid.server.process.tracing.tracing import Tracing

log = logging.getLogger(__name__)

NAME = "poolgrid.request_id"
"""Key of a request's name in the ASGI scope, on all paths but those of the inference endpoints."""

BODILESS = "poolgrid.bodiless"
"""Key of the ASGI scope of a ``HEAD``, which is served as a ``GET`` whose body is not sent."""

EXPOSED_HEADERS = (
    "x-request-id",
    "x-poolgrid-worker",
    "x-poolgrid-decision",
    "x-poolgrid-pool",
    "x-poolgrid-refusal",
    "x-poolgrid-tools-left-out",
    "traceresponse",
    "retry-after",
    *LIMIT_HEADERS,
)
"""Response headers that scripts of other origins may read."""

REQUEST_ID = b"x-request-id"

Readiness = Callable[[], str | None]
"""Returns ``None`` when requests can be served, else what is still missing, in words."""


Endpoints = Callable[[], Sequence[EndpointRow]]
"""Returns who serves which model in which role now."""


def _always_ready() -> str | None:
    return None


class Application(FastAPI):
    """FastAPI, with a short way for the inference endpoints. Its maker closes it, once no server uses it any more.

    They answer every error themselves and take no dependencies, so the layers that FastAPI puts around an endpoint do
    nothing for them but cost 10 % of a short request. Middleware that is added runs on every request: the short way
    is then closed.
    """

    def __init__(
        self,
        close: Callable[[], Awaitable[None]],
        request_ids: RequestIds,
        clock: Clock,
        traffic: Traffic,
        metrics: FrontendMetrics,
        cors_allow_origins: Collection[str],
        **fields: Any,
    ) -> None:
        # The pages that FastAPI makes of a description load their scripts from elsewhere. Both spellings of a path are
        # served: a redirect would name the scheme that the server sees, and TLS may end at a proxy.
        super().__init__(lifespan=_until_close, docs_url=None, redoc_url=None, redirect_slashes=False, **fields)
        self._metrics = metrics
        self._page_origins = frozenset(each.lower() for each in cors_allow_origins)
        self._request_ids = request_ids
        self._clock = clock
        self.close = close
        """Ends the threads, the process and the media fetches of endpoints; a second time does nothing."""
        self.traffic = traffic
        self.front: FrontEnd
        """What the endpoints share, for those of the routers too; set once all of it is there."""
        self.direct: dict[str, InferenceEndpoint | AccessGate] = {}
        """Inference endpoints by path, each behind the gate when there is one."""
        self._short = True

    def served(self) -> tuple[int, ...]:
        """Return the totals of ``poolgrid.server.frontend.metrics.SERVED_COLUMNS``, with the tokens of requests in
        flight."""
        return (self.traffic.totals().account.output_tokens, *self._metrics.served())

    def add_middleware(self, middleware_class: Any, *args: Any, **kwargs: Any) -> None:
        super().add_middleware(middleware_class, *args, **kwargs)
        self._short = self._short and middleware_class is AccessGate

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Return what serves one request."""
        path = scope.get("path", "")
        if path not in self.direct and path.endswith("/") and len(path) > 1 and path != PAGE_FOLDER:
            path = path[:-1]
            scope = {**scope, "path": path}
        is_direct = path in self.direct and scope["method"] == "POST"
        if is_direct and self._short:
            return self.direct[path](scope, receive, send)
        names_itself = is_direct or scope["type"] != "http"
        return super().__call__(scope, receive, send) if names_itself else self._serve_plainly(scope, receive, send)

    async def _serve_plainly(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what is no inference request: with a name too, with the tenant's limits, and ``HEAD`` as ``GET``."""
        bodiless = scope["method"] == "HEAD"
        wanted = next((value for name, value in scope["headers"] if name == REQUEST_ID), None)
        request_id = str(self._request_ids.wanted(wanted))
        scope = {**scope, NAME: request_id, **({"method": "GET", BODILESS: True} if bodiless else {})}

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(name != REQUEST_ID for name, _ in headers):
                    caller = caller_of(scope)
                    if caller is not None:
                        headers += limit_headers(caller.standing(self._clock.monotonic_ms()))
                    headers += dialect_of(scope["path"], scope["headers"]).headers(request_id)
                message = {**message, "headers": headers}
            elif bodiless and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        if scope["method"] not in SAFE_METHODS:
            page = self._foreign_page(scope)
            if page:
                what = f"{scope['method']} {scope['path']}: a web page of {page} sent it"
                allowed = "allowed are pages of this server and of the origins in --cors-allow-origins"
                self._metrics.refused("foreign_origin")
                refusal = _answer(Request(scope), RequestError(403, "foreign_origin", f"{what}, {allowed}"))
                await refusal(scope, receive, named)
                return
        await super().__call__(scope, receive, named)

    def _foreign_page(self, scope: Scope) -> str:
        """Return which page of another origin sent a request that changes something; empty when none did.

        A POST of the API that tenants use has a body of JSON, which a browser sends only after it was allowed to.
        """
        origins = self._page_origins
        if is_path_of_tenants(scope["path"]) and (scope["method"] == "POST" or "*" in origins):
            return ""
        return foreign_origin(scope["headers"], origins)


def cors_options(origins: Collection[str]) -> dict[str, Any]:
    """Return the options of ``CORSMiddleware`` for pages of some origins."""
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": list(EXPOSED_HEADERS),
    }


@asynccontextmanager
async def _until_close(app: Application) -> AsyncIterator[None]:
    """Close the application at the end of its life, for servers that tell it of one; ours does not."""
    try:
        yield
    finally:
        await app.close()


def create_app(
    backend: InferenceBackend,
    models: PromptModels,
    *,
    settings: FrontendSettings,
    registry: CollectorRegistry,
    ready: Readiness = _always_ready,
    is_ending: Callable[[], bool] = lambda: False,
    endpoints: Endpoints = tuple,
    troubles: Callable[[], Sequence[str]] = lambda: (),
    clock: Clock | None = None,
    id_prefix: str | None = None,
    place: GroupPlace | None = None,
    data_dir: Path | None = None,
    tracing: Tracing | None = None,
) -> Application:
    """Return the application.

    ``models`` gives the prompt model of each served model by name; ``registry`` receives ``poolgrid_frontend_*`` and is
    what ``/metrics`` answers with; ``troubles`` says in
    ``/health`` what is wrong while requests are served; ``/ready`` is 503 once the process ``is_ending``, though it
    serves requests for a moment more; ``id_prefix`` makes request ids unique among processes, and is
    random by default; ``place`` is this process's among those that share the port, which divide the limits of
    tenants; ``data_dir`` is where responses are kept that outlive the process; ``tracing`` keeps traces of
    inference requests.
    """
    opened = AsyncExitStack()
    clock = clock or SystemClock()
    request_ids = RequestIds(f"r{secrets.token_hex(6)}" if id_prefix is None else id_prefix)
    metrics = FrontendMetrics(registry, settings.ttft_target_ms, settings.itl_target_ms)
    app = Application(
        opened.aclose,
        request_ids,
        clock,
        Traffic(settings.access_log, partial(counted_tokens, metrics)),
        metrics,
        settings.cors_allow_origins,
        title="poolgrid",
        summary="OpenAI API of a KV-cache-aware router",
        version=__version__,
    )
    media = MediaLoader(settings, MediaMetrics(registry), clock)
    opened.push_async_callback(media.close)
    guides = GuideCheck(count=lambda outcome: metrics.guides.labels(outcome).inc())
    opened.callback(guides.close)
    tokenization = TokenizationPool(settings.tokenizer_threads)
    opened.callback(tokenization.close)
    metrics.tokenizations_pending.set_function(lambda: tokenization.pending)
    preparation = Preparation(backend, models, settings)
    metrics.tokenizers.show(backend, preparation.forms)
    domains = CacheDomains(settings.isolate_tenants, settings.tenant_header)
    bodies = BodyReader(InflationLimits(settings.max_body_bytes), settings.max_body_values, tokenization, clock)
    keys = None
    if settings.api_keys is not None:
        processes = 1 if place is None else place.size
        keys = _gate_keys(settings.api_keys, settings, metrics, clock, request_ids, processes)
        app.add_middleware(AccessGate, keys=keys)
    app.front = front = FrontEnd(
        app=app,
        opened=opened,
        settings=settings,
        backend=backend,
        preparation=preparation,
        tokenization=tokenization,
        bodies=bodies,
        request_ids=request_ids,
        metrics=metrics,
        clock=clock,
        media=media,
        guides=guides,
        domains=domains,
        traffic=app.traffic,
        tracing=tracing,
        keys=keys,
        place=place,
        data_dir=data_dir,
    )
    apis = (CHAT, *installed_endpoints())
    for api in apis:
        for path, endpoint in api.join(front).items():
            app.router.routes.insert(0, Route(path, endpoint, methods=["POST"], name=endpoint.name))
            app.direct[path] = endpoint if keys is None else AccessGate(endpoint, keys)
    if settings.cors_allow_origins:
        app.add_middleware(CORSMiddleware, **cors_options(settings.cors_allow_origins))
    describe_inference(app, [api.description for api in apis])
    _add_models(app, backend, preparation)
    add_tokenizer_endpoints(front)
    _add_health(app, backend, lambda: SERVER_ENDS if is_ending() else ready(), is_ending, endpoints, troubles)
    _add_metrics(app, registry)
    _add_error_shape(app, metrics, settings.isolate_tenants)
    return app


def _gate_keys(
    path: Path,
    settings: FrontendSettings,
    metrics: FrontendMetrics,
    clock: Clock,
    request_ids: RequestIds,
    processes: int,
) -> GateKeys:
    """Return the keys that let clients in; raises ``OSError`` or ``KeyFileError``."""
    watched = WatchedKeyFile(
        path,
        clock,
        lambda outcome: metrics.key_reloads.labels(outcome).inc(),
        processes,
    )
    metrics.keys_stale.set_function(lambda: float(watched.stale))
    return GateKeys(watched, metrics, clock, settings.metrics_need_key or settings.isolate_tenants, request_ids)


def _add_models(app: FastAPI, backend: InferenceBackend, preparation: Preparation) -> None:
    @app.get("/v1/models", tags=["models"])
    async def list_models(request: Request) -> dict[str, Any]:
        """List the models and LoRA adapters that can be asked for now."""
        data: list[dict[str, Any]] = []
        for served in backend.models():
            data.append(_model_card(served))
            data.extend(_model_card(served, lora) for lora in served.loras)
            data.extend({**_model_card(served), "id": alias} for alias in served.aliases)
        caller = caller_of(request.scope)
        if caller is not None:
            data = [card for card in data if caller.may_use(card["id"])]
        if not _is_anthropic(request):
            return {"object": "list", "data": data}
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        cards = [_anthropic_card(card) for card in data]
        return {"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last}

    @app.get("/v1/models/{model_id:path}", tags=["models"])
    async def get_model(request: Request, model_id: str) -> dict[str, Any]:
        """Describe one model."""
        caller = caller_of(request.scope)
        if caller is not None:
            caller.check_model(model_id)
        found = preparation.served(model_id)
        if found is None:
            raise model_not_found(model_id, [served.name for served in backend.models()])
        card = {**_model_card(*found), "id": model_id}
        return _anthropic_card(card) if _is_anthropic(request) else card


def _is_anthropic(request: Request) -> bool:
    return dialect_of(request.url.path, request.scope["headers"]) is ANTHROPIC


def _anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    """Return a card with the fields that Anthropic's clients read in addition."""
    created_at = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tokens = card["max_model_len"]  # prompt and answer share them
    own = {"type": "model", "display_name": card["id"], "created_at": created_at}
    return {**card, **own, "max_input_tokens": tokens, "max_tokens": tokens}


def _model_card(served: ServedModel, lora: str = "") -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": lora or served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "poolgrid",
        "root": served.name,
        "max_model_len": served.max_sequence_length if served.generates else None,
    }
    if lora:
        card["parent"] = served.name
    return card


def _add_health(
    app: FastAPI,
    backend: InferenceBackend,
    ready: Readiness,
    is_ending: Callable[[], bool],
    endpoints: Endpoints,
    troubles: Callable[[], Sequence[str]],
) -> None:
    @app.get("/live", tags=["health"])
    async def live() -> dict[str, str]:
        """Answer 200 while the process serves HTTP at all."""
        return {"status": "alive"}

    @app.get("/version", tags=["health"])
    async def version() -> dict[str, str]:
        """Return the version of poolgrid."""
        return {"version": __version__}

    @app.get("/ping", tags=["health"], responses={503: {"description": "Not ready: the body lists what is missing"}})
    @app.get("/ready", tags=["health"], responses={503: {"description": "Not ready: the body lists what is missing"}})
    async def is_ready(
        response: Response,
        role: Annotated[
            Literal["aggregated", "prefill", "decode", "encode", "embedding", "image", "video"] | None,
            Query(description="Ready only while a worker of this role takes requests."),
        ] = None,
        model: Annotated[str | None, Query(max_length=256, description="Of this model; any by default.")] = None,
    ) -> dict[str, str]:
        """Answer 200 when requests can be served, else 503 with what is missing."""
        asked = (role is not None or model is not None) and not is_ending()
        missing = _without_worker(endpoints, role, model) if asked else ready()
        if missing is None:
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "not ready", "reason": missing}

    @app.get("/health", tags=["health"], responses={503: {"description": "Not ready"}})
    async def health(response: Response) -> dict[str, Any]:
        """Answer as ``/ready`` does, with the models that are served, who serves them, and what is wrong meanwhile.

        ``status`` and ``endpoints`` are what checks written for Dynamo's frontend look for.
        """
        missing, rows = ready(), endpoints()
        served = {
            "endpoints": dynamo_names(rows),
            "models": [each.name for each in backend.models()],
            "served": [row.to_json() for row in rows],
        }
        if missing is None:
            wrong = list(troubles())
            return {"status": "degraded" if wrong else "healthy", **served, **({"troubles": wrong} if wrong else {})}
        response.status_code = 503
        return {"status": "unhealthy", "reason": missing, **served}


DYNAMO_NAMESPACES = {"poolgrid": "dynamo"}
DYNAMO_COMPONENTS = {"worker": "tensorrt_llm", "decode": "tensorrt_llm", "encode": "tensorrt_llm_encode"}
"""Our default namespace and components, and the names that Dynamo's TensorRT-LLM workers have by default."""


def dynamo_names(rows: Iterable[EndpointRow]) -> list[str]:
    """Return the ``dyn://`` names of endpoints with a ready worker; a default one by Dynamo's default name too."""
    names: dict[str, None] = {}
    for row in rows:
        if row.ready:
            names[SCHEME + row.endpoint] = None
            namespace, _, rest = row.endpoint.partition(".")
            component, dot, endpoint = rest.partition(".")
            if dot:
                space, part = DYNAMO_NAMESPACES.get(namespace, namespace), DYNAMO_COMPONENTS.get(component, component)
                names[f"{SCHEME}{space}.{part}.{endpoint}"] = None
    return list(names)


def _without_worker(endpoints: Endpoints, role: str | None, model: str | None) -> str | None:
    """Return what is missing of a role or model that is asked for, whatever the rest of the pool lacks."""
    wanted = [row for row in endpoints() if role in (None, row.role) and model in (None, row.model)]
    if any(row.ready for row in wanted):
        return None
    of_model = "" if model is None else f" of model {model!r}"
    return f"no {'' if role is None else f'{role} '}worker{of_model} takes requests"


def _add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    turn = asyncio.Lock()

    @app.get("/metrics", tags=["metrics"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return the metrics of this process in Prometheus' text form."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # In a thread, and one at a time: many scrapers at once cost no more than one, and streams continue meanwhile.
        async with turn:
            body = await asyncio.to_thread(encode, registry)
        return Response(body, headers={"content-type": content_type})


def _add_error_shape(app: FastAPI, metrics: FrontendMetrics, isolate_tenants: bool) -> None:
    """Give OpenAI's error shape also to what FastAPI refuses (paths, methods, parameters), and to our own bugs."""

    async def on_request_error(request: Request, error: Exception) -> Response:
        if isinstance(error, Refused):
            error = refused(error)
        assert isinstance(error, RequestError), "registered for these types only"
        if isolate_tenants:
            error = without_others(error)
        if error.is_refusal:
            caller = caller_of(request.scope)
            metrics.refused(error.code, caller.tenant if caller is not None else "")
        return _answer(request, error, {name.decode(): value.decode() for name, value in error.headers})

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException), "registered for this type only"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        path = request.url.path
        plugin = absent_endpoint(path) if error.status_code == 404 else ""
        why = f"the plug-in {plugin!r} of {ENDPOINTS} is not installed" if plugin else error.detail
        shaped = RequestError(error.status_code, code, f"{request.method} {path}: {why}")
        return _answer(request, shaped, error.headers)

    async def on_wrong_parameter(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for this type only"
        first = error.errors()[0]
        param = str(first["loc"][-1])
        said: str = first["msg"]
        return _answer(request, invalid(param, f"{param} is {quoted(first['input'])}: {said[:1].lower()}{said[1:]}"))

    async def on_bug(request: Request, error: Exception) -> Response:
        message = "serving the request failed inside the router; its log has the details"
        return _answer(request, RequestError(500, "internal_error", message))

    app.add_exception_handler(RequestValidationError, on_wrong_parameter)
    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(Refused, on_request_error)
    app.add_exception_handler(StarletteHTTPException, on_http_exception)
    app.add_exception_handler(HTTPException, on_http_exception)


def _answer(request: Request, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer that is an error, in the words of the API that the path belongs to."""
    dialect = dialect_of(request.url.path, request.scope["headers"])
    body = dialect.error_body(dialect.named(error), request.scope.get(NAME, ""))
    return Response(body, error.status, headers, media_type="application/json")
