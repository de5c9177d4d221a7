"""The quick way of parsing events says exactly what the checked way says, or leaves the event to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kv_events.cache_events import AnyEngineEvent
from poolgrid.kv_events.trtllm import _parse_checked, parse_event
from poolgrid.wire.errors import DecodeError
from tests.examples import examples

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 1.0, 1.5, "7", [], {}, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
)


def usually(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(usual, usual, usual, usual, usual, usual, usual, ODD)


def shape(required: dict[str, st.SearchStrategy[Any]], optional: dict[str, st.SearchStrategy[Any]]) -> Any:
    return st.fixed_dictionaries(required, optional={**optional, "novelty": ODD})


HASHES = usually(st.integers(0, 2**64 - 1))
TOKEN = shape(
    {"token_id": usually(st.integers(0, 2**32 - 1)).filter(lambda value: value is not True)},
    {"token_extra_id": st.integers(0, 1), "type": ODD},
)
BLOCK = shape(
    {"block_hash": HASHES, "tokens": usually(st.lists(TOKEN, max_size=3))},
    {
        "cache_level": usually(st.integers(0, 2)),
        "priority": usually(st.integers(0, 100)),
        "mm_keys": usually(st.sampled_from([None, [], [{"type": "mm_key", "hash": "00" * 32, "start_offset": 0}]])),
    },
)
STORED = shape(
    {"type": st.just("stored"), "blocks": usually(st.lists(BLOCK, max_size=3))},
    {"parent_hash": st.one_of(st.none(), HASHES)},
)
REMOVED = shape({"type": st.just("removed"), "block_hashes": usually(st.lists(HASHES, max_size=3))}, {})
EVENT = shape(
    {"event_id": usually(st.integers(0, 10)), "data": st.one_of(STORED, REMOVED, ODD)},
    {"window_size": usually(st.integers(1, 100)), "attention_dp_rank": usually(st.integers(0, 3))},
)


def outcome(parse: Any, event: Any) -> AnyEngineEvent | str:
    try:
        parsed: AnyEngineEvent = parse(event)
        return parsed
    except DecodeError as error:
        return str(error)


@settings(max_examples=examples(60))
@given(EVENT)
def test_both_ways_agree_on_every_event(event: dict[str, Any]) -> None:
    assert outcome(parse_event, event) == outcome(_parse_checked, event)


@pytest.mark.parametrize("event", [None, [], "stored", {}, {"data": {"type": []}}, {"data": {"type": {}}}])
def test_what_is_no_event_is_a_decode_error(event: Any) -> None:
    with pytest.raises(DecodeError):
        parse_event(event)
