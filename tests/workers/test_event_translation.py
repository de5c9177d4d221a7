"""Engine events become wire events: exact hashes, no partial blocks, no other windows, no silent loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.kv_events.cache_events import (
    AnyEngineEvent,
    Cleared,
    Created,
    Diff,
    Removed,
    Stored,
    StoredBlock,
    Updated,
)
from poolgrid.kernel.kv_events.trtllm import _parse_checked, parse_event
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, CacheCleared, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import CacheFacts, chains
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from tests.examples import examples
from tests.workers.builders import fold

BLOCK_SIZE = 4
WINDOW = 100
NAMES = sequence_hashes(block_hashes(pack_tokens(range(16)), BLOCK_SIZE))


def block(engine_hash: int, first: int, count: int = BLOCK_SIZE, level: int = 0) -> StoredBlock:
    return StoredBlock(engine_hash, pack_tokens(range(first, first + count)), level)


def stored(event_id: int, parent: int | None, *blocks: StoredBlock, window: int = WINDOW) -> Stored:
    return Stored(event_id=event_id, window_size=window, parent_hash=parent, blocks=blocks)


def removed(event_id: int, *hashes: int, window: int = WINDOW) -> Removed:
    return Removed(event_id=event_id, window_size=window, block_hashes=hashes)


def moved(event_id: int, engine_hash: int, old: int, new: int) -> Updated:
    return Updated(event_id=event_id, window_size=WINDOW, block_hash=engine_hash, cache_level=Diff(old, new))


def test_a_partial_block_and_what_follows_is_swallowed_and_so_is_its_removal() -> None:
    translator = EventTranslator(BLOCK_SIZE)

    translation = translator.translate(
        [stored(0, None, block(901, 0), block(902, 4, count=2), block(903, 8)), removed(1, 903, 902)]
    )

    assert translation.events == [BlocksStored(None, pack_hashes(NAMES[:1]))]
    assert translator.counts.partial_blocks == 2
    assert translator.resident_blocks == 1


def test_a_larger_window_that_shows_up_late_voids_what_was_said() -> None:
    translation = EventTranslator(BLOCK_SIZE).translate(
        [stored(0, None, block(901, 0), window=32), stored(1, None, block(902, 0))]
    )

    assert translation.events == [
        CacheCleared(),
        GroupsReported((KvGroup(8),)),
        BlocksStored(None, pack_hashes(NAMES[:1])),
    ]


def test_a_priority_a_partial_child_or_reuse_from_the_host_prove_nothing() -> None:
    for on_device, event in (
        (True, Updated(event_id=5, window_size=WINDOW, block_hash=901, priority=Diff(35, 80))),
        (True, stored(5, 901, block(902, 4, count=2))),
    ):
        translator = EventTranslator(BLOCK_SIZE, reuse_is_on_device=on_device)
        translator.translate([stored(0, None, block(901, 0))])
        assert translator.translate([event]).events == [CacheCleared()]
    translator = EventTranslator(BLOCK_SIZE, reuse_is_on_device=False)
    translator.translate([stored(0, None, block(901, 0))])
    told = translator.translate([stored(5, 901, block(902, 4))]).events
    assert told == [CacheCleared(), BlocksStored(NAMES[0], pack_hashes(NAMES[1:2]))]


def test_without_created_events_nothing_is_named_until_all_windows_have_been_seen() -> None:
    """Fails when the largest window seen so far is believed: blocks of a small pool would count as reusable."""
    translator = EventTranslator(BLOCK_SIZE, windows=2)

    small = translator.translate([stored(7, None, block(901, 0), window=32)])
    large = translator.translate([stored(8, None, block(902, 0))])

    assert small.events == [CacheCleared()]
    assert large.events == [GroupsReported((KvGroup(8),)), BlocksStored(None, pack_hashes(NAMES[:1]))]
    assert translator.is_incomplete


def test_the_first_block_of_a_chain_may_need_a_seed_that_nobody_knows() -> None:
    seeds = {901: hash_seed("", "salt"), 902: None}
    translator = EventTranslator(BLOCK_SIZE, root_seed=lambda first: seeds[first.block_hash])

    translation = translator.translate(
        [stored(0, None, block(901, 0)), stored(1, None, block(902, 0)), stored(2, 902, block(903, 4)), removed(3, 903)]
    )

    salted = sequence_hashes(block_hashes(pack_tokens(range(4)), BLOCK_SIZE, hash_seed("", "salt")))
    assert translation.events == [BlocksStored(None, pack_hashes(salted))]
    assert translator.counts.foreign_blocks == 2


def test_claims_are_given_up_when_nobody_knows_what_happened() -> None:
    translator = EventTranslator(BLOCK_SIZE)
    translator.translate([stored(0, None, block(901, 0))])

    assert translator.lose() == CacheCleared()
    assert translator.is_incomplete
    assert fold(translator.translate([stored(1, 901, block(902, 4))]).events)[Tier.DEVICE] == set(NAMES[:2])


def test_moves_between_levels_become_moves_between_tiers() -> None:
    translator = EventTranslator(BLOCK_SIZE)
    translator.translate([stored(0, None, block(901, 0), block(902, 4))])

    offload = translator.translate([moved(1, 902, 0, 1), moved(2, 901, 0, 1)])
    onboard = translator.translate([moved(3, 901, 1, 0)])
    removal = translator.translate([removed(4, 902, 901)])

    assert offload.events == [
        BlocksStored(None, pack_hashes(NAMES[:2]), Tier.HOST),
        BlocksRemoved(pack_hashes([NAMES[1], NAMES[0]]), Tier.DEVICE),
    ]
    assert onboard.events == [
        BlocksStored(None, pack_hashes(NAMES[:1]), Tier.DEVICE),
        BlocksRemoved(pack_hashes(NAMES[:1]), Tier.HOST),
    ]
    assert removal.events == [
        BlocksRemoved(pack_hashes([NAMES[1]]), Tier.HOST),
        BlocksRemoved(pack_hashes([NAMES[0]]), Tier.DEVICE),
    ]


def test_an_update_without_a_level_or_of_an_unknown_block_says_nothing() -> None:
    translator = EventTranslator(BLOCK_SIZE)
    translator.translate([stored(0, None, block(901, 0))])

    translation = translator.translate(
        [
            Updated(event_id=1, window_size=WINDOW, block_hash=901, priority=Diff(35, 80)),
            moved(2, 999, 0, 1),
        ]
    )

    assert translation.events == []


def test_two_engine_blocks_of_one_content_are_stored_once_and_removed_with_the_last() -> None:
    """As when the engine separates tenants by a salt that it does not tell."""
    translator = EventTranslator(BLOCK_SIZE)
    first = translator.translate([stored(0, None, block(901, 0))])
    second = translator.translate([stored(1, None, block(902, 0), block(903, 4))])
    third = translator.translate([removed(2, 901), moved(3, 902, 0, 1)])

    held = fold([*first.events, *second.events, *third.events])

    assert held[Tier.DEVICE] == {NAMES[1]}
    assert held[Tier.HOST] == {NAMES[0]}
    assert translator.translate([removed(4, 903, 902)]).events == [
        BlocksRemoved(pack_hashes([NAMES[1]]), Tier.DEVICE),
        BlocksRemoved(pack_hashes([NAMES[0]]), Tier.HOST),
    ]


def test_a_seed_that_the_adapter_knows_enters_the_hashes_of_the_whole_chain() -> None:
    seed = hash_seed("lora", "salt")
    event = Stored(event_id=0, window_size=WINDOW, parent_hash=None, blocks=(block(901, 0),), hash_seed=seed)

    translation = EventTranslator(BLOCK_SIZE).translate([event, stored(1, 901, block(902, 4))])

    expected = sequence_hashes(block_hashes(pack_tokens(range(8)), BLOCK_SIZE, seed))
    assert translation.events == [
        BlocksStored(None, pack_hashes(expected[:1])),
        BlocksStored(expected[0], pack_hashes(expected[1:])),
    ]


def token(token_id: int) -> dict[str, Any]:
    return {"type": "unique_token", "token_id": token_id, "token_extra_id": 0}


# The shapes of the TensorRT-LLM 1.2.1 contract, with 4-token blocks.
CONTRACT: dict[str, dict[str, Any]] = {
    "created": {
        "event_id": 0,
        "data": {"type": "created", "num_blocks_per_cache_level": [101256, 0]},
        "window_size": 32768,
    },
    "stored": {
        "event_id": 1,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": 924206229973855,
                    "tokens": [token(1), token(2), token(3), token(4)],
                    "cache_level": 0,
                    "priority": 35,
                },
                {
                    "type": "stored_block",
                    "block_hash": 2728178455351807326,
                    "tokens": [token(5), token(6), token(7), token(8)],
                    "cache_level": 0,
                    "priority": 35,
                },
            ],
        },
        "window_size": 32768,
    },
    "stored_attention_dp": {
        "event_id": 2,
        "data": {
            "type": "stored",
            "parent_hash": 2728178455351807326,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": 10011707017105896989,
                    "tokens": [token(9), token(10), token(11), token(12)],
                    "cache_level": 0,
                    "priority": 35,
                }
            ],
        },
        "window_size": 32768,
        "attention_dp_rank": 3,
    },
    "stored_multimodal": {
        "event_id": 3,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "type": "stored_block",
                    "block_hash": 177964049208,
                    "tokens": [token(9), token(10), token(11), token(12)],
                    "cache_level": 0,
                    "priority": 35,
                    "mm_keys": [{"type": "mm_key", "hash": "00" * 32, "start_offset": 0}],
                }
            ],
        },
        "window_size": 32768,
    },
    "updated": {
        "event_id": 4,
        "data": {
            "type": "updated",
            "block_hash": 924206229973855,
            "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
            "priority": {"type": "event_diff", "new_value": 35, "old_value": 80},
        },
        "window_size": 32768,
    },
    "removed": {
        "event_id": 5,
        "data": {"type": "removed", "block_hashes": [177964049208, 2728178455351807326, 924206229973855]},
        "window_size": 32768,
    },
}


def test_the_shapes_of_tensorrt_llm_are_parsed() -> None:
    events = {name: parse_event(event) for name, event in CONTRACT.items()}

    assert events["created"] == Created(event_id=0, window_size=32768, num_blocks_per_cache_level=(101256, 0))
    assert events["stored"] == Stored(
        event_id=1,
        window_size=32768,
        parent_hash=None,
        blocks=(
            StoredBlock(924206229973855, pack_tokens([1, 2, 3, 4])),
            StoredBlock(2728178455351807326, pack_tokens([5, 6, 7, 8])),
        ),
    )
    assert events["stored_attention_dp"].attention_dp_rank == 3
    assert isinstance(events["stored_multimodal"], Stored)
    assert events["stored_multimodal"].blocks[0].multimodal
    assert events["updated"] == Updated(
        event_id=4,
        window_size=32768,
        block_hash=924206229973855,
        cache_level=Diff(old_value=0, new_value=1),
        priority=Diff(old_value=80, new_value=35),
    )
    assert events["removed"] == removed(5, 177964049208, 2728178455351807326, 924206229973855, window=32768)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("event_id",), "x", "event_id"),
        (("data", "type"), "moved", "type"),
        (("data", "blocks"), None, "blocks"),
        (("data", "blocks", 0, "tokens", 0, "token_id"), 2**32, "requires|range"),
        (("data", "blocks", 0, "tokens", 0, "token_id"), -1, "argument|requires|range"),
        (("data", "blocks", 0, "block_hash"), "h", "block_hash"),
    ],
)
def test_a_wrong_shape_raises_the_one_decode_error(path: tuple[str | int, ...], value: object, named: str) -> None:
    event: Any = copy.deepcopy(CONTRACT["stored"])
    place = event
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    with pytest.raises(DecodeError, match=named):
        parse_event(event)


def test_neighbouring_facts_join_and_never_overtake_each_other() -> None:
    facts = CacheFacts()
    facts.stored(None, [1, 2], Tier.DEVICE)
    facts.removed([2], Tier.DEVICE)
    facts.removed([1], Tier.DEVICE)
    facts.removed([9], Tier.HOST)
    facts.stored(None, [1], Tier.DEVICE)

    assert facts.take() == [
        BlocksStored(None, pack_hashes([1, 2])),
        BlocksRemoved(pack_hashes([2, 1])),
        BlocksRemoved(pack_hashes([9]), Tier.HOST),
        BlocksStored(None, pack_hashes([1])),
    ]
    assert facts.take() == []


def test_links_group_into_chains_in_either_direction() -> None:
    assert chains([(1, None), (2, 1), (3, 2), (7, None), (5, 4), (4, 3)]) == [
        (None, [1, 2, 3]),
        (None, [7]),
        (3, [4, 5]),
    ]
    assert chains([]) == []


def test_holes_of_a_server_that_passes_some_events_on_are_no_losses() -> None:
    translator = EventTranslator(BLOCK_SIZE, is_filtered=True)
    translation = translator.translate([stored(3, None, block(901, 0)), stored(7, 901, block(902, 4))])
    assert (translation.lost, len(translation.events), translator.is_incomplete) == (0, 2, False)
    assert translator.translate([stored(1, None, block(903, 8))]).events[0] == CacheCleared(), "it started over"


def test_a_server_that_lost_events_says_that_all_is_cleared() -> None:
    cleared = parse_event({"attention_dp_rank": 0, "data": {"type": "all_cleared"}})
    assert isinstance(cleared, Cleared)
    translator = EventTranslator(BLOCK_SIZE)
    translator.translate([stored(0, None, block(901, 0))])
    assert translator.translate([cleared]).events == [CacheCleared()]
    assert not translator.resident_blocks
    assert translator.translate([stored(1, 901, block(902, 4))]).events, "what was known is remembered"


@pytest.mark.parametrize("more", [{}, {"hash_algo": "v1_block_key"}, {"layer_group_id": 0}])
@pytest.mark.parametrize(("said", "known"), [({}, None), ({"cache_salt": None}, None), ({"cache_salt": "s"}, "s")])
def test_a_salt_is_read_wherever_an_event_names_it(more: dict[str, Any], said: dict[str, Any], known: str) -> None:
    tokens = [{"type": "unique_token", "token_id": 5, "token_extra_id": 0}]
    made = {"type": "stored_block", "block_hash": 1, "tokens": tokens, "cache_level": 0, "priority": 35, **said}
    data = {"type": "stored", "parent_hash": None, "blocks": [made]}
    event = parse_event({"event_id": 0, "data": data, "window_size": 8, **more})
    assert isinstance(event, Stored)
    assert event.blocks[0].cache_salt == known
    made["cache_salt"] = 5
    with pytest.raises(DecodeError, match="cache_salt"):
        parse_event({"event_id": 0, "data": data, "window_size": 8, **more})


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
