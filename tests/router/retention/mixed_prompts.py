"""Prompts of which some come again and some never do, and a learner that has learned from them."""

from __future__ import annotations

from collections.abc import Iterator

from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.policies.retention.learner import RetentionLearner
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.requests import KvRetention

WORKER = WorkerKey(WorkerId("w"))
BLOCKS = 64
"""Of 512 tokens each, as many as granules."""

Sent = tuple[int, KvRetention | None]


def prompt(name: str, blocks: int) -> list[int]:
    return [stable_u64(f"{name} {at}") for at in range(blocks)]


def asked(request_id: str, isl: int, seed: int = 0) -> RoutingRequest:
    return RoutingRequest(request_id, "m", isl, 512, -(-isl // 512), seed=seed)


def mixed(learner: RetentionLearner, minutes: int, seed: int = 0, since: int = 0) -> Iterator[Sent]:
    """Let six prompts of 8 blocks come in turn, and after each one that never comes again, one a second.

    What LRU keeps is 8 prompts, and 12 come until one comes again.
    """
    for second in range(since * 60, (since + minutes) * 60):
        number = second // 2 % 6 if second % 2 == 0 else 100 + second
        now_ms = second * 1000.0
        path, request = prompt(f"{seed} {number}", 8), asked(f"r{seed} {now_ms}", 4_200, seed)
        said = learner.advise(request, path, now_ms)
        learner.begin(WORKER, BLOCKS, request.request_id, request, path, now_ms)
        learner.on_started(WORKER, request.request_id, 0)
        learner.on_finished(WORKER, request.request_id, None, now_ms + 500.0)
        yield number, said


def trained(seed: int) -> RetentionLearner:
    """A learner that has something to say of every prompt with this seed."""
    learner = RetentionLearner()
    for _ in mixed(learner, 10, seed):
        pass
    assert learner.pays
    return learner
