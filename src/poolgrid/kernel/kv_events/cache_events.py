"""KV cache events of an engine as events with tokens and the engine's own block names: what dialects are read into.

Two rules: block hashes here are the *engine's* names (opaque u64), never ours; and a block's tokens are packed bytes
(u32 little-endian), because an object per token costs more than everything else together.
"""

from __future__ import annotations

import msgspec

DEVICE_LEVEL = 0
DEFAULT_PRIORITY = 35
"""Retention priority of a block without one, on a scale of 0 to 100."""


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
    media_keys: tuple[str, ...] = ()
    """The engine's own names of the media that touch it, in order; with them ``multimodal`` is set."""
    cache_salt: str | None = None
    """Salt that its event names; ``None`` = it names none, which does not mean that there is none."""
    hash_seed: int | None = None
    """Seed of our block hashes, where its media tell it."""


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
    layer_group_id: int | None = None
    """Group of layers that the event is about; ``None`` = all, or the engine has one."""


class Created(EngineEvent, frozen=True, kw_only=True):
    """The cache exists; number of blocks per level, device first."""

    num_blocks_per_cache_level: tuple[int, ...]


class Stored(EngineEvent, frozen=True, kw_only=True):
    """A chain of blocks became reusable; the first continues ``parent_hash`` (``None`` = a root)."""

    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    hash_seed: int | None = None
    """Seed of our block hashes (LoRA and salt) where the dialect or the engine's adapter knows it."""


class Removed(EngineEvent, frozen=True, kw_only=True):
    """Blocks are gone from every level."""

    block_hashes: tuple[int, ...]


class Updated(EngineEvent, frozen=True, kw_only=True):
    """A block moved to another level or got another priority; ``None`` = unchanged."""

    block_hash: int
    cache_level: Diff | None = None
    priority: Diff | None = None


class Cleared(EngineEvent, frozen=True, kw_only=True):
    """Nothing of what the rank was known to hold can be relied on; its ``event_id`` may be missing (-1)."""


AnyEngineEvent = Created | Stored | Removed | Updated | Cleared
