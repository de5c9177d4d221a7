"""The memory of prompts against an unbounded one that looks at every block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.serving.prompt_paths import BLOCK_BYTES, PART_BYTES, ReuseSketch

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=40)
"""Few kinds of blocks, so that prompts begin alike."""


def path_of(blocks: list[int]) -> list[int]:
    """A hash for each block that stands for all before it too."""
    return [hash(tuple(blocks[: count + 1])) % 2**64 for count in range(len(blocks))]


def known_prefix(path: list[int], known: set[int]) -> int:
    for count, block in enumerate(path):
        if block not in known:
            return count
    return len(path)


@given(PROMPTS)
def test_with_room_for_all_it_counts_what_an_infinite_cache_would_have_reused(prompts: list[list[int]]) -> None:
    sketch, everything = ReuseSketch(2 * 40 * (12 * BLOCK_BYTES + PART_BYTES)), set[int]()

    for path in map(path_of, prompts):
        assert sketch.note(path) == known_prefix(path, everything)
        everything.update(path)


@given(PROMPTS, st.integers(0, 60))
def test_it_never_promises_more_than_was_there_and_keeps_to_its_budget(prompts: list[list[int]], blocks: int) -> None:
    budget = blocks * BLOCK_BYTES + blocks // 4 * PART_BYTES
    sketch, everything = ReuseSketch(budget), set[int]()

    for path in map(path_of, prompts):
        assert sketch.note(path) <= known_prefix(path, everything)
        everything.update(path)
        assert sketch.used_bytes <= budget


@given(PROMPTS, st.integers(1, 12))
def test_it_knows_at_least_the_last_prompts_up_to_half_its_bound(prompts: list[list[int]], whole: int) -> None:
    sketch = ReuseSketch(2 * whole * (12 * BLOCK_BYTES + PART_BYTES))
    paths = [path_of(blocks) for blocks in prompts]

    for number, path in enumerate(paths):
        recent = set[int]().union(*paths[max(0, number - whole + 1) : number])
        assert sketch.note(path) >= known_prefix(path, recent)


def test_what_is_asked_for_again_outlives_what_is_not() -> None:
    sketch = ReuseSketch(2 * (20 * BLOCK_BYTES + 5 * PART_BYTES))
    asked_often, asked_once = [1, 2, 3], [4, 5, 6]
    sketch.note(asked_often)
    sketch.note(asked_once)

    for start in range(100, 180, 4):
        sketch.note(list(range(start, start + 4)))
        assert sketch.note(asked_often) == 3

    assert sketch.note(asked_once) == 0


def test_what_a_conversation_adds_turn_by_turn_is_one_part_however_many_branch_off() -> None:
    sketch = ReuseSketch(100_000)
    trunk = path_of(list(range(400)))

    for turn in range(10, 400, 10):
        assert sketch.note(trunk[:turn]) == turn - 10
        branch = path_of([*range(turn - 5), -1])
        assert sketch.note(branch) == turn - 5

    assert sketch.used_bytes == BLOCK_BYTES * len(sketch) + PART_BYTES * (1 + 39)
    assert sketch.note(trunk) == 390
