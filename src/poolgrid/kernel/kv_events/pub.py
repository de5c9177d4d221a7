"""Read what engines publish about their KV cache themselves: one envelope, two dialects, many versions.

The payload is msgpack ``[timestamp (seconds), [event, ...], dp_rank or nil]``, or a map of the same; an event is an
array that begins with its name, or a map with a ``type``. Which of them depends on the engine and on its version, so
both are read at both levels. Rules for this file:

1. ``decode_pub`` returns a value or raises ``DecodeError``, nothing else, in proportion to the bytes given.
2. Fields and keys that are not known are ignored. An event that is not known, or a stored event that makes no sense, is
   left out and counted: the view is then a part of the truth. A removed event that makes no sense is a ``DecodeError``:
   leaving it out would claim blocks that are gone.
3. Where drafting layers look ahead, a block's hash covers tokens behind it: the tokens come as pairs, each with the one
   that follows (SGLang with EAGLE), or those behind are named besides (vLLM from 0.33 on). A block is named here by its
   own tokens alone, so several hashes of an engine may stand for one name; those behind are ``EngineStored.following``.
4. Chunked attention needs the blocks of the chunk that a place is in. No event has the size of a chunk; the last of
   these blocks stands for all, which are stored together and evicted from their end on.

    medium                                   tier
    ---------------------------------------  -----------------------------
    nil, GPU, DEVICE                         device
    CPU, CPU_PINNED, CPU_TIER1               host
    CPU_TIER2, DISK, NVME, STORAGE           disk
    others (shared stores, the network)      ignored: not this worker's own
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, hash_seed
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX, FRAME_BYTES_MAX, IDENTIFIER_BYTES_MAX

WHAT = "a message of a PUB engine"
TIERS: dict[str | None, Tier] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
}
HASH_BYTES_MAX = 64
FOLLOWING_TOKENS_MAX = 16
"""Tokens behind a block that its hash may cover; engines draft up to eight."""


_U64 = 2**64 - 1
_TIME_MS_MAX = 2**53

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_STORED_SINCE_SALT = (
    "block_mm_infos",
    "cache_salt",
    "is_eagle",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_STORED_SINCE_GROUPS = (
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
_RANK_NAMES = ("data_parallel_rank", "attn_dp_rank", "dp_rank")
"""What the third field of an envelope is called in a map, by lineage."""
_REMOVED = ("block_hashes", "medium", "group_idx", "kv_cache_spec_kind", "window", "locality")

UNKNOWN_KIND = -1
"""Window of a group of layers of which it is not known what they need."""

_decoder = msgspec.msgpack.Decoder()


class EngineStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks became reusable; ``token_bytes`` are their tokens, u32 little-endian."""

    hashes: list[int]
    parent: int | None
    token_bytes: bytes
    block_size: int
    seed: int | None
    """Hash seed when the event begins a chain under a LoRA adapter or a salt, else the parent's counts."""
    tier: Tier
    group: int | None = None
    window_tokens: int | None = None
    """What the layers of the group need of a prefix to continue behind it: ``None`` = all of it, n = n tokens with the
    one that comes next (a sliding window), 0 = the last block alone, which has their state, or the end of a chunk."""
    following: Sequence[bytes] = ()
    """Of each block, in the form of ``token_bytes``, the tokens behind it that its hash covers too; empty = none."""


class EngineRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left a tier."""

    hashes: list[int]
    tier: Tier
    group: int | None = None


class EngineCleared(msgspec.Struct, frozen=True, gc=False):
    """The cache is empty."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class PubBatch(msgspec.Struct):
    """One message; ``ignored`` events were left out."""

    time_ms: int
    dp_rank: int | None
    events: list[EngineEvent] = []
    ignored: int = 0
    why_ignored: str = ""
    """The field of the last of them that is not understood; empty = it is of another medium, or another event."""


class _Senseless(Exception):
    """An event that cannot be understood."""


def decode_pub(payload: bytes) -> PubBatch:
    """Return the batch of a payload, or raise ``DecodeError``."""
    if len(payload) > FRAME_BYTES_MAX:
        raise DecodeError(WHAT, f"{len(payload)} bytes, allowed are at most {FRAME_BYTES_MAX}")
    try:
        value = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError, TypeError) as error:
        # TypeError: a map whose key cannot be one.
        raise DecodeError(WHAT, str(error) or type(error).__name__) from None
    timestamp, events, dp_rank = read_envelope(value)
    if not isinstance(timestamp, (int, float)) or not 0 <= timestamp * 1000 <= _TIME_MS_MAX:
        raise DecodeError(WHAT, f"the timestamp is {str(timestamp)[:40]}, expected are seconds since 1970")
    if dp_rank is not None and (type(dp_rank) is not int or not 0 <= dp_rank < 2**32):
        raise DecodeError(WHAT, f"dp_rank is {str(dp_rank)[:40]}, expected is an integer from 0 or nil")
    batch = PubBatch(int(timestamp * 1000), dp_rank)
    for raw in events:
        kind, fields = event_fields(raw)
        if kind == "BlockStored":
            try:
                stored = _stored(fields)
            except _Senseless as error:
                stored, batch.why_ignored = None, str(error)
            if stored is None:
                batch.ignored += 1
            else:
                batch.events.append(stored)
        elif kind == "BlockRemoved":
            try:
                hashes, tier = _hashes(fields.get("block_hashes")), _tier(fields)
            except _Senseless as error:
                raise DecodeError(WHAT, f"BlockRemoved: {error}") from None
            group = fields.get("group_idx")
            if tier is None:
                batch.ignored += 1
            else:
                batch.events.append(EngineRemoved(hashes, tier, group if type(group) is int else None))
        elif kind == "AllBlocksCleared":
            batch.events.append(EngineCleared())
        else:
            batch.ignored += 1
    return batch


def read_envelope(value: Any) -> tuple[Any, list[Any], Any]:
    """Return timestamp, events and rank of a decoded payload; raises ``DecodeError`` when it is no envelope."""
    if isinstance(value, dict):
        timestamp = value.get("ts", value.get("timestamp"))
        events = value.get("events")
        rank = next((value[name] for name in _RANK_NAMES if name in value), None)
    elif isinstance(value, list) and len(value) >= 2:
        timestamp, events = value[:2]
        rank = value[2] if len(value) > 2 else None
    else:
        timestamp = events = rank = None
    if not isinstance(events, list):
        raise DecodeError(WHAT, "the envelope is not [timestamp, [events], dp_rank], nor a map of ts and events")
    return timestamp, events, rank


def event_fields(raw: Any) -> tuple[Any, dict[Any, Any]]:
    """Return what an event calls itself, and its fields by name; ``None`` and nothing when it is no event."""
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if isinstance(raw, list) and raw:
        kind, values = raw[0], raw[1:]
        if kind == "BlockStored":
            # Two lineages put different things behind extra_keys; the group's number tells which it is.
            groups = len(values) > len(_STORED) and type(values[len(_STORED)]) is int
            names: tuple[str, ...] = _STORED + (_STORED_SINCE_GROUPS if groups else _STORED_SINCE_SALT)
        else:
            names = _REMOVED
        return kind, dict(zip(names, values, strict=False))
    return None, {}


def _stored(fields: dict[Any, Any]) -> EngineStored | None:
    tier = _tier(fields)
    if tier is None or fields.get("is_eagle"):
        return None
    # Engines without kinds have one group.
    group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
    group = group if type(group) is int else None
    window = None if kind is None else _window(kind, fields)
    if window == UNKNOWN_KIND:
        return EngineStored([], None, b"", 1, None, tier, group, window)
    hashes = _hashes(fields.get("block_hashes"))
    parent, block_size, tokens = fields.get("parent_block_hash"), fields.get("block_size"), fields.get("token_ids")
    if type(block_size) is not int or not 1 <= block_size < 2**32:
        raise _Senseless("block_size")
    if not isinstance(tokens, list) or fields.get("block_mm_infos"):
        raise _Senseless("token_ids")
    behind, media = fields.get("lookahead_token_ids"), fields.get("mm_keys")
    if tokens and type(tokens[0]) is list:
        tokens, seconds = _parted(tokens)
        behind = [[token] for token in seconds[block_size - 1 :: block_size]]
    following = _following(behind, len(hashes)) if behind else []
    before_media = None if media is None else _before_media(tokens, media, block_size)
    try:
        token_bytes = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        # It may be a medium's, or behind one.
        before_media = _before_media(tokens, media, block_size)
        token_bytes = _packed(tokens, before_media, block_size)
    if before_media is not None:
        hashes, following = hashes[:before_media], following[:before_media]
        token_bytes = token_bytes[: TOKEN_BYTES * before_media * block_size]
    lora, salt, keys = fields.get("lora_name"), fields.get("cache_salt"), fields.get("extra_keys")
    lora = "" if lora is None else _name(lora)
    salt = "" if salt is None else _name(salt)
    if fields.get("lora_id") is not None and not lora:
        # A number may be another adapter on another worker.
        raise _Senseless("lora_id without lora_name")
    if keys:
        salt, of_text = _salt_of_keys(keys, lora, salt, parent is None)
        if of_text is not None:
            # The blocks from an image on cannot be named by their tokens alone; those before it are as any others.
            hashes, following = hashes[:of_text], following[:of_text]
            # Of a window the event leaves blocks out, so which tokens these are is not known.
            token_bytes = token_bytes[: TOKEN_BYTES * of_text * block_size] if window is None else b""
    # A block below a parent has the parent's adapter and salt, of which the event may name the first alone.
    seed = hash_seed(lora, salt) if parent is None and (lora or salt) else None
    above = parent & _U64 if type(parent) is int else None if parent is None else _hash(parent)
    return EngineStored(hashes, above, token_bytes, block_size, seed, tier, group, window, following)


def _following(tokens: Any, blocks: int) -> list[bytes]:
    """Return the tokens behind each block as bytes; none where they are not told of all blocks in equal number."""
    if not isinstance(tokens, list) or len(tokens) != blocks or not blocks:
        return []
    count = len(tokens[0]) if isinstance(tokens[0], list) else 0
    if not 0 < count <= FOLLOWING_TOKENS_MAX:
        return []
    try:
        pack = struct.Struct(f"<{count}I").pack
        return [pack(*each) for each in tokens]
    except (struct.error, TypeError):
        return []


def _parted(pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tokens of which each comes with the next, and those that come with them."""
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise _Senseless("token_ids")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _before_media(tokens: list[Any], keys: Any, block_size: int) -> int | None:
    """Return how many blocks come before the first that a medium touches (``None`` = none does).

    TensorRT-LLM names the media of each block (``mm_keys``); its token at the place of one may be a digest, as text.
    """
    places = [at // block_size for at, token in enumerate(tokens) if type(token) is str]
    if keys is not None:
        if not isinstance(keys, list):
            raise _Senseless("mm_keys")
        places += [place for place, of_block in enumerate(keys) if of_block]
    return min(places, default=None)


def _packed(tokens: list[Any], blocks: int | None, block_size: int) -> bytes:
    """Return the tokens of so many blocks as bytes."""
    if blocks is None:
        raise _Senseless("token_ids")
    try:
        return struct.pack(f"<{blocks * block_size}I", *tokens[: blocks * block_size])
    except struct.error:
        raise _Senseless("token_ids") from None


def _tier(fields: dict[Any, Any]) -> Tier | None:
    medium = fields.get("medium")
    locality = fields.get("locality")
    if locality is not None and locality != "LOCAL":
        return None
    if isinstance(medium, str):
        return TIERS.get(medium.upper())
    if medium is None:
        return Tier.DEVICE
    raise _Senseless("medium")


def _window(kind: Any, fields: dict[Any, Any]) -> int | None:
    """Return what a group of layers of a kind needs (``EngineStored.window_tokens``).

    A window of unknown size is within all of a prefix.
    """
    kind = kind.lower() if isinstance(kind, str) else ""
    if kind == "mla_attention" or kind.startswith(("full", "sink_full")):
        return None
    if kind in ("sliding_window", "sliding_window_mla", "mla_sliding_window"):
        window = fields.get("kv_cache_spec_sliding_window")
        return window if type(window) is int and 0 < window < 2**32 else None
    return 0 if kind == "chunked_local_attention" or kind.startswith("mamba") else UNKNOWN_KIND


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > IDENTIFIER_BYTES_MAX:
        raise _Senseless("a name")
    return value


def _salt_of_keys(keys: Any, lora: str, salt: str, is_root: bool) -> tuple[str, int | None]:
    """Return the salt of a chain, and how many blocks come before its first medium (``None`` = it has none).

    Refuses blocks whose engine hash covers more than tokens, adapter and salt, but for what comes before a medium.

    The keys of a block are untagged: adapter, media as pairs, the salt in the first block of a prompt only, embeddings.
    So one text without a name, in the first block and in no other, is a salt. Should it be a medium of an old
    version, which wrote them as texts, no prompt has the resulting name.
    """
    if not isinstance(keys, list):
        raise _Senseless("extra_keys")
    named = (None, lora, salt)
    for position, entry in enumerate(keys):
        if entry is None:
            continue
        if not isinstance(entry, list):
            raise _Senseless("extra_keys")
        for key in entry:
            if key in named:
                continue
            if position and isinstance(key, list):
                return salt, position
            if position or not is_root or salt or not isinstance(key, str):
                raise _Senseless("extra_keys")
            salt = _name(key)
    return salt, None


def _hashes(raw: Any) -> list[int]:
    if not isinstance(raw, list) or len(raw) > BLOCKS_PER_EVENT_MAX:
        raise _Senseless("block_hashes")
    hashes: list[int] = []
    for value in raw:  # no comprehension: nearly always it is one
        hashes.append(value & _U64 if type(value) is int else _hash(value))  # noqa: PERF401
    return hashes


def _hash(value: Any) -> int:
    """Normalise an engine's hash: i64 and u64 are the same bits, and of a digest the last eight bytes count."""
    if type(value) is int:
        return value & _U64
    if isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX:
        return int.from_bytes(value[-8:], "big")
    raise _Senseless("a block hash")
