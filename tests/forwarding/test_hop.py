"""The header from a global router to a pool's router passes one hop, and nothing else is taken for it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.headers import request_headers
from poolgrid.server.forwarding.hop import HOP_HEADER, Hop, hop_line, read_hop

HOPS = st.builds(
    Hop,
    st.text(max_size=64),
    st.floats(min_value=1e-6, max_value=1e6),
    st.integers(min_value=-(2**31), max_value=2**31 - 1),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=256),
)


@given(HOPS)
def test_a_hop_is_read_as_it_was_written(hop: Hop) -> None:
    name, value = hop_line(hop)

    assert name == HOP_HEADER
    assert read_hop(value) == hop


@given(st.binary(max_size=200))
def test_any_bytes_are_a_hop_or_refused_in_one_line(value: bytes) -> None:
    found: Hop | None = None
    refusal = "reading x-poolgrid-hop: "
    try:
        found = read_hop(value)
    except ValueError as error:
        refusal = str(error)
    assert isinstance(found, Hop) or ("\n" not in refusal and refusal.startswith("reading x-poolgrid-hop: it is"))


@pytest.mark.parametrize(
    "wrong",
    [{"tenant": "x" * 65}, {"weight": 0}, {"weight": -1}, {"priority": 2**31}, {"priority": 1.5}, [], None, 3]
    + [{"request_id": wrong} for wrong in ("a b", "a\n", "\u00e9", "x" * 257)],
)
def test_a_value_out_of_its_range_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="reading x-poolgrid-hop"):
        read_hop(json.dumps(wrong).encode())


def test_what_a_later_version_adds_is_skipped() -> None:
    assert read_hop(b'{"priority":3,"deadline_ms":5}') == Hop(priority=3)


@pytest.mark.parametrize("name", [b"x-poolgrid-hop", b"X-Poolgrid-Hop", b"X-POOLGRID-HOP"])
def test_a_line_that_was_received_is_never_passed(name: bytes) -> None:
    received = [(b"x-other", b"1"), (name, b'{"priority":100}')]

    assert request_headers(received) == [(b"x-other", b"1")]
    assert request_headers(received, [hop_line(Hop())]) == [(b"x-other", b"1"), (HOP_HEADER, b"{}")]
