"""What a prefill worker hands to a decode worker arrives as it was, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.errors import DecodeError, LimitError
from poolgrid.kernel.wire.limits import OPAQUE_BYTES_MAX
from poolgrid.plugins.trtllm.core.disaggregated_params import decode, encode
from tests.fakes.tensorrt_llm import DisaggregatedParams


@dataclass(slots=True)
class LaterParams(DisaggregatedParams):
    """The 1.3 line has more fields."""

    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
PLAIN = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=6) | st.binary(max_size=9)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
HANDLES = st.dictionaries(st.text(max_size=6), VALUES, max_size=3)


@st.composite
def params(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(0, 3))
    hashes = [draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8)) for _ in range(count)]
    mrope = draw(st.booleans())
    return {
        "request_type": draw(st.sampled_from(["context_only", "generation_only", "context_and_generation", None])),
        "first_gen_tokens": draw(st.none() | TOKENS),
        "ctx_request_id": draw(st.none() | st.integers(0, 2**64 - 1)),
        "opaque_state": draw(st.none() | st.binary(max_size=300)),
        "draft_tokens": draw(st.none() | TOKENS),
        "multimodal_embedding_handles": draw(st.none() | st.just([draw(HANDLES) for _ in range(count)])),
        "multimodal_hashes": draw(st.none() | st.just(hashes)),
        "mrope_position_ids_handle": draw(HANDLES) if mrope else None,
        "mrope_position_deltas_handle": draw(HANDLES) if mrope else None,
    }


@given(params())
def test_what_goes_in_comes_out(values: dict[str, Any]) -> None:
    given_params = DisaggregatedParams(**values)

    carried = decode(encode(given_params), DisaggregatedParams)

    assert carried.dropped == ()
    assert carried.params == given_params
    # Equality does not tell a tuple in a list's place.
    assert repr(carried.params) == repr(given_params)


@given(params(), st.integers(0, 2**63))
def test_versions_with_more_fields_and_with_fewer_understand_each_other(values: dict[str, Any], number: int) -> None:
    later = LaterParams(**values, disagg_request_id=number, schedule_style=1)
    assert decode(encode(later), LaterParams).params == later
    down = decode(encode(later), DisaggregatedParams)
    assert down.params == DisaggregatedParams(**values)
    assert down.dropped == ("disagg_request_id", "schedule_style")
    up = decode(encode(DisaggregatedParams(**values)), LaterParams)
    assert up.params == LaterParams(**values)
    assert up.dropped == ()


class Tensor:
    """Stands for anything that is not plain."""


@pytest.mark.parametrize("value", [Tensor(), {1, 2}, 2**64])
def test_what_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"mrope_position_ids_handle\.a|64 bits"):
        encode(DisaggregatedParams(mrope_position_ids_handle={"a": value}, mrope_position_deltas_handle={}))


def test_a_state_beyond_the_wires_limit_is_not_sent() -> None:
    with pytest.raises(LimitError, match="size of disaggregated params"):
        encode(DisaggregatedParams(opaque_state=bytes(OPAQUE_BYTES_MAX)))


def packed(**values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"\xc1", "cannot decode disaggregated params"),
        (packed(request_type=3), r"\$\.request_type"),
        (packed(request_type="prefill"), "request_type is 'prefill', allowed are context_only"),
        (packed(first_gen_tokens=["a"]), r"\$\.first_gen_tokens"),
        (packed(opaque_state="text"), r"\$\.opaque_state"),
        (packed(multimodal_hashes=[[1, 2]]), r"multimodal_hashes\[0\] has 2 integers, allowed are 8"),
        (packed(multimodal_hashes=[[1] * 8], multimodal_embedding_handles=[]), "1 multimodal_hashes come with 0"),
        (packed(mrope_position_ids_handle={}), "mrope"),
        (msgspec.msgpack.encode([1]), "object"),
        (packed(later=msgspec.msgpack.Ext(7, b"")), "extension 7"),
        (packed(later=msgspec.msgpack.Ext(1, b"\x01")), "tuple"),
        (bytes(OPAQUE_BYTES_MAX + 1), "at most"),
        (b"\x81\xa1a" + b"\x91" * 100_000, "cannot decode disaggregated params"),
    ],
)
def test_bytes_that_are_wrong_are_a_decode_error(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(data, DisaggregatedParams)


@given(st.binary(max_size=64))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    try:
        decode(data, DisaggregatedParams)
    except DecodeError:
        pass
