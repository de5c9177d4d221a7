"""Whether traces are kept, which, and where they are sent: of routers and workers, and of OpenTelemetry's variables.

Which requests' traces are kept. Pure, but for the randomness that it is given.

A process that is called with a trace keeps it when its caller does (W3C's ``sampled`` flag): a trace is whole or not
there. Of requests without a trace, a share is kept, drawn from the trace's id, so that all who go by the id draw alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.trace_context import SAMPLED, TracePlace
from poolgrid.server.process.settings import Settings

ID_HALF = 1 << 64
"""A trace's id is drawn by its lower half, as OpenTelemetry does."""


class TraceSampling(NamedTuple):
    """What is kept."""

    ratio: float
    """Share of traces that begin here, from 0 to 1."""
    follows_callers: bool = True
    """Whether a caller's flag decides where there is a caller; else the share holds for its traces too."""


class Sampler:
    """Draws for one process."""

    def __init__(self, sampling: TraceSampling, bits: Callable[[int], int]) -> None:
        """``bits`` returns so many random bits."""
        self.sampling = sampling
        self._bits = bits
        self._bound = round(sampling.ratio * ID_HALF)

    def draw(self, caller: TracePlace | None) -> tuple[int, int] | None:
        """Return the trace id and flags of a request whose trace is kept; ``None`` for any other."""
        if caller is not None:
            kept = caller.is_sampled if self.sampling.follows_callers else caller.trace_id % ID_HALF < self._bound
            return (caller.trace_id, caller.flags | SAMPLED) if kept else None
        lower = self._bits(64)
        if lower >= self._bound:
            return None
        return (self._bits(64) or 1) << 64 | lower, SAMPLED

    def span_id(self) -> int:
        return self._bits(64) or 1


Protocol = Literal["grpc", "http/protobuf"]

TRACES_PATH = "/v1/traces"
"""Where OTLP's receivers take traces over HTTP."""

DYNAMO_ENDPOINT = "http://localhost:4317"
"""Receiver of traces for scripts for Dynamo that only switch traces on."""

HTTP_PORT = 4318
"""OTLP's own for HTTP; 4317 is that for gRPC."""

TRUE_WORDS = ("1", "true", "yes", "on")


class TraceSettings(Settings):
    """Traces of one process."""

    panel: ClassVar[str] = "Logs and traces"

    trace_endpoint: str = Field(
        "",
        max_length=2048,
        description=(
            "Send traces to this OTLP receiver, as http://collector:4317 (gRPC) or :4318 (HTTP). Unset = "
            "OpenTelemetry's variables, else no traces."
        ),
    )
    trace_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description=(
            "Keep this share of traces of requests without a traceparent. Unset = OTEL_TRACES_SAMPLER, else all."
        ),
    )


class TraceTarget(NamedTuple):
    """Where traces go, and which."""

    endpoint: str
    """The receiver's URL; for HTTP with its path."""
    protocol: Protocol
    sampling: TraceSampling


def trace_target(settings: TraceSettings, environment: Mapping[str, str]) -> TraceTarget | None:
    """Return where traces go; ``None`` = there are none. Raises ``ValueError`` for what cannot be meant."""
    endpoint, is_base = settings.trace_endpoint.strip(), False
    if not endpoint:
        found = _endpoint_of(environment)
        if found is None:
            return None
        endpoint, is_base = found
    where = urlsplit(endpoint)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(
            f"sending traces: the endpoint is {without_credentials(endpoint)!r}, allowed are http://host:port and https://host:port"
        )
    protocol = _protocol_of(environment)
    if protocol is None:
        has_path = where.path.rstrip("/") != ""
        protocol = "http/protobuf" if has_path or _port(endpoint) == HTTP_PORT else "grpc"
    if protocol == "http/protobuf" and (is_base or not where.path.rstrip("/")):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    return TraceTarget(endpoint, protocol, _sampling(settings, environment))


def _port(endpoint: str) -> int | None:
    try:
        return urlsplit(endpoint).port
    except ValueError:
        shown = without_credentials(endpoint)
        raise ValueError(f"sending traces: the endpoint is {shown!r}, whose port is no number") from None


def _endpoint_of(environment: Mapping[str, str]) -> tuple[str, bool] | None:
    """Return the receiver in the variables, and whether it is the base of all signals, with a path for traces."""

    def word(name: str) -> str:
        return environment.get(name, "").strip()

    if word("OTEL_SDK_DISABLED").lower() == "true" or word("OTEL_TRACES_EXPORTER").lower() == "none":
        return None
    wanted = word("OTEL_EXPORT_ENABLED").lower()
    if wanted and wanted not in TRUE_WORDS:
        return None
    if own := word("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return own, False
    if base := word("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return base, True
    if wanted or "otlp" in word("OTEL_TRACES_EXPORTER").lower().split(","):
        return DYNAMO_ENDPOINT, True
    return None


def _protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environment.get(name, "").strip()
        if value == "grpc":
            return "grpc"
        if value == "http/protobuf":
            return "http/protobuf"
        if value:
            raise ValueError(f"sending traces: {name} is {value!r}, allowed are grpc and http/protobuf")
    return None


def _sampling(settings: TraceSettings, environment: Mapping[str, str]) -> TraceSampling:
    if settings.trace_sample_ratio is not None:
        return TraceSampling(settings.trace_sample_ratio)
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip() or "parentbased_always_on"
    kind = name.removeprefix("parentbased_")
    follows = kind != name
    if kind == "always_on":
        return TraceSampling(1.0, follows)
    if kind == "always_off":
        return TraceSampling(0.0, follows)
    if kind != "traceidratio":
        raise ValueError(
            f"sending traces: OTEL_TRACES_SAMPLER is {name!r}, allowed are always_on, always_off, traceidratio, and "
            "each with parentbased_ before it"
        )
    argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"sending traces: OTEL_TRACES_SAMPLER_ARG is {argument!r}, allowed are numbers from 0 to 1")
    return TraceSampling(ratio, follows)
