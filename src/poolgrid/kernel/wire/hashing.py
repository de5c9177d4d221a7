"""Block hashes and sequence hashes: the values the field already uses, so that our index can talk to others'.

``block_hash``     XXH3-64 of a block's token ids as u32 little-endian. Multimodal object hashes (u64 little-endian,
                   sorted) are appended to the bytes of the blocks they touch.
``sequence_hash``  s0 = block_hash0; s_i = XXH3-64 of the little-endian bytes of [s_{i-1}, block_hash_i], seed 1337.
``seed``           1337 + XXH3-64(lora name, seed 0) + XXH3-64(cache salt, seed 1), wrapping u64; empty = absent.

Only whole blocks are hashed; a trailing partial block gives nothing. Source: Dynamo's documented scheme
(the test vectors of ``docs/internals/wire.md`` were computed with its published bindings).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any, Final

from xxhash import xxh3_64_intdigest

BASE_SEED: Final = 1337
HASH_SPEC: Final = "xxh3-64/1337"
"""Name of this scheme on a worker card; a pool refuses a worker that hashes otherwise."""

TOKEN_BYTES: Final = 4
CUT_BLOCKS: Final = 32
"""Blocks of a prompt that are cut out at a time; for each there is a word of a format, kept ready."""

BLOCK_SIZES_MAX: Final = 16
"""Block sizes whose formats are kept ready; those of more are made again, in some microseconds."""

_U64: Final = 2**64
_LONG_TOKENS: Final = 256
_LITTLE_ENDIAN: Final = sys.byteorder == "little"
_NATIVE_U32: Final = _LITTLE_ENDIAN and array("I").itemsize == TOKEN_BYTES
_Cut = Callable[[bytes | memoryview], Iterator[tuple[Any, ...]]]
_pair: Final = struct.Struct("<QQ")
_digest: Final = xxh3_64_intdigest
_hashes: Final = [struct.Struct(f"<{count}Q") for count in range(513)]
_unpackers: Final = {8 * count: packed.unpack for count, packed in enumerate(_hashes)}
"""Ready-made for the chain lengths of one engine step; making the format costs as much as unpacking ten hashes."""
_packers: Final = [packed.pack for packed in _hashes]
_token_unpackers: Final = {TOKEN_BYTES * count: struct.Struct(f"<{count}I").unpack for count in range(65)}
"""The same for the tokens of a few engine steps."""


def hash_seed(lora_name: str = "", cache_salt: str = "") -> int:
    """Return the block-hash seed of a LoRA adapter and a tenant's cache salt (either empty = absent)."""
    seed = BASE_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed % _U64


@lru_cache(BLOCK_SIZES_MAX)
def _cuts(stride: int) -> tuple[_Cut, _Cut]:
    """Return what cuts bytes into blocks of ``stride``: one at a time, and ``CUT_BLOCKS`` at a time."""
    return struct.Struct(f"{stride}s").iter_unpack, struct.Struct(f"{stride}s" * CUT_BLOCKS).iter_unpack


def block_hashes(
    token_bytes: bytes | memoryview,
    block_size: int,
    seed: int = BASE_SEED,
    multimodal_hashes: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Hash each whole block of a prompt.

    ``token_bytes`` holds token ids as u32 little-endian; ``block_size`` is in tokens (at least 1);
    ``multimodal_hashes`` maps a block's position to the u64 hashes of the objects that touch it.
    """
    if block_size < 1:
        raise ValueError(f"hashing blocks: block_size is {block_size}, allowed are integers from 1")
    stride = block_size * TOKEN_BYTES
    blocks = len(token_bytes) // stride
    if not blocks:
        return []
    digest = _digest
    view = memoryview(token_bytes)
    each_block, each_cut = _cuts(stride)
    cut = blocks - blocks % CUT_BLOCKS
    # Blocks are copied many at a time: that takes half the time of a memoryview for each, and is free again at once.
    hashes: list[int] = []
    if cut:
        for some in each_cut(view[: cut * stride]):
            hashes.extend(map(digest, some, repeat(seed)))
    hashes.extend(map(digest, chain.from_iterable(each_block(view[cut * stride : blocks * stride])), repeat(seed)))
    if multimodal_hashes:
        for position, objects in multimodal_hashes.items():
            if 0 <= position < len(hashes) and objects:
                at = position * stride
                suffix = struct.pack(f"<{len(objects)}Q", *sorted(objects))
                hashes[position] = digest(bytes(view[at : at + stride]) + suffix, seed)
    return hashes


def sequence_hashes(hashes: Sequence[int], parent: int | None = None) -> list[int]:
    """Chain block hashes into sequence hashes, as a continuation of ``parent`` or from the root."""
    chained: list[int] = []
    append = chained.append
    if parent is None:
        if not hashes:
            return chained
        parent, hashes = hashes[0], hashes[1:]
        append(parent)
    pack = _pair.pack
    digest = _digest
    for block_hash in hashes:
        parent = digest(pack(parent, block_hash), BASE_SEED)
        append(parent)
    return chained


def path_of(token_bytes: bytes, block_size: int, seed: int = BASE_SEED) -> array[int]:
    """Return the sequence hashes of the whole blocks of a short prompt, as ``sequence_hashes(block_hashes(...))`` does,
    in one go."""
    stride = block_size * TOKEN_BYTES
    pack = _pair.pack
    digest = _digest
    chained: list[int] = []
    parent = 0
    for at in range(0, len(token_bytes) - len(token_bytes) % stride, stride):
        block = digest(token_bytes[at : at + stride], seed)
        parent = digest(pack(parent, block), BASE_SEED) if at else block
        chained.append(parent)
    return array("Q", chained)


def child_hash(token_bytes: bytes, parent: int, seed: int = BASE_SEED) -> int:
    """Return the sequence hash of one whole block behind ``parent``.

    The result of ``sequence_hashes(block_hashes(token_bytes, ...), parent)`` for one block, in a tenth of its time:
    engines that generate store their blocks one by one.
    """
    return _digest(_pair.pack(parent, _digest(token_bytes, seed)), BASE_SEED)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack u64 hashes for the wire: little-endian, 8 bytes each."""
    if _LITTLE_ENDIAN and type(hashes) is array and hashes.typecode == "Q":
        return hashes.tobytes()
    count = len(hashes)
    return _packers[count](*hashes) if count < len(_packers) else struct.pack(f"<{count}Q", *hashes)


def unpack_hashes(packed: bytes) -> tuple[int, ...]:
    """Unpack the hashes of an event; the codec has checked that the length is a multiple of 8."""
    size = len(packed)
    unpack = _unpackers.get(size)
    return struct.unpack(f"<{size // 8}Q", packed) if unpack is None else unpack(packed)


def _swapped(packed: bytes) -> array[int]:
    hashes = array("Q", packed)
    hashes.byteswap()
    return hashes


hash_array: Final[Callable[[bytes], array[int]]] = partial(array, "Q") if _LITTLE_ENDIAN else _swapped
"""Returns the hashes of an event as an array, for what keeps them or looks at each: no object for each, nothing for the
collector, no call of Python's."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids for the wire: u32 little-endian, 4 bytes each."""
    if len(token_ids) >= _LONG_TOKENS and _NATIVE_U32:
        # No argument per token, and half the time; out of range raises OverflowError here, struct.error below.
        return array("I", token_ids).tobytes()
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes | memoryview) -> tuple[int, ...]:
    """Unpack token ids; the codec has checked that the length is a multiple of 4."""
    size = len(packed)
    unpack = _token_unpackers.get(size)
    return struct.unpack(f"<{size // TOKEN_BYTES}I", packed) if unpack is None else unpack(packed)


def stable_u64(text: str, seed: int = 0) -> int:
    """Hash text to a u64 that is the same in every process and run: the source of ties and samples."""
    return _digest(text.encode(), seed)
