"""TensorRT-LLM's block hash "v1", after its description in ``contract_1_2_1.json`` (``block_hash``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B9

MultimodalKey = tuple[bytes, int]
"""The 32-byte hash of an object and where in it the block starts."""


def _mix32(seed: int, value: int) -> int:
    v = value & _U32
    v = (((v >> 16) ^ v) * 0x45D9F3B) & _U32
    v = (((v >> 16) ^ v) * 0x45D9F3B) & _U32
    v = (v >> 16) ^ v
    # The constant is added in 32 bits, the rest in 64.
    return seed ^ (((v + _GOLDEN) & _U32) + (seed << 6) + (seed >> 2)) & _U64


def _mix64(seed: int, value: int) -> int:
    v = value & _U64
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & _U64
    v ^= v >> 31
    return seed ^ (v + _GOLDEN + (seed << 6) + (seed >> 2)) & _U64


def block_key_hash(
    tokens: Sequence[int],
    parent: int = 0,
    cache_salt_id: int | None = None,
    lora_task_id: int | None = None,
    multimodal: Iterable[MultimodalKey] = (),
) -> int:
    """Return the u64 name of a block: its tokens on its parent's name (0 = root)."""
    seed = len(tokens) ^ (parent * 0xBF58476D1CE4E5B9 & _U64)
    if not parent and cache_salt_id is not None:
        seed = _mix64(seed, cache_salt_id)
    for token in tokens:
        seed = _mix32(seed, token)
    if lora_task_id is not None:
        seed = _mix64(seed, lora_task_id)
    for digest, start in multimodal:
        for at in range(0, 32, 4):
            seed = _mix32(seed, int.from_bytes(digest[at : at + 4], "little"))
        seed = _mix64(seed, start)
    return seed


def salt_id(cache_salt: str) -> int:
    """Return the 64-bit id of a cache salt."""
    return int.from_bytes(blake3(cache_salt.encode()).digest()[:8], "little")
