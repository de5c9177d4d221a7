"""TensorRT-LLM's block hash "v1", and what a salt and a SHA-256 name become in it: the only place in the fake.

``python -m tests.trtllm_upstream`` compares it with upstream's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256, sha512

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


def salt_id(cache_salt: str, algorithm: str = "sha256") -> int:
    """Return the 64-bit id of a cache salt.

    ``sha256``: the second cache manager. ``blake3``: versions before 1.3. ``std``: the first manager since, which takes
    the hash of its C++ library; nobody else can compute it, so any other hash stands for it.
    """
    text = cache_salt.encode()
    digests = {"sha256": sha256(text).digest(), "blake3": blake3(text).digest(), "std": sha512(text).digest()}
    return int.from_bytes(digests[algorithm][:8], "little")


def truncated(digest: bytes) -> int:
    """Return the integer that stands for a SHA-256 name (``v2_sha256_64``)."""
    return int.from_bytes(digest[:8], "big")


def radix_key(
    above: bytes | None,
    tokens: Sequence[int | str],
    cache_salt_id: int | None = None,
    lora_task_id: int | None = None,
) -> bytes:
    """Return the second cache manager's own name of a block: its tokens on the name above, or on its scope's.

    A token is 4 bytes, little-endian; the digest of a medium stands as it is.
    """
    if above is None:
        fields = (lora_task_id, cache_salt_id)
        mask = sum(1 << at for at, each in enumerate(fields) if each is not None)
        numbers = (each.to_bytes(8, "little") for each in fields if each is not None)
        above = sha256(bytes([mask]) + b"".join(numbers)).digest()
    written = (bytes.fromhex(each) if isinstance(each, str) else each.to_bytes(4, "little") for each in tokens)
    return sha256(above + b"".join(written)).digest()
