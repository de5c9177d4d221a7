from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.server.serving.prompt_paths import STRETCH_BLOCKS, PromptPaths
from tests.examples import examples


def plain(token_ids: bytes, block_size: int, seed: int) -> array[int]:
    return array("Q", sequence_hashes(block_hashes(token_ids, block_size, seed)))


prompts = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 3, STRETCH_BLOCKS, STRETCH_BLOCKS * 4, 170])), max_size=6
).map(lambda runs: pack_tokens([token for token, count in runs for _ in range(count)]))


@settings(max_examples=examples(20), database=None)
@given(
    st.lists(st.tuples(prompts, st.sampled_from([1, 2, 4]), st.sampled_from(["", "tenant"])), max_size=12),
    st.sampled_from([0, 3000, 10_000_000]),
)
def test_paths_are_those_of_the_wire_whatever_was_asked_before(
    asked: list[tuple[bytes, int, str]], budget_bytes: int
) -> None:
    paths = PromptPaths(budget_bytes)
    for token_ids, block_size, salt in asked:
        seed = hash_seed(cache_salt=salt)
        assert paths.path(token_ids, block_size, seed) == plain(token_ids, block_size, seed)
        assert paths.used_bytes <= max(budget_bytes, 0)


@settings(max_examples=examples(20), database=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # which conversation
            st.sampled_from(["grow", "grow", "grow", "again", "branch", "shorten"]),
            st.sampled_from([0, 1, 5, 130, 700, 2100]),
        ),
        min_size=4,
        max_size=14,
    ),
    st.sampled_from([60_000, 200_000, 10_000_000]),
)
def test_the_paths_of_conversations_are_right_however_they_interleave(
    turns: list[tuple[int, str, int]], budget_bytes: int
) -> None:
    """All begin with one long system prompt, so they agree in their samples."""
    paths = PromptPaths(budget_bytes)
    system = list(range(2100))
    held = {conversation: [*system, conversation] for conversation in range(3)}
    for number, (conversation, what, tokens) in enumerate(turns):
        said = held[conversation]
        if what == "branch":
            said = [*said[: len(said) - min(tokens, len(said) // 4)], 7, number]
        elif what == "shorten":
            said = said[: max(1, len(said) - tokens)]
        elif what == "grow":
            said = [*said, *(number * 31 + token % 3 for token in range(tokens))]
        held[conversation] = said
        packed = pack_tokens(said)
        assert paths.path(packed, 4, 1337) == plain(packed, 4, 1337)
        assert paths.used_bytes <= budget_bytes


def test_a_later_turn_costs_its_new_blocks_only_however_many_conversations_begin_alike() -> None:
    paths = PromptPaths()
    held = {number: [*range(3000), *(number,) * 4] for number in range(6)}
    for said in held.values():
        paths.path(pack_tokens(said), 4, 1337)
    for turn in range(3):
        for number in held:
            before = paths.reused_blocks
            known = len(held[number]) // 4
            held[number] = [*held[number], *range(9000 * number + turn, 9000 * number + turn + 200)]
            paths.path(pack_tokens(held[number]), 4, 1337)
            assert paths.reused_blocks - before == known
    assert len(paths._recent) == len(held), "a turn takes the place of the one before"


def test_a_prompt_found_for_one_that_grows_may_be_forgotten_meanwhile() -> None:
    paths = PromptPaths(120_000)
    first = pack_tokens(range(2100))
    paths.path(first, 4, 1337)
    longer = first + pack_tokens(range(5000))
    growing = array("Q")
    for number, _ in enumerate(paths.grow(growing, longer, 4, 1337)):
        other = pack_tokens(range(number, number + 2500))
        assert paths.path(other, 4, 1337) == plain(other, 4, 1337)
    assert growing == plain(longer, 4, 1337)
    assert paths.used_bytes <= 120_000
