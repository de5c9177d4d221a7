"""The inference endpoints, as plain ASGI: one request from its body to the last byte of its answer.

Rules of this file
- When the client leaves, the request's own task is cancelled, at any stage (admission, tokenization, waiting for
  tokens, writing), and its streams are cancelled on the way out. The connection's guard calls when that happens
  (``poolgrid.server.http.guard``); without one such a request runs to its end.
- A request with one sequence has no further task. One with several has a pump per sequence, for its whole life.
- Everything that arrived since the last wake-up goes out in one write; writing awaits the connection's own flow
  control, and what arrives meanwhile stays with the backend, bounded by ``max_tokens``.
- The status line of a stream goes out with its first output, or ``REFUSAL_WAIT_S`` after every sequence has a worker.
  What fails before (no worker, or one that refuses) is a JSON error with its status; what fails later is an error
  event, and the stream ends there without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, Final, Self

from starlette.types import Receive, Scope, Send

from poolgrid.kernel.requests.inference import (
    HINT_HEADERS,
    NO_HINT,
    InferenceRequest,
    Refused,
    StreamDelta,
)
from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.requests.trace_record import TraceRecord
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.trace_context import caller_context
from poolgrid.server.frontend.access.gate import CALLER
from poolgrid.server.frontend.access.meter import limit_headers
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.errors import OPENAI, ApiDialect, RequestError, refused, without_others
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.media.loader import MediaLease
from poolgrid.server.frontend.metrics import FrontendMetrics, ModelSeries
from poolgrid.server.frontend.parsed_answers import encoder_of, stops_parser
from poolgrid.server.frontend.prepared_request import PreparedRequest, Prompt
from poolgrid.server.frontend.prompts import look_up, tokenize
from poolgrid.server.frontend.request_body import (
    GZIP_BYTES_MIN,
    SHORT_BYTES,
    accepts_gzip,
    check_announced,
    check_shape,
    compressed,
    receive_body,
)
from poolgrid.server.frontend.responses import AnswerEncoder, counts_so_far, usage
from poolgrid.server.frontend.sequence_output import RequestOutput, SequenceOutput
from poolgrid.server.frontend.sequences import sequences_of
from poolgrid.server.frontend.session_fields import SESSION_HEADERS, session_hint
from poolgrid.server.frontend.stream_head import KeepAlive, StreamHead
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.frontend.tools import HOSTED_TOOL
from poolgrid.server.frontend.traffic import EndedRequest, TokenTotals, tell_request
from poolgrid.server.http.client_address import client_address
from poolgrid.server.http.guard import SERVER_ENDS, guard_of
from poolgrid.server.process.tasks import detached

log: Final = logging.getLogger(__name__)

WORKERS_IN_HEADER_MAX: Final = 16
"""Distinct workers that ``x-poolgrid-worker`` lists for a request of many sequences."""

HEADER_VALUES_MAX: Final = 4096
"""Names of workers, pools and reasons that are kept as headers have them; what was used longest ago goes first."""

LOOK_UP_BYTES_MAX: Final = 512 * 1024
"""Largest body whose prompt is rendered and looked up on the event loop, before it is known how much of it is new. Both
take about 0.6 ns a byte with nothing new and 1.3 with nothing known, so at most 0.7 ms; it holds 80k tokens of text."""

LOOK_UP_RENDERING_MS = 5.0
"""Longest rendering there, an engine step; it is begun again in a thread when it takes longer. Templates take a few µs
a message, but what they do with thousands of tiny ones is theirs."""

RECEIPT_HEADER: Final = b"x-poolgrid-receipt"
"""Request header that asks for a receipt in ``usage``: what was promised, and what was reused."""

TOOLS_LEFT_OUT: Final = b"x-poolgrid-tools-left-out"
"""Names the types of a request's tools that cannot run here, such as a vendor's web search."""

NOT_APPLIED: Final = b"x-poolgrid-not-applied"
"""Names a field that asks for no reasoning of a model that may reason without a switch for it."""

LEFT_OUT_CHARS_MAX: Final = 256
"""Longest value of that header: types are text of the client's."""

LEFT_OUT_TYPES_MAX: Final = 64
"""Types of tools that the log names, once each: more than vendors have."""

JSON: Final = b"application/json"

CLIENT_LEFT: Final = 499
"""Status that is counted (not sent) when the client left first; nginx's number for it."""

Prepare = Callable[[bytes, Caller | None], PreparedRequest | Awaitable[PreparedRequest]]
"""Returns the job that a body asks for, given whose it is; raises ``RequestError``."""

Arrivals = Sequence[tuple[SequenceOutput, Sequence[StreamDelta]]]


class InferenceEndpoint:
    """One of the endpoints; an ASGI application of its own."""

    def __init__(self, front: FrontEnd, name: str, prepare: Prepare, dialect: ApiDialect = OPENAI) -> None:
        self.name = name
        """Value of the metrics' ``endpoint`` label."""
        self.takes_forms = False
        """Whether a body may be a form (``multipart/form-data``) in place of JSON."""
        self._prepare = prepare
        self._dialect = dialect
        self._backend = front.backend
        self._tokenization = front.tokenization
        self._bodies = front.bodies
        self._request_ids = front.request_ids
        self._metrics = metrics = front.metrics
        self._in_flight = metrics.in_flight.labels(self.name)
        for streaming in ("true", "false"):
            # From 0 on: a series that begins with its first errors would show no increase.
            metrics.requests.labels(self.name, "500", streaming)
        self._settings = front.settings
        self._clock = front.clock
        self._media = front.media
        self._guides = front.guides
        self._domains = front.domains
        self._traffic = front.traffic
        self._tracing = front.tracing
        self._isolates = front.settings.isolate_tenants
        self.keep_alive_s = front.settings.keep_alive_interval_s or math.inf
        self._left_out: set[str] = set()
        self._body_bytes_max = front.settings.max_body_bytes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Return what serves one POST: a coroutine around it would be woken with it every time."""
        return InferenceExchange(self, scope, self._clock.monotonic_ms(), receive, send).run()

    def note_left_out(self, types: Collection[str], request_id: str) -> None:
        """Log the types of tools that a request was run without, each once."""
        for name in types:
            # A client can write anything there, and what clients write is not for logs.
            kind = name if HOSTED_TOOL.fullmatch(name) else "unknown"
            if kind not in self._left_out and len(self._left_out) < LEFT_OUT_TYPES_MAX:
                self._left_out.add(kind)
                log.warning(
                    "%s: tools of type %s cannot run here and are left out of requests (first in %s)",
                    self.name,
                    kind,
                    request_id,
                )

    def begin(self, exchange: InferenceExchange) -> None:
        """Take note of a request that begins."""
        if self._tracing is not None:
            exchange.trace = self._tracing.begin_request(self.name, exchange._scope["headers"], exchange._arrived_ms)
        self._in_flight.value += 1
        self._traffic.running.add(exchange)

    def end(self, exchange: InferenceExchange) -> None:
        """Take note of a request that is over, whose tokens are counted."""
        self._traffic.end(exchange)
        self._in_flight.value -= 1
        self._metrics.answered(self.name, exchange.status, exchange.streaming)
        if exchange.trace is not None and self._tracing is not None:
            self._tracing.end(exchange.trace, tell(exchange.trace, exchange))


class InferenceExchange:
    """One request and its answer."""

    # Most of it stays as it is here for most requests.
    done = False
    """The last byte has been handed over: that the client leaves is no longer news."""
    left = False
    _started = False
    """The status line has been sent."""
    _lease: MediaLease | None = None
    _encoder: AnswerEncoder | None = None
    status = CLIENT_LEFT
    streaming = False
    _tools_left_out: Collection[str] = ()
    """Types of the client's tools that cannot run here."""
    _not_applied = ""
    """A field of the request without effect, which the answer names."""
    model = ""
    """What was asked for, once the body is read."""
    series: ModelSeries | None = None
    """The instruments of its model, once there is a token."""
    error = ""
    """Code of the error that it was answered with."""
    first_token_ms: float | None = None
    trace: TraceRecord | None = None
    """What happens to it, where its trace is kept."""

    def __init__(
        self,
        endpoint: InferenceEndpoint,
        scope: Scope,
        arrived_ms: float,
        receive: Receive,
        send: Send,
    ) -> None:
        self._endpoint = endpoint
        self._metrics = endpoint._metrics
        self._clock = endpoint._clock
        self._scope = scope
        self.headers = headers = dict(scope["headers"])
        self._wanted_id = endpoint._request_ids.wanted(headers.get(b"x-request-id"))
        self._arrived_ms = arrived_ms
        self._caller: Caller | None = scope.get(CALLER)
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = None
        """Cancelled when the client leaves, from when its request is whole."""
        self._outputs: list[RequestOutput] = []

    async def run(self) -> None:
        """Answer; raises only what is a bug or the end of the process."""
        task = asyncio.current_task()
        assert task is not None, "servers call applications in a task"
        self._endpoint.begin(self)
        try:
            body = await self._read(task)
            if body is None:
                self._left()
                return
            serving = self._serve_body(body)
            del body  # nothing here holds it while the answer is generated
            await serving
        except RequestError as error:
            await self._answer_error(error)
        except Refused as refusal:
            await self._answer_error(refused(refusal))
        except asyncio.CancelledError as cancelled:
            if self.left:
                task.uncancel()
                self._left()
            elif cancelled.args == (SERVER_ENDS,):
                task.uncancel()
                await self._answer_error(RequestError(503, "not_ready", SERVER_ENDS))
            else:
                raise
        except Exception:
            trace_id = "" if self.trace is None else self.trace.trace_id
            named = about(request_id=str(self._wanted_id), trace_id=trace_id)
            log.exception("serving request %s failed: this is a bug", self._wanted_id, extra=named)
            message = "serving the request failed inside the router; its log has the details"
            await self._answer_error(RequestError(500, "internal_error", message))
        finally:
            self.done = True
            try:
                self._give_up()
                if self._lease is not None:
                    self._lease.close()
                self._count_tokens()
            finally:
                self._endpoint.end(self)

    async def _read(self, task: asyncio.Task[Any]) -> bytes | None:
        """Return the body as it may be parsed, and ``None`` when the client left before it was whole; from then on the
        ``task`` is cancelled when the client leaves. Raises ``RequestError``."""
        endpoint, headers = self._endpoint, self.headers
        limit = endpoint._body_bytes_max
        content_type, length = headers.get(b"content-type", b""), headers.get(b"content-length", b"")
        check_announced(content_type, length, limit, self._scope["headers"], endpoint.takes_forms)
        body = await receive_body(self._receive, limit)
        if body is None:
            return None
        if self.trace is not None:
            self.trace.add("receive", self._arrived_ms)
        guard = guard_of(self._scope)
        if guard is not None:
            if guard.is_lost:
                return None
            self._task = task
            guard.source = self
        if b"content-encoding" in headers:
            encoding = headers[b"content-encoding"]
            body = await endpoint._bodies.inflated(body, encoding.decode("latin-1").strip().lower(), self.has_left)
        if len(body) > SHORT_BYTES:
            await check_shape(body, endpoint._settings.max_body_values, endpoint._tokenization)
        return body

    def has_left(self) -> bool:
        return self.left

    # -- as the source of an answer (``poolgrid.server.http.guard``)
    # ----------------------------------------------------------

    def client_gone(self) -> None:
        """Cancel the request of a client that has left, unless it has its answer."""
        if not self.done and self._task is not None:
            self.left = True
            self._task.cancel()

    def pause(self) -> None:
        """Do nothing: ``send`` waits for the client."""

    def resume(self) -> None:
        """Do nothing: ``send`` waits for the client."""

    # ------------------------------------------------------------------------------------------------------------------

    async def _serve_body(self, body: bytes) -> None:
        """Answer what the body asks for."""
        endpoint, caller = self._endpoint, self._caller
        try:
            prepared = endpoint._prepare(body, caller)
            job = prepared if isinstance(prepared, PreparedRequest) else await prepared
        except RecursionError:
            # The parser takes what is nested several hundred levels deep; later code may take less.
            raise RequestError(
                400, "invalid_json", f"reading the request body ({len(body)} bytes): it is nested too deeply"
            ) from None
        body_bytes = len(body)
        del body
        self.streaming = bool(job.body.stream)
        self.model = job.body.model
        if job.tools.left_out:
            self._tools_left_out = job.tools.left_out
            endpoint.note_left_out(job.tools.left_out, str(self._wanted_id))
        self._not_applied = job.not_applied
        if caller is not None:
            caller.check_model(job.body.model)
        endpoint._domains.claim(job, caller, self._scope["headers"])
        if job.guide:
            if caller is not None:
                caller.check_feature("guided_decoding")
            await endpoint._guides.check(job.guide, job.guide_param, job.domain)
        if job.media:
            if caller is not None:
                caller.check_feature("media")  # before anything is fetched for it
            self._lease = endpoint._media.lease()
            job.items = await endpoint._media.load(job.media, self._lease, job.domain, job.served.media.item_bytes_max)
        began_s = perf_counter()
        began_ms = 0.0 if self.trace is None else self._clock.monotonic_ms()
        if _is_tokenized_here(job, body_bytes, endpoint._tokenization):
            prompts = tokenize(job)
        else:
            prompts = await endpoint._tokenization.run_in_thread(partial(tokenize, job))
        job.forget_prompt()
        if self.trace is not None:
            self.trace.add("render and tokenize", began_ms)
        self._metrics.tokenization.observe(perf_counter() - began_s)
        if self._lease is not None:
            endpoint._media.note_places([each for prompt in prompts for each in prompt.media_items])
        await self._serve(job, prompts)

    async def _serve(self, job: PreparedRequest, prompts: Sequence[Prompt]) -> None:
        """Answer with what the router generates for the prompts."""
        endpoint, per_prompt = self._endpoint, job.choices_per_prompt
        count = len(prompts) * per_prompt
        request_ids = endpoint._request_ids.of_sequences(self._wanted_id, count)
        told = not TELLING_HEADERS.isdisjoint(self.headers)
        requests = sequences_of(job, prompts, request_ids, hints_of_headers(self.headers) if told else None)
        hint = session_hint(job, self.headers) if told or not job.is_plain or job.after_tool else NO_HINT
        if hint is not NO_HINT:
            for request in requests:
                request.session = hint
        self.join_trace(requests)
        if self._caller is not None:
            isl = sum(prompt.isl for prompt in prompts)
            self._caller.admit(requests, isl, self._clock.monotonic_ms())
        else:
            address = client_address(self._scope)
            for request in requests:
                request.address = address
        outputs: list[SequenceOutput] = []
        for index, request in enumerate(requests):
            output = SequenceOutput(
                index,
                request,
                job.output_model,
                job.stops,
                collect=not self.streaming,
                echo=prompts[index // per_prompt].text,
                prompt_only=job.prompt_only,
                parser=stops_parser(job, prompts[index // per_prompt]),
            )
            outputs.append(output)
            self._outputs.append(output)
            output.stream = await endpoint._backend.submit(request)
            if count > 1:
                # Others come between the sequences of this one: 128 of them take 40 ms.
                await asyncio.sleep(0)
        for prompt in prompts:
            self._metrics.isl.observe(len(prompt.token_ids) // TOKEN_BYTES)
        self._encoder = encoder = encoder_of(job, prompts, outputs, request_ids, self._clock.wall_ms() // 1000)
        if job.body.stream_options is not None and job.counts_in_chunks:
            encoder.count_in_chunks(partial(_counts_in_chunk, prompts, outputs, per_prompt))
        answer = _Answer(self, job, prompts, encoder, outputs)
        await (answer.stream() if self.streaming else answer.whole())

    def join_trace(self, requests: Sequence[InferenceRequest]) -> None:
        """Put requests into the trace that is kept of this one, else into its client's."""
        if self.trace is not None:
            for request in requests:
                request.trace = self.trace
        elif b"traceparent" in self.headers:
            context = caller_context(self._scope["headers"])
            for request in requests:
                request.trace_context = context

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        headers = self._endpoint._dialect.headers(self._wanted_id)
        if self._tools_left_out:
            headers.append((TOOLS_LEFT_OUT, _header_value(", ".join(self._tools_left_out)[:LEFT_OUT_CHARS_MAX])))
        if self._not_applied:
            headers.append((NOT_APPLIED, self._not_applied.encode()))
        if self._endpoint._isolates:
            return headers
        if len(self._outputs) == 1 and (stream := self._outputs[0].stream) is not None:
            worker, reason, pool = stream.worker, stream.decision_reason, stream.pool
        else:
            streams = [output.stream for output in self._outputs if output.stream is not None]
            worker = _listed([stream.worker for stream in streams])
            reason = _listed([stream.decision_reason for stream in streams])
            pool = _listed([stream.pool for stream in streams if stream.pool])
        headers.append((b"x-poolgrid-worker", _header_value(worker)))
        headers.append((b"x-poolgrid-decision", _header_value(reason)))
        if pool:
            headers.append((b"x-poolgrid-pool", _header_value(pool)))
        if self.trace is not None:
            headers.append((b"traceresponse", self.trace.root.place.traceparent.encode()))
        return headers

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Complete the headers of an answer that begins."""
        self.status = status
        if self._caller is not None:
            headers += limit_headers(self._caller.standing(self._clock.monotonic_ms()))
        self._started = True

    async def start_stream(self) -> None:
        headers = [*self.response_headers(), *_STREAM_HEADERS]
        self.begin(200, headers)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def write(self, body: bytes) -> Awaitable[None]:
        """Return what writes a part of the answer: a coroutine around it would cost as much as the part."""
        return _nothing() if self.done else self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.done = True
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def end(self, body: bytes) -> None:
        self.done = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer_error(self, error: RequestError) -> None:
        self._give_up()
        self.error = error.code
        if self._endpoint._isolates:
            error = without_others(error)
        if error.is_refusal:
            self._metrics.refused(error.code, self._caller.tenant if self._caller is not None else "")
        dialect = self._endpoint._dialect
        error = dialect.named(error)
        body = dialect.error_body(error, self._wanted_id)
        try:
            if self._started:
                # A client with a part of an answer was not refused: to operators its request failed.
                self.status = 500 if error.is_refusal else error.status
                assert self._encoder is not None, "a stream has begun, so there is an encoder"
                await self.end(self._encoder.error(error))
                return
            headers = [(b"content-type", JSON), *dialect.headers(self._wanted_id), *error.headers]
            self.begin(error.status, headers)
            await self.answer(error.status, headers, body)
        except asyncio.CancelledError:
            # The client left while its error was being written.
            if not self.left:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self._left()

    def account(self) -> TokenTotals:
        """Return what the request has sent to workers and got so far."""
        prompt_tokens = cached_tokens = output_tokens = 0
        for output in self._outputs:
            if output.stream is not None:
                prompt_tokens += len(output.request.token_ids) // TOKEN_BYTES
                cached_tokens += output.cached_tokens or 0
                output_tokens += output.completion_tokens
        return TokenTotals(prompt_tokens, cached_tokens, output_tokens)

    def line(self) -> EndedRequest:
        """Return what there is to log of it, once it is over."""
        streams = [output.stream for output in self._outputs if output.stream is not None]
        return EndedRequest(
            name=str(self._wanted_id),
            endpoint=self._endpoint.name,
            status=self.status,
            error=self.error,
            streaming=self.streaming,
            model=self.model,
            tenant=self._caller.tenant if self._caller is not None else "",
            account=self.account(),
            ttft_ms=None if self.first_token_ms is None else self.first_token_ms - self._arrived_ms,
            duration_ms=self._clock.monotonic_ms() - self._arrived_ms,
            workers=",".join(dict.fromkeys(stream.worker for stream in streams)),
            trace_id=self.trace.trace_id if self.trace is not None else "",
        )

    def _give_up(self) -> None:
        """Cancel every stream that has not ended; before anything is written about it, for workers come first."""
        for output in self._outputs:
            if output.stream is not None and output.finish_reason is None:
                output.finish_reason = "cancelled"
                output.completion_tokens += output.stream.unread_tokens
                output.stream.cancel()

    def _left(self) -> None:
        self.status = CLIENT_LEFT
        self._metrics.disconnects.inc()

    def _count_tokens(self) -> None:
        """Count what the request has got at its end."""
        metrics = self._metrics
        output_tokens = 0
        for output in self._outputs:
            if output.stream is None:
                continue
            completion_tokens = output.completion_tokens
            output_tokens += completion_tokens
            metrics.prompt_tokens.value += len(output.request.token_ids) // TOKEN_BYTES
            metrics.cached_tokens.value += output.cached_tokens or 0
            metrics.osl.observe(completion_tokens)
            # Of the tokens that came after the first ones: those came together.
            later_tokens = completion_tokens - output.first_tokens
            if later_tokens > 0 and self.series is not None and output.last_token_at_ms is not None:
                itl_ms = (output.last_token_at_ms - output.first_token_at_ms) / later_tokens
                met = itl_ms <= metrics.itl_target_ms
                (self.series.itl_met if met else self.series.itl_missed).value += 1
        metrics.output_tokens.value += output_tokens
        if self._caller is not None:
            self._caller.generated(output_tokens)
            if all(output.stream is None for output in self._outputs):
                self._caller.not_dispatched(self._clock.monotonic_ms())


class _Answer:
    """What workers generate for one request, on its way into the body of its answer."""

    def __init__(
        self,
        exchange: InferenceExchange,
        job: PreparedRequest,
        prompts: Sequence[Prompt],
        encoder: AnswerEncoder,
        outputs: Sequence[SequenceOutput],
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._prompts = prompts
        self._encoder = encoder
        self._outputs = outputs

    async def stream(self) -> None:
        """Write the answer as events, as it is generated."""
        exchange = self._exchange
        waits = partial(_wait_for_room, self._outputs)
        head = StreamHead(exchange.start_stream, exchange.write, self._encoder.begin(), waits)

        async def comment(body: bytes) -> None:
            if not head.is_sent and _wait_for_room(self._outputs):
                return
            await exchange.write(await head.before(body))

        keep_alive = KeepAlive(comment, self._exchange._endpoint.keep_alive_s)
        try:
            if len(self._outputs) == 1:
                await self._events_of_one(head, keep_alive)
            else:
                with _Pumps(self._outputs) as pumps:
                    await self._events(pumps, head, keep_alive)
        finally:
            head.close()
            keep_alive.close()

    async def _events(self, pumps: _Pumps, head: StreamHead, keep_alive: KeepAlive) -> None:
        exchange, encoder = self._exchange, self._encoder
        unfinished = len(self._outputs)
        parts: list[bytes] = []
        while unfinished:
            parts = []
            failed: SequenceOutput | None = None
            for output in self._take(await pumps.next()):
                finish_reason = output.finish_reason
                if finish_reason is not None:
                    unfinished -= 1
                    if finish_reason == "error":
                        failed = output
                        finish_reason = None
                if output.text or finish_reason is not None:
                    if not output.started:
                        output.started = True
                        parts.append(encoder.role(output.index))
                    parts.append(encoder.chunk(output.index, output.take_text(), output.take_logprobs(), finish_reason))
            if any(parts) and (unfinished or failed is not None):
                await exchange.write(await head.before(b"".join(parts)))
                keep_alive.wrote = True
            if failed is not None:
                await head.settled()
                raise generation_failed(failed)
        parts.append(encoder.end(self._usage()))
        last = await head.before(b"".join(parts))
        keep_alive.close()
        await exchange.end(last)

    async def _events_of_one(self, head: StreamHead, keep_alive: KeepAlive) -> None:
        """As ``_events``, for one sequence: what happens for every token of nearly every stream."""
        exchange, encoder = self._exchange, self._encoder
        [output] = self._outputs
        stream = output.stream
        assert stream is not None, "submitted before anything is awaited from it"
        index = output.index
        while True:
            self._absorb(output, await stream.next())
            finish_reason = output.finish_reason
            last = finish_reason is not None
            failed = finish_reason == "error"
            if failed:
                finish_reason = None
            part = b""
            if output.text or finish_reason is not None:
                if not output.started:
                    output.started = True
                    part = encoder.role(index)
                part += encoder.chunk(index, output.take_text(), output.take_logprobs(), finish_reason)
            if last and not failed:
                break
            if part:
                await exchange.write(part if head.is_sent else await head.before(part))
                keep_alive.wrote = True
            if failed:
                await head.settled()
                raise generation_failed(output)
        end = await self._completed(partial(encoder.end, self._usage()))
        part = await head.before(part + end)
        keep_alive.close()
        await exchange.end(part)

    async def whole(self) -> None:
        """Write the answer at once, when all of it is there."""
        exchange, encoder = self._exchange, self._encoder
        if len(self._outputs) == 1:
            [output] = self._outputs
            stream = output.stream
            assert stream is not None, "submitted before anything is awaited from it"
            while output.finish_reason is None:
                self._absorb(output, await stream.next(output.waits_for_end()))
            if output.finish_reason == "error":
                raise generation_failed(output)
        else:
            await self._ends()
        counts = self._usage()
        if self._job.form is None:
            body = encoder.whole(self._outputs, counts)
        else:
            body = await self._completed(partial(encoder.whole, self._outputs, counts))
        headers = exchange.response_headers()
        headers.append((b"content-type", JSON))
        if len(body) >= GZIP_BYTES_MIN:
            headers.append((b"vary", b"accept-encoding"))
            if accepts_gzip(exchange.headers.get(b"accept-encoding", b"")):
                body = compressed(body)
                headers.append((b"content-encoding", b"gzip"))
        exchange.begin(200, headers)
        await exchange.answer(200, headers, body)

    async def _ends(self) -> None:
        """Wait until all of several sequences have ended; raises ``RequestError`` when one fails."""
        unfinished = len(self._outputs)
        with _Pumps(self._outputs) as pumps:
            while unfinished:
                for output in self._take(await pumps.next()):
                    if output.finish_reason is not None:
                        unfinished -= 1
                        if output.finish_reason == "error":
                            raise generation_failed(output)

    async def _completed(self, complete: Callable[[], bytes]) -> bytes:
        """Return the end of an answer. A response counts the tokens of its reasoning, in a thread when it is long, and
        is kept before its client can continue from it."""
        form = self._job.form
        if form is None:
            return complete()
        pool = self._exchange._endpoint._tokenization
        generated_bytes = TOKEN_BYTES * sum(output.completion_tokens for output in self._outputs)
        if form.counts_reasoning and not pool.is_short(generated_bytes, self._job.model.tokenizes_fast()):
            end = await pool.run_in_thread(complete, is_due=True)
        else:
            end = complete()
        replaced = None if form.keep is None else await form.keep(self._encoder)
        return end if replaced is None else replaced

    def _take(self, arrivals: Arrivals) -> Iterable[SequenceOutput]:
        """Absorb everything that arrived and return each sequence that it was for, once."""
        touched: dict[int, SequenceOutput] = {}
        for output, deltas in arrivals:
            # What arrives after a stop string was found is not part of the answer.
            if output.finish_reason is None or output.index in touched:
                touched[output.index] = output
                if output.finish_reason is None:
                    self._absorb(output, deltas)
        return touched.values()

    def _absorb(self, output: SequenceOutput, deltas: Sequence[StreamDelta]) -> None:
        tokens = output.absorb(deltas)
        if output.stopped_here and output.stream is not None:
            output.stream.cancel()
        if tokens == 0:
            return
        exchange = self._exchange
        now_ms = exchange._clock.monotonic_ms()
        series = exchange.series
        if output.last_token_at_ms is None:
            metrics = exchange._metrics
            if series is None:
                series = exchange.series = metrics.of_model(exchange.model)
                exchange.first_token_ms = now_ms
            ttft_ms = now_ms - exchange._arrived_ms
            if exchange.trace is None:
                series.ttft.observe(ttft_ms / 1000)
            else:
                series.ttft.observe_traced(ttft_ms / 1000, exchange.trace.trace_id)
            (series.ttft_met if ttft_ms <= metrics.ttft_target_ms else series.ttft_missed).value += 1
            output.first_tokens = tokens
            output.first_token_at_ms = now_ms
        else:
            assert series is not None, "the first tokens came before these"
            series.itl.observe((now_ms - output.last_token_at_ms) / 1000 / tokens)
        output.last_token_at_ms = now_ms

    def _usage(self) -> dict[str, Any]:
        """Return the counts: every prompt once, with the reuse that its first choice found."""
        written_tokens: int | None = None
        if self._job.keep_ms:
            written_tokens = sum(map(newly_kept_tokens, self._outputs[:: self._job.choices_per_prompt]))
        if len(self._outputs) == 1:
            [output], [prompt] = self._outputs, self._prompts
            isl, cached_tokens = len(prompt.token_ids) // TOKEN_BYTES, output.cached_tokens or 0
            counts = usage(isl, output.completion_tokens, cached_tokens, written_tokens)
        else:
            first_choices = self._outputs[:: self._job.choices_per_prompt]
            counts = usage(
                sum(prompt.isl for prompt in self._prompts),
                sum(output.completion_tokens for output in self._outputs),
                sum(output.cached_tokens or 0 for output in first_choices),
                written_tokens,
            )
        # What a cache holds is other tenants' business where they are kept apart.
        if RECEIPT_HEADER in self._exchange.headers and not self._exchange._endpoint._isolates:
            counts["poolgrid_receipt"] = [receipt(each) for each in self._outputs]
        return counts


def newly_kept_tokens(output: SequenceOutput) -> int:
    """Return the prompt tokens that a worker keeps as the client asks, without those that it held before."""
    turn = output.request.turn
    return 0 if turn is None else max(0, turn.keep_tokens - (output.cached_tokens or 0))


def receipt(output: SequenceOutput) -> dict[str, Any]:
    """Return what was promised to one sequence and what its worker reported (``docs/http_api.md``, Receipts)."""
    stream = output.stream
    return {
        "request_id": output.request.request_id,
        "worker": "" if stream is None else stream.worker,
        "decision": "" if stream is None else stream.decision_reason,
        "promised_tokens": 0 if stream is None else stream.promised_tokens,
        "reported_tokens": output.cached_tokens,
    }


def counted_tokens(metrics: FrontendMetrics) -> TokenTotals:
    """Return what all requests that are over have sent to workers and got."""
    counters = metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens
    return TokenTotals(*(int(counter.value) for counter in counters))


def tell(trace: TraceRecord, exchange: InferenceExchange) -> str:
    """Put what is known of a request that is over on its span; return its error in a word, for one that failed here."""
    ended = exchange.line()
    if not ended.error and exchange.status == CLIENT_LEFT:
        ended = ended._replace(error="client_left")
    outputs = [output for output in exchange._outputs if output.stream is not None]
    tell_request(trace, ended, outputs, exchange.first_token_ms)
    return exchange.error if exchange.status >= 500 else ""


class _Pumps:
    """Merges the streams of a request with several sequences: one task per sequence, one wake-up for all."""

    def __init__(self, outputs: Sequence[SequenceOutput]) -> None:
        self._arrived: list[tuple[SequenceOutput, Sequence[StreamDelta]]] = []
        self._news = asyncio.Event()
        self._tasks = [detached(self._pump(output), f"tokens of {output.request.request_id}") for output in outputs]

    def __enter__(self) -> Self:
        return self

    async def next(self) -> Arrivals:
        """Wait for news of any sequence and return all of it."""
        await self._news.wait()
        self._news.clear()
        arrived, self._arrived = self._arrived, []
        return arrived

    def __exit__(self, *_: object) -> None:
        """End the tasks that are still waiting.

        They are dropped: a task that was cancelled holds the frames it was cancelled in, and these hold this.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()

    async def _pump(self, output: SequenceOutput) -> None:
        stream = output.stream
        assert stream is not None, "submitted before the pumps begin"
        while True:
            try:
                deltas = await stream.next(output.waits_for_end())
            except Exception as error:
                request = output.request
                log.exception(
                    "reading the tokens of %s failed: this is a bug", request.request_id, extra=request.named()
                )
                deltas = [StreamDelta(b"", finish_reason="error", error=f"reading tokens failed: {error}")]
            self._arrived.append((output, deltas))
            self._news.set()
            if not deltas or deltas[-1].finish_reason is not None:
                return


_STREAM_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies of nginx's family collect a response otherwise.
    (b"x-accel-buffering", b"no"),
]


async def _nothing() -> None:
    """Write nothing."""


_HINT_HEADERS: Final = {name.encode(): name for name in HINT_HEADERS}

TELLING_HEADERS: Final = SESSION_HEADERS | _HINT_HEADERS.keys()
"""Headers of a request that say something about its session or its routing."""


def hints_of_headers(headers: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return the headers that say something about routing, if any."""
    if _HINT_HEADERS.keys().isdisjoint(headers):
        return None
    return {name: headers[key].decode("latin-1") for key, name in _HINT_HEADERS.items() if key in headers}


def _is_tokenized_here(job: PreparedRequest, body_bytes: int, pool: TokenizationPool) -> bool:
    """Return whether what is to be tokenized is short enough for the event loop; looks up what is known of it."""
    fast = job.model.tokenizes_fast()
    if not job.has_text or (not job.chat and pool.is_short(body_bytes, fast)):
        return True
    left = look_up(job, LOOK_UP_RENDERING_MS) if body_bytes <= LOOK_UP_BYTES_MAX else None
    return left is not None and pool.is_short(left, fast)


def _counts_in_chunk(
    prompts: Sequence[Prompt], outputs: Sequence[SequenceOutput], per_prompt: int, index: int
) -> dict[str, int]:
    return counts_so_far(prompts[index // per_prompt].isl, outputs[index].completion_tokens)


def _listed(values: list[str]) -> str:
    return ",".join(list(dict.fromkeys(values))[:WORKERS_IN_HEADER_MAX])


@lru_cache(HEADER_VALUES_MAX)
def _header_value(text: str) -> bytes:
    if text.isascii() and text.isprintable():
        return text.encode()
    return "".join(character if " " <= character <= "~" else "?" for character in text).encode()


def _wait_for_room(outputs: Sequence[SequenceOutput]) -> bool:
    """Return whether every sequence waits in the queue once more."""
    return all(each.stream is not None and each.stream.waits_for_room for each in outputs)


def generation_failed(output: RequestOutput) -> RequestError:
    """Return the error of a request that its router or its engine ended."""
    failure, what = output.failure, f"{output.work}: {output.error}"
    if failure.retry_after_s is not None:
        return refused(Refused(429, "busy", what, failure.retry_after_s))
    if failure.unknown_model:
        return RequestError(404, "model_not_found", what, param="model")
    if failure.unsupported:
        return RequestError(400, "unsupported_by_worker", what)
    if failure.poison:
        # Not a 5xx, which client libraries send again by themselves: each time it would cost workers.
        return RequestError(422, "workers_lost", what)
    if failure.shutdown or failure.no_worker:
        return RequestError(503, "not_ready" if failure.shutdown else "no_worker", what)
    return RequestError(500, "generation_failed", what)
