"""W3C's Trace Context, between processes: what a header says, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.limits import TRACEPARENT_CHARS_MAX
from poolgrid.kernel.wire.trace_context import TraceContext, TracePlace, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KNOWN = TracePlace(int(TRACE, 16), int(SPAN, 16), 1)


def test_a_traceparent_is_read_and_written_as_w3c_says() -> None:
    assert read_traceparent(f"00-{TRACE}-{SPAN}-01") == KNOWN
    assert KNOWN.traceparent == f"00-{TRACE}-{SPAN}-01"
    assert KNOWN.is_sampled
    assert not read_traceparent(f"00-{TRACE}-{SPAN}-02").is_sampled  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01what",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_is_as_if_it_were_not_there(text: str) -> None:
    assert read_traceparent(text) is None


def test_a_context_that_cannot_be_read_is_not_sampled() -> None:
    assert TraceContext(KNOWN.traceparent).is_sampled
    assert not TraceContext("sampled").is_sampled


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_whatever_is_written_is_read_again(trace_id: int, span_id: int, flags: int) -> None:
    place = TracePlace(trace_id, span_id, flags)
    assert read_traceparent(place.traceparent) == place
    assert len(place.traceparent) == TRACEPARENT_CHARS_MAX


def test_an_engine_gets_the_headers_that_there_are() -> None:
    assert TraceContext("00-a-b-01").headers == {"traceparent": "00-a-b-01"}
    assert TraceContext("00-a-b-01", "vendor=1").headers == {"traceparent": "00-a-b-01", "tracestate": "vendor=1"}
