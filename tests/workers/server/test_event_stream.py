"""Server-sent events out of pieces: the same events however they are torn, and each byte looked at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.http.http_client import RequestFailed
from poolgrid.tools.bench.client import EVENT_BYTES_MAX
from poolgrid.tools.bench.client import BenchExchange as Loaded
from poolgrid.workers.engines.server.core.calls import LINE_BYTES_MAX, LineTooLong, ServerSentEvents


class Piece(bytes):
    """What must not be put behind what came before: that copies all of it, for each piece again."""

    def __radd__(self, before: bytes) -> bytes:
        raise AssertionError(f"{len(before)} bytes are copied for {len(self)} more")


@given(
    st.lists(st.sampled_from([b"data: {}", b"data:[DONE]", b": x", b"", b"event: x", b"data:  1 \r"]), max_size=9),
    st.binary(max_size=9),
    st.data(),
)
def test_events_are_the_same_however_they_are_torn(lines: list[bytes], rest: bytes, data: st.DataObject) -> None:
    rest = rest.replace(b"\n", b"")
    whole = b"".join(line + b"\n" for line in lines) + rest
    at = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    stream, taken = ServerSentEvents(), []
    for start, end in zip([0, *at], [*at, len(whole)], strict=True):
        taken += list(stream.take(Piece(whole[start:end])))

    fields = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    assert taken == [field for field in fields if field != b"[DONE]"]
    assert stream.done is (b"[DONE]" in fields)


def test_a_line_in_small_pieces_is_never_copied_whole() -> None:
    stream = ServerSentEvents()
    line = b"data: " + b"1" * 3_000_000
    for at in range(0, len(line), 1200):
        assert not list(stream.take(Piece(line[at : at + 1200])))
    assert list(stream.take(Piece(b"\n"))) == [line[6:]]


@pytest.mark.parametrize("ends", [b"", b"\n", b"\ndata: 1\n"])
def test_a_line_beyond_the_bound_is_refused_before_it_is_kept(ends: bytes) -> None:
    stream = ServerSentEvents()
    list(stream.take(b"x" * LINE_BYTES_MAX))
    with pytest.raises(LineTooLong):
        list(stream.take(b"y" + ends))
    assert len(stream._rest) == LINE_BYTES_MAX


def test_the_client_of_the_load_generator_reads_the_same_way() -> None:
    exchange = Loaded()
    exchange.status = 200
    exchange.take_body(Piece(b"data: {"))
    for _ in range(1000):
        exchange.take_body(Piece(b" " * 1000))
    exchange.take_body(Piece(b"}\n"))
    exchange.take_body(Piece(b" " * EVENT_BYTES_MAX))
    with pytest.raises(RequestFailed):
        exchange.take_body(Piece(b" "))
