"""KV cache events in an engine's own vocabulary, which is TensorRT-LLM's: created, stored, removed, updated.

Two rules: block hashes here are the *engine's* names (opaque u64), never ours; and a block's tokens are packed bytes
(u32 little-endian), because the per-token objects of the JSON form cost more than everything else together.
Shapes: TensorRT-LLM 1.2.1, ``LLM.get_kv_cache_events``.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from poolgrid.wire.errors import DecodeError

DEVICE_LEVEL = 0
HOST_LEVEL = 1
DEFAULT_PRIORITY = 35
"""TensorRT-LLM's retention priority of a block nobody gave one."""


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """One block of a ``Stored`` event; fewer tokens than a block holds make it a partial block."""

    block_hash: int
    tokens: bytes
    cache_level: int = DEVICE_LEVEL
    priority: int = DEFAULT_PRIORITY
    multimodal: bool = False
    """The block also depends on something that is not among its tokens (``mm_keys``)."""
    media_hashes: tuple[int, ...] = ()
    """u64 hashes of the media that touch it, where the engine names media as the front end does."""


class Diff(msgspec.Struct, frozen=True, gc=False):
    """A value that changed."""

    old_value: int
    new_value: int


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all engine events: what every one carries."""

    event_id: int
    """From 0 and without holes within one rank; a hole means that the engine dropped events."""
    window_size: int
    """Attention window whose blocks the event is about."""
    attention_dp_rank: int | None = None


class Created(EngineEvent, frozen=True, kw_only=True):
    """The cache exists; number of blocks per level, device first."""

    num_blocks_per_cache_level: tuple[int, ...]


class Stored(EngineEvent, frozen=True, kw_only=True):
    """A chain of blocks became reusable; the first continues ``parent_hash`` (``None`` = a root)."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    hash_seed: int | None = None
    """Seed of our block hashes (LoRA and salt) where the engine adapter knows it; TensorRT-LLM does not tell."""


class Removed(EngineEvent, frozen=True, kw_only=True):
    """Blocks are gone from every level."""

    block_hashes: tuple[int, ...]


class Updated(EngineEvent, frozen=True, kw_only=True):
    """A block moved to another level or got another priority; ``None`` = unchanged."""

    block_hash: int
    cache_level: Diff | None = None
    priority: Diff | None = None


AnyEngineEvent = Created | Stored | Removed | Updated


class _Token(msgspec.Struct):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct):
    block_hash: int
    tokens: list[_Token]
    cache_level: int = DEVICE_LEVEL
    priority: int = DEFAULT_PRIORITY
    mm_keys: list[Any] | None = None


class _CreatedData(msgspec.Struct, tag_field="type", tag="created"):
    num_blocks_per_cache_level: list[int]


class _StoredData(msgspec.Struct, tag_field="type", tag="stored"):
    blocks: list[_Block]
    parent_hash: int | None = None


class _RemovedData(msgspec.Struct, tag_field="type", tag="removed"):
    block_hashes: list[int]


class _UpdatedData(msgspec.Struct, tag_field="type", tag="updated"):
    block_hash: int
    cache_level: Diff | None = None
    priority: Diff | None = None


class _Envelope(msgspec.Struct):
    event_id: int
    data: _CreatedData | _StoredData | _RemovedData | _UpdatedData
    window_size: int = 0
    attention_dp_rank: int | None = None


PACKERS_MAX = 4096
"""Block sizes for which a packer is kept; there are as many as partial blocks have lengths."""
_pack_u32: dict[int, Callable[..., bytes]] = {}


def _packer(count: int) -> Callable[..., bytes]:
    """Return what packs so many u32; making the format costs a quarter of packing a block."""
    pack = struct.Struct(f"<{count}I").pack
    if len(_pack_u32) < PACKERS_MAX:
        _pack_u32[count] = pack
    return pack


_token_id = operator.itemgetter("token_id")
_token_extra_id = operator.itemgetter("token_extra_id")


def parse_event(event: Mapping[str, Any]) -> AnyEngineEvent:
    """Return the event of TensorRT-LLM's dict form; unknown fields are ignored.

    Raises ``DecodeError`` naming the field when the shape is wrong.
    """
    try:
        data = event["data"]
        kind = data["type"]
        if kind == "stored":
            return _parse_stored(event, data)
        if kind == "removed":
            return _parse_removed(event, data)
    except (KeyError, TypeError, AttributeError, ValueError, struct.error, OverflowError):
        pass  # optional fields are absent, or something is wrong: the checked way finds out
    return _parse_checked(event)


def _parse_stored(event: Mapping[str, Any], data: Mapping[str, Any]) -> Stored:
    """Read a ``stored`` event, nearly all of the traffic, without an object per token.

    Whatever is not as usual raises some error, so that the checked way decides. Of a token only what is packed is
    checked: that it fits into u32.
    """
    if type(data["blocks"]) is not list:
        raise ValueError
    blocks = []
    pack = _pack_u32
    for block in data["blocks"]:
        tokens = block["tokens"]
        count = len(tokens)
        block_hash = block["block_hash"]
        cache_level = block["cache_level"]
        priority = block["priority"]
        mm_keys = block.get("mm_keys")
        if (
            not (type(block_hash) is type(cache_level) is type(priority) is int)
            or type(tokens) is not list
            or (mm_keys is not None and type(mm_keys) is not list)
        ):
            raise ValueError
        blocks.append(
            StoredBlock(
                block_hash,
                (pack.get(count) or _packer(count))(*map(_token_id, tokens)),
                cache_level,
                priority,
                bool(mm_keys) or any(map(_token_extra_id, tokens)),
            )
        )
    event_id = event["event_id"]
    window_size = event["window_size"]
    parent_hash = data["parent_hash"]
    rank = event.get("attention_dp_rank")
    if (
        not (type(event_id) is type(window_size) is int)
        or (parent_hash is not None and type(parent_hash) is not int)
        or (rank is not None and type(rank) is not int)
    ):
        raise ValueError
    return Stored(
        event_id=event_id,
        window_size=window_size,
        attention_dp_rank=rank,
        parent_hash=parent_hash,
        blocks=tuple(blocks),
    )


def _parse_removed(event: Mapping[str, Any], data: Mapping[str, Any]) -> Removed:
    """Read a ``removed`` event, the rest of the traffic; as above."""
    event_id = event["event_id"]
    window_size = event["window_size"]
    rank = event.get("attention_dp_rank")
    if type(data["block_hashes"]) is not list:
        raise ValueError
    block_hashes = tuple(data["block_hashes"])
    if not (type(event_id) is type(window_size) is int) or (rank is not None and type(rank) is not int):
        raise ValueError
    for block_hash in block_hashes:
        if type(block_hash) is not int:
            raise ValueError
    return Removed(event_id=event_id, window_size=window_size, attention_dp_rank=rank, block_hashes=block_hashes)


def _parse_checked(event: Mapping[str, Any]) -> AnyEngineEvent:
    try:
        envelope = msgspec.convert(event, _Envelope)
        rank = envelope.attention_dp_rank
        event_id = envelope.event_id
        window = envelope.window_size
        data = envelope.data
        if isinstance(data, _StoredData):
            blocks = tuple(
                StoredBlock(
                    block_hash=block.block_hash,
                    tokens=struct.pack(f"<{len(block.tokens)}I", *(token.token_id for token in block.tokens)),
                    cache_level=block.cache_level,
                    priority=block.priority,
                    multimodal=bool(block.mm_keys) or any(token.token_extra_id for token in block.tokens),
                )
                for block in data.blocks
            )
            return Stored(
                event_id=event_id,
                window_size=window,
                attention_dp_rank=rank,
                parent_hash=data.parent_hash,
                blocks=blocks,
            )
        if isinstance(data, _RemovedData):
            return Removed(
                event_id=event_id, window_size=window, attention_dp_rank=rank, block_hashes=tuple(data.block_hashes)
            )
        if isinstance(data, _UpdatedData):
            return Updated(
                event_id=event_id,
                window_size=window,
                attention_dp_rank=rank,
                block_hash=data.block_hash,
                cache_level=data.cache_level,
                priority=data.priority,
            )
        return Created(
            event_id=event_id,
            window_size=window,
            attention_dp_rank=rank,
            num_blocks_per_cache_level=tuple(data.num_blocks_per_cache_level),
        )
    except (msgspec.ValidationError, struct.error, RecursionError) as error:
        raise DecodeError("a KV cache event of the engine", str(error)) from None
