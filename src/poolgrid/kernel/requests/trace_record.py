"""What happened to one request in one process, as spans in the making. Pure: clock and ids are given.

Only requests whose traces are kept have a record; for all others there is ``None``, and asking for that is all that
they cost. Spans are exported at the request's end (``poolgrid.server.process.tracing.tracing``), so that nothing is
sent, and no library asked, while it is served.

Rules
    1. A record holds at most ``SPANS_MAX`` spans and ``EVENTS_MAX`` events a span. What is beyond is counted and left
       out: a request may move, and wait, many times.
    2. No text of a prompt or an answer is in it, only names, counts and times.
    3. Whatever has not ended when the record ends, ends then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from poolgrid.kernel.wire.trace_context import TraceContext, TracePlace

SPANS_MAX = 128
"""A request of eight choices in two legs has some forty, and each move of one adds five."""

EVENTS_MAX = 32

Value = str | int | float | bool | list[str]

SpanIds = Callable[[], int]
"""Makes span ids: u64, not 0, not twice."""


class SpanKind(Enum):
    """On which side of a call a span is."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    at_ms: float
    attributes: Mapping[str, Value]


@dataclass(slots=True, eq=False)
class SpanRecord:
    """A span, from its beginning on; times are of the process's monotonic clock."""

    name: str
    kind: SpanKind
    place: TracePlace
    parent: TracePlace | None
    began_ms: float
    ended_ms: float | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    events_left_out: int = 0
    links: list[TracePlace] = field(default_factory=list)
    """Spans that led to this one and are not its parents: that of the worker that was lost."""
    error: str = ""
    """In a word, what went wrong; empty = nothing did."""

    def event(self, name: str, at_ms: float, attributes: Mapping[str, Value] | None = None) -> None:
        if len(self.events) < EVENTS_MAX:
            self.events.append(SpanEvent(name, at_ms, attributes or {}))
        else:
            self.events_left_out += 1

    def end(self, at_ms: float, error: str = "") -> None:
        if self.ended_ms is None:
            self.ended_ms = at_ms
            self.error = error


class TraceRecord:
    """One request in one process."""

    __slots__ = ("_ids", "_now_ms", "lost", "open", "root", "spans", "spans_left_out", "tracestate")

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        trace_id: int,
        flags: int,
        parent: TracePlace | None,
        tracestate: str,
        began_ms: float,
        ids: SpanIds,
        now_ms: Callable[[], float],
    ) -> None:
        """Begin with the span of the whole; ``parent`` is the span of another process that asked for it.

        ``now_ms`` is the clock of all its times: a router has two, of which one stands still while the process does.
        """
        self._ids = ids
        self._now_ms = now_ms
        self.root = SpanRecord(name, kind, TracePlace(trace_id, ids(), flags), parent, began_ms)
        self.spans = [self.root]
        self.spans_left_out = 0
        self.tracestate = tracestate
        self.open: dict[str, SpanRecord] = {}
        """Spans found again at their end by a name: of legs by their dispatch ids."""
        self.lost: dict[str, SpanRecord] = {}
        """By request id, the leg that a request lost and that none has replaced yet."""

    @property
    def trace_id(self) -> str:
        return f"{self.root.place.trace_id:032x}"

    def now_ms(self) -> float:
        return self._now_ms()

    def begin(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: SpanRecord | None = None,
        began_ms: float | None = None,
    ) -> SpanRecord:
        """Begin a span below ``parent``, or below the whole; now, unless it began before."""
        of, whole = self.root if parent is None else parent, self.root.place
        place = TracePlace(whole.trace_id, self._ids(), whole.flags)
        span = SpanRecord(name, kind, place, of.place, self._now_ms() if began_ms is None else began_ms)
        if len(self.spans) < SPANS_MAX:
            self.spans.append(span)
        else:
            self.spans_left_out += 1
        return span

    def add(
        self, name: str, began_ms: float, ended_ms: float | None = None, parent: SpanRecord | None = None
    ) -> SpanRecord:
        """Add a span that is over, now unless it ended before."""
        span = self.begin(name, parent=parent, began_ms=began_ms)
        span.end(self._now_ms() if ended_ms is None else ended_ms)
        return span

    def close(self, name: str, error: str = "") -> SpanRecord | None:
        span = self.open.pop(name, None)
        if span is not None:
            span.end(self._now_ms(), error)
        return span

    def context(self, span: SpanRecord) -> TraceContext:
        return TraceContext(span.place.traceparent, self.tracestate)

    def end(self, error: str = "") -> None:
        now_ms = self._now_ms()
        self.root.end(now_ms, error)
        for span in self.spans:
            span.end(now_ms)
