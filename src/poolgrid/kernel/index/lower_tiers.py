"""Holders of blocks outside the device: on the host, on disk, and only there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from poolgrid.kernel.index.sharded_map import KEY_BITS, ShardedMap
from poolgrid.kernel.wire.identifiers import Tier


class TierOverlap(msgspec.Struct, frozen=True):
    """Leading blocks of a path that one worker holds, by the fastest tier that has them."""

    device: int
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk


class LowerTiers:
    """Masks of holders by block; a block without a holder outside the device takes no room."""

    def __init__(self, shard_entries: int) -> None:
        self.host: ShardedMap[int] = ShardedMap(shard_entries)
        self.disk: ShardedMap[int] = ShardedMap(shard_entries)
        self.off_device: ShardedMap[int] = ShardedMap(shard_entries)
        """Holders of a block on the host or on disk and not on the device."""
        self._maps = (self.host, self.disk, self.off_device)
        self._swept_maps = len(self._maps)
        self._swept_to = 0
        self._to_sweep: list[int] = []

    @property
    def in_use(self) -> bool:
        return bool(self.host.entries or self.disk.entries)

    def tier(self, tier: Tier) -> ShardedMap[int]:
        return self.host if tier is Tier.HOST else self.disk

    def tiers_of(self, sequence_hash: int, bit: int) -> list[Tier]:
        """Return the tiers on which a worker has a block that it holds, in the order of their names."""
        tiers = [] if self._mask(self.off_device, sequence_hash) & bit else [Tier.DEVICE]
        if self._mask(self.disk, sequence_hash) & bit:
            tiers.append(Tier.DISK)
        if self._mask(self.host, sequence_hash) & bit:
            tiers.append(Tier.HOST)
        return tiers

    def onboard(self, bit: int, hashes: Sequence[int]) -> None:
        """Note that blocks lie on the device, too."""
        off_device = self.off_device
        for sequence_hash in hashes:
            mask = off_device.get(sequence_hash)
            if mask is not None and mask & bit:
                clear_bits(off_device, sequence_hash, bit)

    def take_off(self, bit: int, hashes: Iterable[int], tier: Tier) -> tuple[list[int], int]:
        """Take blocks off a tier, which may be the device.

        Returns those that no tier holds any more, and how many entries of lower tiers went.
        """
        gone: list[int] = []
        lowered = 0
        where = self.tier(tier)
        for sequence_hash in hashes:
            off_device = self._mask(self.off_device, sequence_hash) & bit
            if tier is Tier.DEVICE:
                if not off_device and self._below(sequence_hash) & bit:
                    add_bits(self.off_device, sequence_hash, bit)
                elif not off_device:
                    gone.append(sequence_hash)
            elif self._mask(where, sequence_hash) & bit:
                clear_bits(where, sequence_hash, bit)
                lowered += 1
                if off_device and not self._below(sequence_hash) & bit:
                    clear_bits(self.off_device, sequence_hash, bit)
                    gone.append(sequence_hash)
        return gone, lowered

    def count(self, path: Iterable[int], bit: int) -> tuple[int, int]:
        """Return how many blocks of a path one worker holds only on the host or below, and only on disk."""
        off_device, shift = self.off_device.shards, self.off_device.shift
        host = disk = 0
        for sequence_hash in path:
            if off_device[sequence_hash >> shift].get(sequence_hash, 0) & bit:
                if self._mask(self.host, sequence_hash) & bit:
                    host += 1
                else:
                    disk += 1
        return host, disk

    def forget(self, sequence_hash: int, mask: int) -> list[int]:
        """Forget some holders of a block on all lower tiers; return, by tier, the former holders."""
        lower: list[int] = []
        for where in (self.host, self.disk):
            bits = self._mask(where, sequence_hash) & mask
            if bits:
                clear_bits(where, sequence_hash, bits)
                lower.append(bits)
        if self._mask(self.off_device, sequence_hash) & mask:
            clear_bits(self.off_device, sequence_hash, mask)
        return lower

    def begin_sweep(self) -> None:
        """Begin to take dead holders off all blocks."""
        self._swept_maps = self._swept_to = 0
        self._to_sweep = []

    def sweep(self, dead: int, entries: int) -> int:
        """Look at that many entries; return what of this number is left over once the sweep is done."""
        while entries > 0 and self._swept_maps < len(self._maps):
            where = self._maps[self._swept_maps]
            if self._to_sweep:
                sequence_hash = self._to_sweep.pop()
                if self._mask(where, sequence_hash) & dead:
                    clear_bits(where, sequence_hash, dead)
            elif self._swept_to < 1 << KEY_BITS:
                # The keys of one shard are copied: what comes in meanwhile is of live workers.
                shard, self._swept_to = where.shard_from(self._swept_to)
                self._to_sweep = list(shard)
            else:
                self._swept_maps += 1
                self._swept_to = 0
            entries -= 1
        return entries

    def discard(self, entries: int) -> int:
        """Free that many entries; return what of this number is left over."""
        for each in self._maps:
            entries = each.discard(entries)
        return entries

    def size_bytes(self) -> int:
        return sum(each.size_bytes() for each in self._maps)

    @staticmethod
    def _mask(where: ShardedMap[int], sequence_hash: int) -> int:
        return where.shards[sequence_hash >> where.shift].get(sequence_hash, 0)

    def _below(self, sequence_hash: int) -> int:
        return self._mask(self.host, sequence_hash) | self._mask(self.disk, sequence_hash)


def add_bits(where: ShardedMap[int], sequence_hash: int, bits: int) -> None:
    """Add holders of a block to a map."""
    where[sequence_hash] = (where.get(sequence_hash) or 0) | bits


def clear_bits(where: ShardedMap[int], sequence_hash: int, bits: int) -> None:
    """Take holders of a block out of a map that has it."""
    rest = (where.get(sequence_hash) or 0) & ~bits
    if rest:
        where[sequence_hash] = rest
    else:
        del where[sequence_hash]
