"""Conversations as they are planned: the same for the same seed, sharing system prompts and nothing else."""

from __future__ import annotations

import statistics
from itertools import islice, repeat

from poolgrid.tools.bench.agents import PREFIX_TOKENS
from poolgrid.tools.bench.conversations import (
    AGENT_TENANTS,
    PAUSE_MAX,
    ConversationShape,
    PlannedConversation,
    plan_agents,
    plan_conversations,
)


def planned(count: int, seed: int = 0, **shape: float) -> list[PlannedConversation]:
    told = ConversationShape(**{"turns": 4, "isl": 10, "osl": 2, **shape})  # type: ignore[arg-type]
    return [each for each, _ in zip(plan_conversations(repeat(None), told, seed), range(count), strict=False)]


def test_the_same_seed_plans_the_same_and_another_one_nothing_of_it() -> None:
    first = planned(20, shared_prefix=30, think_time_s=1.0)

    assert first == planned(20, shared_prefix=30, think_time_s=1.0)
    other = planned(20, 1, shared_prefix=30, think_time_s=1.0)
    blocks = {block for each in first for turn in each.turns for block in turn.block_ids}
    assert blocks.isdisjoint(block for each in other for turn in each.turns for block in turn.block_ids)


def test_every_question_is_new_and_each_conversation_has_one_of_the_system_prompts() -> None:
    made = planned(60, shared_prefix=30, shared_prefixes=3)

    systems = [each.turns[0].block_ids[0] for each in made]
    own = [turn.block_ids[-1] for each in made for turn in each.turns]
    assert len(set(systems)) == 3
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


def test_agents_are_planned_without_end_and_share_the_system_prompt_of_their_tenant() -> None:
    made = list(islice(plan_agents(1, 0.1), 60))

    assert made == list(islice(plan_agents(1, 0.1), 60))
    turns = [turn for each in made for turn in each.turns]
    assert [turn.index for turn in turns] == list(range(len(turns)))
    assert len({each.turns[0].block_ids[0] for each in made}) == AGENT_TENANTS
    assert {each.turns[0].block_tokens for each in made} == {PREFIX_TOKENS // 10}
    assert all(len(each.pauses_ms) == len(each.turns) and each.pauses_ms[0] == 0.0 for each in made)
