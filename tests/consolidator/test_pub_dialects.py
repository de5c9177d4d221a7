"""Frames of engines that publish themselves: both dialects, odd versions, hostile bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poolgrid.kernel.kv_events.pub import EngineCleared, EngineRemoved, EngineStored, decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import (
    block_hashes,
    hash_seed,
    pack_hashes,
    pack_tokens,
    sequence_hashes,
    unpack_hashes,
)
from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pub_engine import BLOCK, block_removed, block_stored, frame_of
from tests.examples import examples

DIALECTS = ["vllm", "trtllm"]


def translated(events: list[Any], translator: EngineTranslator | None = None) -> list[Any]:
    translator = EngineTranslator(BLOCK, 1000) if translator is None else translator
    return translator.translate(decode_pub(frame_of(events)).events)


def names(tokens: list[int], lora: str = "", salt: str = "") -> list[int]:
    return sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK, hash_seed(lora, salt)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_blocks_are_named_by_their_tokens(dialect: str) -> None:
    tokens = list(range(12))
    out = translated([block_stored(dialect, [-5, 6, 7], None, tokens), block_removed(dialect, [2**64 - 5, 7])])

    assert isinstance(out[0], BlocksStored)
    assert list(unpack_hashes(out[0].sequence_hashes)) == names(tokens)
    assert isinstance(out[1], BlocksRemoved)  # i64 -5 and u64 2**64 - 5 are the same hash
    assert list(unpack_hashes(out[1].sequence_hashes)) == [names(tokens)[0], names(tokens)[2]]


@pytest.mark.parametrize(
    "event", [block_stored("vllm", [1], None, [1] * 4), block_stored("trtllm", [1], None, [1] * 4)]
)
@pytest.mark.parametrize("rank", ["data_parallel_rank", "attn_dp_rank", "dp_rank"])
def test_an_envelope_that_is_a_map_says_the_same_as_an_array(event: Any, rank: str) -> None:
    as_map = decode_pub(msgspec.msgpack.encode({"ts": 1.5, "events": [event], rank: 3}))

    assert as_map == decode_pub(frame_of([event], 3))
    assert as_map.dp_rank == 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_continuation_keeps_the_adapter_and_the_salt_of_its_parent(dialect: str) -> None:
    tokens = list(range(8))
    events = [
        block_stored(dialect, [b"\x01" * 32], None, tokens[:4], lora="a", salt="s"),
        block_stored(dialect, [b"\x02" * 32], b"\x01" * 32, tokens[4:]),
    ]
    translator = EngineTranslator(BLOCK, 1000)
    out = [told for event in events for told in translated([event], translator)]

    translated([block_removed(dialect, [b"\x01" * 32])], translator)
    chain = BlocksStored(None, pack_hashes(names(tokens, "a", "s")))
    assert translated(events, translator) == [chain], "in one message: one chain"
    found = [sequence_hash for event in out for sequence_hash in unpack_hashes(event.sequence_hashes)]
    assert found == names(tokens, "a", "s")
    assert out[1].parent == found[0]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_message_says_block_by_block_is_what_as_many_messages_say(seed: int) -> None:
    """Chains are put together, and nothing else changes: tiers, other adapters, what has no parent."""
    source = random.Random(seed)
    together, apart = EngineTranslator(BLOCK, 1000), EngineTranslator(BLOCK, 1000)
    held: dict[str, set[tuple[int, Tier]]] = {"together": set(), "apart": set()}
    messages = {"together": 0, "apart": 0}
    chains = [[10 * chain + 1 + at for at in range(8)] for chain in range(3)]
    stored: set[tuple[int, str]] = set()
    for _ in range(12):
        events: list[Any] = []
        for _ in range(source.randrange(1, 6)):
            chain, at = source.randrange(3), source.choice([0, 0, 0, source.randrange(8)])
            hashes = chains[chain][at : at + source.randrange(1, 6)]
            medium, lora = source.choice(["GPU", "GPU", "CPU"]), "ab"[chain % 2]
            if source.random() < 0.3:
                events.append(block_removed("vllm", hashes, medium))
                stored -= {(each, medium) for each in hashes}
                continue
            if (hashes[0], medium) in stored:
                continue  # an engine begins behind what it holds
            stored |= {(each, medium) for each in hashes}
            for each in hashes:
                tokens, place = [each] * BLOCK, each % 10 - 1
                parent = each - 1 if place else None
                events.append(block_stored("vllm", [each], parent, tokens, medium, None if place else lora))
        batches = [decode_pub(frame_of(each)).events for each in (events, *([one] for one in events))]
        for name, told_of in (
            ("together", together.translate(batches[0])),
            ("apart", [out for one in batches[1:] for out in apart.translate(one)]),
        ):
            for out in told_of:
                assert isinstance(out, BlocksStored | BlocksRemoved)
                messages[name] += 1
                blocks = {(block, out.tier) for block in unpack_hashes(out.sequence_hashes)}
                held[name] = held[name] | blocks if isinstance(out, BlocksStored) else held[name] - blocks
        assert held["together"] == held["apart"]
        assert together.ignored_blocks == apart.ignored_blocks
    assert 0 < messages["together"] < messages["apart"]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("NVME", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    (event,) = translated([block_stored("trtllm", [1], None, [1, 2, 3, 4], medium)])

    assert event.tier is tier


def test_shared_media_are_ignored_and_counted() -> None:
    batch = decode_pub(frame_of([block_stored("vllm", [1], None, [1] * 4, "NETWORK"), ["Heartbeat"], 7, []]))

    assert batch.events == []
    assert batch.ignored == 4


@pytest.mark.parametrize(
    "event",
    [
        block_stored("vllm", [1], 99, [1, 2, 3, 4]),  # a parent nobody stored
        block_stored("vllm", [1], None, [1, 2, 3]),  # a partial block
        block_stored("vllm", [1], None, [1] * 6, block_size=6),  # a block size that is no multiple
        block_stored("vllm", [1], None, [1] * 12),  # more tokens than blocks
    ],
)
def test_what_cannot_be_placed_is_ignored_and_counted_and_so_is_what_hangs_on_it(event: Any) -> None:
    translator = EngineTranslator(BLOCK, 1000)

    out = translated([event, block_stored("vllm", [2], 1, [5, 6, 7, 8]), block_removed("vllm", [1])], translator)

    assert out == []
    assert translator.ignored_blocks == 2


def test_blocks_that_cover_more_than_tokens_are_ignored() -> None:
    image = {**block_stored("trtllm", [1], None, [1] * 4), "extra_keys": [[["image-hash", 0]]]}
    old = {**block_stored("trtllm", [1, 2], None, [1] * 8), "extra_keys": [["image-hash"], ["image-hash"]]}
    later = {**block_stored("trtllm", [2], 1, [1] * 4), "extra_keys": [["image-hash"]]}
    lora = {**block_stored("trtllm", [1], None, [1] * 4, lora="a"), "extra_keys": [["a"]]}

    mixed = {
        **block_stored("trtllm", [7, 8, 9, 10], None, list(range(16)), lora="a"),
        "extra_keys": [["a", "salt"], ["a"], ["a", ["image-hash", 2]], ["a"]],
    }
    child = block_stored("trtllm", [11], 10, [1] * 4)

    assert translated([image]) == []
    # What comes before a picture is text as any other, and what comes after it hangs on it.
    (event,) = translated([mixed, child, block_removed("trtllm", [9, 10])])
    assert list(unpack_hashes(event.sequence_hashes)) == names(list(range(8)), "a", "salt")
    assert translated([old]) == []
    assert translated([block_stored("trtllm", [1], None, [1] * 4), later])[1:] == []
    assert len(translated([lora])) == 1


def test_a_text_among_the_keys_of_the_first_block_alone_is_the_salt() -> None:
    tokens = list(range(12))
    first = {**block_stored("trtllm", [1, 2], None, tokens[:8]), "extra_keys": [["tenant-a"], None]}
    adapted = {
        **block_stored("trtllm", [11, 12], None, tokens[:8], lora="poet"),
        "extra_keys": [["poet", "tenant-a"], ["poet"]],
    }
    rest = {**block_stored("trtllm", [13], 12, tokens[8:], lora="poet"), "extra_keys": [["poet"]]}

    salted, both = translated([first, adapted, rest])

    assert list(unpack_hashes(salted.sequence_hashes)) == names(tokens[:8], salt="tenant-a")
    assert list(unpack_hashes(both.sequence_hashes)) == names(tokens, "poet", "tenant-a")


def test_other_groups_of_a_hybrid_model_are_told_apart() -> None:
    full = {**block_stored("trtllm", [1], None, [1] * 4), "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {**block_stored("trtllm", [1], None, [1] * 4), "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    window["kv_cache_spec_sliding_window"] = 9
    out = translated([full, window, {**block_removed("trtllm", [1]), "group_idx": 1}])

    assert out[0] == GroupsReported((KvGroup(2),))
    assert [(type(event), event.group) for event in out[1:]] == [
        (BlocksStored, 0),
        (BlocksStored, 1),
        (BlocksRemoved, 1),
    ]


@pytest.mark.parametrize(
    ("kind", "promised"),
    [
        (None, True),
        ("full_attention", True),
        ("FULL_ATTENTION", True),
        ("sink_full_attention", True),
        ("mla_attention", True),
        ("sliding_window_mla", KvGroup(3)),
        ("mla_sliding_window", KvGroup(3)),
        ("sliding_window", KvGroup(3)),
        ("mamba", KvGroup(1)),
        ("chunked_local_attention", KvGroup(1)),
        ("not_full_attention", KvGroup(0)),
        ("", KvGroup(0)),
        (3, KvGroup(0)),
    ],
)
def test_what_a_group_needs_follows_from_its_kind(kind: Any, promised: KvGroup | bool) -> None:
    stored = {**block_stored("trtllm", [1], None, [1] * 4), "group_idx": 0, "kv_cache_spec_kind": kind}
    out = translated([{**stored, "kv_cache_spec_sliding_window": 12}])

    if promised is True:
        assert [(type(event), event.group) for event in out] == [(BlocksStored, 0)]
    else:
        assert isinstance(promised, KvGroup)
        assert out[0] == GroupsReported((promised,), has_full_attention=False)
        assert [event.group for event in out[1:]] == ([] if promised == KvGroup(0) else [1])


def of_group(event: dict[str, Any], group: int | None, kind: str | None = None) -> dict[str, Any]:
    return {
        **event,
        **({} if group is None else {"group_idx": group}),
        **({"kv_cache_spec_kind": kind} if kind else {}),
    }


def test_a_window_group_that_was_never_seen_to_store_removes_nothing() -> None:
    full = of_group(block_stored("trtllm", [1], None, [1] * 4), 0, "mla_attention")
    out = translated([full, of_group(block_removed("trtllm", [1]), 1)])
    assert [type(event) for event in out] == [BlocksStored]


@pytest.mark.parametrize(("stores", "removes"), [(None, 0), (0, None)])
def test_groups_may_be_numbered_in_one_kind_of_event_only(stores: int | None, removes: int | None) -> None:
    stored = of_group(block_stored("trtllm", [1], None, [1] * 4), stores)
    out = translated([stored, of_group(block_removed("trtllm", [1]), removes)])
    assert [type(event) for event in out] == [BlocksStored, BlocksRemoved]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3), st.integers(1, 3)), max_size=40))
@example([(True, 0, 0, 1), (True, 1, 1, 1), (True, 0, 0, 1), (False, 0, 0, 1), (True, 1, 0, 1)])
@settings(max_examples=examples(40))
def test_a_block_is_promised_while_all_groups_hold_it(
    steps: list[tuple[bool, int, int, int]],
) -> None:
    """The naive model: copies of each block by group; a group that never stored anything does not count. What all
    groups hold from the root on is no copy when it is stored again, but a report of what is reused."""
    tokens = [list(range(10 * block, 10 * block + 4)) for block in range(7)]
    chain = names([token for block in tokens for token in block])
    translator = EngineTranslator(BLOCK, 1000)
    copies: list[dict[int, int]] = [{} for _ in tokens]
    promised: set[int] = set()
    met: set[int] = set()
    again = 0
    for stores, group, begin, count in steps:
        blocks = range(begin, begin + count)
        hashes = [block + 1 for block in blocks]
        if stores:
            if begin and not any(copies[begin - 1].values()):
                continue
            parent = begin or None
            flat = [token for block in blocks for token in tokens[block]]
            event = of_group(block_stored("trtllm", hashes, parent, flat), group, "full_attention")
            met.add(group)
            held = all(copies[block].get(each) for block in blocks for each in met)
            is_report = not begin and held and count > again
            for block in blocks if not is_report else ():
                copies[block][group] = copies[block].get(group, 0) + 1
        else:
            event = of_group(block_removed("trtllm", hashes), group)
            for block in blocks:
                if copies[block].get(group):
                    copies[block][group] -= 1
                if not any(copies[block].values()):
                    copies[block].clear()
        for said in translated([event], translator):
            if isinstance(said, GroupsReported):
                again = said.recomputed_blocks
                continue
            found = set(unpack_hashes(said.sequence_hashes))
            if isinstance(said, BlocksStored):
                assert said.parent is None or said.parent in chain
                promised |= found
            else:
                assert found <= promised
                promised -= found
        assert promised == {chain[at] for at, held in enumerate(copies) if met and all(held.get(each) for each in met)}


def test_the_upstream_layout_with_a_group_behind_the_extra_keys_is_read() -> None:
    event = ["BlockStored", [1], None, [1] * 4, 4, None, "GPU", None, None, 1, "sliding_window", 128]

    assert translated([event])[0] == GroupsReported((KvGroup(32),), has_full_attention=False)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode({"ts": 1.0, "events": {}}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["x", []]),
        msgspec.msgpack.encode([float("nan"), []]),
        msgspec.msgpack.encode([-1, []]),
        msgspec.msgpack.encode([1.0, [], -1]),
        msgspec.msgpack.encode([1.0, [], "rank"]),
        frame_of([["BlockRemoved", 5]]),
        frame_of([["BlockRemoved", [[]]]]),
        frame_of([{"type": "BlockRemoved", "block_hashes": [1], "medium": 3}]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_wrong_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_pub(payload)


@pytest.mark.parametrize("field", range(1, 9))
@pytest.mark.parametrize("value", [-1, "x", {}, [[]], [2**40], 2.5, True, b"\xff", [None]])
def test_a_stored_event_with_any_odd_field_never_breaks(field: int, value: Any) -> None:
    event = block_stored("vllm", [1], None, [1, 2, 3, 4])
    event[field] = value

    translated([event])


@settings(max_examples=examples(60))
@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_the_one_error(payload: bytes) -> None:
    try:
        decode_pub(payload)
    except DecodeError:
        pass


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
stored_names = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
]


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.lists(plain, max_size=10).map(lambda fields: ["BlockStored", *fields])
        | st.lists(plain, max_size=3).map(lambda fields: ["BlockRemoved", *fields])
        | st.dictionaries(st.sampled_from(stored_names), plain).map(lambda fields: {"type": "BlockStored", **fields})
        | plain,
        max_size=4,
    )
)
def test_well_formed_nonsense_decodes_or_raises_the_one_error(events: list[Any]) -> None:
    try:
        batch = decode_pub(msgspec.msgpack.encode([1.0, events]))
    except DecodeError:
        return
    assert all(isinstance(event, (EngineStored, EngineRemoved, EngineCleared)) for event in batch.events)
    EngineTranslator(BLOCK, 100).translate(batch.events)


def test_the_translator_has_a_bound() -> None:
    translator = EngineTranslator(BLOCK, 2)
    translated([block_stored("vllm", [1, 2, 3], None, [1] * 12)], translator)

    assert len(translator) == 0
    assert translator.ignored_blocks == 3


@pytest.mark.parametrize(
    ("tokens", "keys", "kept"),
    [
        ([*range(12)], [[], [{"type": "mm_key", "hash": "f" * 64, "start_offset": 0}], []], 1),
        ([*range(5), "f" * 64, *range(6)], None, 1),
        (["f" * 64, *range(11)], [[{"type": "mm_key", "hash": "f" * 64, "start_offset": 0}], [], []], 0),
        ([*range(12)], [[], [], []], 3),
    ],
)
def test_blocks_of_trtllm_are_text_as_far_as_no_medium_touches_them(tokens: list[Any], keys: Any, kept: int) -> None:
    (event,) = decode_pub(frame_of([{**block_stored("trtllm", [5, 6, 7], None, tokens), "mm_keys": keys}])).events
    assert isinstance(event, EngineStored)
    assert event.hashes == [5, 6, 7][:kept]
    assert event.token_bytes == pack_tokens([*range(12)][: kept * BLOCK])
