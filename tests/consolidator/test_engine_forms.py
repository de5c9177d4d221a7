"""What events of engines mean beyond one hash, one block: several hashes of one name, larger and smaller blocks,
reports of what is reused, and what an engine computes again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from poolgrid.kernel.kv_events import translation
from poolgrid.kernel.kv_events.pub import decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.wire.events import FOLLOWED_GROUP, AnyEvent, BlocksRemoved, BlocksStored, GroupsReported, KvGroup
from poolgrid.kernel.wire.hashing import block_hashes, child_hash, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pub_engine import frame_of

BLOCK = 4
TOKENS = list(range(100, 140))
NAMES = sequence_hashes(block_hashes(pack_tokens(TOKENS), BLOCK))


LARGE = {"block_size": 2 * BLOCK}


class Reader:
    """What a router holds of an engine, by group and tier."""

    def __init__(self, block_size: int = BLOCK, drafts: bool = False) -> None:
        self.translator = EngineTranslator(block_size, 1000, drafts=drafts)
        self.held: dict[tuple[int, Tier], set[int]] = {}
        self.reports: list[GroupsReported] = []

    def take(self, *events: dict[str, Any]) -> list[AnyEvent]:
        told = self.translator.translate(decode_pub(frame_of(list(events))).events)
        for event in told:
            if isinstance(event, GroupsReported):
                self.reports.append(event)
            elif isinstance(event, BlocksStored | BlocksRemoved):
                held = self.held.setdefault((event.group, event.tier), set())
                change = held.update if isinstance(event, BlocksStored) else held.difference_update
                change(unpack_hashes(event.sequence_hashes))
        return told

    def of(self, group: int = 0, tier: Tier = Tier.DEVICE) -> set[int]:
        return self.held.get((group, tier), set())


def stored(hashes: list[int], begin: int = 0, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """Blocks of ``TOKENS`` from block ``begin`` on."""
    size = more.get("block_size", BLOCK)
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": TOKENS[begin * size : (begin + len(hashes)) * size],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def full(group: int = 0) -> dict[str, Any]:
    return {"group_idx": group, "kv_cache_spec_kind": "full_attention"}


def window(tokens: int, group: int = 1) -> dict[str, Any]:
    return {"group_idx": group, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": tokens}


def state(group: int = 1) -> dict[str, Any]:
    return {"group_idx": group, "kv_cache_spec_kind": "mamba"}


@pytest.mark.parametrize("groups", [[{}], [full(), full(1)]], ids=["one group", "two groups"])
def test_a_name_is_held_while_one_of_its_hashes_is(groups: list[dict[str, Any]]) -> None:
    reader = Reader()
    for engine_hash in (10, 11):
        for group in groups:
            reader.take(stored([engine_hash], lookahead_token_ids=[[engine_hash]], **group))
    reader.take(stored([20], 1, 11, **groups[0]))
    for group in groups:
        number = {name: group[name] for name in ("group_idx",) if name in group}
        reader.take(removed(10, **number))
        assert NAMES[0] in reader.of()
    for group in groups:
        number = {name: group[name] for name in ("group_idx",) if name in group}
        reader.take(removed(11, **number))
        assert NAMES[0] not in reader.of()


def test_a_name_is_held_by_tier() -> None:
    reader = Reader()
    reader.take(stored([10]), stored([11]), stored([10], medium="CPU"))
    reader.take(removed(10), removed(11))
    assert reader.of() == set()
    assert reader.of(tier=Tier.HOST) == {NAMES[0]}
    reader.take(removed(10, medium="CPU"))
    assert reader.of(tier=Tier.HOST) == set()
    assert len(reader.translator) == 0


def test_tokens_may_come_in_pairs_with_those_behind_them() -> None:
    pairs = [list(pair) for pair in pairwise(TOKENS[:9])]
    reader = Reader()
    reader.take(stored([1, 2]) | {"token_ids": pairs})
    assert reader.of() == set(NAMES[:2])


def followed(*blocks: int) -> set[int]:
    """Names of blocks of ``TOKENS`` with the token behind them."""
    return {child_hash(pack_tokens([TOKENS[(block + 1) * BLOCK]]), NAMES[block]) for block in blocks}


def test_blocks_of_hashes_that_look_ahead_are_told_with_the_tokens_behind_them() -> None:
    behind: dict[str, Any] = {"lookahead_token_ids": [[TOKENS[BLOCK]], [TOKENS[2 * BLOCK]]]}
    pairs = {"token_ids": [list(pair) for pair in pairwise(TOKENS[: 2 * BLOCK + 1])]}
    for form in (behind, pairs):
        reader = Reader()
        reader.take(stored([1, 2]) | form)
        assert reader.reports == [GroupsReported((), following_tokens=1)]
        assert reader.of(FOLLOWED_GROUP) == followed(0, 1)
        reader.take(removed(2))
        assert reader.of(FOLLOWED_GROUP) == followed(0)


def test_a_block_is_followed_while_all_groups_hold_it_under_one_hash() -> None:
    reader = Reader()
    behind: dict[str, Any] = {"lookahead_token_ids": [[TOKENS[BLOCK]], [TOKENS[2 * BLOCK]]]}
    reader.take(stored([1, 2], **full(), **behind), stored([1, 2], **window(5), **behind))
    assert reader.of(FOLLOWED_GROUP) == followed(0, 1)
    reader.take(removed(2, group_idx=1), stored([12], 1, 1, **window(5), lookahead_token_ids=[[7]]))
    assert reader.of(1) == set(NAMES[:2]), "another hash of the block has the same name"
    assert reader.of(FOLLOWED_GROUP) == followed(0)
    reader.take(stored([2], 1, 1, **state(2), lookahead_token_ids=[[TOKENS[2 * BLOCK]]]))
    assert reader.of(FOLLOWED_GROUP) == set(), "a group that is met later has none of the blocks before it"
    reader.take(stored([2], 1, 1, **window(5), lookahead_token_ids=[[TOKENS[2 * BLOCK]]]))
    assert reader.of(FOLLOWED_GROUP) == followed(1)
    assert reader.reports[-1].following_tokens == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_group_whose_first_event_leaves_all_blocks_out_says_nothing_of_what_is_behind_them(at_once: bool) -> None:
    reader = Reader(drafts=True)
    events = [stored([1], **state()) | {"block_hashes": []}, stored([1], **full(), lookahead_token_ids=[[7]])]
    for each in [events] if at_once else [events[1:], events[:1]]:
        reader.take(*each)
    assert reader.reports[-1] == GroupsReported((KvGroup(1),), following_tokens=1)
    assert len(reader.of(FOLLOWED_GROUP)) == 0, "the state has not stored the block"


@pytest.mark.parametrize("behind", [None, [], [[1]], [[1], []], [[1], [-1]], [[1], ["a"]], [[1], 2], [[], []]])
def test_tokens_behind_blocks_that_make_no_sense_are_not_looked_at(behind: Any) -> None:
    reader = Reader()
    reader.take(stored([1, 2], lookahead_token_ids=behind))
    assert (reader.reports, reader.of()) == ([], set(NAMES[:2]))


@pytest.mark.parametrize("pair", [[1], [1, 2, 3], 4, [-1, 2], [[1, 2], 3]])
def test_a_pair_that_is_none_is_left_out_and_named(pair: Any) -> None:
    batch = decode_pub(frame_of([stored([1]) | {"token_ids": [[1, 2], [2, 3], [3, 4], pair]}]))
    assert (batch.events, batch.ignored, batch.why_ignored) == ([], 1, "token_ids")


@pytest.mark.parametrize("blocks", [1, 3])
def test_what_is_reused_and_reported_again_is_no_copy(blocks: int) -> None:
    hashes = list(range(1, 1 + blocks))
    reader = Reader()
    reader.take(stored(hashes))
    reader.take(stored(hashes), stored([9], blocks, blocks))
    reader.take(removed(9, *reversed(hashes)))
    assert reader.of() == set()
    assert len(reader.translator) == 0


def test_blocks_that_two_requests_computed_at_once_are_copies() -> None:
    """Below a parent, and from the root on where more follows: an engine begins behind what it holds."""
    reader = Reader()
    reader.take(stored([1, 2]), stored([1, 2, 3]), stored([4], 3, 3), stored([4], 3, 3))
    reader.take(removed(4, 3, 2, 1))
    assert reader.of() == {NAMES[0], NAMES[1], NAMES[3]}
    reader.take(removed(4, 2, 1))
    assert reader.of() == set()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("other", [window(BLOCK + 1), state()], ids=["window", "state"])
def test_reports_are_of_all_groups_and_stores_where_nothing_could_be_resumed_are_none(
    other: dict[str, Any], turned: bool
) -> None:
    def of_groups(hashes: list[int], other_hashes: list[int]) -> list[dict[str, Any]]:
        tokens = {"token_ids": TOKENS[: len(hashes) * BLOCK]}
        events = [stored(hashes, **full()), stored(other_hashes, **other) | tokens]
        return events[::-1] if turned else events

    reader = Reader()
    reader.take(*of_groups([1, 2, 3], [3]))
    reader.take(*of_groups([1, 2, 3], [1, 2, 3]))  # a report: it names blocks that the other group never held
    reader.take(removed(3, group_idx=1))
    assert reader.of(1) == set()
    # Nothing can be resumed any more: all of it is computed again, beside what full attention still holds.
    reader.take(*of_groups([1, 2, 3], [3]))
    reader.take(removed(3, 2, 1, group_idx=0))
    assert reader.of() == set(NAMES[:3])
    reader.take(removed(3, 2, 1, group_idx=0), removed(3, group_idx=1))
    assert reader.of() == reader.of(1) == set()


def test_a_block_that_is_larger_is_as_many_of_the_indexs() -> None:
    reader = Reader()
    reader.take(stored([1, 2], block_size=2 * BLOCK, **full()))
    assert reader.of() == set(NAMES[:4])
    assert reader.translator.other_block_size == 0
    reader.take(stored([3], 2, 2, block_size=2 * BLOCK, **full()), removed(3, 2, group_idx=0))
    assert reader.of() == set(NAMES[:2])


def test_no_event_is_longer_than_events_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "BLOCKS_PER_EVENT_MAX", 8)
    reader = Reader(1)
    chains = reader.take(stored([1, 2]) | {"token_ids": TOKENS[:10], "block_size": 5})
    assert [len(unpack_hashes(each.sequence_hashes)) for each in chains if isinstance(each, BlocksStored)] == [8, 2]
    first, last = chains
    assert isinstance(first, BlocksStored)
    assert isinstance(last, BlocksStored)
    assert last.parent == unpack_hashes(first.sequence_hashes)[-1]
    gone = reader.take(removed(2, 1))
    assert [len(unpack_hashes(each.sequence_hashes)) for each in gone if isinstance(each, BlocksRemoved)] == [8, 2]
    assert reader.of() == set()


def test_a_larger_block_that_left_in_the_message_that_stores_it_keeps_its_parts() -> None:
    small = window(5) | {"block_size": BLOCK}
    reader = Reader()
    reader.take(stored([1], **full(), **LARGE), stored([9, 1], **small))
    reader.take(removed(1, group_idx=0))
    reader.take(removed(9, 1, group_idx=1), stored([1], **full(), **LARGE), stored([9, 1], **small))
    assert reader.of() == set(NAMES[:2])


def test_of_smaller_blocks_than_full_attentions_the_last_stands_for_all() -> None:
    reader = Reader()
    small = stored([1, 10, 2, 20], block_size=BLOCK // 2, **window(5)) | {"token_ids": TOKENS[: 2 * BLOCK]}
    reader.take(stored([10, 20], **full()), small)
    assert reader.reports == [GroupsReported((KvGroup(1),))]
    assert reader.of(1) == set(NAMES[:2])
    reader.take(removed(2, group_idx=1))
    assert reader.of(1) == set(NAMES[:2])
    reader.take(removed(20, group_idx=1))
    assert reader.of(1) == {NAMES[0]}
    assert reader.translator.ignored_blocks == 0


def test_chunked_attention_needs_the_last_block_before_a_place() -> None:
    reader = Reader()
    chunked: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"}
    reader.take(stored([1, 2, 3], **full()), stored([1, 2, 3], **chunked))
    assert reader.reports == [GroupsReported((KvGroup(1),))]
    reader.take(removed(1, group_idx=1))
    assert reader.of(1) == set(NAMES[1:3])


def resumed(reader: Reader, begin: int, count: int, **more: Any) -> None:
    """A request that resumes behind ``begin`` blocks and fills ``count``; hashes are the blocks' numbers from 1 on."""
    reader.take(stored(list(range(begin + 1, begin + 1 + count)), begin, begin or None, **more))


def test_what_is_computed_again_shows_where_a_request_resumed_before_what_is_held() -> None:
    reader = Reader()
    resumed(reader, 0, 4)
    resumed(reader, 3, 2)
    assert reader.reports == [GroupsReported((), recomputed_blocks=1)]


def test_the_last_block_of_a_prompt_is_computed_by_every_engine() -> None:
    """A prompt that is held whole ends with a block that is computed again; so may a request be that reuses nothing."""
    reader = Reader()
    resumed(reader, 0, 4)
    resumed(reader, 3, 1)
    for _ in range(8):
        reader.take()  # its answer is made
    resumed(reader, 4, 2)
    resumed(reader, 0, 6)
    assert reader.reports == []


def test_a_block_that_left_in_the_same_message_may_have_been_found_before() -> None:
    """A request of a full cache takes the place of the very block that it computes again."""
    reader = Reader()
    resumed(reader, 0, 4)
    resumed(reader, 3, 2)
    reader.take(removed(5), stored([5, 6], 4, 4))
    assert reader.reports[-1].recomputed_blocks == 1


def test_a_prompt_that_continues_at_once_did_not_end_with_what_was_computed_again() -> None:
    reader = Reader()
    resumed(reader, 0, 4)
    resumed(reader, 3, 1)
    resumed(reader, 4, 2)
    assert reader.reports == [GroupsReported((), recomputed_blocks=1)]


def test_one_request_that_was_told_to_reuse_nothing_does_not_count_for_long() -> None:
    reader = Reader()
    resumed(reader, 0, 8)
    resumed(reader, 3, 6)
    assert reader.reports[-1].recomputed_blocks == 1
    for chain in range(2000, 5000, 1000):  # others branch off behind what is held
        tokens = {"token_ids": list(range(chain, chain + BLOCK))}
        reader.take(stored([chain], parent=2) | tokens)
    assert reader.reports[-1].recomputed_blocks == 0


def test_a_group_that_lacks_what_it_needs_is_why_full_attention_computes_again() -> None:
    reader = Reader()
    for other in (window(2 * BLOCK + 1), state(2)):
        reader.take(stored([1, 2, 3, 4], **full()), stored([1, 2, 3, 4], **other))
    reader.take(removed(4, group_idx=1))
    reader.take(stored([4, 5], 3, 3, **full()), stored([4, 5], 3, 3, **window(2 * BLOCK + 1)))
    assert all(not report.recomputed_blocks for report in reader.reports)


def test_windows_need_not_hold_what_is_computed_again_where_only_full_attention_drafts() -> None:
    reader, of_window = Reader(), window(2 * BLOCK + 1)
    reader.take(stored([1, 2, 3, 4], **full()), stored([1, 2, 3, 4], **of_window))
    reader.take(stored([4, 5], 3, 3, **full()), stored([4, 5], 3, 3, **of_window))
    assert (reader.reports[-1].recomputed_blocks, reader.reports[-1].recomputes_windows) == (1, True)
    reader.take(removed(3, group_idx=1))
    for _ in range(8):
        reader.take()  # others are served
    reader.take(stored([3, 4], 2, 2, **full()), stored([3, 4], 2, 2, **of_window))
    assert (reader.reports[-1].recomputed_blocks, reader.reports[-1].recomputes_windows) == (1, False)


def test_a_prompt_whose_first_block_is_all_that_is_held_and_is_computed_again_shows_it() -> None:
    reader = Reader()
    resumed(reader, 0, 1)
    reader.take(stored([1, 12]) | {"token_ids": [*TOKENS[:BLOCK], 1, 2, 3, 4]})
    assert reader.reports == [GroupsReported((), recomputed_blocks=1)]


@pytest.mark.parametrize("other", [state(), window(2 * BLOCK)], ids=["states", "windows"])
def test_an_engine_that_drafts_computes_the_last_block_again_until_a_request_shows_otherwise(
    other: dict[str, Any],
) -> None:
    reader = Reader(drafts=True)
    chain = stored([1, 2, 3])
    for _ in range(2):  # requests that compute it at the same time
        reader.take(chain | full(), chain | {"block_hashes": [3]} | other)
    for answer in (21, 22, 23):
        assert [report.recomputed_blocks for report in reader.reports] == [1]
        reader.take(stored([answer], 3, 3, **full()) | {"token_ids": [answer] * BLOCK})
    assert [report.recomputed_blocks for report in reader.reports] == [1, 0], "the third resumed behind all"


def test_full_attention_alone_shows_what_drafts_make_of_it() -> None:
    reader = Reader(drafts=True)
    resumed(reader, 0, 4)
    assert reader.reports == []
    resumed(reader, 3, 2)
    assert reader.reports == [GroupsReported((), recomputed_blocks=1)]


def test_a_larger_block_that_is_computed_again_is_several_of_the_index() -> None:
    reader = Reader()
    for begin, count in ((0, 3), (2, 3)):
        reader.take(stored(list(range(begin + 1, begin + 1 + count)), begin, begin or None, **full(), **LARGE))
    assert reader.reports == [GroupsReported((), recomputed_blocks=2)]


def test_another_life_of_an_engine_may_be_another_engine() -> None:
    reader = Reader()
    resumed(reader, 0, 4)
    resumed(reader, 3, 2)
    reader.translator.clear()
    reader.reports.clear()
    resumed(reader, 0, 4)
    resumed(reader, 4, 2)
    assert reader.reports == []
