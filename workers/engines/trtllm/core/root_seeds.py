"""Which tenant the first block of a chain belongs to: events name neither the cache salt nor the adapter. Pure.

Both enter the engine's own hash, and the worker knows which requests it was given. So for each request with a salt or
an adapter the engine's hash of its first block is computed and remembered with the wire's hash seed. A first block is

1. one of those, by its hash, or by the names of the media that touch it (``media_names``);
2. of the salt that its event names, where the engine names salts and no request with an adapter began with its tokens;
3. nobody's in particular, when no such request began with its tokens, or when its hash is that of the bare tokens;
4. not known, else: an engine that hashes otherwise. It is told to nobody. Tenants never share a key by mistake.

Bounded: the oldest of ``ROOTS_MAX`` first blocks is forgotten; its events came long ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3

from poolgrid.kv_events.cache_events import StoredBlock
from poolgrid.wire.hashing import BASE_SEED, hash_seed, unpack_tokens

ROOTS_MAX = 65_536
"""First blocks that are remembered: far more than an engine has requests."""


class RootSeeds:
    """The first blocks of requests that have a salt or an adapter."""

    def __init__(self, block_size: int) -> None:
        self._bytes = 4 * block_size
        self._seeds: OrderedDict[int, int] = OrderedDict()
        self._tokens: OrderedDict[bytes, None] = OrderedDict()
        self._adapted: OrderedDict[bytes, None] = OrderedDict()
        """First blocks of requests with an adapter."""

    def note(self, token_ids: bytes, lora_name: str, lora_number: int | None, cache_salt: str) -> None:
        """Remember a request that the engine is about to get; its prompt in u32 little-endian."""
        if not (lora_name or cache_salt) or len(token_ids) < self._bytes:
            return
        first = token_ids[: self._bytes]
        key = root_key(unpack_tokens(first), cache_salt, lora_number)
        _remember(self._seeds, key, hash_seed(lora_name, cache_salt))
        _remember(self._tokens, first, None)
        if lora_name:
            _remember(self._adapted, first, None)

    def __call__(self, block: StoredBlock) -> int | None:
        """Return the wire's hash seed of a chain's first block, or ``None`` when it cannot be told."""
        if block.media_hashes:
            # The engine has other tokens for media than the request, and its hash covers more: neither tells.
            return block.hash_seed
        seed = self._seeds.get(block.block_hash)
        if seed is not None:
            return seed
        if block.cache_salt is not None:
            return None if block.tokens in self._adapted else hash_seed("", block.cache_salt)
        if block.tokens not in self._tokens or root_key(unpack_tokens(block.tokens)) == block.block_hash:
            return BASE_SEED
        return None


def _remember(into: OrderedDict, key: object, value: object) -> None:  # type: ignore[type-arg]
    into[key] = value
    into.move_to_end(key)
    if len(into) > ROOTS_MAX:
        into.popitem(last=False)


_U32 = 0xFFFF_FFFF
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9


def salt_id(cache_salt: str) -> int:
    """Return the number that stands for a cache salt: the first 8 bytes, little-endian, of its BLAKE3 digest."""
    return int.from_bytes(blake3(cache_salt.encode()).digest()[:8], "little")


def root_key(token_ids: Sequence[int], cache_salt: str = "", lora_number: int | None = None) -> int:
    """Return the engine's hash, "v1", of a first block.

    Source: the collected facts (``docs/trtllm.md``). Arithmetic is modulo 2^64; the mix of a token wraps at 32 bits.
    """
    seed = len(token_ids)
    if cache_salt:
        seed = _mix_64(seed, salt_id(cache_salt))
    for token_id in token_ids:
        value = token_id & _U32
        value = ((value >> 16) ^ value) * 0x45D9_F3B & _U32
        value = ((value >> 16) ^ value) * 0x45D9_F3B & _U32
        value = (value >> 16) ^ value
        seed ^= (((value + _GOLDEN) & _U32) + (seed << 6) + (seed >> 2)) & _U64
    if lora_number is not None:
        seed = _mix_64(seed, lora_number)
    return seed


def _mix_64(seed: int, value: int) -> int:
    value &= _U64
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & _U64
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & _U64
    value ^= value >> 31
    return seed ^ ((value + _GOLDEN + (seed << 6) + (seed >> 2)) & _U64)
