"""Prompts: the same id is the same tokens, different ids differ, and every form says the same thing."""

from __future__ import annotations

import statistics
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.plugins.bench.conversations import (
    PAUSE_MAX,
    ConversationShape,
    PlannedConversation,
    plan_conversations,
)
from poolgrid.plugins.bench.prompt import WORDS, PlannedRequest, PromptMaker, block_symbols, digits_of

block_ids = st.integers(0, 2**32 - 1)
bases = st.integers(2, 300)


def request(*ids: int, isl: int, block_tokens: int = 16) -> PlannedRequest:
    return PlannedRequest(0, None, ids, block_tokens, isl, 1)


class TestBlocks:
    def test_a_block_is_the_same_in_every_process_and_version(self) -> None:
        # 1000 = 4 · 240 + 40 in five digits, then SplitMix64 seeded with 1000, computed with plain integers.
        assert block_symbols(1000, 12, 240) == [40, 4, 0, 0, 0, 66, 116, 71, 74, 21, 11, 40]

    @given(block_id=st.integers(0, 2**64 - 1), base=bases, short=st.integers(0, 40), long=st.integers(0, 40))
    def test_a_shorter_block_is_a_prefix_of_the_longer_one(
        self, block_id: int, base: int, short: int, long: int
    ) -> None:
        short, long = min(short, long), max(short, long)

        assert block_symbols(block_id, short, base) == block_symbols(block_id, long, base)[:short]

    @given(one=block_ids, other=block_ids, base=bases, more=st.integers(0, 20))
    def test_blocks_of_different_ids_differ_as_soon_as_the_ids_fit(
        self, one: int, other: int, base: int, more: int
    ) -> None:
        count = max(digits_of(one, base), digits_of(other, base)) + more

        assert (block_symbols(one, count, base) == block_symbols(other, count, base)) == (one == other)


class TestForms:
    @given(
        ids=st.lists(block_ids, min_size=1, max_size=5).map(tuple),
        last=st.integers(1, 16),
        first_token=st.integers(0, 100),
        width=st.integers(2, 1000),
    )
    def test_json_and_token_ids_agree_and_have_the_length_asked_for(
        self, ids: tuple[int, ...], last: int, first_token: int, width: int
    ) -> None:
        prompts = PromptMaker(first_token, first_token + width - 1)
        wanted = request(*ids, isl=(len(ids) - 1) * 16 + last)

        tokens = prompts.token_ids(wanted)

        assert len(tokens) == wanted.isl
        assert min(tokens) >= first_token
        assert max(tokens) < first_token + width
        assert msgspec.json.decode(prompts.tokens_json(wanted)) == tokens

    def test_text_has_one_word_per_token_and_shares_prefixes(self) -> None:
        prompts = PromptMaker(16, 255)

        one = prompts.text(request(1, 2, isl=20)).split(" ")
        other = prompts.text(request(1, 3, isl=32)).split(" ")

        assert (len(one), len(other)) == (20, 32)
        assert one[:16] == other[:16]
        assert one[16] != other[16]
        assert set(one) <= set(WORDS)

    @pytest.mark.parametrize(("first", "last"), [(5, 5), (9, 8), (-1, 5)])
    def test_a_range_without_choice_is_refused(self, first: int, last: int) -> None:
        with pytest.raises(ValueError, match=f"token ids from {first} to {last}"):
            PromptMaker(first, last)


def planned(count: int, seed: int = 0, **shape: float) -> list[PlannedConversation]:
    told = ConversationShape(**{"turns": 4, "isl": 10, "osl": 2, **shape})  # type: ignore[arg-type]
    return list(islice(plan_conversations(told, seed), count))


def test_the_same_seed_plans_the_same_and_another_one_nothing_of_it() -> None:
    first = planned(20, shared_prefix=30, think_time_s=1.0)

    assert first == planned(20, shared_prefix=30, think_time_s=1.0)
    other = planned(20, 1, shared_prefix=30, think_time_s=1.0)
    blocks = {block for each in first for turn in each.turns for block in turn.block_ids}
    assert blocks.isdisjoint(block for each in other for turn in each.turns for block in turn.block_ids)


def test_every_question_is_new_and_the_conversations_share_the_system_prompt() -> None:
    made = planned(60, shared_prefix=30)

    systems = [each.turns[0].block_ids[0] for each in made]
    own = [turn.block_ids[-1] for each in made for turn in each.turns]
    assert len(set(systems)) == 1
    assert len(set(own)) == len(own) == 240
    assert [turn.index for each in made for turn in each.turns] == list(range(240))
    assert {(turn.system_blocks, turn.isl) for each in made for turn in each.turns} == {(1, 40), (0, 10)}


def test_users_think_before_each_question_but_the_first() -> None:
    made = planned(500, think_time_s=0.5)

    assert {each.pauses_ms[0] for each in made} == {0.0}
    pauses = [pause for each in made for pause in each.pauses_ms[1:]]
    assert 450 < statistics.fmean(pauses) < 550
    assert max(pauses) <= PAUSE_MAX * 500
    assert {pause for each in planned(3) for pause in each.pauses_ms} == {0.0}
