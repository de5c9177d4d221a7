"""TensorRT-LLM's own block hash, "v1", as far as it tells requests with a salt or an adapter from those without. Pure.

Source: the description in the collected facts (``docs/trtllm.md``), which agrees with the engine's main line. Only the
first block of a chain is needed here. Arithmetic is modulo 2^64; the mix of a token wraps at 32 bits in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

_U32 = 0xFFFF_FFFF
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9


def salt_id(cache_salt: str) -> int:
    """Return the number that stands for a cache salt: the first 8 bytes, little-endian, of its BLAKE3 digest."""
    return int.from_bytes(blake3(cache_salt.encode()).digest()[:8], "little")


def root_key(token_ids: Sequence[int], cache_salt: str = "", lora_number: int | None = None) -> int:
    """Return the engine's hash of a first block."""
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
