"""The ASGI application in front of a router's own: requests for engine servers are forwarded, all others passed on.

In front of a global router the servers are routers of pools, which forward in turn.

It answers no request by itself but those that no server may get. What both sides have in common (keys, tenants, names
of requests, metrics, the log line of a request) is the front end's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Receive, Scope, Send

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.server.forwarding.headers import request_headers
from poolgrid.server.forwarding.hop import HOP, HOP_HEADER, Hop, hop_line, read_hop
from poolgrid.server.forwarding.kept_stream import KEPT_TOGETHER_BYTES_MAX, forget_longest
from poolgrid.server.forwarding.model_list import merge_model_lists
from poolgrid.server.forwarding.multipart import boundary_of, model_of_query
from poolgrid.server.forwarding.paths import RequestTarget, TargetAccess, read_target
from poolgrid.server.forwarding.prompt_ids import IDS_MIN, may_carry
from poolgrid.server.frontend.access.gate import (
    AccessGate,
    GateKeys,
    PathClass,
    caller_of,
    is_path_of_tenants,
    is_upgrade,
    key_of,
)
from poolgrid.server.frontend.access.tenants import CacheDomains
from poolgrid.server.frontend.errors import RequestError, dialect_of
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.preparation import model_not_found
from poolgrid.server.frontend.request_body import BodyReader, RequestIds, receive_body, too_large
from poolgrid.server.frontend.session_fields import hint_of_members
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.traffic import Traffic, tell_request
from poolgrid.server.http.client_address import client_address
from poolgrid.server.http.guard import Guard
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import Restart, cancel_all, supervised
from poolgrid.server.process.tracing.tracing import Tracing
from poolgrid.server.proxy.changes import Changes, is_streamed, make_changes
from poolgrid.server.proxy.collector import look_up
from poolgrid.server.proxy.cors import RouterCors, cors_headers, unasked_page
from poolgrid.server.proxy.exchange import (
    CLIENT_LEFT,
    SILENCE_LOOKS,
    SILENCE_S,
    ForwardExchange,
    RoutingFields,
    target_of,
)
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.ports import ForwardBackend, ServerPlace
from poolgrid.server.proxy.prompt_reading import MEDIA, UNLIMITED, PromptReader, members_of
from poolgrid.server.proxy.prompt_record import PromptRecord
from poolgrid.server.proxy.routing_hints import tell_hints
from poolgrid.server.proxy.server_connection import AnswerFailed, HeaderList
from poolgrid.server.proxy.server_state import ServerState, named_state
from poolgrid.server.proxy.tunnel import TUNNELS_MAX, Tunnel
from poolgrid.server.proxy.upload import Upload

log = logging.getLogger(__name__)

ENDPOINTS: Final = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/realtime": "realtime",
}
"""Values of the ``endpoint`` label."""

MODELS: Final = "/v1/models"

IDS_BYTES_MIN: Final = IDS_MIN * TOKEN_BYTES

OTHER_ENDPOINT: Final = "other"
"""Of all other paths: clients can name any number of them."""


MakeServer = Callable[[str], ForwardServer]


class ForwardApplication:
    """Forwards what is for engine servers; ``inner`` serves everything else."""

    def __init__(
        self,
        inner: ASGIApp,
        backend: ForwardBackend,
        reader: PromptReader,
        prompts: PromptRecord,
        bodies: BodyReader,
        request_ids: RequestIds,
        metrics: FrontendMetrics,
        settings: FrontendSettings,
        traffic: Traffic,
        domains: CacheDomains,
        clock: Clock,
        make_server: MakeServer,
        tracing: Tracing | None = None,
        keys: GateKeys | None = None,
        own_paths: frozenset[str] = frozenset(),
    ) -> None:
        """``make_server`` opens a server by its URL; ``own_paths`` begin the paths that are the router's own, though
        engines may have some of the same name."""
        self._inner = inner
        self.backend = backend
        self.request_ids = request_ids
        self.metrics = metrics
        self.clock = clock
        self.isolates = settings.isolate_tenants
        self._reader = reader
        self.prompts = prompts
        self._bodies = bodies
        self._body_bytes_max = settings.max_body_bytes
        self._make_server = make_server
        self._traffic = traffic
        self._domains = domains
        self._tracing = tracing
        self._own_paths = own_paths
        self._own_folders = tuple(f"{each}/" for each in own_paths)
        self._servers: dict[str, ForwardServer] = {}
        self.state = ServerState()
        self._open: set[ForwardExchange] = set()
        self._tunnels: set[Tunnel] = set()
        self._has_keys = keys is not None
        self._page_origins = frozenset(each.lower() for each in settings.cors_allow_origins)
        self._guarded: ASGIApp = self._forwarded if keys is None else AccessGate(self._forwarded, keys, class_of)
        if settings.cors_allow_origins:
            self._guarded = RouterCors(self._guarded, settings.cors_allow_origins)

    # -- ASGI ----------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        # A global router has keys of an operator, its clients have not: the paths of this router are closed to it.
        has_hop = HOP_HEADER in dict(scope["headers"])
        if self.backend.forwards("") and (has_hop or not self._is_own(scope["path"])):
            await self._guarded(scope, receive, send)
        elif has_hop and not is_path_of_tenants(scope["path"]):
            await _answer(scope, send, RequestError(503, "no_worker", "no engine server is known now; try again later"))
        else:
            await self._inner(scope, receive, send)

    def _is_own(self, path: str) -> bool:
        return path in self._own_paths or path.startswith(self._own_folders)

    async def _forwarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request, whose caller may ask for its path where there are keys."""
        target = read_target(scope["raw_path"])
        try:
            hop = _hop_of(scope)
        except RequestError as error:
            await _answer(scope, send, error)
            return
        if hop is not None:
            scope[HOP] = hop
        # Its global router has looked, and has taken the client's key out, which shows that a browser asked first.
        page = unasked_page(scope, self._page_origins) if hop is None else ""
        if page:
            what = f"{scope['method']} {scope['path']}: a web page of {page} sent it as a form can be sent"
            allowed = "allowed are pages of this server and of the origins in --cors-allow-origins"
            self.metrics.refused("foreign_origin")
            await _answer(scope, send, RequestError(403, "foreign_origin", f"{what}, {allowed}"))
        elif target.access is TargetAccess.REFUSED:
            await _answer(scope, send, RequestError(400, "invalid_target", target.reason))
        elif target.access is TargetAccess.OPERATOR and not self._has_keys:
            # Without keys no request is known to be an operator's.
            message = f"{target.reason}; it is for operators, whom API keys name (api_keys)"
            await _answer(scope, send, RequestError(403, "operator_only", message))
        elif is_upgrade(scope):
            await self._tunnel(scope, send)
        elif scope["method"] in ("GET", "HEAD") and (target.path + "/").startswith(MODELS + "/"):
            await self._list_models(scope, send, target.path[len(MODELS) + 1 :])
        else:
            await ForwardExchange(self, scope, receive, send, target, endpoint_of(target.path)).run()

    async def _list_models(self, scope: Scope, send: Send, name: str) -> None:
        """Answer with the models of all servers, each card as its server wrote it, or with the card of one."""
        caller = caller_of(scope)
        places = sorted(self.backend.places(""), key=lambda place: place.url)  # in one order, whatever their load
        origin = [pair for pair in scope["headers"] if pair[0] == b"origin"]
        answers = await asyncio.gather(*(self._models_of(place, origin) for place in places))
        merged = merge_model_lists((url, body) for url, body, _ in answers if body is not None)
        for url, why in merged.unread.items():
            log.warning("asking %s for its models: %s", url, why)
        body: bytes | None = merged.body
        if name:
            body = merged.cards.get(name) if caller is None or caller.may_use(name) else None
        elif caller is not None and not all(map(caller.may_use, merged.cards)):
            allowed = [card for each, card in merged.cards.items() if caller.may_use(each)]
            body = b'{"object":"list","data":[' + b",".join(allowed) + b"]}"
        if body is None:
            await _answer(scope, send, model_not_found(name, list(merged.cards)))
            return
        if not merged.cards:
            await _answer(scope, send, RequestError(503, "no_worker", "no server answers now; try again later"))
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        wanted = next((value for key, value in scope["headers"] if key == b"x-request-id"), None)
        headers.append((b"x-request-id", str(self.request_ids.wanted(wanted)).encode()))
        headers += next((cors_headers(theirs) for _, answer, theirs in answers if answer is not None), [])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _models_of(self, place: ServerPlace, origin: HeaderList) -> tuple[str, bytes | None, HeaderList]:
        try:
            found = await look_up(self.server(place.url), b"/v1/models", place.is_router, origin)
        except (AnswerFailed, OSError, TimeoutError) as error:
            log.warning("asking %s for its models: %s", place.url, str(error) or "no answer in time")
            return place.url, None, []
        return place.url, found.body if found.status == 200 else None, found.headers

    # -- the life of a request -----------------------------------------------------------------------------------------

    def begin(self, exchange: ForwardExchange) -> None:
        """Take note of a request that begins."""
        if self._tracing is not None:
            exchange.trace = self._tracing.begin_request(exchange.endpoint, exchange.headers, exchange.arrived_ms)
        self.metrics.in_flight.labels(exchange.endpoint).value += 1
        self._traffic.running.add(exchange)
        self._open.add(exchange)

    def end(self, exchange: ForwardExchange) -> None:
        """Take note of a request that is over, and count what it has got."""
        self._open.discard(exchange)
        self._count(exchange)
        if exchange.reading is not None and exchange.status < 400:
            self.prompts.note(exchange.reading, exchange.prompt_tokens, exchange.became_of_ids)
        self._traffic.end(exchange)
        self.metrics.in_flight.labels(exchange.endpoint).value -= 1
        self.metrics.answered(exchange.endpoint, exchange.status, exchange.is_streamed)
        if exchange.status == CLIENT_LEFT:
            self.metrics.disconnects.inc()
        if exchange.trace is not None and self._tracing is not None:
            ended = exchange.line()
            tell_request(exchange.trace, ended, (), exchange.first_token_ms)
            self._tracing.end(exchange.trace, exchange.error if exchange.status >= 500 else "")

    def _count(self, exchange: ForwardExchange) -> None:
        metrics, caller = self.metrics, exchange.caller
        if not exchange.is_dispatched:
            if caller is not None:
                caller.not_dispatched(self.clock.monotonic_ms())
            return
        account = exchange.account()
        metrics.prompt_tokens.value += account.prompt_tokens
        metrics.cached_tokens.value += account.cached_tokens
        metrics.output_tokens.value += account.output_tokens
        metrics.isl.observe(account.prompt_tokens)
        metrics.osl.observe(account.output_tokens)
        if exchange.first_token_ms is not None:
            self._count_times(exchange, exchange.first_token_ms, account.output_tokens)
        if caller is not None:
            caller.generated(account.output_tokens)

    def _count_times(self, exchange: ForwardExchange, first_ms: float, output_tokens: int) -> None:
        """Count the times of a stream: its tokens are not looked at one by one, so their mean is all that is known."""
        metrics, series = self.metrics, self.metrics.of_model(exchange.model)
        ttft_ms = first_ms - exchange.arrived_ms
        if exchange.trace is None:
            series.ttft.observe(ttft_ms / 1000)
        else:
            series.ttft.observe_traced(ttft_ms / 1000, exchange.trace.trace_id)
        (series.ttft_met if ttft_ms <= metrics.ttft_target_ms else series.ttft_missed).value += 1
        if output_tokens > 1:
            itl_ms = (self.clock.monotonic_ms() - first_ms) / (output_tokens - 1)
            series.itl.observe(itl_ms / 1000)
            (series.itl_met if itl_ms <= metrics.itl_target_ms else series.itl_missed).value += 1

    # -- its parts -----------------------------------------------------------------------------------------------------

    async def read_body(self, exchange: ForwardExchange) -> bytes | None:
        """Return the body of a request, inflated where its client compressed it; ``None`` when the client left.

        Raises ``RequestError``.
        """
        headers, limit = exchange.header_values, self._body_bytes_max
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise too_large(length.decode(), limit)
        encoding = headers.get(b"content-encoding")
        boundary = boundary_of(headers.get(b"content-type", b"")) if encoding is None else None
        if boundary is not None:
            return await self._read_form(exchange, boundary, int(length) if length.isdigit() else None)
        body = await receive_body(exchange.receive, limit)
        if body and encoding is not None:
            # No engine reads compressed bodies.
            return await self._bodies.inflated(body, encoding.decode("latin-1").strip().lower(), exchange.has_left)
        return body

    async def _read_form(self, exchange: ForwardExchange, boundary: bytes, length: int | None) -> bytes | None:
        """Return a form that can be held whole; the exchange gets a longer one as an upload."""
        scope = exchange.scope
        guard: Guard = scope["state"]["guard"]
        form = Upload(exchange.receive, guard, boundary, length, self._body_bytes_max, exchange.caller)
        body = await form.begin()
        exchange.form_model = form.model
        if body is None or form.is_whole:
            return body
        exchange.upload = form
        return b""

    def understand(
        self, scope: Scope, target: RequestTarget, headers: Mapping[bytes, bytes], body: bytes, form_model: str | None
    ) -> RoutingFields:
        """Return what of a request matters here."""
        values: Mapping[str, Raw] = {}
        model = form_model or ""
        if body and form_model is None:
            values = members_of(body)
            model = _text(values.get("model"))
        if not model and scope["query_string"]:
            model = model_of_query(scope["query_string"]) or ""
        route = target.route
        if not model and route is not None and route.model_in_path:
            model = target.path[len(MODELS) + 1 :]
        has_prompt = scope["method"] == "POST" and route is not None and route.has_prompt and bool(values)
        return RoutingFields(target, model, is_streamed(values), has_prompt, values)

    def places(self, model: str) -> Sequence[ServerPlace]:
        """Return the servers for a request that is not booked: those of its model, or any where it names none."""
        served, lora = self._reader.served(model) if model else ("", "")
        return self.backend.places(served, lora) or self.backend.places("")

    async def place_of_state(self, exchange: ForwardExchange) -> ServerPlace | None:
        """Return the server that made what a request continues, ``None`` for one that continues nothing.

        Raises ``RequestError`` where no server of the pool has it.
        """
        target = exchange.target
        named = named_state(exchange.values) if target.state_id is None else (target.collection, target.state_id)
        if named is None:
            return None
        collection, state_id = named
        places = [(place, self.server(place.url)) for place in self.backend.places("")]
        found = await self.state.find(collection, state_id, places)
        if found is None:
            message = (
                f"no server of the pool has {state_id[:80]!r}: it was never made, has expired, or its server is gone"
            )
            raise RequestError(404, "not_found", message)
        return found

    async def prepare(self, exchange: ForwardExchange, asked: RoutingFields, body: bytes) -> InferenceRequest:
        """Return a request as the router chooses for it, with its tenant's share.

        Raises ``RequestError``, ``Refused``.
        """
        hop, values, caller = hop_of(exchange.scope), asked.values, exchange.caller
        if hop is not None and hop.request_id:
            request_id = hop.request_id
        else:
            (request_id,) = self.request_ids.of_sequences(exchange.name, 1)
        reading = await self._reader.read(asked.target.path, body, request_id, values)
        exchange.reading = reading
        request = reading.request
        if request is None:
            model = reading.model or self._any_model()
            request = InferenceRequest(request_id, model, b"", UNLIMITED, by_text=True)
        exchange.has_one_prompt = not request.by_text and len(request.token_ids) == TOKEN_BYTES * reading.isl
        request.session = hint_of_members(values, exchange.header_values, reading.after_tool, reading.answer)
        tell_hints(request, values, exchange.header_values)
        salt = _text(values.get("cache_salt"))
        if hop is not None:
            request.tenant, request.tenant_weight, request.priority = hop.tenant, hop.weight, hop.priority
            request.may_wait = False
            request.cache_salt = salt  # the tenant's part of the caches already
        elif caller is not None:
            request.cache_salt = salt
            caller.admit_using(features_of(values, body), [request], reading.isl, self.clock.monotonic_ms())
        else:
            request.cache_salt = self._domains.salt_of(exchange.headers, salt)
            request.address = client_address(exchange.scope)
        return request

    def _any_model(self) -> str:
        """Return a model for a request that names none that is served: its server answers for it."""
        return next((each.name for each in self.backend.models() if self.backend.forwards(each.name)), "")

    def changes(self, exchange: ForwardExchange, request: InferenceRequest, place: ServerPlace) -> Changes:
        """Return a request's body for a server, and what of its answer is not for the client."""
        caller, path, values = exchange.caller, exchange.target.path, exchange.values
        if hop_of(exchange.scope) is not None:
            caller = None
            is_shared = True  # what makes the body the tenant's was done before
        else:
            is_shared = caller is None and not self.isolates
        use = None
        takes_ids = exchange.is_whole and not place.is_router and not exchange.has_refused_ids
        if takes_ids and len(request.token_ids) >= IDS_BYTES_MIN and may_carry(path, values):
            after_tool = exchange.reading is not None and exchange.reading.after_tool
            use = self.prompts.use_of(request, place, path, frozenset(values), after_tool)
        return make_changes(
            path,
            place.kind,
            exchange.body,
            values,
            "" if is_shared else request.cache_salt,
            None if caller is None else caller.priority_max,
            use,
            request.token_ids,
            place.version,
            request.priority,
        )

    def count_tokens(self, model: str, text: str) -> int | None:
        """Return how many tokens a text has; ``None`` where the model's tokenizer is not known here."""
        return self._reader.count_tokens(model, text)

    def server(self, url: str) -> ForwardServer:
        """Return the connections to a server."""
        known = self._servers.get(url)
        if known is None:
            known = self._servers[url] = self._make_server(url)
        return known

    # -- time ----------------------------------------------------------------------------------------------------------

    def open(self, opened: AsyncExitStack) -> None:
        """Begin to look after silent streams; ``opened`` ends that, and the connections to servers."""
        watch = supervised(self._watch_silence, "silence of streams", Restart())
        opened.push_async_callback(cancel_all, [watch])
        opened.callback(self.close)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SILENCE_S / SILENCE_LOOKS)
            self._close_left_servers()
            kept = [exchange.kept for exchange in self._open]
            forget_longest([each for each in kept if each is not None], KEPT_TOGETHER_BYTES_MAX)
            now_s = loop.time()
            for exchange in list(self._open):
                exchange.look_for_silence(now_s)

    def _close_left_servers(self) -> None:
        """Close kept connections to servers that have left the pool."""
        there = self.backend.server_urls()
        for url in [url for url in self._servers if url not in there]:
            self._servers.pop(url).close()

    # -- tunnels -------------------------------------------------------------------------------------------------------

    async def _tunnel(self, scope: Scope, send: Send) -> None:
        """Carry a request for another protocol to a server, and both sides' bytes from then on."""
        guard: Guard = scope["state"]["guard"]
        model = model_of_query(scope["query_string"]) or ""
        caller = caller_of(scope)
        error: RequestError | None = None
        if len(self._tunnels) >= TUNNELS_MAX:
            error = RequestError(429, "busy", f"{TUNNELS_MAX} tunnels are open, the most of this process")
        elif caller is not None and model and not caller.may_use(model):
            error = RequestError(403, "model_not_allowed", f"tenant {caller.tenant} may not use model {model!r}")
        if error is None:
            error = await self._open_tunnel(scope, guard, self.places(model))
        if error is not None:
            await _answer(scope, send, error)

    async def _open_tunnel(self, scope: Scope, guard: Guard, places: Sequence[ServerPlace]) -> RequestError | None:
        """Run a tunnel to its end; return why there is none."""
        endpoint = endpoint_of(scope["path"])
        for place in places:
            server = self.server(place.url)
            upgrade = [pair for pair in scope["headers"] if pair[0] in (b"connection", b"upgrade")]
            added = [*server.key_headers]
            if place.is_router:
                added.append(hop_line(Hop()))
            headers = request_headers(scope["headers"], added, key_of(scope))
            head = server.head(b"GET", target_of(scope), [*headers, *upgrade], None)
            tunnel = Tunnel(guard, head, server.keys)
            guard.source = tunnel
            try:
                await tunnel.open(server)
            except (OSError, TimeoutError) as failure:
                log.warning("opening a tunnel to %s: %s", server.url, failure)
                continue
            self._tunnels.add(tunnel)
            self.metrics.in_flight.labels(endpoint).value += 1
            try:
                await tunnel.over
            finally:
                self._tunnels.discard(tunnel)
                self.metrics.in_flight.labels(endpoint).value -= 1
                self.metrics.answered(endpoint, tunnel.status or 502, True)
            return None
        return RequestError(503, "no_worker", "no server can be reached now; try again later")


async def _answer(scope: Scope, send: Send, error: RequestError) -> None:
    """Answer a request that is not forwarded."""
    body = dialect_of(scope["path"]).error_body(error, "")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error.headers]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _hop_of(scope: Scope) -> Hop | None:
    """Return the ``Hop`` that a request came with; raises ``RequestError``."""
    value = dict(scope["headers"]).get(HOP_HEADER)
    if value is None:
        return None
    caller = caller_of(scope)
    if caller is not None and not caller.is_operator:
        name = HOP_HEADER.decode()
        raise RequestError(403, "operator_only", f"{name} is for global routers, which have an operator's key")
    try:
        return read_hop(value)
    except ValueError as error:
        raise RequestError(400, "invalid_value", str(error)) from None


def hop_of(scope: Scope) -> Hop | None:
    """Return the ``Hop`` of a request; ``None`` for one of a client of this router."""
    hop: Hop | None = scope.get(HOP)
    return hop


def class_of(scope: Scope, metrics_need_key: bool) -> PathClass:
    """Return who may send a request to an engine server."""
    access = read_target(scope["raw_path"]).access
    return PathClass.OPERATOR if access is TargetAccess.OPERATOR else PathClass.TENANT


def endpoint_of(path: str) -> str:
    """Return the value of the metrics' ``endpoint`` label."""
    return ENDPOINTS.get(path, OTHER_ENDPOINT)


def _text(value: Raw | None) -> str:
    if value is None:
        return ""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return ""


GUIDES: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "text",
)


def features_of(values: Mapping[str, Raw], body: bytes) -> list[str]:
    """Return those features that a key may lack and a body uses
    (``poolgrid.server.frontend.access.key_file.FEATURES``)."""

    def given(name: str) -> bool:
        return name in values and bytes(values[name]) not in (b"null", b"false")

    def has_guide(name: str) -> bool:
        return given(name) and not (
            name in ("response_format", "text")
            and b"json" not in bytes(values[name])
            and b"grammar" not in bytes(values[name])
            and b"regex" not in bytes(values[name])
        )

    found = []
    if any(map(has_guide, GUIDES)):
        found.append("guided_decoding")
    if given("logits_processors"):
        found.append("logits_processors")
    if given("logprobs") or given("top_logprobs"):
        found.append("logprobs")
    if any(mark in body for mark in MEDIA):
        found.append("media")
    if given("prompt_logprobs"):
        found.append("prompt_logprobs")
    return found
