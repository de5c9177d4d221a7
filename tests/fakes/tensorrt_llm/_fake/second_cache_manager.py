"""Events as the second cache manager (V2, after 1.2) tells them.

1. Every event names its hash algorithm and, of several groups of layers, the one that it is about.
2. Blocks may be named by SHA-256: as 64 hexadecimal digits, or by the first 8 of its bytes as an integer.
3. A medium is among the tokens of its blocks: its first token is its 64 hexadecimal digits, each later one the size of
   the vocabulary plus the place in the medium. There are no ``mm_keys``.
4. Each block says the salt that it was stored under, or, in 1.4, says ``null`` for every salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import sha256
from typing import Any

from .block_key import truncated


class BlockNames(Enum):
    """How blocks are named, and so which manager there is."""

    V1 = "v1"
    """The first manager's events."""
    V2_BLOCK_KEY = "v1_block_key"
    V2_SHA256 = "v2_sha256"
    V2_SHA256_64 = "v2_sha256_64"


MEDIUM_TOKENS = 4
"""How many tokens a medium is pretended to have, in its first block."""


def spoken(
    event: dict[str, Any], names: BlockNames, windows: Sequence[int], vocabulary_size: int = 32_000
) -> dict[str, Any]:
    """Return an event of the first manager as the chosen one tells it; ``windows`` are ascending.

    Groups of layers are numbered as layers name them first: models with small windows begin with one.
    """
    if names is BlockNames.V1:
        return event
    data = dict(event["data"])
    for key in ("parent_hash", "block_hash"):
        if data.get(key) is not None:
            data[key] = _name(data[key], names)
    if data["type"] == "removed":
        data["block_hashes"] = [_name(each, names) for each in data["block_hashes"]]
    elif data["type"] == "stored":
        data["blocks"] = [_block(each, names, vocabulary_size) for each in data["blocks"]]
    return {**event, "data": data, "hash_algo": names.value, "layer_group_id": windows.index(event["window_size"])}


def _name(v1: int, names: BlockNames) -> int | str:
    if names is BlockNames.V2_BLOCK_KEY:
        return v1
    digest = sha256(v1.to_bytes(8, "little")).digest()
    return digest.hex() if names is BlockNames.V2_SHA256 else truncated(digest)


def _digest(name: str) -> str:
    """Return the digest of a medium, also where the first manager would say its name."""
    return name if len(name) == 64 else sha256(name.encode()).hexdigest()


def _block(block: dict[str, Any], names: BlockNames, vocabulary_size: int) -> dict[str, Any]:
    tokens = list(block["tokens"])
    at = 0
    for key in block.get("mm_keys", ()):
        for offset in range(min(MEDIUM_TOKENS, len(tokens) - at)):
            said = vocabulary_size + offset if offset else _digest(key["hash"])
            tokens[at] = {"type": "unique_token", "token_id": said, "token_extra_id": 0}
            at += 1
    made = {key: value for key, value in block.items() if key != "mm_keys"}
    return made | {"block_hash": _name(block["block_hash"], names), "tokens": tokens}
