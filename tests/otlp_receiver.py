"""A receiver of traces that speaks OTLP, over gRPC and over HTTP, with OpenTelemetry's own messages and stubs.

It is what a collector is to whoever sends; it keeps what it gets instead of passing it on.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

ERROR = 2
"""OTLP's status code of a span that failed."""


class Received(NamedTuple):
    """One span, with who sent it."""

    service: str
    instance: str
    by: str
    """``grpc`` or ``http``."""
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a span that begins a trace."""
    links: tuple[str, ...]
    """Span ids."""
    error: str
    """Empty for a span that did not fail."""
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    start_ns: int
    end_ns: int


def _value(of: AnyValue) -> Any:
    kind = of.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in of.array_value.values]
    return None if kind is None else getattr(of, kind)


def _attributes(of: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in of}


class OtlpReceiver:
    """Takes spans from any number of processes, on two ports of loopback."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._lock = threading.Lock()
        receiver = self

        class Servicer(TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                receiver._take("grpc", request)
                return ExportTraceServiceResponse()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                receiver._take("http", ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._grpc = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(Servicer(), self._grpc)  # type: ignore[no-untyped-call]
        self.grpc_url = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.http_url = f"http://127.0.0.1:{self._http.server_port}/v1/traces"

    def __enter__(self) -> OtlpReceiver:
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, name="otlp over http", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._http.server_close()

    def spans(self, trace_id: str) -> list[Received]:
        """Return what has come of a trace, in the order in which its spans began."""
        with self._lock:
            return sorted((each for each in self._spans if each.trace_id == trace_id), key=lambda each: each.start_ns)

    def trace_ids(self) -> set[str]:
        """Return all traces of which something has come."""
        with self._lock:
            return {each.trace_id for each in self._spans}

    def _take(self, by: str, request: Any) -> None:
        found = []
        for of_resource in request.resource_spans:
            who = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                found += [
                    Received(
                        who["service.name"],
                        who["service.instance.id"],
                        by,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        tuple(link.span_id.hex() for link in span.links),
                        (span.status.message or "error") if span.status.code == ERROR else "",
                        _attributes(span.attributes),
                        tuple((event.name, _attributes(event.attributes)) for event in span.events),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                    )
                    for span in scope.spans
                ]
        with self._lock:
            self._spans += found
