"""A checkpoint of a router's state: everything that the pool's journal does not have, taken, packed and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poolgrid.kernel.projection.approximate_index import Beliefs, BelievedChain
from poolgrid.kernel.projection.leg_times import LearnedLegTimes
from poolgrid.kernel.projection.load_ledger import LoadEntry
from poolgrid.kernel.projection.stream_health import OpenChoice as AwaitedChoice
from poolgrid.kernel.projection.stream_health import Window
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.server.router.decision_journal.entries import (
    BelievedBlocks,
    Checkpoint,
    CheckWindow,
    LedgerEntry,
    OpenChoice,
    RouterBeliefs,
)

SPEEDS = "paces"
"""The observer whose state has a field of its own in a checkpoint."""


@dataclass(slots=True)
class Draft:
    """A checkpoint as the router's turn takes it, by copying references; the writer packs it."""

    offset: int
    now_ms: float
    time_ms: int
    fresh: bool
    ledger: list[LedgerEntry] = field(default_factory=list)
    policy_count: int | None = None
    open_choices: list[AwaitedChoice] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    beliefs: Beliefs | None = None
    untrusted: dict[WorkerKey, str] = field(default_factory=dict)
    observers: dict[str, Any] = field(default_factory=dict)
    """What observers know, by their names."""
    late_starts: list[tuple[WorkerKey, str]] = field(default_factory=list)

    def checkpoint(self, max_believed_blocks: int) -> Checkpoint:
        beliefs = None
        if self.beliefs is not None:
            beliefs = beliefs_of(*self.beliefs.condensed(max_believed_blocks), self.untrusted)
        return Checkpoint(
            self.offset,
            self.now_ms,
            self.time_ms,
            self.fresh,
            beliefs is None,
            self.ledger,
            self.policy_count,
            [
                OpenChoice(
                    worker.worker_id, worker.dp_rank, dispatch_id, pack_hashes(path), block_size, blocks, computed
                )
                for worker, dispatch_id, path, block_size, blocks, computed in self.open_choices
            ],
            [
                CheckWindow(worker.worker_id, worker.dp_rank, window, is_suspect)
                for worker, window, is_suspect in self.windows
            ],
            beliefs,
            self.observers.get(SPEEDS),
            None,
            {name: state for name, state in self.observers.items() if name != SPEEDS},
            [(worker.worker_id, worker.dp_rank, request_id) for worker, request_id in self.late_starts],
        )


def draft_of(state: RouterState, now_ms: float, time_ms: int) -> Draft:
    """Return the checkpoint of a state as it is."""
    projection, policy = state.projection, state.selector.policy
    trust = projection.trust
    beliefs: Beliefs | None = None
    if trust.untrusted or not projection.follows_blocks or not trust.predictions.is_empty:
        beliefs = projection.predictions.beliefs()
    count: int | None = policy.checkpoint() if hasattr(policy, "checkpoint") else None
    return Draft(
        projection.next_offset,
        now_ms,
        time_ms,
        False,
        [
            LedgerEntry(
                worker.worker_id,
                worker.dp_rank,
                request_id,
                entry.prefill_tokens,
                entry.active_blocks,
                entry.confirmed,
                entry.due_ms,
            )
            for (worker, request_id), entry in projection.ledger.entries().items()
        ],
        count,
        trust.open_choices(),
        trust.windows(),
        beliefs,
        dict(trust.untrusted),
        {each.name: known for each in projection.observers if (known := each.checkpoint()) is not None},
        list(projection.ledger.late_starts),
    )


def restore(state: RouterState, checkpoint: Checkpoint) -> None:
    """Put back what a checkpoint has into a state that has loaded the pool's up to the checkpoint's offset."""
    projection, beliefs = state.projection, checkpoint.beliefs
    index, trust = projection.index, projection.trust
    restored = []
    for each in checkpoint.ledger:
        key = WorkerKey(WorkerId(each.worker_id), each.dp_rank)
        kept = LoadEntry(index.slot(key), each.prefill_tokens, each.active_blocks, each.confirmed, each.due_ms)
        restored.append((key, each.request_id, kept))
    projection.ledger.restore(
        restored, [(WorkerKey(WorkerId(name), rank), request_id) for name, rank, request_id in checkpoint.late_starts]
    )
    untrusted = beliefs.untrusted if beliefs is not None else []
    trust.restore(
        [
            (WorkerKey(WorkerId(each.worker_id), each.dp_rank), each.dispatch_id, unpack_hashes(each.path),
             each.block_size, each.blocks, each.computed)
            for each in checkpoint.open_choices
        ],
        [
            (WorkerKey(WorkerId(each.worker_id), each.dp_rank), each.requests, each.is_suspect)
            for each in checkpoint.windows
        ],
        {WorkerKey(WorkerId(worker_id), rank): why for worker_id, rank, why in untrusted},
    )  # fmt: skip
    if beliefs is not None:
        projection.predictions.restore_beliefs(believed_chains(beliefs), beliefs.exact_from_ms, checkpoint.now_ms)
    known = {SPEEDS: checkpoint.paces, **checkpoint.observers}
    if LearnedLegTimes.name in known:
        projection.follow_legs()
    for observer in projection.observers:
        if known.get(observer.name) is not None:
            observer.restore(known[observer.name])
    policy = state.selector.policy
    if checkpoint.policy_count is not None and hasattr(policy, "restore"):
        policy.restore(checkpoint.policy_count)


def beliefs_of(
    chains: Sequence[BelievedChain], exact_from_ms: float, untrusted: Mapping[WorkerKey, str]
) -> RouterBeliefs:
    """Return the part of a checkpoint with a router's inputs other than events."""
    numbers: dict[WorkerKey, int] = {}
    blocks = [
        BelievedBlocks(
            numbers.setdefault(chain.worker, len(numbers)), chain.chosen_ms, chain.parent, pack_hashes(chain.hashes)
        )
        for chain in chains
    ]
    return RouterBeliefs(
        [(worker.worker_id, worker.dp_rank) for worker in numbers],
        blocks,
        exact_from_ms,
        [(worker.worker_id, worker.dp_rank, why) for worker, why in untrusted.items()],
    )


def believed_chains(beliefs: RouterBeliefs) -> list[BelievedChain]:
    """Return the blocks of ``beliefs_of`` as they were given; raises ``ValueError`` when parts do not fit together."""
    workers = [WorkerKey(WorkerId(worker_id), rank) for worker_id, rank in beliefs.workers]
    for each in beliefs.blocks:
        if not 0 <= each.worker < len(workers) or not each.path or len(each.path) % 8:
            raise ValueError(
                f"beliefs about worker {each.worker} of {len(workers)}, {len(each.path)} bytes of hashes, needed a "
                "worker that is listed and a multiple of 8"
            )
    return [
        BelievedChain(workers[each.worker], each.chosen_ms, each.parent, unpack_hashes(each.path))
        for each in beliefs.blocks
    ]
