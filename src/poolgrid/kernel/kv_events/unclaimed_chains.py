"""Chains of an engine of which it is not known yet whose they are. Pure.

An engine that names no salts may tell of a tenant's first block before its follower knows the salt. What hangs on that
block would then have no name for as long as the engine keeps it, which is long for the beginning of many prompts. So
such chains are held until their salt is reported, or the engine removes them.

Bounded: of more than ``HELD_BLOCKS_MAX`` blocks the oldest are forgotten.
"""

from __future__ import annotations

from msgspec.structs import replace

from poolgrid.kernel.kv_events.pub import EngineEvent, EngineRemoved, EngineStored
from poolgrid.kernel.kv_events.translation import RootSeed
from poolgrid.kernel.wire.hashing import TOKEN_BYTES

HELD_BLOCKS_MAX = 65_536
"""Some 30 MB: the caches of a few tenants whose salts are not known."""


class UnclaimedChains:
    """Stands before the translator of an engine's events."""

    def __init__(self, root_seed: RootSeed) -> None:
        self._root_seed = root_seed
        self._held: dict[int, list[EngineStored]] = {}
        """Events of one block, by its hash: one for each tier."""
        self._roots: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def chains(self) -> int:
        return len(self._roots)

    def clear(self) -> None:
        self._held.clear()
        self._roots.clear()

    def pass_on(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """Return what can be translated now."""
        passed: list[EngineEvent] = []
        for event in events:
            if isinstance(event, EngineStored):
                if self._is_unclaimed(event):
                    self._hold(event)
                    continue
                if self._held:
                    for each in event.hashes:
                        self._forget(each)
            elif isinstance(event, EngineRemoved):
                if self._held:
                    for each in event.hashes:
                        self._remove(each, event)
            else:
                self.clear()
            passed.append(event)
        return passed

    def claimed_by(self, seed: RootSeed) -> list[EngineEvent]:
        """Return what is held of the chains whose first block has a seed by now, in the order in which it came."""
        claimed = {each for each in self._roots if seed(*self._first_of(self._held[each][0])) is not None}
        if not claimed:
            return []
        events: list[EngineEvent] = []
        for engine_hash, stored in self._held.items():
            if engine_hash in claimed or stored[0].parent in claimed:
                claimed.add(engine_hash)
                events += stored
        for each in claimed:
            self._forget(each)
        return events

    def _first_of(self, event: EngineStored) -> tuple[bytes, int]:
        return event.token_bytes[: TOKEN_BYTES * event.block_size], event.hashes[0]

    def _is_unclaimed(self, event: EngineStored) -> bool:
        if event.seed is not None or len(event.token_bytes) < TOKEN_BYTES * event.block_size or not event.hashes:
            return False
        if event.parent is not None:
            return event.parent in self._held
        return self._root_seed(*self._first_of(event)) is None

    def _hold(self, event: EngineStored) -> None:
        parent, size = event.parent, TOKEN_BYTES * event.block_size
        for at, engine_hash in enumerate(event.hashes):
            token_bytes = event.token_bytes[at * size : (at + 1) * size]
            if len(token_bytes) < size:
                break
            block = replace(event, hashes=[engine_hash], parent=parent, token_bytes=token_bytes)
            of_tier = self._held.setdefault(engine_hash, [])
            if all(each.tier is not event.tier for each in of_tier):
                of_tier.append(block)
            if parent is None:
                self._roots[engine_hash] = None
            parent = engine_hash
        while len(self._held) > HELD_BLOCKS_MAX:
            self._forget(next(iter(self._held)))

    def _remove(self, engine_hash: int, event: EngineRemoved) -> None:
        held = self._held.get(engine_hash)
        if held is not None:
            held[:] = [each for each in held if each.tier is not event.tier]
            if not held:
                self._forget(engine_hash)

    def _forget(self, engine_hash: int) -> None:
        self._held.pop(engine_hash, None)
        self._roots.pop(engine_hash, None)
