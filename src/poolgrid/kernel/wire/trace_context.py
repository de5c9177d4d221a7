"""Where a request stands in a distributed trace, as W3C's Trace Context writes it: what processes hand to each other.

A span is made by the process that did the work. What crosses between processes is only the name of the span that asked
for it, and whether the trace is kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.limits import TRACE_STATE_CHARS_MAX, TRACEPARENT_CHARS_MAX

SAMPLED = 0x01
"""The flag of a trace that is kept."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The span that a message was sent from."""

    traceparent: Annotated[str, Meta(max_length=TRACEPARENT_CHARS_MAX)]
    """``00-TRACE-SPAN-FLAGS`` in lower-case hex: 16 bytes, 8 bytes, 1 byte."""
    tracestate: Annotated[str, Meta(max_length=TRACE_STATE_CHARS_MAX)] = ""
    """State of tracing systems; passed on unread."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the two headers, for an engine that takes them."""
        if self.tracestate:
            return {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {"traceparent": self.traceparent}

    @property
    def is_sampled(self) -> bool:
        """Return whether the trace is kept; ``False`` for what is no traceparent."""
        place = read_traceparent(self.traceparent)
        return place is not None and place.is_sampled


class TracePlace(NamedTuple):
    """A traceparent, read."""

    trace_id: int
    """u128, not 0."""
    span_id: int
    """u64, not 0."""
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags & 0xFF:02x}"


def read_traceparent(text: str) -> TracePlace | None:
    """Return the content of a ``traceparent``; ``None`` when it is none, which W3C treats as absent."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return TracePlace(trace_id, span_id, int(found[4], 16))


def caller_context(headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the trace context that a client sent, if it is one; ``headers`` are in lower case."""
    traceparent = tracestate = b""
    for header, value in headers:
        if header == b"traceparent":
            traceparent = value
        elif header == b"tracestate":
            tracestate = tracestate + b"," + value if tracestate else value
    place = read_traceparent(traceparent.decode("latin-1")) if traceparent else None
    return None if place is None else TraceContext(place.traceparent, _sane_state(tracestate))


def _sane_state(value: bytes) -> str:
    """Return a tracestate that may be given on: W3C has those dropped that are too long or hold other characters."""
    text = value.decode("latin-1").strip()
    sane = len(text) <= TRACE_STATE_CHARS_MAX and all(" " <= each <= "~" for each in text)
    return text if sane else ""
