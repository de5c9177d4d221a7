"""A simulated pool with one seeded fault, and the examiner of its router."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    GroupsReported,
    KvGroup,
    LoadReported,
    RequestStarted,
    StreamStateChanged,
    WorkerJoined,
)
from poolgrid.kernel.wire.identifiers import StreamState, Tier
from poolgrid.kernel.wire.requests import Generate
from poolgrid.plugins.bench.trace import TRACE_BLOCK_TOKENS, TraceRow
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder
from poolgrid.plugins.simulation.pool import UNLIMITED_QUEUE, RouterFleet, SimulatedPool
from poolgrid.plugins.simulation.workload import SimulatedRequest, Workload, build_workload
from poolgrid.server.diagnosis.rules import ReuseVerdict
from poolgrid.server.router.examiner import Examiner
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.serving.prompt_paths import ReuseSketch
from poolgrid.server.workers.timing import PolynomialTiming
from tests.simulation.builders import limits

BLOCK = 64
REQUESTS = 100
"""A fault must be named within so many."""

WATCHED_EVERY = 10
"""Requests between two looks at the verdicts of a pool that is watched."""

OTHER = 0x5DEECE66D1234567
"""Turns a hash into another one."""

Edit = Callable[[list[AnyEvent], int], list[AnyEvent]]
"""What becomes of the events of a step, given how many requests have been sent."""


def conversations(requests: int = REQUESTS, talks: int = 8, gap_ms: float = 900.0) -> list[TraceRow]:
    """Talks in turn behind one system prompt; a talk has five turns, then another begins in its place."""
    rows = []
    for number in range(requests):
        slot, turn = number % talks, number // talks
        talk, turn = slot + talks * (turn // 5), turn % 5
        ids = (0, *(1 + talk * 50 + place for place in range(1 + 2 * turn)))
        isl = len(ids) * TRACE_BLOCK_TOKENS - 40 - 13 * (number % 7)
        rows.append(TraceRow(number * gap_ms, isl, 6, ids))
    return rows


def an_hour(seed: int, gap_ms: float = 6_000.0) -> list[TraceRow]:
    """Talks of an hour that come and go at random, behind one of three system prompts, some of them of one turn."""
    randomness = random.Random(seed)
    rows, fresh, begin = [], 3, 0.0
    while begin < 3_600_000:
        begin += randomness.expovariate(1 / gap_ms)
        ids, at = (randomness.randrange(3),), begin
        for _ in range(randomness.choice((1, 1, 3, 6))):
            grown = randomness.randint(1, 3)
            ids = (*ids, *range(fresh, fresh + grown))
            fresh += grown
            rows.append(TraceRow(at, len(ids) * TRACE_BLOCK_TOKENS - randomness.randrange(300), 6, ids))
            at += randomness.uniform(2_000, 40_000)
    return sorted(rows, key=lambda row: row.timestamp)


def unrelated(requests: int = REQUESTS) -> list[TraceRow]:
    return [TraceRow(each * 500.0, 1500, 4, (3 * each, 3 * each + 1, 3 * each + 2)) for each in range(requests)]


@dataclass
class Fault:
    """What is wrong with the engines, or their streams."""

    name: str = ""
    edit: Edit = lambda events, sent: events
    engine_path: Callable[[SimulatedRequest], Sequence[int]] | None = None
    """The path that the engine computes of a prompt."""
    engine_block: int = BLOCK
    forget_at: int = 0
    """The engines drop their caches before this request, and say nothing."""
    blocks: int | None = None
    host_blocks: int = 0
    routers: int = 1
    rows: Sequence[TraceRow] = ()


class WatchedSelector(Selector):
    """The selector of a pool's router, whose decisions are kept for the examiner."""

    def __init__(self, pool: FaultyPool) -> None:
        super().__init__(pool.projection, pool._policy, requests_per_worker_factor=UNLIMITED_QUEUE)
        self._pool = pool

    def book(
        self,
        decision: Decision,
        path: Sequence[int],
        now_ms: float,
        dispatch_id: str | None = None,
        lease_ms: float = 0.0,
    ) -> None:
        decision.seen_tokens = self._pool.sketch.note(path) * BLOCK
        self._pool.log.add(decision)
        super().book(decision, path, now_ms, dispatch_id, lease_ms)


class FaultyEngine(SimulatedEngine):
    """An engine that computes other paths than the router hashed."""

    def __init__(self, pool: FaultyPool, fits: SimulatedLimits, recorder: CacheRecorder) -> None:
        super().__init__(fits, timing=PolynomialTiming(), recorder=recorder, report_tokens=False)
        self._paths = pool._engine_paths

    def submit(
        self, request: Generate, now_ms: float, sequence_hashes: list[int] | None = None, *rest: Any, **more: Any
    ) -> None:
        super().submit(request, now_ms, self._paths[request.request_id], *rest, **more)


class FaultyPool(SimulatedPool):
    """A pool whose router is examined."""

    def __init__(self, fault: Fault, workers: int = 1, event_delay_ms: float = 0.0, policy: str = "kv") -> None:
        rows = fault.rows or conversations()
        workload = build_workload(rows, 1.0, BLOCK)
        self.fault = fault
        self.sent = 0
        self._alarms: set[str] = set()
        self._engine_paths = {
            request.request_id: list(request.path if fault.engine_path is None else fault.engine_path(request))
            for request in workload.requests
        }
        if fault.engine_block != BLOCK:
            wide = build_workload(rows, 1.0, fault.engine_block)
            self._engine_paths = {request.request_id: request.path for request in wide.requests}
        self._fits: SimulatedLimits = limits(workload, fault.blocks, fault.host_blocks)
        played = Workload(workload.requests, BLOCK, 0.0, workload.total_tokens, workload.longest)
        fleet = RouterFleet(fault.routers, event_delay_ms)
        super().__init__(played, make_policy(policy), workers, self._fits, routers=fleet)
        self.log = DecisionLog(10_000)
        self.sketch = ReuseSketch()
        self.examiner = Examiner(self.projection, self.log.of_dispatch)
        self._selectors[0] = WatchedSelector(self)
        for number in range(workers):
            self._renew(number)

    def _renew(self, number: int) -> None:
        """Put another engine, with an empty cache, in the place of one."""
        fits = resized(self._fits, self.fault.engine_block)
        self._recorders[number].take()
        self.engines[number] = FaultyEngine(self, fits, self._recorders[number])

    def arrive(self, request: SimulatedRequest, now: float) -> None:
        self.sent += 1
        if self.sent % WATCHED_EVERY == 0:
            self._alarms |= {each.cause.value for each in self.examiner.verdicts() if each.cause.is_fault}
        if self.sent == self.fault.forget_at:
            for number in range(len(self.engines)):
                self._renew(number)
        super().arrive(request, now)

    def watched(self) -> set[str]:
        """Play it; return the faults that a verdict named at any time."""
        self.run()
        return self._alarms

    def _tell(self, number: int, now: float, events: list[AnyEvent]) -> None:
        super()._tell(number, now, self.fault.edit(events, self.sent))

    def verdicts(self) -> list[ReuseVerdict]:
        """Play it; return the verdict on each worker."""
        self.run()
        return [self.examiner.verdict(key) for key in sorted(self.projection.fleet.workers)]


def resized(fits: SimulatedLimits, block_size: int) -> SimulatedLimits:
    return replace(fits, block_size=block_size, total_kv_blocks=fits.total_kv_blocks * BLOCK // block_size)


CACHE_EVENTS = (BlocksStored, BlocksRemoved)


def without_cache_events(begin: int = 0, end: int = 10**9) -> Edit:
    def edit(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
        return [each for each in events if not (begin <= sent < end and isinstance(each, CACHE_EVENTS))]

    return edit


def starts(change: Callable[[RequestStarted], dict[str, int]]) -> Edit:
    """Have engines report other numbers at the start of a request."""

    def edit(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
        return [
            msgspec.structs.replace(each, **change(each)) if isinstance(each, RequestStarted) else each
            for each in events
        ]

    return edit


def lost_frames(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
    """Events of thirty requests are lost, and the consolidator says so."""
    kept = without_cache_events(30, 60)(events, sent)
    if sent == 60:
        kept.insert(0, StreamStateChanged("worker", StreamState.STALE, "frames 31 to 60 are lost, and not replayed"))
    return kept


def cleared_frames(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
    """Events of thirty requests are lost, and the worker takes back what it reported before."""
    kept = without_cache_events(30, 60)(events, sent)
    return [CacheCleared(), *kept] if sent == 60 else kept


def silent_host_tier(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
    return [each for each in events if not (isinstance(each, BlocksStored) and each.tier is not Tier.DEVICE)]


def steps_from_zero(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
    return [*events, LoadReported(0, 0, 0, 0, 0, 1000, sent if sent < 50 else sent - 50)]


def mangled(request: SimulatedRequest) -> list[int]:
    """What an engine computes of a prompt whose first tokens are others."""
    return [each ^ OTHER for each in request.path]


def with_wrong_window(events: list[AnyEvent], sent: int) -> list[AnyEvent]:
    """The engine resumes at checkpoints of 2048 tokens; its index is told of a window of two blocks."""
    out: list[AnyEvent] = []
    for each in events:
        if isinstance(each, RequestStarted):
            out.append(msgspec.structs.replace(each, cached_tokens=each.cached_tokens // 2048 * 2048))
            continue
        out.append(each)
        if isinstance(each, WorkerJoined):
            out.append(GroupsReported((KvGroup(2),)))
        elif isinstance(each, CACHE_EVENTS):
            out.append(msgspec.structs.replace(each, group=1))
    return out
