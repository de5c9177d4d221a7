"""The hash scheme against its published vectors, a naive reimplementation, and what must be true of it."""

from __future__ import annotations

import random
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.hashing import (
    BASE_SEED,
    CUT_BLOCKS,
    HASH_SPEC,
    block_hashes,
    hash_array,
    hash_seed,
    pack_hashes,
    pack_tokens,
    sequence_hashes,
    stable_u64,
)
from poolgrid.kernel.wire.limits import U32_MAX, U64_MAX

TOKENS = pack_tokens(range(64))

# Tokens 0..63, block size 16. Computed with Dynamo's published bindings.
PLAIN = [15310707395893867146, 15292316782987903195, 5532946206955930018, 14928757266181269122]
FIRST_WITH = {
    ("a", ""): 13515555613885636154,
    ("", "s"): 10918622510783919058,
    ("a", "s"): 10359633570180259448,
}
FIRST_WITH_MULTIMODAL_5 = 14492624133500104032
CHAIN = [15310707395893867146, 13769157705258532664, 11879827756109914528, 3888788807566526800]

u64s = st.integers(0, U64_MAX)
u32s = st.integers(0, U32_MAX)


class TestVectors:
    def test_blocks_of_64_tokens(self) -> None:
        assert block_hashes(TOKENS, 16) == PLAIN

    def test_the_scheme_has_a_name_and_a_seed(self) -> None:
        assert (HASH_SPEC, BASE_SEED, hash_seed()) == ("xxh3-64/1337", 1337, 1337)

    @pytest.mark.parametrize(("lora_name", "cache_salt"), FIRST_WITH)
    def test_lora_and_salt_change_the_seed(self, lora_name: str, cache_salt: str) -> None:
        hashes = block_hashes(TOKENS, 16, hash_seed(lora_name, cache_salt))

        assert hashes[0] == FIRST_WITH[lora_name, cache_salt]
        assert set(hashes).isdisjoint(PLAIN)

    def test_a_lora_and_a_salt_of_the_same_name_differ(self) -> None:
        assert hash_seed("x", "") != hash_seed("", "x")

    def test_multimodal_objects_change_only_the_blocks_they_touch(self) -> None:
        assert block_hashes(TOKENS, 16, multimodal_hashes={0: [5]}) == [FIRST_WITH_MULTIMODAL_5, *PLAIN[1:]]

    def test_multimodal_objects_of_a_block_are_sorted(self) -> None:
        one_way = block_hashes(TOKENS, 16, multimodal_hashes={1: [7, 5]})

        assert one_way == block_hashes(TOKENS, 16, multimodal_hashes={1: [5, 7]})
        assert one_way[1] == 8436477856552151290
        assert [one_way[0], *one_way[2:]] == [PLAIN[0], *PLAIN[2:]]

    @pytest.mark.parametrize("positions", [{4: [5]}, {-1: [5]}, {0: []}, {}])
    def test_multimodal_objects_outside_the_whole_blocks_change_nothing(self, positions: dict[int, list[int]]) -> None:
        assert block_hashes(TOKENS, 16, multimodal_hashes=positions) == PLAIN

    def test_the_sequence_chain(self) -> None:
        assert sequence_hashes(PLAIN) == CHAIN

    def test_stable_u64_is_the_same_in_every_process(self) -> None:
        assert stable_u64("poolgrid") == 9366607096777903204
        assert stable_u64("poolgrid", 1) == 2570018248422307547


class TestBlocks:
    @pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (63, 3)])
    def test_only_whole_blocks_are_hashed(self, tokens: int, blocks: int) -> None:
        assert block_hashes(TOKENS[: 4 * tokens], 16) == PLAIN[:blocks]

    @pytest.mark.parametrize("block_size", [1, 7, 16, 64])
    @pytest.mark.parametrize("blocks", [1, CUT_BLOCKS - 1, CUT_BLOCKS, CUT_BLOCKS + 1, 3 * CUT_BLOCKS, 200])
    def test_each_block_of_a_long_prompt_is_hashed_by_its_own_tokens_alone(self, block_size: int, blocks: int) -> None:
        size = 4 * block_size
        packed = random.Random(blocks).randbytes(size * blocks + size - 1)

        expected = [xxh3_64_intdigest(packed[at : at + size], 5) for at in range(0, size * blocks, size)]
        assert block_hashes(packed, block_size, 5) == expected
        assert block_hashes(memoryview(packed), block_size, 5) == expected

    @pytest.mark.parametrize("block_size", [0, -1])
    def test_a_block_size_below_one_is_refused_by_value(self, block_size: int) -> None:
        with pytest.raises(ValueError, match=f"block_size is {block_size}, allowed are integers from 1"):
            block_hashes(TOKENS, block_size)

    @given(
        tokens=st.lists(u32s, max_size=70),
        block_size=st.integers(1, 20),
        seed=u64s,
        objects=st.dictionaries(st.integers(0, 5), st.lists(u64s, max_size=3), max_size=3),
    )
    def test_equals_the_definition(
        self, tokens: list[int], block_size: int, seed: int, objects: dict[int, list[int]]
    ) -> None:
        expected = []
        for position in range(len(tokens) // block_size):
            block = tokens[position * block_size : (position + 1) * block_size]
            data = b"".join(struct.pack("<I", token) for token in block)
            data += b"".join(struct.pack("<Q", item) for item in sorted(objects.get(position, [])))
            expected.append(xxh3_64_intdigest(data, seed))

        assert block_hashes(pack_tokens(tokens), block_size, seed, objects) == expected
        assert block_hashes(memoryview(pack_tokens(tokens)), block_size, seed, objects) == expected


class TestSequences:
    @given(hashes=st.lists(u64s, max_size=20), cut=st.integers(0, 20))
    def test_a_chain_continues_from_its_parent(self, hashes: list[int], cut: int) -> None:
        whole = sequence_hashes(hashes)
        head, tail = hashes[:cut], hashes[cut:]

        first = sequence_hashes(head)

        assert first + sequence_hashes(tail, first[-1] if first else None) == whole

    @given(hashes=st.lists(u64s, min_size=1, max_size=20))
    def test_equals_the_definition(self, hashes: list[int]) -> None:
        previous = hashes[0]
        for item, found in zip(hashes[1:], sequence_hashes(hashes)[1:], strict=True):
            previous = xxh3_64_intdigest(struct.pack("<QQ", previous, item), 1337)
            assert found == previous


@given(st.lists(st.integers(0, 2**64 - 1), max_size=80))
def test_hashes_as_an_array_are_those_that_were_packed(hashes: list[int]) -> None:
    assert hash_array(pack_hashes(hashes)).tolist() == hashes


def test_hashes_are_packed_alike_whatever_holds_them() -> None:
    hashes = [0, 1, 2**64 - 1, *range(600)]
    for some in (hashes[:3], hashes):
        packed = struct.pack(f"<{len(some)}Q", *some)
        assert pack_hashes(some) == pack_hashes(tuple(some)) == pack_hashes(array("Q", some)) == packed
    assert pack_hashes(array("I", [1, 2])) == pack_hashes([1, 2])
