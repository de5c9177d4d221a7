"""The prefix index, hashing and a whole decision, beside Dynamo's published Rust bindings in the same run.

    python -m lab.benchmarks.index [--blocks 1000000] [--json OUT]

Needs `pip install -e '.[bench]'` for the peer; without it the peer's columns are left out, and it says so. The peer's
`RadixTree` hands each call to a background thread; `hop` is the time of a call that does nothing, and ratios are given
with it and without it.
"""

from __future__ import annotations

import argparse
import array
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.benchmarks.measuring import median_us, pin_to_one_cpu, resident_bytes
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex, slots_of
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import BlocksStored, JournalRecord, WorkerJoined
from poolgrid.kernel.wire.hashing import block_hashes, pack_hashes, sequence_hashes
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from tests.router.fleet_builder import decided

WORKERS = 16
BLOCKS_PER_EVENT = 32
BLOCK_SIZE = 32
DEPTH = 512


def load_peer() -> Any | None:
    """Return the peer's module, or nothing when it is not installed."""
    try:
        import dynamo._core as peer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return peer


class Chain:
    """A path: local hashes as the peer wants them, sequence hashes as the index wants them."""

    def __init__(self, randomness: random.Random, length: int, prefix: Chain | None = None) -> None:
        self.shared = len(prefix.local) if prefix else 0
        self.local: list[int] = (prefix.local if prefix else []) + [randomness.getrandbits(64) for _ in range(length)]
        self.sequence = sequence_hashes(self.local)


def population(blocks: int) -> list[tuple[int, Chain, int]]:
    """Return (worker, chain, first new block): conversations over 40 shared prefixes, as real traffic is."""
    randomness = random.Random(2)
    prefixes = [Chain(randomness, randomness.randrange(32, 256)) for _ in range(40)]
    seen: set[tuple[int, int]] = set()
    made: list[tuple[int, Chain, int]] = []
    total = 0
    while total < blocks:
        number = randomness.randrange(40)
        chain = Chain(randomness, randomness.randrange(32, 384), prefixes[number])
        worker = randomness.randrange(WORKERS)
        start = chain.shared if (worker, number) in seen else 0
        seen.add((worker, number))
        made.append((worker, chain, start))
        total += len(chain.local) - start
    return made


def our_frames(made: list[tuple[int, Chain, int]]) -> tuple[list[bytes], int]:
    """Return journal records as they come over the wire, and how many blocks they store."""
    frames: list[bytes] = []
    blocks = 0
    for worker, chain, start in made:
        for at in range(start, len(chain.local), BLOCKS_PER_EVENT):
            part = chain.sequence[at : at + BLOCKS_PER_EVENT]
            event = BlocksStored(chain.sequence[at - 1] if at else None, pack_hashes(part))
            frames.append(
                codec.journal_record.encode(JournalRecord(len(frames) + WORKERS, f"w{worker}", 0, 1, 0, 0, 0, [event]))
            )
            blocks += len(part)
    return frames, blocks


def peer_frames(made: list[tuple[int, Chain, int]]) -> list[tuple[int, bytes]]:
    """Return the same events in the peer's JSON."""
    frames: list[tuple[int, bytes]] = []
    for worker, chain, start in made:
        for at in range(start, len(chain.local), BLOCKS_PER_EVENT):
            part = slice(at, at + BLOCKS_PER_EVENT)
            stored = {
                "parent_hash": chain.sequence[at - 1] if at else None,
                "blocks": [
                    {"block_hash": block, "tokens_hash": local}
                    for block, local in zip(chain.sequence[part], chain.local[part], strict=True)
                ],
            }
            event = {"event_id": len(frames) + 1, "data": {"stored": stored}, "dp_rank": 0}
            frames.append((worker, json.dumps(event).encode()))
    return frames


def card(workers: int) -> WorkerCard:
    """Return a card for any worker."""
    return WorkerCard("m", Role.AGGREGATED, BLOCK_SIZE, WorkerLimits(256, 8192, 100_000, 131_072), "tcp://x:1")


def our_index(frames: list[bytes], blocks: int) -> tuple[Projection, dict[str, float]]:
    """Apply the frames; return the projection and what it cost."""
    projection = Projection(PrefixIndex(), LoadLedger())
    for worker in range(WORKERS):
        projection.apply(JournalRecord(worker, WorkerId(f"w{worker}"), 0, 1, 0, 0, 0, [WorkerJoined(card(1))]), 0.0)
    gc.collect()
    gc.disable()
    before = resident_bytes()
    started = time.perf_counter()
    decode = codec.journal_record.decode
    apply = projection.apply
    for frame in frames:
        apply(decode(frame), 0.0)
    elapsed = time.perf_counter() - started
    gc.enable()
    return projection, {
        "store_ns_per_block": elapsed / blocks * 1e9,
        "rss_bytes_per_entry": (resident_bytes() - before) / blocks,
        "estimated_bytes_per_distinct_block": projection.index.size_bytes() / len(projection.index),
    }


def peer_index(peer: Any, frames: list[tuple[int, bytes]], blocks: int) -> tuple[Any, dict[str, float]]:
    """Apply the frames to the peer's tree; return it and what it cost."""
    tree = peer.RadixTree()
    gc.collect()
    gc.disable()
    before = resident_bytes()
    started = time.perf_counter()
    for worker, frame in frames:
        tree.apply_event(worker, frame)
    tree.find_matches([1, 2, 3])  # returns when everything before it was applied
    elapsed = time.perf_counter() - started
    gc.enable()
    return tree, {
        "store_ns_per_block": elapsed / blocks * 1e9,
        "rss_bytes_per_entry": (resident_bytes() - before) / blocks,
    }


def find_figures(projection: Projection, tree: Any | None, holders: int) -> dict[str, dict[str, float]]:
    """Time the depth of a 512-block path: shared by all holders, or held in 64 different depths (a staircase)."""
    randomness = random.Random(holders)
    index = projection.index
    figures: dict[str, dict[str, float]] = {}
    for shape in ("shared", "staircase", "half", "miss"):
        chain = Chain(randomness, DEPTH)
        for number in range(holders if shape != "miss" else 0):
            length = (
                DEPTH * (number + 1) // holders if shape == "staircase" else DEPTH // 2 if shape == "half" else DEPTH
            )
            index.store(WorkerKey(WorkerId(f"f{number}")), None, chain.sequence[:length])
            if tree is not None:
                for frame in _peer_chain(chain, length):
                    tree.apply_event(1000 + number, frame)
        path = chain.sequence
        ours = median_us(lambda path=path: index.find(path), 2000)  # type: ignore[misc]

        def as_dict(path: list[int] = path) -> dict[int, int]:
            return {slot: depth for depth, mask in index.find(path) for slot in slots_of(mask)}

        figure = {"ours_us": ours, "ours_as_dict_us": median_us(as_dict, 500)}
        if tree is not None:
            local = chain.local
            found = tree.find_matches(local).scores
            assert len(found) == (holders if shape != "miss" else 0), "the peer found other holders"
            assert sorted(found.values()) == sorted(as_dict().values()), "the two disagree on depths"
            figure["peer_us"] = median_us(lambda local=local: tree.find_matches(local), 300)  # type: ignore[misc]
            figure["peer_hop_us"] = median_us(lambda: tree.find_matches([1]), 1000)
        figures[shape] = figure
    return figures


def _peer_chain(chain: Chain, length: int) -> list[bytes]:
    frames = []
    for at in range(0, length, BLOCKS_PER_EVENT):
        part = slice(at, min(length, at + BLOCKS_PER_EVENT))
        stored = {
            "parent_hash": chain.sequence[at - 1] if at else None,
            "blocks": [
                {"block_hash": block, "tokens_hash": local}
                for block, local in zip(chain.sequence[part], chain.local[part], strict=True)
            ],
        }
        frames.append(json.dumps({"event_id": at + 1, "data": {"stored": stored}, "dp_rank": 0}).encode())
    return frames


def hash_figures(peer: Any | None) -> dict[str, dict[str, float]]:
    """Time the block hashes of 8,192 tokens: ours from an array, the peer's from a list (the form it takes)."""
    figures: dict[str, dict[str, float]] = {}
    tokens = [random.Random(1).randrange(32_000) for _ in range(8192)]
    packed = array.array("I", tokens).tobytes()
    for block_size in (16, 32, 64):
        figure = {
            "ours_us": median_us(lambda block_size=block_size: block_hashes(packed, block_size), 300),  # type: ignore[misc]
        }
        hashes = block_hashes(packed, block_size)
        figure["ours_with_sequence_hashes_us"] = figure["ours_us"] + median_us(
            lambda hashes=hashes: sequence_hashes(hashes),  # type: ignore[misc]
            300,
        )
        if peer is not None:
            assert peer.compute_block_hash_for_seq(tokens, block_size) == hashes, "the two hash differently"
            figure["peer_us"] = median_us(
                lambda block_size=block_size: peer.compute_block_hash_for_seq(tokens, block_size),  # type: ignore[misc]
                300,
            )
        figures[f"block {block_size}"] = figure
    return figures


def decision_figures(workers: int) -> dict[str, float]:
    """Time one whole decision and its parts: ISL 8,192, many workers, a prefix that a quarter of them share."""
    projection = Projection(PrefixIndex(), LoadLedger())
    tokens = array.array("I", [random.Random(3).randrange(32_000) for _ in range(8192)]).tobytes()
    path = sequence_hashes(block_hashes(tokens, BLOCK_SIZE))
    for number in range(workers):
        key = WorkerKey(WorkerId(f"w{number:04}"))
        projection.apply(JournalRecord(number, key.worker_id, 0, 1, 0, 0, 0, [WorkerJoined(card(1))]), 0.0)
        if number % 4 == 0:
            projection.index.store(key, None, path[: 64 + number % 128])
    selector = Selector(projection, KvAware())
    request = RoutingRequest("r", "m", 8192, BLOCK_SIZE, len(path))
    decision = decided(selector.select(WorkerWanted(request, path, 0.0, 0)))

    def book() -> None:
        selector.book(decision, path, 0.0)
        projection.ledger.finished(decision.worker, "r")

    hashing = median_us(lambda: sequence_hashes(block_hashes(tokens, BLOCK_SIZE)), 300)
    overlap = median_us(lambda: projection.index.find(path), 1000)
    select = median_us(lambda: decided(selector.select(WorkerWanted(request, path, 0.0, 0))), 500)
    booking = median_us(book, 1000)
    return {
        "hashing_us": hashing,
        "overlap_us": overlap,
        "cost_and_record_us": select - overlap,
        "booking_us": booking,
        "whole_us": hashing + select + booking,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure; memory counts in the first run only, where it was fresh."""
    return {
        name: runs[0][name] if "bytes" in name else statistics.median(run[name] for run in runs) for name in runs[0]
    }


def ratio(peer_value: float | None, ours: float) -> str:
    """Return how many times faster (or smaller) ours is."""
    return "–" if peer_value is None else f"{peer_value / ours:.1f}×"


def main() -> int:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="resident (worker, block) entries")
    parser.add_argument("--holders", type=int, default=64, help="workers that hold the path that is looked for")
    parser.add_argument(
        "--passes", type=int, default=5, help="how often the index is filled, ours and the peer's in turn"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    console = Console()
    peer = load_peer()
    cpu = pin_to_one_cpu()
    console.print(f"pinned to CPU {cpu}; Python {sys.version.split()[0]}")
    if peer is None:
        console.print("ai-dynamo-runtime is not installed (pip install -e '.[bench]'): the peer's columns are left out")
    figures: dict[str, Any] = {"hash": hash_figures(peer)}
    made = population(options.blocks)
    frames, blocks = our_frames(made)
    theirs = peer_frames(made) if peer is not None else []
    # In turn, so that a change of the machine's speed meets both.
    ours_runs: list[dict[str, float]] = []
    peer_runs: list[dict[str, float]] = []
    projection = tree = None
    for _ in range(options.passes):
        projection = tree = None
        projection, ours_run = our_index(frames, blocks)
        ours_runs.append(ours_run)
        if peer is not None:
            tree, peer_run = peer_index(peer, theirs, blocks)
            peer_runs.append(peer_run)
        made.clear()  # only now: what it leaves free would hide the memory of the first run
    assert projection is not None
    frames.clear()
    theirs.clear()
    figures["ours"] = medians(ours_runs)
    if peer_runs:
        figures["peer"] = medians(peer_runs)
    figures["blocks"] = blocks
    figures["distinct_blocks"] = len(projection.index)
    figures["find"] = find_figures(projection, tree, options.holders)
    figures["decision"] = {workers: decision_figures(workers) for workers in (256, 1000)}

    table = Table("what", "ours", "peer", "ratio", "ratio without hop", title=f"{blocks:,} resident entries")
    for shape, figure in figures["find"].items():
        peer_us = figure.get("peer_us")
        hop = figure.get("peer_hop_us", 0.0)
        table.add_row(
            f"find 512 blocks, {shape}, {options.holders} workers",
            f"{figure['ours_us']:.2f} µs",
            "–" if peer_us is None else f"{peer_us:.1f} µs",
            ratio(peer_us, figure["ours_us"]),
            ratio(None if peer_us is None else peer_us - hop, figure["ours_us"]),
        )
        table.add_row(
            "  … and as a map from worker to depth",
            f"{figure['ours_as_dict_us']:.2f} µs",
            "",
            ratio(peer_us, figure["ours_as_dict_us"]),
            ratio(None if peer_us is None else peer_us - hop, figure["ours_as_dict_us"]),
        )
    theirs_figures = figures.get("peer", {})
    for name, text, unit in (
        ("store_ns_per_block", "wire bytes to index", "ns/block"),
        ("rss_bytes_per_entry", "resident memory per (worker, block)", "B"),
    ):
        ours = figures["ours"][name]
        other = theirs_figures.get(name)
        table.add_row(
            text, f"{ours:.0f} {unit}", "–" if other is None else f"{other:.0f} {unit}", ratio(other, ours), ""
        )
    for name, figure in figures["hash"].items():
        other = figure.get("peer_us")
        table.add_row(
            f"hash 8,192 tokens, {name}",
            f"{figure['ours_us']:.1f} µs",
            "–" if other is None else f"{other:.1f} µs",
            ratio(other, figure["ours_us"]),
            "",
        )
    console.print(table)
    decisions = figures["decision"]
    parts = Table("one decision: ISL 8,192", *(f"{workers:,} workers" for workers in decisions), title="µs")
    for name in decisions[256]:
        parts.add_row(name.removesuffix("_us").replace("_", " "), *(f"{each[name]:.1f}" for each in decisions.values()))
    console.print(parts)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
