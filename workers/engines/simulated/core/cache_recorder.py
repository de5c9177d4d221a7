"""Who listens to the block pool: one recorder speaks the engine's vocabulary, one goes straight to wire events.

Both are told the same facts. ``EngineRecorder`` is the path of a real engine (its own hashes, tokens in the events)
and needs ``poolgrid.workers.core.event_translation`` afterwards; ``WireRecorder`` skips that round trip for virtual
time. A test proves that both come to the same wire events.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from poolgrid.kv_events.cache_events import AnyEngineEvent, Created, Diff, Removed, Stored, StoredBlock, Updated
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.cache_facts import CacheEvent, CacheFacts

Link = tuple[int, int | None]
"""A block's sequence hash and its parent's."""

_u64 = struct.Struct("<Q")
_ENGINE_HASH_KEY = 0x51D0_4A7E_93C6_2B8F
"""Any constant: it makes the simulated engine's block names differ from ours, as a real engine's do."""


class CacheRecorder(Protocol):
    """What the block pool and the engine tell about cached blocks, in order."""

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Note a chain of new device blocks; ``tokens`` returns their token ids, and may not be called later.

        ``media`` are the hashes of the media that touch them, by position in the chain.
        """
        ...

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        """Note blocks that are gone from their only tier."""
        ...

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        """Note blocks that changed tier."""
        ...


class SilentRecorder:
    """Listens to nothing."""

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Ignore it."""

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        """Ignore it."""

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        """Ignore it."""


class WireRecorder:
    """Keeps wire events."""

    def __init__(self) -> None:
        self._facts = CacheFacts()

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._facts.stored(parent, hashes, Tier.DEVICE)

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        """Note blocks that are gone from their only tier."""
        self._facts.removed(hashes, tier)

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        self._facts.moved(links, source, target)

    def take(self) -> list[CacheEvent]:
        return self._facts.take()


def engine_hash(sequence_hash: int) -> int:
    """Return the simulated engine's own name of a block."""
    return xxh3_64_intdigest(_u64.pack(sequence_hash), _ENGINE_HASH_KEY)


class EngineRecorder:
    """Keeps events in TensorRT-LLM's vocabulary."""

    def __init__(self, device_blocks: int, host_blocks: int, window_size: int) -> None:
        self._window_size = window_size
        self._next_event_id = 1
        self._removed: list[int] = []
        self._events: list[AnyEngineEvent] = [
            Created(event_id=0, window_size=window_size, num_blocks_per_cache_level=(device_blocks, host_blocks))
        ]

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Note a chain of new device blocks."""
        self._close()
        packed = tokens()
        stride = 4 * block_size
        blocks = tuple(
            StoredBlock(
                engine_hash(sequence_hash),
                packed[at * stride : (at + 1) * stride],
                media_hashes=tuple(media.get(at, ())) if media else (),
            )
            for at, sequence_hash in enumerate(hashes)
        )
        parent_hash = None if parent is None else engine_hash(parent)
        self._events.append(
            Stored(
                event_id=self._claim_id(),
                window_size=self._window_size,
                parent_hash=parent_hash,
                blocks=blocks,
                hash_seed=seed,
            )
        )

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        """Note blocks that are gone; neighbours join into one event, as TensorRT-LLM's do."""
        self._removed += [engine_hash(sequence_hash) for sequence_hash in hashes]

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        """Note blocks that changed tier."""
        self._close()
        level = Diff(old_value=int(source), new_value=int(target))
        for sequence_hash, _ in links:
            self._events.append(
                Updated(
                    event_id=self._claim_id(),
                    window_size=self._window_size,
                    block_hash=engine_hash(sequence_hash),
                    cache_level=level,
                )
            )

    def take(self) -> list[AnyEngineEvent]:
        """Return the events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _claim_id(self) -> int:
        event_id = self._next_event_id
        self._next_event_id = event_id + 1
        return event_id

    def _close(self) -> None:
        if self._removed:
            self._events.append(
                Removed(event_id=self._claim_id(), window_size=self._window_size, block_hashes=tuple(self._removed))
            )
            self._removed = []
