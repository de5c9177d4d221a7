"""The traces of one process: which requests have a record, and what becomes of it at their end.

Rules
    1. Where traces are off there is no ``Tracing``, and no record is made.
    2. A record is handed over once, at its end, and is not touched any more.
    3. A request without a record is passed on with the trace context of its client, unchanged.
    4. The sender of records may lose them, and counts them; it never makes a request wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from poolgrid.kernel.requests.trace_record import SpanKind, TraceRecord
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.trace_context import TraceContext, TracePlace, caller_context, read_traceparent
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tracing.settings import Sampler, TraceSampling, TraceSettings, trace_target


class TraceSink(Protocol):
    """Takes records that are over."""

    def take(self, record: TraceRecord, now_ms: float) -> None:
        """Take a record; ``now_ms`` is the time by its clock. Returns at once."""
        ...

    def close(self) -> None: ...


class Tracing:
    """The traces of one process."""

    def __init__(self, sampling: TraceSampling, sink: TraceSink, clock: Clock, seed: int | None = None) -> None:
        """``seed`` makes ids that can be foretold, for tests."""
        self._sampler = Sampler(sampling, random.Random(seed).getrandbits)
        self._sink = sink
        self._clock = clock
        unkept = TracePlace(self._sampler.span_id() << 64 | self._sampler.span_id(), self._sampler.span_id(), 0)
        self.not_kept = TraceContext(unkept.traceparent)
        """Trace context for others of requests whose traces are not kept, so that they do not begin one of their own:
        the same for all, as it is not read."""

    def begin_request(self, name: str, headers: Sequence[tuple[bytes, bytes]], began_ms: float) -> TraceRecord | None:
        """Begin the record of a client's request, if it is kept; ``headers`` are in lower case."""
        context = caller_context(headers)
        caller = None if context is None else read_traceparent(context.traceparent)
        drawn = self._sampler.draw(caller)
        if drawn is None:
            return None
        return self._record(name, *drawn, caller, "" if context is None else context.tracestate, began_ms)

    def begin_work(self, name: str, context: TraceContext | None) -> TraceRecord | None:
        """Begin the record of what another process of ours asks for, if that is kept."""
        if context is None:
            return None
        caller = read_traceparent(context.traceparent)
        if caller is None or not caller.is_sampled:
            return None
        return self._record(name, caller.trace_id, caller.flags, caller, context.tracestate, self._clock.monotonic_ms())

    def _record(
        self, name: str, trace_id: int, flags: int, caller: TracePlace | None, state: str, began_ms: float
    ) -> TraceRecord:
        ids, now_ms = self._sampler.span_id, self._clock.monotonic_ms
        return TraceRecord(name, SpanKind.SERVER, trace_id, flags, caller, state, began_ms, ids, now_ms)

    def end(self, record: TraceRecord, error: str = "") -> None:
        record.end(error)
        self._sink.take(record, self._clock.monotonic_ms())

    def close(self) -> None:
        self._sink.close()


log = logging.getLogger(__name__)


def open_tracing(
    opened: AsyncExitStack, settings: TraceSettings, clock: Clock, service: str, instance: str
) -> Tracing | None:
    """Return the traces of this process, ``None`` where they are off; ``opened`` sends the last of them.

    ``service`` names what it is (``poolgrid-router``), ``instance`` distinguishes several. Raises ``ValueError`` for
    settings that cannot be meant, and where the packages lack.
    """
    target = trace_target(settings, os.environ)
    if target is None:
        return None
    shown = without_credentials(target.endpoint)
    try:
        from poolgrid.server.process.tracing.otel import OtelSink, make_exporter
    except ImportError as error:
        raise ValueError(
            f"sending traces to {shown}: {error}; install poolgrid[otel], or unset the variables that begin with OTEL_"
        ) from None
    sink = OtelSink(make_exporter(target), service, instance)
    tracing = Tracing(target.sampling, sink, clock)
    # In a thread: a receiver that does not answer is waited for a moment.
    opened.push_async_callback(asyncio.to_thread, tracing.close)
    log.info("traces go to %s (%s), %g of those that begin here", shown, target.protocol, target.sampling.ratio)
    return tracing
