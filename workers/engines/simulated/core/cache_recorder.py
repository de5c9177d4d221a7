"""Changes of cached blocks from the block pool and the engine, in order, as wire events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from poolgrid.wire.events import GroupsReported
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.cache_facts import CacheEvent, CacheFacts

Link = tuple[int, int | None]
"""A block's sequence hash and its parent's."""


class CacheRecorder:
    """Keeps wire events until they are taken."""

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
        """Note a chain of new device blocks. A recorder that says more than wire events do needs the rest: ``tokens``
        returns their token ids, and may not be called later; ``media`` are the hashes of the media that touch them, by
        position in the chain.
        """
        self._facts.stored(parent, hashes, Tier.DEVICE)

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        self._facts.removed(hashes, tier)

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        self._facts.moved(links, source, target)

    def tell(self, event: CacheEvent | GroupsReported) -> None:
        """Note an event about KV groups other than full attention."""
        self._facts.append(event)

    def take(self) -> list[CacheEvent | GroupsReported]:
        return self._facts.take()
