"""What must hold inside a prefix index at every moment."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

from poolgrid.kernel.index.prefix_index import HASHES_END, PrefixIndex
from poolgrid.kernel.index.run_forest import Run
from poolgrid.kernel.index.run_map import RUN_BLOCKS_MAX
from poolgrid.kernel.index.sharded_map import ShardedMap
from poolgrid.kernel.wire.feed import BlockChain
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Tier, WorkerKey

V = TypeVar("V")


def assert_sound(index: PrefixIndex) -> None:
    """Check runs, links, counts and shards against each other."""
    runs = list(index._reach.forest.ages)
    assert index._reach.forest.ages.entries == len(runs)
    by_last = {run.blocks[-1]: run for run in runs}
    sound = index._live & ~index._reach.broken
    for run in runs:
        assert run.mask, "a run without holders"
        assert 0 < len(run.blocks) <= RUN_BLOCKS_MAX
        assert index._reach.edges.get(run.blocks[0]) is run
        assert index._reach.edges.get(run.blocks[-1]) is run
        children = []
        child = run.child
        while child is not None:
            children.append(child)
            child = child.right
        assert not children or children[0].left is None
        assert all(one.right is other and other.left is one for one, other in pairwise(children))
        assert run.blocks[-1] not in index._reach.waiting, "runs wait for a block that is there"
        for each in children:
            assert each.parent == run.blocks[-1]
            assert not each.mask & ~run.mask & sound, "a holder without the block before"
        if run.parent is not None:
            above = by_last.get(run.parent)
            assert above is not None or not run.mask & sound, "a holder without the block before"
            first = index._reach.waiting.get(run.parent) if above is None else above.child
            assert _is_among(run, first), "a run that its parent does not know"
    parents = {run.parent for run in runs if run.parent is not None}
    assert {block for block, _ in index._reach.waiting.items()} == parents - by_last.keys()
    assert all(first.left is None for _, first in index._reach.waiting.items())
    assert index._reach.blocks == sum(len(run.blocks) for run in runs)
    assert index._reach.edges.entries == sum(1 if len(run.blocks) == 1 else 2 for run in runs)
    # Each block is found by its bare hash; asked before what is fresh is handed out.
    for run in runs[:100]:
        assert all(index._reach.inside(block, run.mask) is run for block in run.blocks[:20])
    written = sorted((block, id(run)) for block, run in index._reach.places.items())
    assert written == sorted((block, id(run)) for run in runs for block in run.blocks)
    assert not index._reach.crossed

    leaves = []
    end = index._reach.forest._leaves_end
    leaf = end.newer_leaf
    while leaf is not end:
        assert leaf.newer_leaf.older_leaf is leaf
        leaves.append(leaf)
        leaf = leaf.newer_leaf
    assert len(leaves) == len({id(each) for each in leaves})
    assert {id(each) for each in leaves} == {id(run) for run in runs if run.child is None}
    known = {id(None), id(end), *map(id, runs)}
    for run in runs:
        named = (run.child, run.left, run.right, run.older_leaf, run.newer_leaf)
        assert all(id(each) in known for each in named), "a run names one that is gone, and keeps it alive"

    lower = index.lower
    assert_sound_map(index._reach.edges)
    assert_sound_map(index._reach.waiting)
    for lower_map in (lower.host, lower.disk, lower.off_device):
        assert_sound_map(lower_map)


def _is_among(run: Run, child: Run | None) -> bool:
    """Tell whether a run is one of several that continue the same block."""
    while child is not None and child is not run:
        child = child.right
    return child is run


def assert_sound_map(sharded: ShardedMap[V]) -> None:
    """Check that every key is in its shard, and that keys and shards are counted once."""
    shards = list(sharded.each_shard())
    assert len(shards) == len({id(shard) for shard in sharded.shards})
    assert sharded.entries == sum(map(len, shards))
    keys = [key for key, _ in sharded.items()]
    assert len(keys) == len(set(keys)) == sharded.entries
    assert all(key in sharded for key in keys)


def holdings(index: PrefixIndex, worker: WorkerKey) -> dict[Tier, set[int]]:
    """All that a worker holds, by tier."""
    held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    first = 0
    while first < HASHES_END:
        found, first = index.holdings_from(worker, first)
        for block, tier in found:
            held[tier].add(block)
    return held


def dump(index: PrefixIndex, worker: WorkerKey) -> list[BlockChain]:
    """A worker's blocks as chains, parents before children: ``store`` of each rebuilds the same index."""
    slot = index._slots.get(worker)
    if slot is None:
        return []
    parents: dict[int, int | None] = {}
    for run in index._reach.forest.ages:
        if run.mask >> slot & 1:
            parents.update(zip(run.blocks, (run.parent, *run.blocks), strict=False))
    held = holdings(index, worker)
    return [chain for tier in Tier for chain in _chains({h: None for h in parents if h in held[tier]}, parents, tier)]


def _chains(blocks: dict[int, None], parents: dict[int, int | None], tier: Tier) -> list[BlockChain]:
    """Cut a set of blocks into chains, parents before children."""
    below: dict[int, list[int]] = {}
    heads: list[int] = []
    for sequence_hash in blocks:
        parent = parents.get(sequence_hash)
        if parent is not None and parent in blocks:
            below.setdefault(parent, []).append(sequence_hash)
        else:
            heads.append(sequence_hash)
    chains: list[BlockChain] = []
    for head in heads:
        pending = [head]
        while pending:
            first = pending.pop()
            chain = [first]
            while (next_blocks := below.get(chain[-1])) is not None:
                pending.extend(next_blocks[1:])
                chain.append(next_blocks[0])
            chains.append(BlockChain(parents.get(first), pack_hashes(chain), tier))
    return chains
