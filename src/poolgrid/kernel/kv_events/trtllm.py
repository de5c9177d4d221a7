"""TensorRT-LLM's dialect: KV cache events as ``LLM.get_kv_cache_events`` gives them (1.2.1), created, stored, removed,
updated, each a dict. ``all_cleared`` comes from the fan-out of ``trtllm-serve`` (1.4) in place of lost events.

The second cache manager (1.3) has more fields, in another form:

1. a block's hash may be a SHA-256 digest, as hexadecimal digits: its last 8 bytes stand for it here;
2. an event names the group of layers that it is about (``layer_group_id``);
3. a medium is among the tokens of its blocks: the digest of its content, then numbers beyond the vocabulary.

A block may name the salt that it was stored under (``cache_salt``). Where it names none, the engine may not have had
one, or not named it: the first cache manager of 1.3 names salts, some builds of the second never do.

A block that media touch names each of them in ``mm_keys``: by the name that the request gave it
(``multi_modal_uuids``, after 1.2), else by a digest of its content. The second cache manager has both, the name as
``uuid``.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from poolgrid.kernel.kv_events.cache_events import (
    DEFAULT_PRIORITY,
    DEVICE_LEVEL,
    AnyEngineEvent,
    Cleared,
    Created,
    Diff,
    Removed,
    Stored,
    StoredBlock,
    Updated,
)
from poolgrid.kernel.wire.errors import DecodeError

Name = int | str
"""A block's hash: an integer, or hexadecimal digits."""

DIGEST_BYTES = 32
MEDIA_KEY_CHARS_MAX = 256
"""Longest name of a medium: digests have 64 characters, ours 32; other clients of the engine choose their own."""
U64_MAX = 2**64 - 1
EVENT_ID_MAX = 2**53
"""Largest number of an event: what is missing between two is counted in floats."""
HEX = re.compile(rf"[0-9a-fA-F]{{1,{2 * DIGEST_BYTES}}}")


class _Token(msgspec.Struct):
    token_id: Name
    token_extra_id: int = 0


class _MediaKey(msgspec.Struct):
    hash: str = ""
    uuid: str | None = None


class _Block(msgspec.Struct):
    block_hash: Name
    tokens: list[_Token]
    cache_level: int = DEVICE_LEVEL
    priority: int = DEFAULT_PRIORITY
    mm_keys: list[_MediaKey] | None = None
    cache_salt: str | None = None


class _CreatedData(msgspec.Struct, tag_field="type", tag="created"):
    num_blocks_per_cache_level: list[int]


class _StoredData(msgspec.Struct, tag_field="type", tag="stored"):
    blocks: list[_Block]
    parent_hash: Name | None = None


class _RemovedData(msgspec.Struct, tag_field="type", tag="removed"):
    block_hashes: list[Name]


class _UpdatedData(msgspec.Struct, tag_field="type", tag="updated"):
    block_hash: Name
    cache_level: Diff | None = None
    priority: Diff | None = None


class _ClearedData(msgspec.Struct, tag_field="type", tag="all_cleared"):
    pass


class _Envelope(msgspec.Struct):
    data: _CreatedData | _StoredData | _RemovedData | _UpdatedData | _ClearedData
    event_id: Annotated[int, msgspec.Meta(ge=0, le=EVENT_ID_MAX)] | None = None
    window_size: int = 0
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


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
        if "hash_algo" in event or "layer_group_id" in event:
            return _parse_checked(event)
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
        cache_salt = block.get("cache_salt")
        if (
            not (type(block_hash) is type(cache_level) is type(priority) is int)
            or type(tokens) is not list
            or (mm_keys is not None and type(mm_keys) is not list)
            or (cache_salt is not None and type(cache_salt) is not str)
        ):
            raise ValueError
        blocks.append(
            StoredBlock(
                block_hash,
                (pack.get(count) or _packer(count))(*map(_token_id, tokens)),
                cache_level,
                priority,
                bool(mm_keys) or any(map(_token_extra_id, tokens)),
                (),
                _media_keys(mm_keys) if mm_keys else (),
                cache_salt or None,
            )
        )
    event_id = event["event_id"]
    window_size = event["window_size"]
    parent_hash = data["parent_hash"]
    rank = event.get("attention_dp_rank")
    if (
        not (type(event_id) is type(window_size) is int and 0 <= event_id <= EVENT_ID_MAX)
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
    if not (type(event_id) is type(window_size) is int and 0 <= event_id <= EVENT_ID_MAX) or (
        rank is not None and type(rank) is not int
    ):
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
        group = envelope.layer_group_id
        if isinstance(data, _ClearedData):
            return Cleared(event_id=-1 if event_id is None else event_id, window_size=window, attention_dp_rank=rank)
        if event_id is None:
            raise ValueError("event_id is missing")
        if isinstance(data, _StoredData):
            return Stored(
                event_id=event_id,
                window_size=window,
                attention_dp_rank=rank,
                layer_group_id=group,
                parent_hash=None if data.parent_hash is None else _name(data.parent_hash),
                blocks=tuple(map(_block, data.blocks)),
            )
        if isinstance(data, _RemovedData):
            return Removed(
                event_id=event_id,
                window_size=window,
                attention_dp_rank=rank,
                layer_group_id=group,
                block_hashes=tuple(map(_name, data.block_hashes)),
            )
        if isinstance(data, _UpdatedData):
            return Updated(
                event_id=event_id,
                window_size=window,
                attention_dp_rank=rank,
                layer_group_id=group,
                block_hash=_name(data.block_hash),
                cache_level=data.cache_level,
                priority=data.priority,
            )
        return Created(
            event_id=event_id,
            window_size=window,
            attention_dp_rank=rank,
            layer_group_id=group,
            num_blocks_per_cache_level=tuple(data.num_blocks_per_cache_level),
        )
    except (msgspec.ValidationError, struct.error, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError("a KV cache event of the engine", str(error)) from None


def _block(block: _Block) -> StoredBlock:
    media = bool(block.mm_keys) or any(token.token_extra_id for token in block.tokens)
    ids: list[int] = []
    for token in block.tokens:
        if isinstance(token.token_id, str):
            # The place of a medium, by the digest of its content; our hashes do not cover it.
            media = True
            ids.append(_name(token.token_id, "token_id") & 0xFFFF_FFFF)
        else:
            ids.append(token.token_id)
    return StoredBlock(
        block_hash=_name(block.block_hash),
        tokens=struct.pack(f"<{len(ids)}I", *ids),
        cache_level=block.cache_level,
        priority=block.priority,
        multimodal=media,
        media_keys=tuple([_media_key(key.uuid or key.hash) for key in block.mm_keys or ()]),
        cache_salt=block.cache_salt or None,
    )


def _media_keys(keys: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the engine's names of media; raises some error for what is not as usual."""
    return tuple([_media_key(key.get("uuid") or key["hash"]) for key in keys])


def _media_key(name: str) -> str:
    if type(name) is not str or len(name) > MEDIA_KEY_CHARS_MAX:
        raise ValueError(
            f"the name of a medium is {str(name)[:80]!r}, allowed are at most {MEDIA_KEY_CHARS_MAX} characters"
        )
    return name


def _name(value: Name, field: str = "block_hash") -> int:
    """Return the u64 that stands for a hash; raises ``ValueError``."""
    if isinstance(value, int):
        return value
    if not HEX.fullmatch(value):
        raise ValueError(
            f"{field} is {value[:80]!r}, allowed are integers and 1 to {2 * DIGEST_BYTES} hexadecimal digits"
        )
    return int(value, 16) & U64_MAX
