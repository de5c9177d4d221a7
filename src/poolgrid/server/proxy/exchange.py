"""One client's request on its way to an engine server, and the server's answer on its way back.

Rules
    1. The client's bytes go to the server as they are, but for what ``poolgrid.server.proxy.changes`` cuts in. The
       server's bytes go to the client as they are, but for what was asked for by us alone.
    2. The head of the answer waits for the server's head, so a refusal keeps its status, headers and body. Only a
       stream that waits in the router's queue gets its head after ``SILENCE_S``.
    3. The router's request machine decides what follows a failure; the exchange reports what it saw. Another server
       gets the same bytes: before the first byte of an answer, and within a stream that can be continued
       (``poolgrid.server.forwarding.continuation``). On a connection that had been kept and ended without a byte the
       same server gets them once more.
    4. A server that answers 429 or 503 is busy. When no other server takes the request, the client gets the last of
       these answers.
    5. Where two servers share a request, one computes the prompt and the other answers
       (``poolgrid.server.forwarding.two_legs``). What the first refuses is the client's answer. A failure of either
       before the first byte begins both legs again.
    6. A client that leaves closes the server's connection at once, in each of these stages. A client that does not read
       has the server's connection paused.
    7. Nothing here runs per token but the calls of the two connections, and none of them makes a task. What a stream's
       client has is kept as it was written, and read only when its server dies.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from msgspec import Raw, Struct
from starlette.types import Receive, Scope, Send

from poolgrid.kernel.requests.inference import InferenceRequest, Refused, StreamDelta, TokenStream
from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.requests.trace_record import TraceRecord
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind
from poolgrid.kernel.wire.secret_texts import blotted, blotted_part
from poolgrid.server.forwarding import trtllm_serve
from poolgrid.server.forwarding.body_edit import top_level
from poolgrid.server.forwarding.continuation import ContinuationError
from poolgrid.server.forwarding.event_filter import (
    GAVE_UP_BY_ABORT,
    LOST_CODE,
    AnswerNotes,
    ApiForm,
    EventFilter,
    read_answer,
)
from poolgrid.server.forwarding.headers import is_event_stream, request_headers, response_headers
from poolgrid.server.forwarding.hop import HOP, OWN_HEADERS, WORKER_HEADER, Hop, hop_line
from poolgrid.server.forwarding.kept_stream import KEPT_BYTES_MAX, KeptStream
from poolgrid.server.forwarding.paths import RequestTarget
from poolgrid.server.forwarding.two_legs import can_be_split, decode_body
from poolgrid.server.frontend.access.gate import CALLER, key_of
from poolgrid.server.frontend.access.meter import limit_headers
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.errors import RequestError, dialect_of, refused, without_others
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.frontend.request_body import ClientLeft, RequestIds
from poolgrid.server.frontend.traffic import EndedRequest, TokenTotals
from poolgrid.server.http.guard import Guard
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import detached
from poolgrid.server.proxy.changes import Changes
from poolgrid.server.proxy.chunks import chunk
from poolgrid.server.proxy.collector import WholeAnswer
from poolgrid.server.proxy.dispatch_reports import DispatchReports
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.ports import ForwardBackend, ServerPlace
from poolgrid.server.proxy.prefill_leg import PrefillLeg
from poolgrid.server.proxy.prompt_reading import PromptReading
from poolgrid.server.proxy.prompt_record import PromptRecord
from poolgrid.server.proxy.sent_ids import SentIds
from poolgrid.server.proxy.server_connection import NO_BODY, AnswerFailed, HeaderList, ServerConnection
from poolgrid.server.proxy.server_state import ServerState
from poolgrid.server.proxy.upload import Upload
from poolgrid.server.proxy.withheld_answer import BUSY_STATUSES, Withheld, WithheldAnswer

log = logging.getLogger(__name__)

CLIENT_LEFT: Final = 499
"""Status that is counted, not sent, when the client left first."""

SILENCE_S: Final = 15.0
"""A stream without a byte for so long gets an event or a comment, and one that waits in the queue its head: proxies
close what is silent for 30 to 60 s."""

SILENCE_LOOKS: Final = 6
"""How often in that time streams are looked at: the last look is up to a sixth late."""

LEFT_LOOKS: Final = 2
"""How many of these looks an answer may be silent whose server has left the pool: 5 s, in which a server that drains
sends tokens. vLLM keeps its connections open on SIGTERM, and sends nothing more."""

SILENCE_COMMENT: Final = b": keep-alive\n\n"

SILENCE_EVENTS: Final[Mapping[ApiForm | None, bytes]] = {
    ApiForm.MESSAGES: b'event: ping\ndata: {"type": "ping"}\n\n',
    ApiForm.RESPONSES: b'event: keepalive\ndata: {"type": "keepalive"}\n\n',
}
"""By API: Anthropic's clients and Codex count events, not comments."""

UNSERVED_STATUSES: Final = frozenset((429, 502, 503))
"""Of a pool's router, in its own words: no server of the pool has answered."""

WHOLE_BYTES_MAX: Final = 1 << 20
"""Longest answer that is read for its counts once it has passed; longer ones are images, audio, embeddings."""

ERROR_EVENT: Final = re.compile(rb'(?:^|\n)(?:event: *error\r?\n|data: *\{ *"error")')
"""First event of a stream whose server did not get the KV: vLLM's and SGLang's."""

ERROR_EVENT_BYTES_MAX: Final = 256
"""Within these bytes of the first chunk."""


class RoutingFields(Struct, frozen=True):
    """What of a request matters here."""

    target: RequestTarget
    model: str
    """As the client wrote it; empty where it names none."""
    is_streamed: bool
    has_prompt: bool
    """Whether it is work for an engine, which is booked."""
    values: Mapping[str, Raw]
    """Members of its body, unread."""


class ExchangeOwner(Protocol):
    """What the exchanges of a router have in common."""

    backend: ForwardBackend
    request_ids: RequestIds
    metrics: FrontendMetrics
    clock: Clock
    isolates: bool
    """Whether tenants have caches of their own."""
    state: ServerState
    prompts: PromptRecord

    def begin(self, exchange: ForwardExchange) -> None:
        """Take note of a request that begins."""
        ...

    def end(self, exchange: ForwardExchange) -> None:
        """Take note of a request that is over, and count what it has got."""
        ...

    async def read_body(self, exchange: ForwardExchange) -> bytes | None:
        """Return the body of a request, ``None`` when the client left. Raises ``RequestError``."""
        ...

    def understand(
        self, scope: Scope, target: RequestTarget, headers: Mapping[bytes, bytes], body: bytes, form_model: str | None
    ) -> RoutingFields:
        """Return what of a request matters here."""
        ...

    def places(self, model: str) -> Sequence[ServerPlace]:
        """Return the servers for a request that is not booked."""
        ...

    async def place_of_state(self, exchange: ForwardExchange) -> ServerPlace | None:
        """Return the server that made what a request continues. Raises ``RequestError``."""
        ...

    async def prepare(self, exchange: ForwardExchange, asked: RoutingFields, body: bytes) -> InferenceRequest:
        """Return a request as the router chooses for it. Raises ``RequestError``, ``Refused``."""
        ...

    def changes(self, exchange: ForwardExchange, request: InferenceRequest, place: ServerPlace) -> Changes:
        """Return a request's body for a server, and what of its answer is not for the client."""
        ...

    def count_tokens(self, model: str, text: str) -> int | None:
        """Return how many tokens a text has; ``None`` where the model's tokenizer is not known here."""
        ...

    def server(self, url: str) -> ForwardServer:
        """Return the connections to a server."""
        ...


class ForwardExchange:
    """Implements ``AnswerSink`` for its server, ``AnswerSource`` for its client, ``Carrier`` for its router and
    ``SplitRequest`` for its prefill leg."""

    # Most of it stays as it is here for most requests.
    status = CLIENT_LEFT
    error = ""
    """Code of the error that it was answered with."""
    model = ""
    first_token_ms: float | None = None
    trace: TraceRecord | None = None
    is_streamed = False
    finish_reason: str = FinishReason.CANCELLED
    cached_tokens: int | None = None
    is_prefilled = False
    _quiet_looks = 0
    """Looks for silence since the last byte."""
    _queued_s: float | None = None
    """Since when it waits in the router's queue, or is with no server."""
    has_head = False
    """Whether the client has the head of its answer."""
    _stream: TokenStream | None = None
    _request: InferenceRequest | None = None
    _place: ServerPlace | None = None
    _server: ForwardServer | None = None
    _connection: ServerConnection | None = None
    _connecting: asyncio.Task[None] | None = None
    _waiter: asyncio.Future[None] | None = None
    _keys: tuple[bytes, ...] = ()
    """Keys of its server, which no client may see."""
    _reports: DispatchReports | None = None
    """To the router, of a request that it has booked."""
    _stage = Stage.WHOLE
    _params = b""
    """What the prefill leg has left for this decode leg."""
    _prefill: PrefillLeg | None = None
    _continues_state = False
    """Whether one server has what it continues."""
    _busy: WithheldAnswer | None = None
    """The last answer of a busy server."""
    _withheld: WithheldAnswer | None = None
    """The answer that comes, while it is withheld."""
    _sent_ids: SentIds | None = None
    reading: PromptReading | None = None
    """What was read of its prompt."""
    has_one_prompt = False
    """Whether the tokens of all that it sends as prompt are known, and one prompt."""
    _answer_status = 0
    _answer_headers: Sequence[tuple[bytes, bytes]] = ()
    _is_raw = False
    """Whether chunks go to the client's connection as they come."""
    _is_open = False
    """Whether the client's connection takes them by now."""
    _is_over = False
    """Whether the answer has come to its end."""
    _is_settled = False
    """Whether the router has nothing of the request any more."""
    _failure: AnswerFailed | None = None
    _last: StreamDelta | None = None
    """How the router ended the request."""
    _has_output = False
    """Whether a byte of the current dispatch's answer has come."""
    _has_left = False
    upload: Upload | None = None
    """A form that is not held whole."""
    _late_refusal: RequestError | Refused | None = None
    """Why a request that was chosen for, or whose form is on its way, cannot be served."""
    _is_paused = False
    """Whether the client takes nothing now."""
    _kept: KeptStream | None = None
    """A stream of generated text, which another server may continue."""
    _lost = ""
    """Why the stream broke off."""
    _filter: EventFilter | None = None
    _form: ApiForm | None = None
    """Of which API the answer is; ``None`` for one whose counts are not looked for."""
    _whole: bytearray | None = None
    """An answer that is no stream, as far as it is kept for its counts."""
    _last_piece = b""
    """What of a stream was written last, while nothing filters it."""

    def __init__(
        self,
        application: ExchangeOwner,
        scope: Scope,
        receive: Receive,
        send: Send,
        target: RequestTarget,
        endpoint: str,
    ) -> None:
        self._application = application
        self.target = target
        self.endpoint = endpoint
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.header_values: dict[bytes, bytes] = dict(self.headers)
        self.name = application.request_ids.wanted(self.header_values.get(b"x-request-id"))
        self._guard: Guard = scope["state"]["guard"]
        self._caller: Caller | None = scope.get(CALLER)
        self._client_key = None if self._caller is None else key_of(scope)
        self.arrived_ms = application.clock.monotonic_ms()
        self._pieces: list[bytes] = []
        self.body = b""
        """As the client wrote it."""
        self.form_model: str | None = None
        """What a form names; ``None`` for another body."""
        self.values: Mapping[str, Raw] = {}
        """Its members, unread."""
        self._sent_for = "", b""
        """For what server, and with what parameters, ``_sent_body`` was made."""
        self._sent_body = b""
        self._task = asyncio.current_task()
        self._notes = AnswerNotes()

    # -- the request ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer; raises only what is a bug or the end of the process."""
        guard, application = self._guard, self._application
        guard.source = self
        application.begin(self)
        try:
            if guard.is_lost:
                raise ClientLeft
            await self._serve()
        except RequestError as error:
            await self._refuse(error)
        except Refused as refusal:
            await self._refuse(refused(refusal))
        except ClientLeft:
            self.status = CLIENT_LEFT
        except asyncio.CancelledError:
            if not self._has_left:
                raise
            if self._task is not None:
                self._task.uncancel()
            self.status = CLIENT_LEFT
        except Exception:
            trace_id = "" if self.trace is None else self.trace.trace_id
            log.exception(
                "forwarding request %s failed: this is a bug",
                self.name,
                extra=about(request_id=str(self.name), trace_id=trace_id),
            )
            await self._refuse(
                RequestError(500, "internal_error", "forwarding the request failed; see the router's log")
            )
        finally:
            guard.source = None
            self._give_up()
            application.end(self)

    async def _serve(self) -> None:
        application = self._application
        body = await application.read_body(self)
        if body is None:
            raise ClientLeft
        asked = application.understand(self.scope, self.target, self.header_values, body, self.form_model)
        self.body, self.values = body, asked.values
        self.model = asked.model
        self.is_streamed = asked.is_streamed
        if self._caller is not None and asked.model:
            self._caller.check_model(asked.model)
        place = await application.place_of_state(self)
        if asked.has_prompt:
            self._form = self.target.route.answer if self.target.route is not None else None
            self._request = request = await application.prepare(self, asked, body)
            self._reports = DispatchReports(application.backend, request.request_id)
            request.carrier = self
            request.trace = self.trace
            if place is not None:
                request.only_worker = place.worker.worker_id
                self._continues_state = True
            self._queued_s = asyncio.get_running_loop().time()
            self._stream = await application.backend.submit(request)
            self._queued_s = None
        else:
            self._sent_body = body
            places = application.places(asked.model) if place is None else [place]
            await self._send_anywhere(places)
        await self._pass_on()

    def has_left(self) -> bool:
        return self._has_left

    # -- Carrier: what the router orders -------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Return whether one server gets all of the request, and answers it from the beginning."""
        return self._stage is Stage.WHOLE and not self._continues

    def can_be_split(self, kind: str) -> bool:
        if self._continues_state or not can_be_split(self.target.path, kind, self.values):
            return False
        try:
            return bool(top_level(self.body).members)
        except ValueError:
            return False  # nothing can be cut into it

    def send(self, dispatch_id: str, worker: WorkerKey, stage: Stage, params: bytes) -> None:
        place = self._application.backend.place_of(worker)
        assert self._reports is not None, "it is booked"
        self._reports.begin(dispatch_id)
        self._stage, self._params = stage, params
        if place is None:
            # It left between the choice and this call, which are one turn of the loop: only a faulty policy does that.
            asyncio.get_running_loop().call_soon(self._attempt_failed, AnswerFailed(f"worker {worker} has no server"))
        elif stage is Stage.PREFILL:
            if self._prefill is None:
                self._prefill = PrefillLeg(self, self.target.path, self.values)
            self.is_prefilled = False
            self._prefill.begin(dispatch_id, place)
        else:
            self._attempt(place)

    def withdraw(self, dispatch_id: str) -> None:
        prefill = self._prefill
        if prefill is not None and dispatch_id == prefill.dispatch_id:
            # Once the decode server has its KV, the prefill server has all but ended its own answer.
            if not self._has_output:
                prefill.withdraw()
        elif self._is_current(dispatch_id):
            self._close_server()

    def _is_current(self, dispatch_id: str) -> bool:
        return self._reports is not None and self._reports.dispatch_id == dispatch_id

    def ended(self, last: StreamDelta) -> None:
        self._last = last
        self._is_settled = True
        self._wake()

    # -- AnswerSource: what the client's connection sees ---------------------------------------------------------------

    def client_gone(self) -> None:
        self._has_left = True
        self._close_server()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._waiter is not None:
            self._wake()
        elif self._task is not None and not self._is_over:
            self._task.cancel()  # it waits for the body, for its tokens, or for a place in the queue

    def pause(self) -> None:
        self._is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._connection is not None:
            self._connection.resume()

    # -- attempts ------------------------------------------------------------------------------------------------------

    async def _send_anywhere(self, places: Sequence[ServerPlace]) -> None:
        """Send a request that is no work for the router's books to the first of some servers, to the next one if it is
        away."""
        if not places:
            raise RequestError(
                503, "no_worker", "no server is known now; try again later", headers=((b"retry-after", b"1"),)
            )
        for place in places:
            if self.upload is not None and self.upload.has_begun:
                break
            self._failure = None
            self._attempt(place)
            while not (self._answer_status or self._failure is not None):
                await self._wait()
                self._check()
            if self._failure is None:
                return
        raise RequestError(502, LOST_CODE, f"forwarding the request: {self._failure}")

    def _attempt(self, place: ServerPlace) -> None:
        self._place = place
        self._queued_s = None
        self._server = server = self._application.server(place.url)
        self._keys = server.keys
        self._reach(server)

    def _reach(self, server: ForwardServer) -> None:
        # A kept connection may end without a word, and an upload cannot be sent again.
        connection = server.kept() if self.upload is None else None
        if connection is None:
            self._connecting = detached(self._connect(server), "connection to an engine server")
        else:
            self._send_on(server, connection)

    async def _connect(self, server: ForwardServer) -> None:
        try:
            connection = await server.connect()
        except (OSError, TimeoutError) as error:
            if self._server is server:
                why = f"no connection to {server.url}: {str(error) or 'no answer in time'}"
                self._attempt_failed(AnswerFailed(why))
            return
        if self._server is server and not self._has_left:
            self._send_on(server, connection)
        else:
            connection.abort()

    def _send_on(self, server: ForwardServer, connection: ServerConnection) -> None:
        place = self._place
        assert place is not None, "an attempt has a place"
        if self._request is not None and self._sent_for != (place.url, self._params):
            try:
                self._change(self._request, place)
            except RequestError as refusal:
                connection.abort()
                self._refuse_late(refusal)
                return
        self._connection = connection
        head, body, upload = self.head_for(server, place, self._sent_body), self._sent_body, self.upload
        if upload is not None:
            connection.send(self, (head, upload.first()), is_whole=False)
            upload.start(connection, self._refuse_late)
        else:
            connection.send(self, (head, body) if body else (head,), self.scope["method"] == "HEAD")
        if self._is_paused:
            connection.pause()

    def head_for(self, server: ForwardServer, place: ServerPlace, body: bytes) -> bytes:
        """Return the head of the request as a server gets it."""
        scope = self.scope
        added = [(b"x-request-id", str(self.name).encode()), *server.key_headers]
        if place.is_router:
            added.append(hop_line(self._hop()))
        if place.rank is not None:
            added.append((b"x-data-parallel-rank", b"%d" % place.rank))
        if place.kind == trtllm_serve.KIND and self._request is not None:
            added += trtllm_serve.conversation_lines(self._request.turn, self.header_values)
        received = self.headers
        if b"content-encoding" in self.header_values:  # the body was inflated
            received = [pair for pair in received if pair[0] != b"content-encoding"]
        headers = request_headers(received, added, self._client_key)
        method = scope["method"].encode()
        if self.upload is None:
            length = len(body) if body or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE") else None
        else:
            length = self.upload.length
            if length is None:
                headers = [*headers, (b"transfer-encoding", b"chunked")]
        return server.head(method, target_of(scope), headers, length)

    def _hop(self) -> Hop:
        """Return what a pool's router is to know of the request."""
        request, reports = self._request, self._reports
        if request is None or reports is None:
            return Hop()
        return Hop(request.tenant, request.tenant_weight, request.priority, reports.dispatch_id)

    def _refuse_late(self, refusal: RequestError | Refused) -> None:
        self._late_refusal = refusal
        self._wake()

    def _change(self, request: InferenceRequest, place: ServerPlace) -> None:
        """Make the body for a server, and what takes out of the answer again what it asks for."""
        self._sent_for = place.url, self._params
        changes = self._application.changes(self, request, place)
        self._sent_body = decode_body(changes.body, self._params)
        if not self.has_refused_ids:
            self._sent_ids = None if changes.use is None else SentIds(changes.use, changes.asks_ids)
        if self.is_streamed and self._form is not None:
            self._filter = EventFilter(self._form, changes.asks_usage, changes.asks_ids)
            self._notes = self._filter.notes

    # -- SplitRequest: a prompt that another server computes -----------------------------------------------------------

    def server_of(self, place: ServerPlace) -> ForwardServer:
        return self._application.server(place.url)

    def body_for(self, place: ServerPlace) -> bytes:
        assert self._request is not None, "it has a prompt"
        return self._application.changes(self, self._request, place).body

    def decode_place(self) -> ServerPlace | None:
        if self._request is None:
            return None
        places = self._application.backend.places(self._request.model)
        return next((each for each in places if each.role is Role.DECODE), None)

    def take_transfer(self, dispatch_id: str, params: bytes) -> None:
        if self._reports is not None:
            self._reports.prefilled(dispatch_id, params, self.cached_tokens if self.is_prefilled else None)

    def take_prompt(self, cached_tokens: int | None) -> None:
        self.is_prefilled, self.cached_tokens = True, cached_tokens

    def prefill_failed(self, dispatch_id: str, error: AnswerFailed) -> None:
        if self._is_current(dispatch_id):
            self._attempt_failed(error)
        elif self._reports is not None and not self._has_output:
            log.warning("request %s: %s", self.name, error, extra=about(request_id=str(self.name)))
            self._reports.prefill_broken(dispatch_id, str(error))

    def prefill_refused(self, dispatch_id: str, place: ServerPlace, server: ForwardServer, answer: WholeAnswer) -> None:
        """Give the client the refusal of the prefill server as that of its request."""
        if not self._is_current(dispatch_id):
            if answer.status in BUSY_STATUSES or self._has_output:
                why = f"computing the prompt on {server.url}: the server answered {answer.status}"
                self.prefill_failed(dispatch_id, AnswerFailed(why))
                return
            self._abort_connection()
        self._place, self._server, self._keys = place, server, server.keys
        self.on_head(answer.status, answer.headers, False)
        if answer.body:
            self.on_data(answer.body)
        self.on_end()

    # -- the server ----------------------------------------------------------------------------------------------------

    def _attempt_failed(self, error: AnswerFailed) -> None:
        """Take note that a server did not answer; the router decides what follows."""
        self._connection = None
        if self._reports is None:
            self._failure = error
            self._wake()
            return
        log.warning("request %s: %s", self.name, error, extra=about(request_id=str(self.name)))
        self.finish_reason = FinishReason.ERROR
        self._reports.refused(RefusalKind.BROKEN, str(error))

    def _close_server(self) -> None:
        if self._prefill is not None:
            self._prefill.stop()
        self._abort_connection()

    def _abort_connection(self) -> None:
        connection, self._connection, self._server = self._connection, None, None
        if self.upload is not None:
            self.upload.stop()
        if connection is not None:
            if self._prefill is not None:
                self._prefill.kv_is_asked_for()
            connection.abort()

    # -- AnswerSink: what the server sends -----------------------------------------------------------------------------

    def on_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        if self._place is not None and self._place.is_router:
            if self._reports is not None:
                self._reports.answered(status, headers)
            elif status in UNSERVED_STATUSES and not _named_worker(headers):
                self._close_server()
                self._attempt_failed(AnswerFailed(f"the router of pool {self._place.worker} answered {status}"))
                return
        if not self._has_output and (why := self._withholds(status, headers)) is not None:
            self._withheld = WithheldAnswer(why, status, headers)
            return
        if self._stage is Stage.DECODE and status >= 500 and not self._continues:
            self._continuation_failed(f"answered {status}")
            return
        if not self._continues:
            self._take_head(status, headers, is_chunked)

    def _withholds(self, status: int, headers: HeaderList) -> Withheld | None:
        if status in BUSY_STATUSES and self._request is not None:
            return Withheld.BUSY
        if self._continues:
            return None if status == 200 and is_event_stream(headers) else Withheld.UNCONTINUED
        return None if self._sent_ids is None else self._sent_ids.withholds(status, headers)

    def _take_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        self._answer_status, self._answer_headers = status, headers
        is_raw = is_chunked and self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD"
        # What is looked through for keys is not passed as it came.
        self._is_raw = is_raw and not (self._keys and status >= 400)
        if self._filter is not None and (status != 200 or not self._is_event_stream()):
            self._filter = None
        if self._filter is not None and self._form is not None:
            count_tokens = partial(self._application.count_tokens, self.model)
            self._kept = KeptStream(self._form, self.target.path, self.values, count_tokens)
        if self._filter is None and status == 200 and (self._request is not None or self._makes_state):
            self._whole = bytearray()
        if self._stage is not Stage.DECODE or not self.is_streamed or status != 200:
            self._wake()  # else the first event shows whether the KV has come

    def _continuation_failed(self, why: str) -> None:
        """Begin both legs again: the KV may not have come to this server, and the prefill server may be gone."""
        self._abort_connection()
        self._answer_status, self._whole = 0, None
        self._attempt_failed(AnswerFailed(f"the server that was to continue a prompt {why}"))

    def on_data(self, data: bytes, chunks: bytes = b"") -> None:
        if self._withheld is not None:
            self._withhold(self._withheld, data)
            return
        if not self._has_output and not self._begin_output(data):
            return
        if self._filter is not None:
            passed = self._pass_events(self._filter, data)
            if not passed:
                return
            if passed is not data:
                data, chunks = passed, b""
        else:
            self._last_piece = data
            if self._whole is not None:
                self._keep_whole(data)
        self._quiet_looks = 0
        if self._is_raw:
            data = chunks or chunk(data)
        if self._is_open:
            self._guard.write(data)
        else:
            self._pieces.append(data)
            self._wake()

    def _pass_events(self, found: EventFilter, data: bytes) -> bytes:
        """Return what of a stream's next bytes is for the client."""
        passed, kept = found.feed(data), self._kept
        if kept is not None:
            if kept.is_continued:
                passed = self._rest_of(kept, passed) or b""
            kept.keep(passed)
        return passed

    def on_end(self) -> None:
        self._connection = None
        if self.upload is not None:
            self.upload.stop()
        withheld, self._withheld = self._withheld, None
        if withheld is not None and withheld.why is Withheld.BUSY:
            self._end_busy(withheld)
            return
        if withheld is not None and withheld.why is Withheld.REFUSED:
            self._send_as_text(withheld.status)
            return
        if withheld is not None and withheld.why is Withheld.UNCONTINUED:
            self._refused_to_continue(withheld.status)
            return
        if withheld is not None and not self._pass_cut(withheld):
            return
        if self._filter is not None:
            rest = self._filter.finish()
            given_up = self._filter.given_up
            # An error that the client can read is passed where the stream is not continued.
            if given_up and (given_up == GAVE_UP_BY_ABORT or not self._why_not_continued()):
                self._take_over(AnswerFailed(given_up))
                return
            if self._kept is not None and self._kept.is_continued:
                found = self._rest_of(self._kept, rest, is_end=True)
                if found is None:
                    return
                rest = found
                self._kept.correct(self._notes)
            if rest:
                self._write_rest(rest)
        if self._whole is not None:
            self._notes = read_answer(bytes(self._whole))
            if self._notes.is_aborted and self._request is not None:
                self._whole_aborted()
                return
        self._is_over = True
        self._end_well()
        self._wake()

    def _whole_aborted(self) -> None:
        """Have another server answer in place of one that aborted its answer, which the client must not take for whole.

        Its last bytes have come in this turn of the loop, so the client has not got them.
        """
        error = AnswerFailed(GAVE_UP_BY_ABORT)
        if self.has_head:
            self._fail(error)
            return
        self._answer_status, self._whole, self._pieces, self._has_output = 0, None, [], False
        self._attempt_failed(error)

    def on_failed(self, error: AnswerFailed, is_stale: bool) -> None:
        server, self._connection = self._server, None
        if self.upload is not None:
            self.upload.stop()
        if is_stale and server is not None:
            self._connecting = detached(self._connect(server), "another connection to an engine server")
            return
        withheld, self._withheld = self._withheld, None
        if withheld is not None and withheld.why is Withheld.REFUSED:
            self._send_as_text(withheld.status)
            return
        if not self._answer_status:
            self._attempt_failed(error)
            return
        if self._kept is not None and self._kept.has_end:
            self._is_over = True  # only the end of its framing is missing
            self._end_well()
            self._wake()
            return
        self._take_over(error)

    def _take_over(self, error: AnswerFailed) -> None:
        """Have another server continue a stream whose server gave it up; end it where that cannot be exact."""
        why = self._why_not_continued()
        if why:
            self._fail(AnswerFailed(f"{error}; {why}"))
        else:
            assert self._kept is not None, "otherwise there is a reason"
            self._lost = str(error)
            self._kept.begin()
            self._has_output = False
            self._sent_for = "", b""  # for a filter of its own
            self._attempt_failed(error)

    def _fail(self, failure: AnswerFailed) -> None:
        """Have the answer end here, as one that is not whole."""
        self._failure = failure
        self.finish_reason = FinishReason.ERROR
        self._report_end(FinishReason.ERROR, str(failure))
        self._wake()

    def _withhold(self, withheld: WithheldAnswer, data: bytes) -> None:
        if withheld.take(data):
            return
        self._withheld = None
        if withheld.why is Withheld.REFUSED:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.abort()
            self._send_as_text(withheld.status)
            return
        if self._continues:
            self._close_server()
            self._refused_to_continue(withheld.status)
            return
        self._take_head(withheld.status, withheld.headers, False)
        self._answer_headers = withheld.headers_without_length()
        self.on_data(bytes(withheld.body))

    def _end_busy(self, busy: WithheldAnswer) -> None:
        self._busy = busy
        self.finish_reason = FinishReason.ERROR
        self._queued_s = asyncio.get_running_loop().time()  # unless another gets it at once
        assert self._reports is not None, "no other request is withheld from a busy server"
        self._reports.refused(RefusalKind.BUSY, f"the server answered {busy.status}", busy.retry_after_ms())

    def _send_as_text(self, status: int) -> None:
        """Send the request once more to a server that refused its prompt's ids with ``status``, without them."""
        assert self._sent_ids is not None, "they were refused"
        self._sent_ids.refuse(status)
        self._sent_for = "", b""
        if self._server is not None:
            self._reach(self._server)

    def _pass_cut(self, whole: WithheldAnswer) -> bool:
        """Take the ids out of a whole answer that has come, and let it pass; return ``False`` for one that its server
        aborted, in place of which another answers."""
        assert self._sent_ids is not None, "they are cut"
        headers, body, self._notes = whole.cut(self._sent_ids.asked)
        if self._notes.is_aborted:
            self._attempt_failed(AnswerFailed(GAVE_UP_BY_ABORT))
            return False
        self._take_head(whole.status, headers, False)
        self._whole = None
        self._begin_output(body)
        self._pieces.append(body)
        return True

    def _keep_whole(self, data: bytes) -> None:
        whole = self._whole
        assert whole is not None, "it is kept"
        whole += data
        if len(whole) > WHOLE_BYTES_MAX:
            self._whole = None

    def _write_rest(self, rest: bytes) -> None:
        data = chunk(rest) if self._is_raw else rest
        if self._is_open:
            self._guard.write(data)
        else:
            self._pieces.append(data)

    def _begin_output(self, data: bytes) -> bool:
        """Take note of the first bytes of an answer; return ``False`` where they are not for the client."""
        is_second_leg = self._stage is Stage.DECODE and self.is_streamed and not self._continues
        if is_second_leg and ERROR_EVENT.search(data, 0, ERROR_EVENT_BYTES_MAX):
            self._continuation_failed("ended its answer before the first token")
            return False
        self._has_output = True
        if self._answer_status != 200:
            return True
        if self.is_streamed:
            if self.first_token_ms is None:
                self.first_token_ms = self._application.clock.monotonic_ms()
            if self._reports is not None:
                self._reports.first_output()
        return True

    def _end_well(self) -> None:
        """Report the end of an answer that is whole."""
        self.cached_tokens = self._notes.cached_tokens
        if self._makes_state and self._notes.response_id is not None and self._place is not None:
            self._application.state.note(self._notes.response_id, self._place.url)
        if self._sent_ids is not None and self._answer_status == 200:
            self._learn(self._sent_ids)
        is_well = self._answer_status < 400
        self.finish_reason = reason = FinishReason.STOP if is_well else FinishReason.ERROR
        self._report_end(reason, "" if is_well else f"the server answered {self._answer_status}")

    def _learn(self, sent: SentIds) -> None:
        """Take note of what the answer shows of the prompt's ids."""
        request, place, stream, application = self._request, self._place, self._stream, self._application
        assert request is not None, "it has a prompt"
        assert place is not None, "it answered"
        promised_tokens = 0 if stream is None else stream.promised_tokens
        sent.learn(application.prompts, application.backend, request, place, self._notes, promised_tokens)

    def _report_end(self, reason: FinishReason, error: str) -> None:
        if self._reports is not None and not self._is_settled:
            self._reports.ended(reason, self.cached_tokens, error)

    # -- a stream whose server died ------------------------------------------------------------------------------------

    @property
    def kept(self) -> KeptStream | None:
        return self._kept

    @property
    def _continues(self) -> bool:
        """Whether the current dispatch continues a stream that broke off."""
        return self._kept is not None and self._kept.is_continued

    def _why_not_continued(self) -> str:
        """Return why the stream that broke off cannot be continued; empty where it can."""
        if self._kept is None or self._filter is None:
            return "only streams of generated text are continued"
        if self._kept.is_forgotten:
            return f"it is not continued, because more than {KEPT_BYTES_MAX} bytes of it, or of all streams, were sent"
        if not self._filter.is_between_events:
            return "it is not continued, because the client has a part of an event"
        return ""

    def _rest_of(self, kept: KeptStream, events: bytes, is_end: bool = False) -> bytes | None:
        """Return what of another server's events the client has not; ``None`` where they do not continue the stream,
        for which another way has been begun by then, or which ends."""
        try:
            return kept.rest(events, is_end)
        except ContinuationError as error:
            self._close_server()
            self._continue_text(kept, error)
            return None

    def _continue_text(self, kept: KeptStream, differs: ContinuationError) -> None:
        """Have the server whose answer differs from what the client has continue its text, if it is sampled text."""
        place, found = self._place, self._filter
        assert place is not None, "it answered"
        assert found is not None, "a stream that is kept has a filter"
        try:
            if self._params:
                raise differs  # the KV that its server fetched is of the prompt alone
            self._sent_body = kept.continue_text(differs, place.kind, self._sent_body)
        except ContinuationError as error:
            self._fail(AnswerFailed(f"{self._lost}; {error}"))
            return
        self._filter = found.again()
        self._notes = self._filter.notes
        self._attempt(place)

    def _refused_to_continue(self, status: int) -> None:
        """Report that a server does not take the request whose stream it was to continue."""
        assert self._reports is not None, "its stream was that of a booked request"
        self._reports.refused(RefusalKind.CANNOT_DO, f"the server answered {status} where it was to continue a stream")

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Write the answer, from its head to its end."""
        while not self._answer_status:
            self._check()
            if self._is_settled and self._last is not None:
                await self._answer_without_server(self._last)
                return
            await self._wait()
        is_head_request = self.scope["method"] == "HEAD"
        if not self.has_head:
            await self._send_head(self._answer_status, self._answer_headers)
        elif self._answer_status != 200:
            self._failure = AnswerFailed(f"the server answered {self._answer_status}")
        if self._is_raw:
            self._open()
        keys = self._keys if self._answer_status >= 400 else ()
        held = b""
        while True:
            self._check()
            if self._failure is not None:
                await self._cut(self._failure)
                return
            if self._is_settled and not self._is_over and self._last is not None:
                # Where tenants are apart, none learns from the router's words where others run.
                known = "" if self._application.isolates else self._last.error
                await self._cut(AnswerFailed(f"{self._lost}; {known or 'no other server can continue it now'}"))
                return
            pieces, self._pieces = self._pieces, []
            body = held + b"".join(pieces)
            if self._is_over:
                body = blotted(body, keys)
                if self._is_raw:
                    if body:
                        self._guard.write(body)
                    body = b""
                await self._send({"type": "http.response.body", "body": b"" if is_head_request else body})
                return
            if not pieces:
                await self._wait()
                continue
            if keys:  # which some servers repeat in a refusal
                body, held = blotted_part(body, keys)
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _open(self) -> None:
        """Have chunks go straight to the client's connection from now on."""
        for piece in self._pieces:
            self._guard.write(piece)
        self._pieces = []
        self._is_open = True

    def _check(self) -> None:
        if self._has_left:
            raise ClientLeft
        if self._late_refusal is not None:
            raise self._late_refusal

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _send_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        passed = response_headers(headers, self._keys, is_body_changed=self._filter is not None)
        own = self._own_headers()
        replaced = {name for name, _ in own}
        passed = [pair for pair in passed if pair[0] not in replaced and not pair[0].startswith(OWN_HEADERS)]
        passed += own
        if status in NO_BODY:
            # It may have the length of the body that it leaves out; uvicorn would wait for that.
            passed = [pair for pair in passed if pair[0] != b"content-length"]
        self.has_head = True
        await self._send({"type": "http.response.start", "status": status, "headers": passed})

    def _own_headers(self) -> HeaderList:
        application = self._application
        headers = [(b"x-request-id", str(self.name).encode())]
        if not application.isolates or HOP in self.scope:
            stream, place, worker = self._stream, self._place, self._worker()
            if stream is not None:
                headers.append((b"x-poolgrid-decision", stream.decision_reason.encode()))
                if stream.pool:
                    headers.append((b"x-poolgrid-pool", stream.pool.encode()))
            elif place is not None and place.is_router:
                headers.append((b"x-poolgrid-pool", str(place.worker).encode()))
            if worker:
                headers.append((WORKER_HEADER, worker.encode()))
        if self._caller is not None:
            headers += limit_headers(self._caller.standing(application.clock.monotonic_ms()))
        return headers

    def _worker(self) -> str:
        """Return the worker that serves, or served last."""
        stream, place = self._stream, self._place
        if stream is not None:
            return stream.worker
        if place is None or not place.is_router:
            return "" if place is None else str(place.worker)
        return _named_worker(self._answer_headers)

    async def _begin_early(self) -> None:
        """Send the head of a stream that still waits in the router's queue."""
        self.has_head = True
        self.status = 200
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self._own_headers(),
                ],
            }
        )
        await self._send({"type": "http.response.body", "body": self._silence_event(), "more_body": True})

    def look_for_silence(self, now_s: float) -> None:
        """Write what this API's clients count as a sign of life between two events of a silent stream, and send the
        head of a stream that waits in the router's queue; called ``SILENCE_LOOKS`` times in ``SILENCE_S``."""
        self._quiet_looks += 1
        if self._queued_s is not None and not self._is_open:
            if self.is_streamed and not self.has_head and now_s - self._queued_s >= SILENCE_S:
                detached(self._begin_early(), "head of a stream that waits")
            return
        if self._quiet_looks % LEFT_LOOKS == 0 and self._connection is not None and self._request is not None:
            self._look_for_server(self._connection)
        if self._quiet_looks <= SILENCE_LOOKS or not self._is_open or self._is_over:
            return
        if self._is_event_stream() and self._is_between_events():
            self._quiet_looks = 0
            self._guard.write(chunk(self._silence_event()))

    def _look_for_server(self, connection: ServerConnection) -> None:
        place, server = self._place, self._server
        if place is not None and server is not None and self._application.backend.place_of(place.worker) is None:
            detached(self._try_left_server(server, connection), "connection to a server that has left")

    async def _try_left_server(self, server: ForwardServer, connection: ServerConnection) -> None:
        """Take a request from a server that has left the pool, is silent, and takes no connection any more."""
        try:
            found = await server.connect()
        except (OSError, TimeoutError):
            if self._connection is connection:
                connection.abort()
                self.on_failed(AnswerFailed("the server has left, and its answer is silent"), False)
        else:
            found.abort()

    def _silence_event(self) -> bytes:
        return SILENCE_EVENTS.get(self._form, SILENCE_COMMENT)

    def _is_between_events(self) -> bool:
        if self._filter is not None:
            return self._filter.is_between_events
        return not self._last_piece or self._last_piece.endswith(b"\n\n")

    async def _answer_without_server(self, last: StreamDelta) -> None:
        """Answer a request that no server took."""
        busy = self._busy
        if busy is not None:
            if self.has_head:
                await self._end_stream(RequestError(busy.status, "busy", "every server is busy"))
                return
            await self._send_head(busy.status, busy.whole_headers())
            await self._send({"type": "http.response.body", "body": blotted(bytes(busy.body), self._keys)})
            return
        message = f"forwarding the request: {last.error or 'no server took it'}"
        if last.poison:
            raise RequestError(422, "workers_lost", message)
        if last.retry_after_s is not None:
            raise refused(Refused(429, "busy", message, last.retry_after_s))
        raise refused(Refused(503, "not_ready" if last.shutdown else "no_worker", message, 1.0))

    async def _cut(self, failure: AnswerFailed) -> None:
        """End an answer that cannot be completed, so that no client takes it for whole."""
        self.error = LOST_CODE
        log.warning("request %s: %s", self.name, failure, extra=about(request_id=str(self.name)))
        if self._is_event_stream() and not any(name == b"content-length" for name, _ in self._answer_headers):
            await self._end_stream(RequestError(502, LOST_CODE, str(failure)))
            return
        self.status = 502
        self._guard.abort()

    def _is_event_stream(self) -> bool:
        return is_event_stream(self._answer_headers)

    async def _end_stream(self, error: RequestError) -> None:
        """Write an error as the last event of a stream, and end the connection without the message's end."""
        self.status, self.error = error.status, error.code
        body = dialect_of(self.target.path).error_body(error, str(self.name))
        event = b"event: error\ndata: " + body + b"\n\n"
        if not self._is_between_events():
            event = b"\n\n" + event
        if self._is_open:
            self._guard.write(chunk(event))
        else:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._guard.break_off()

    async def _refuse(self, error: RequestError) -> None:
        """Answer in our own words."""
        self.error = error.code
        if self._application.isolates:
            error = without_others(error)
        if error.is_refusal:
            self._application.metrics.refused(error.code, self._caller.tenant if self._caller is not None else "")
        if self._has_left:
            return
        if self.has_head:
            await self._end_stream(error)
            return
        dialect = dialect_of(self.target.path)
        body = dialect.error_body(dialect.named(error), str(self.name))
        self.status = error.status
        self.has_head = True
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *dialect.headers(str(self.name)),
            *error.headers,
        ]
        if self._caller is not None:
            headers += limit_headers(self._caller.standing(self._application.clock.monotonic_ms()))
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self.scope["method"] == "HEAD" else body})

    def _give_up(self) -> None:
        """Take the request off its server and its router, unless it is over there."""
        self._close_server()
        if self._stream is not None and not self._is_settled:
            self._stream.cancel()

    # -- accounts ------------------------------------------------------------------------------------------------------

    def account(self) -> TokenTotals:
        """Return the tokens that the request has sent and got so far, as its server counts them."""
        notes = self._notes
        prompt_tokens = notes.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = 0 if self._stream is None or self._request is None else len(self._request.token_ids) // 4
        return TokenTotals(prompt_tokens, notes.cached_tokens or 0, notes.completion_tokens or 0)

    @property
    def prompt_tokens(self) -> int | None:
        """Return the length of the prompt as its server reported it, where it is that of the prompt known here."""
        return self._notes.prompt_tokens if self.has_one_prompt else None

    @property
    def has_refused_ids(self) -> bool:
        """Whether its server refused the prompt's ids."""
        return self._sent_ids is not None and self._sent_ids.refused_status != 0

    @property
    def became_of_ids(self) -> str:
        """What became of the prompt's ids, as the metric has it."""
        return "none" if self._sent_ids is None else self._sent_ids.outcome

    @property
    def notes(self) -> AnswerNotes:
        return self._notes

    @property
    def output_tokens(self) -> int | None:
        return self._notes.completion_tokens

    @property
    def _makes_state(self) -> bool:
        """Whether what the answer describes stays at its server under an id."""
        target = self.target
        return self.scope["method"] == "POST" and target.collection != "" and target.state_id is None

    @property
    def is_dispatched(self) -> bool:
        return self._stream is not None

    @property
    def caller(self) -> Caller | None:
        return self._caller

    def line(self) -> EndedRequest:
        """Return what there is to log of the request, once it is over."""
        now_ms = self._application.clock.monotonic_ms()
        return EndedRequest(
            name=str(self.name),
            endpoint=self.endpoint,
            status=self.status,
            error=self.error,
            streaming=self.is_streamed,
            model=self.model,
            tenant="" if self._caller is None else self._caller.tenant,
            account=self.account(),
            ttft_ms=None if self.first_token_ms is None else self.first_token_ms - self.arrived_ms,
            duration_ms=now_ms - self.arrived_ms,
            workers=self._worker(),
            trace_id="" if self.trace is None else self.trace.trace_id,
        )


def _named_worker(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return who has answered, by the header lines of a pool's router; empty where that is the router itself."""
    return next((value for name, value in headers if name == WORKER_HEADER), b"").decode("latin-1")


def target_of(scope: Scope) -> bytes:
    """Return path and query as the client wrote them."""
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path
