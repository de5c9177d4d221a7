"""Traces of one process: which are kept, what a record holds, and what OpenTelemetry's SDK makes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import StatusCode

from poolgrid.kernel.requests.trace_record import EVENTS_MAX, SPANS_MAX, SpanKind, TraceRecord
from poolgrid.kernel.wire.limits import TRACE_STATE_CHARS_MAX
from poolgrid.kernel.wire.trace_context import TraceContext, TracePlace
from poolgrid.server.process.tracing.otel import OtelSink
from poolgrid.server.process.tracing.settings import Sampler, TraceSampling, TraceSettings, trace_target
from poolgrid.server.process.tracing.tracing import Tracing
from tests.clock import HandClock

CALLER = TracePlace(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7, 1)
UNSAMPLED = CALLER._replace(flags=0)


class Sink:
    def __init__(self) -> None:
        self.taken: list[tuple[TraceRecord, float]] = []
        self.closed = False

    def take(self, record: TraceRecord, now_ms: float) -> None:
        self.taken.append((record, now_ms))

    def close(self) -> None:
        self.closed = True


def _tracing(ratio: float = 1.0, follows: bool = True) -> tuple[Tracing, Sink, HandClock]:
    sink, clock = Sink(), HandClock(1000.0)
    return Tracing(TraceSampling(ratio, follows), sink, clock, seed=1), sink, clock


def _headers(place: TracePlace, state: bytes = b"") -> list[tuple[bytes, bytes]]:
    further = [(b"tracestate", state)] if state else []
    return [(b"host", b"here"), (b"traceparent", place.traceparent.encode()), *further]


# -- which are kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_the_caller_decides_where_there_is_one(ratio: float) -> None:
    tracing, _, _ = _tracing(ratio)
    kept = tracing.begin_request("chat", _headers(CALLER), 0.0)
    assert kept is not None
    assert (kept.root.place.trace_id, kept.root.parent) == (CALLER.trace_id, CALLER)
    assert kept.root.place.span_id != CALLER.span_id
    assert tracing.begin_request("chat", _headers(UNSAMPLED), 0.0) is None


def test_a_share_of_the_others_is_kept() -> None:
    drawn = Sampler(TraceSampling(0.25), random.Random(5).getrandbits)
    kept = [found for found in (drawn.draw(None) for _ in range(4000)) if found is not None]
    assert 900 < len(kept) < 1100
    assert all(trace_id and flags == 1 for trace_id, flags in kept)
    assert len(set(kept)) == len(kept)


@given(st.integers(1, 2**128 - 1), st.floats(0, 1))
def test_all_who_go_by_the_id_draw_alike_and_a_larger_share_holds_a_smaller_one(trace_id: int, ratio: float) -> None:
    place = TracePlace(trace_id, 1, 0)

    def kept(ratio: float) -> bool:
        return Sampler(TraceSampling(ratio, follows_callers=False), random.Random().getrandbits).draw(place) is not None

    assert kept(ratio) == kept(ratio)
    assert kept(1.0)
    assert not kept(0.0)
    assert not kept(ratio / 2) or kept(ratio)


@pytest.mark.parametrize(
    ("given_", "kept"),
    [(b"vendor=1", "vendor=1"), (b"a=1, b=2", "a=1, b=2"), (b"x" * (TRACE_STATE_CHARS_MAX + 1), ""), (b"a=\x01", "")],
)
def test_the_callers_state_is_given_on_if_it_is_sane(given_: bytes, kept: str) -> None:
    tracing, _, _ = _tracing()
    record = tracing.begin_request("chat", _headers(CALLER, given_), 0.0)
    assert record is not None
    assert record.context(record.root).tracestate == kept


def test_work_that_another_process_asks_for_is_kept_when_its_own_is() -> None:
    tracing, _, clock = _tracing(0.0)
    clock.now_ms = 7.0
    record = tracing.begin_work("worker whole", TraceContext(CALLER.traceparent, "vendor=1"))
    assert record is not None
    assert (record.root.parent, record.root.began_ms, record.tracestate) == (CALLER, 7.0, "vendor=1")
    for unkept in (None, TraceContext(UNSAMPLED.traceparent), TraceContext("broken"), tracing.not_kept):
        assert tracing.begin_work("worker whole", unkept) is None


# -- where they go ---------------------------------------------------------------------------------------------------

GRPC, HTTP = "grpc", "http/protobuf"
ALL = TraceSampling(1.0)


@pytest.mark.parametrize(
    ("settings", "environment", "target"),
    [
        ({}, {}, None),
        ({}, {"OTEL_SERVICE_NAME": "mine"}, None),
        ({"trace_endpoint": "http://c:4317"}, {}, ("http://c:4317", GRPC, ALL)),
        ({"trace_endpoint": "http://c:4318"}, {}, ("http://c:4318/v1/traces", HTTP, ALL)),
        ({"trace_endpoint": "https://c/otlp/v1/traces"}, {}, ("https://c/otlp/v1/traces", HTTP, ALL)),
        (
            {"trace_endpoint": "http://c:1", "trace_sample_ratio": 0.01},
            {"OTEL_TRACES_SAMPLER": "always_off", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:4317"},
            ("http://c:1", GRPC, TraceSampling(0.01)),
        ),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://tempo:4317"}, ("http://tempo:4317", GRPC, ALL)),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ("http://c:4317", GRPC, ALL)),
        (
            {},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:9/otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": HTTP},
            ("http://c:9/otlp/v1/traces", HTTP, ALL),
        ),
        (
            {},
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:9",
                "OTEL_EXPORTER_OTLP_PROTOCOL": HTTP,
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:8",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": GRPC,
            },
            ("http://t:8", GRPC, ALL),
        ),
        ({}, {"OTEL_EXPORT_ENABLED": "true"}, ("http://localhost:4317", GRPC, ALL)),
        ({}, {"OTEL_TRACES_EXPORTER": "otlp"}, ("http://localhost:4317", GRPC, ALL)),
        ({}, {"OTEL_EXPORT_ENABLED": "false", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
        ({}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
        ({}, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
        (
            {},
            {
                "OTEL_EXPORT_ENABLED": "1",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0.25",
            },
            ("http://localhost:4317", GRPC, TraceSampling(0.25)),
        ),
        (
            {"trace_endpoint": "http://c:4317"},
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            ("http://c:4317", GRPC, TraceSampling(0.5, follows_callers=False)),
        ),
        (
            {"trace_endpoint": "http://c:4317"},
            {"OTEL_TRACES_SAMPLER": "parentbased_always_off"},
            ("http://c:4317", GRPC, TraceSampling(0.0)),
        ),
    ],
)
def test_where_traces_go_is_said_by_options_or_by_the_variables_of_opentelemetry_and_dynamo(
    settings: dict[str, object], environment: dict[str, str], target: object
) -> None:
    assert trace_target(TraceSettings.model_validate(settings), environment) == target


@pytest.mark.parametrize(
    ("settings", "environment", "why"),
    [
        ({"trace_endpoint": "collector:4317"}, {}, "the endpoint is 'collector:4317', allowed are http://host:port"),
        ({"trace_endpoint": "http://c:port"}, {}, "whose port is no number"),
        ({"trace_endpoint": "http://c:1"}, {"OTEL_TRACES_SAMPLER": "jaeger"}, "OTEL_TRACES_SAMPLER is 'jaeger'"),
        (
            {"trace_endpoint": "http://c:1"},
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "OTEL_TRACES_SAMPLER_ARG is '2', allowed are numbers from 0 to 1",
        ),
        (
            {"trace_endpoint": "http://c:1"},
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json', allowed are grpc and http/protobuf",
        ),
    ],
)
def test_what_cannot_be_meant_ends_the_start(
    settings: dict[str, object], environment: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match="sending traces: ") as caught:
        trace_target(TraceSettings.model_validate(settings), environment)
    assert why in str(caught.value)


# -- a record --------------------------------------------------------------------------------------------------------


def _record(tracing: Tracing) -> TraceRecord:
    record = tracing.begin_request("chat", _headers(CALLER), 900.0)
    assert record is not None
    return record


def test_what_has_not_ended_ends_with_the_record_and_the_error_is_of_the_whole() -> None:
    tracing, sink, clock = _tracing()
    record = _record(tracing)
    over = record.add("render and tokenize", 910.0, 920.0)
    left = record.begin("queue")
    clock.now_ms = 1500.0
    tracing.end(record, "busy")

    assert sink.taken == [(record, 1500.0)]
    assert [(span.began_ms, span.ended_ms, span.error) for span in record.spans] == [
        (900.0, 1500.0, "busy"),
        (910.0, 920.0, ""),
        (1000.0, 1500.0, ""),
    ]
    assert over.parent == left.parent == record.root.place


def test_a_span_is_found_again_by_its_name_and_ends_once() -> None:
    tracing, _, clock = _tracing()
    record = _record(tracing)
    record.open["r~1"] = leg = record.begin("leg decode", SpanKind.CLIENT)
    clock.now_ms += 5
    assert record.close("r~1", "worker lost") is leg
    assert record.close("r~1") is None
    leg.end(9999.0, "again")
    assert (leg.ended_ms, leg.error) == (1005.0, "worker lost")


def test_a_record_is_bounded_and_says_what_was_left_out() -> None:
    tracing, _, _ = _tracing()
    record = _record(tracing)
    for _ in range(SPANS_MAX + 9):
        record.begin("queue")
    for number in range(EVENTS_MAX + 3):
        record.root.event("moved", float(number))
    assert (len(record.spans), record.spans_left_out) == (SPANS_MAX, 10)
    assert (len(record.root.events), record.root.events_left_out) == (EVENTS_MAX, 3)


# -- as OpenTelemetry's spans ----------------------------------------------------------------------------------------


class Exporter(SpanExporter):
    """Keeps what the SDK's processor hands over."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def _exported(monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[ReadableSpan]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter, clock = Exporter(), HandClock(1000.0)
    sink = OtelSink(exporter, "poolgrid-router", "router-7", lambda: clock.wall_ms() * 1_000_000)
    tracing = Tracing(ALL, sink, clock, seed=1)
    record = tracing.begin_request("chat", _headers(CALLER, b"vendor=1"), 900.0)
    assert record is not None
    record.root.attributes |= {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": ["stop"]}
    lost = record.begin("leg decode", SpanKind.CLIENT, began_ms=950.0)
    lost.end(960.0, "worker lost")
    again = record.begin("leg decode", SpanKind.CLIENT, began_ms=960.5)
    again.links.append(lost.place)
    again.event("first output", 970.0, {"poolgrid.cached_tokens": 32})
    for _ in range(SPANS_MAX):
        record.begin("queue")
    tracing.end(record, "generation_failed")
    tracing.close()
    return exporter.spans


def test_spans_have_the_times_ids_parents_links_and_errors_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    root, lost, again, *_ = _exported(monkeypatch)

    def of(span: ReadableSpan) -> object:
        assert span.context is not None
        return span.context.span_id

    assert root.parent is not None
    assert (root.parent.span_id, root.parent.is_remote) == (CALLER.span_id, True)
    assert dict(root.parent.trace_state) == {"vendor": "1"}
    assert {span.context.trace_id for span in (root, lost, again) if span.context} == {CALLER.trace_id}
    assert [span.parent.span_id for span in (lost, again) if span.parent] == [of(root)] * 2
    assert [link.context.span_id for link in again.links] == [of(lost)]
    assert (root.start_time, root.end_time) == (1_700_000_000_900_000_000, 1_700_000_001_000_000_000)
    assert (again.start_time, again.kind, root.kind) == (
        1_700_000_000_960_500_000,
        OtelKind.CLIENT,
        OtelKind.SERVER,
    )
    assert [(event.name, event.timestamp, dict(event.attributes or {})) for event in again.events] == [
        ("first output", 1_700_000_000_970_000_000, {"poolgrid.cached_tokens": 32})
    ]
    assert [(span.status.status_code, span.status.description) for span in (root, lost, again)] == [
        (StatusCode.ERROR, "generation_failed"),
        (StatusCode.ERROR, "worker lost"),
        (StatusCode.UNSET, None),
    ]
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.finish_reasons": ["stop"],
        "poolgrid.spans_left_out": 3,
    }


def test_the_spans_of_a_process_share_a_resource_that_compares_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = _exported(monkeypatch)
    [resource] = {id(span.resource): span.resource for span in spans}.values()
    same = Resource(resource.attributes, resource.schema_url)

    assert (resource, hash(resource)) == (same, hash(same))
    monkeypatch.setattr("opentelemetry.sdk.resources.dumps", None)
    assert hash(resource), "it is not written anew for each span"


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({}, "poolgrid-router"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,deployment.environment=test"}, "mine"),
    ],
)
def test_a_process_says_who_it_is_unless_the_environment_does(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], service: str
) -> None:
    attributes = _exported(monkeypatch, **environment)[0].resource.attributes
    assert (attributes["service.name"], attributes["service.instance.id"]) == (service, "router-7")
    assert attributes.get("deployment.environment") == ("test" if "RESOURCE" in str(environment) else None)
