"""Sends records as OpenTelemetry's spans, by its own SDK and exporters. Imported only where traces are on.

The SDK batches spans in a bounded queue and sends them from a thread of its own; ``OTEL_BSP_*`` bound it, and
``OTEL_EXPORTER_OTLP_*`` configure how the receiver is reached (headers, certificates, compression, time-outs). What
does not fit is dropped, which the SDK logs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace import SpanKind as OtelKind

from poolgrid import __version__
from poolgrid.kernel.requests.trace_record import SpanKind, SpanRecord, TraceRecord
from poolgrid.kernel.wire.trace_context import TracePlace
from poolgrid.server.process.tracing.settings import TraceTarget

log = logging.getLogger(__name__)

KINDS = {SpanKind.INTERNAL: OtelKind.INTERNAL, SpanKind.SERVER: OtelKind.SERVER, SpanKind.CLIENT: OtelKind.CLIENT}

UNNAMED = "unknown_service"
"""What the SDK calls a service that the environment does not name."""

NS_PER_MS = 1_000_000

CLOSE_TIMEOUT_MS = 3000
"""How long the end of a process waits for its last spans to be taken."""


NO_STATUS = Status()


class ProcessResource(Resource):
    """The one resource of all spans of this process.

    Encoders look spans up by their resource, for which the SDK's own writes itself as JSON, once for each span: a fifth
    of what sending a span costs.
    """

    def __init__(self, of: Resource) -> None:
        super().__init__(of.attributes, of.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class OtelSink:
    """Implements ``poolgrid.server.process.tracing.tracing.TraceSink``."""

    def __init__(
        self, exporter: SpanExporter, service: str, instance: str, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """``service`` is the name where ``OTEL_SERVICE_NAME`` gives none, ``instance`` distinguishes processes;
        ``wall_ns`` is the time since 1970, which spans of several processes are put side by side by."""
        self._wall_ns = wall_ns
        resource = Resource.create({"service.instance.id": instance})
        if str(resource.attributes.get("service.name", UNNAMED)).startswith(UNNAMED):
            resource = resource.merge(Resource({"service.name": service}))
        self._resource = ProcessResource(resource)
        self._scope = InstrumentationScope("poolgrid", __version__)
        self._processor = BatchSpanProcessor(exporter)

    def take(self, record: TraceRecord, now_ms: float) -> None:
        """Put the spans into the queue."""
        to_wall_ns = self._wall_ns() - round(now_ms * NS_PER_MS)
        state = TraceState.from_header([record.tracestate]) if record.tracestate else None
        if record.spans_left_out:
            record.root.attributes["poolgrid.spans_left_out"] = record.spans_left_out
        for span in record.spans:
            self._processor.on_end(self._span(span, state, to_wall_ns))

    def close(self) -> None:
        if not self._processor.force_flush(CLOSE_TIMEOUT_MS):
            log.warning("the last spans were not all taken within %d ms", CLOSE_TIMEOUT_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _span(self, span: SpanRecord, state: TraceState | None, to_wall_ns: int) -> ReadableSpan:
        def wall_ns(at_ms: float | None) -> int:
            assert at_ms is not None, "the record has ended"
            return round(at_ms * NS_PER_MS) + to_wall_ns

        return ReadableSpan(
            span.name,
            context=_context(span.place, state, is_remote=False),
            parent=None
            if span.parent is None
            else _context(span.parent, state, is_remote=span.kind is SpanKind.SERVER),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(each.name, dict(each.attributes), wall_ns(each.at_ms)) for each in span.events],
            links=[Link(_context(each, None, is_remote=False)) for each in span.links],
            kind=KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else NO_STATUS,
            start_time=wall_ns(span.began_ms),
            end_time=wall_ns(span.ended_ms),
            instrumentation_scope=self._scope,
        )


def _context(place: TracePlace, state: TraceState | None, *, is_remote: bool) -> SpanContext:
    return SpanContext(place.trace_id, place.span_id, is_remote, TraceFlags(place.flags & 0xFF), state)


def make_exporter(target: TraceTarget) -> SpanExporter:
    """Return what sends spans to a receiver."""
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=target.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=target.endpoint)
