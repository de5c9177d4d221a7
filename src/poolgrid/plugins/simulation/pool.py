"""Pools in virtual time: the router's own core in front of simulated engines, without a socket or a clock.

A pool may have several routers: each has a projection of its own of the same stream, requests come to them round robin,
and events of an engine reach them ``event_delay_ms`` later. A router knows its own choices at once, the others do not.

The loop knows three kinds of moments, in this order when they coincide: an engine's step ends and its events reach the
router; a request arrives and is routed; an idle engine begins a step. Requests wait at their router, as at a real one,
while the engine where they would go has enough to compute, or to be planned with a policy that plans: those that arrive
at one moment are tried together, as a router does with what comes in one turn of its event loop, and again whenever an
event reaches it. Nothing else happens, so a run is a function of workload, policy and
limits. Several pools can share one time; who chooses among them is the caller's business.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import EXPECTED_MS, HOLD_LIMIT_MS, Policy, RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.projection.load_ledger import CROWDING_RETRIES, LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.engine_times import refill_ms
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
    WorkerJoined,
)
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.plugins.simulated.core.engine import Fact, SimulatedEngine, SimulatedLimits, StepOutcome
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder
from poolgrid.plugins.simulation.agent_workload import AgentWorkload
from poolgrid.plugins.simulation.mixed_traffic import MixedWorkload
from poolgrid.plugins.simulation.session_line import SessionLine
from poolgrid.plugins.simulation.waiting import LANE, ROLES, WaitingRequests
from poolgrid.plugins.simulation.workload import NEVER, SimulatedRequest, TtftTargets, WorkerSpeeds, Workload, changing
from poolgrid.server.workers.booked_prefill import BookedPrefill
from poolgrid.server.workers.timing import PolynomialTiming, TimingModel, step_times_of

MODEL = LANE
_NOTHING: Mapping[WorkerKey, int] = {}
_NO_REASONS: Mapping[WorkerKey, str] = {}
UNLIMITED_QUEUE = 10**9
"""Nothing is refused in a simulation: how requests pile up is what it measures."""

SHORT_PROMPT_TOKENS = 1000
"""A prompt below is short: it is computed in less time than it may wait behind a long one."""

APPROXIMATE_TTL_MS = 1e12
"""Separate routers never forget their own choices: the best case for them."""


@dataclass(slots=True)
class RunResult:
    """What one policy did with the workload."""

    policy: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    overlap_found_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    short_ttft_ms: list[float] = field(default_factory=list)
    """Of prompts below ``SHORT_PROMPT_TOKENS``."""
    predicted: list[tuple[float, int, float, float]] = field(default_factory=list)
    """When a worker was chosen, which, what the policy expected until the first token and what it was, without what the
    request had waited at its router before; in order of first tokens."""
    targets_met: int = 0
    """Requests whose TTFT was within their target."""
    itl_ms: list[tuple[float, int]] = field(default_factory=list)
    """Gaps between tokens and how often each occurred."""
    busy_ms: float = 0.0
    span_ms: float = 0.0
    worker_tokens: list[int] = field(default_factory=list)
    """Prompt tokens sent to each worker."""
    worker_requests: list[int] = field(default_factory=list)
    worker_busy_ms: list[float] = field(default_factory=list)
    preemptions: int = 0
    crowded: int = 0
    """Choices that a worker refused because other routers had sent it more than the router knew."""
    steps: int = 0
    first_turn_ms: list[float] = field(default_factory=list)
    """TTFT of the first call of each agent, without subagents."""
    classes: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """TTFT of requests of sessions by kind and tenant."""
    waited: int = 0
    """Turns of sessions that waited at the router for room in the working set."""


@dataclass(frozen=True, slots=True)
class RouterFleet:
    """The routers of one pool."""

    routers: int = 1
    event_delay_ms: float = 0.0
    """From an engine to every router."""
    separate: bool = False
    """Each router knows its own choices only, and no events of caches."""
    crowding_retries: int = CROWDING_RETRIES
    """How often a worker may refuse a request because others were quicker; see
    ``poolgrid.server.workers.booked_prefill``."""

    hold_limit_ms: float = HOLD_LIMIT_MS
    """How long a request waits at its router for a better worker, with a policy that plans; 0 = none does."""
    waits_for_engines: bool = True
    """Whether requests wait at their router while engines have enough to compute."""
    requests_per_worker_factor: float = UNLIMITED_QUEUE
    """Send a worker at most this multiple of its batch size."""

    def make_state(self) -> Projection:
        """Return what one more router knows at the start."""
        index = PrefixIndex()
        ledger = LoadLedger(reservation_ttl_ms=float("inf"))
        projection = Projection(index, ledger)
        if self.separate:
            projection.attach(ApproximateIndex(index, APPROXIMATE_TTL_MS))
        return projection


class SimulatedPool:
    """One run of one policy; ``timing`` is that of every worker, or a list of one for each."""

    def __init__(
        self,
        workload: Workload | AgentWorkload | MixedWorkload,
        policy: Policy,
        workers: int,
        limits: SimulatedLimits,
        timing: TimingModel | Sequence[TimingModel] | None = None,
        on_fact: Callable[[Fact, float], None] | None = None,
        routers: RouterFleet | None = None,
        speeds: WorkerSpeeds | None = None,
        targets: TtftTargets | None = None,
        line: SessionLine | None = None,
    ) -> None:
        """``speeds`` are what the cards do not say of the workers; without them all are as fast as ``timing`` says.

        ``line`` is where turns of agents wait for room in the pool's working set; without it none does.
        """
        fleet = routers or RouterFleet()
        self._lines = [] if line is None else [line, *(line.another() for _ in range(1, fleet.routers))]
        """Of each router, over one working set."""
        self._turns_under_way: deque[tuple[float, Callable[[float], None]]] = deque()
        """What the routers have not learned yet of turns of others, in order."""
        self._targets = targets
        self._workload = workload
        self._policy = policy
        self._on_fact = on_fact
        self.event_delay_ms = fleet.event_delay_ms
        self._selectors = [
            Selector(fleet.make_state(), policy, fleet.requests_per_worker_factor) for _ in range(fleet.routers)
        ]
        self._projections = [selector.projection for selector in self._selectors]
        self._waiting = [
            WaitingRequests(
                selector, fleet.hold_limit_ms, fleet.waits_for_engines, self._wanted, partial(self._send, router)
            )
            for router, selector in enumerate(self._selectors)
        ]
        """Requests that wait at each router."""
        self._sent: list[int] = []
        """Engines that were given a request since that was last asked for."""
        self._under_way: deque[tuple[float, JournalRecord]] = deque()
        """Records that the routers have not received yet, in order."""
        self._turn = 0
        self._tails: set[int] = set()
        """Last whole blocks of prompts: one that repeats such a block continues their conversation."""
        # A lone router knows what its workers have; it is never refused.
        self._crowding_retries = fleet.crowding_retries if fleet.routers > 1 else 0
        self._books = [BookedPrefill() for _ in range(workers)]
        self._keys = [WorkerKey(WorkerId(f"worker-{number:03}")) for number in range(workers)]
        self._number = {key: number for number, key in enumerate(self._keys)}
        self._recorders = [CacheRecorder() for _ in self._keys]
        given = timing if isinstance(timing, Sequence) else [timing or PolynomialTiming()] * workers
        self._speeds = speeds
        self._changing = [] if speeds is None else changing(given)
        timings: Sequence[TimingModel] = given if speeds is None else self._changing
        self.engines = [
            SimulatedEngine(limits, timing=own, recorder=recorder, report_tokens=False)
            for own, recorder in zip(timings, self._recorders, strict=True)
        ]
        self._seq = [0] * workers
        self._offset = 0
        self._arrived: dict[str, SimulatedRequest] = {}
        self._expected_ms: dict[str, tuple[float, float]] = {}
        """By request when it was chosen for and what was expected from then on, of a policy that predicts TTFTs."""
        self.result = RunResult(
            policy.name,
            worker_tokens=[0] * workers,
            worker_requests=[0] * workers,
            worker_busy_ms=[0.0] * workers,
        )
        card_limits = WorkerLimits(
            limits.max_batch_size, limits.max_num_tokens, limits.total_kv_blocks, limits.max_sequence_length
        )
        for number in range(workers):
            card = WorkerCard(
                MODEL,
                Role.AGGREGATED,
                limits.block_size,
                card_limits,
                f"inproc://{number}",
                step_times=step_times_of(given[number]),
                takes_retention=True,
            )
            self._tell(number, 0.0, [WorkerJoined(card)])
            for each in self._lines:
                each.working_set.know(self._keys[number], limits.total_kv_blocks, round(refill_ms(card)))
        self._deliver(float("inf"))

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> RunResult:
        """Play the whole workload; ``on_progress`` is called with the number of requests finished, now and then."""
        play_workload(self._workload, [self], lambda request, now: 0, on_progress)
        self._deliver(float("inf"))
        for projection in self._projections:
            # Load that workers reported of other routers' requests expires by itself; reservations never do.
            projection.ledger.expire(sys.float_info.max)
        return self.result

    @property
    def projections(self) -> Sequence[Projection]:
        return self._projections

    @property
    def projection(self) -> Projection:
        return self._projections[0]

    def best_overlap_tokens(self, request: SimulatedRequest) -> int:
        """Return the most prompt tokens that a worker of the pool holds, as the pool's router knows; choose nothing."""
        blocks = self._selectors[0].best_overlap_blocks(MODEL, ROLES, request.path)
        return min(request.isl, blocks * self._workload.block_size)

    def arrive(self, request: SimulatedRequest, now: float) -> None:
        """Route a request and hand it to its engine, or let it wait for ``take_sent``."""
        self._deliver(now)
        router = self._turn % len(self._selectors)
        self._turn += 1
        if self._lines:
            overlap = partial(self._overlap_blocks, router)
            crowded = self._lines[router].arrive(request, self._keys, overlap, now)
            if crowded is None:
                self.result.waited += 1
                return
            if crowded:
                self._send(router, request, self._choose(router, request, now, crowded), now)
                return
        self._selectors[router].projection.ledger.expire(now)
        self._waiting[router].arrive(request, now)

    @property
    def holds(self) -> bool:
        return not all(each.is_empty for each in self._waiting) or any(line.holds for line in self._lines)

    def _overlap_blocks(self, router: int, request: SimulatedRequest) -> int:
        return self._selectors[router].best_overlap_blocks(MODEL, ROLES, request.path)

    def take_sent(self, now: float) -> list[int]:
        """Hand on those that wait and can go now; return the numbers of the engines that were given any since the last
        call."""
        if self.holds:
            self._deliver(now)
            for router in range(len(self._lines)):
                self._place_sessions(router, now)
            for waiting in self._waiting:
                waiting.place(now)
        sent, self._sent = self._sent, []
        return sent

    def _place_sessions(self, router: int, now: float) -> None:
        """Hand on the turns of a router that have room in the working set."""

        def send(request: SimulatedRequest, crowded: Mapping[WorkerKey, str]) -> None:
            self._send(router, request, self._choose(router, request, now, crowded), now)

        self._lines[router].place_turns(self._keys, partial(self._overlap_blocks, router), now, send)

    def _wanted(
        self,
        request: SimulatedRequest,
        now: float,
        behind: Mapping[WorkerKey, int] = _NOTHING,
        unavailable: Mapping[WorkerKey, str] = _NO_REASONS,
    ) -> WorkerWanted:
        """Return the question for a request."""
        block_size = self._workload.block_size
        target_ms = 0.0 if self._targets is None else self._targets.of(request.request_id)
        routing = RoutingRequest(
            request.request_id,
            MODEL,
            request.isl,
            block_size,
            -(-request.isl // block_size),
            request.priority,
            ttft_target_ms=target_ms if self._targets is not None and self._targets.told else 0.0,
            session="" if request.session is None else request.session.session_id,
            is_later=not self._tails.isdisjoint(request.path),
        )
        queued_ms = now - request.arrival_ms
        return WorkerWanted(routing, request.path, now, int(now), unavailable, behind=behind, queued_ms=queued_ms)

    def _choose(
        self, router: int, request: SimulatedRequest, now: float, unavailable: Mapping[WorkerKey, str]
    ) -> Decision:
        selector = self._selectors[router]
        selector.projection.ledger.expire(now)
        found = selector.select(self._wanted(request, now, unavailable=unavailable))
        if not isinstance(found, Decision):
            raise RuntimeError(f"simulating request {request.request_id}: {found}")
        return found

    def _send(self, router: int, request: SimulatedRequest, decision: Decision, now: float) -> None:
        """Hand a request to the engine of a decision; where that refuses it, to that of another one."""
        block_size = self._workload.block_size
        selector = self._selectors[router]
        retries = self._crowding_retries
        while True:
            number = self._number[decision.worker]
            booked = self._books[number].crowding(decision.prefill_tokens if retries else None)
            if booked is None:
                break
            retries -= 1
            self.result.crowded += 1
            selector.projection.ledger.crowded(
                decision.worker, selector.projection.index.slot(decision.worker), request.request_id, booked, now
            )
            decision = self._choose(router, request, now, _NO_REASONS)
        selector.book(decision, request.path, now)
        if self._lines:
            begun = self._lines[router].place(request, decision.worker, decision.overlap_blocks, now)
            if begun is not None:
                for other, line in enumerate(self._lines):
                    if other != router:
                        self._turns_under_way.append((now + self.event_delay_ms, partial(line.follow, begun)))
        expected = decision.choice.terms.get(EXPECTED_MS)
        if expected is not None:
            self._expected_ms[request.request_id] = (now, float(expected[decision.choice.row]))
        overlap_tokens = min(request.isl, decision.overlap_blocks * block_size)
        self._books[number].accept(request.request_id, request.isl - overlap_tokens)
        self._arrived[request.request_id] = request
        self._tails.update(request.path[-1:])
        self.engines[number].submit(request.generate, now, request.path)
        self.result.worker_tokens[number] += request.isl
        self.result.worker_requests[number] += 1
        self.result.prompt_tokens += request.isl
        self.result.overlap_found_tokens += overlap_tokens
        self._sent.append(number)

    def begin_step(self, number: int, now: float, horizon: float) -> StepOutcome | None:
        """Let an idle engine begin; ``None`` when it has nothing to do."""
        if self.holds:
            horizon = now  # any waiting request may be given to this engine at the next event
        if self._speeds is not None:
            self._changing[number].speed = self._speeds.at(number, now)
            horizon = min(horizon, self._speeds.next_change_ms(number, now))
        outcome = self.engines[number].step(now, horizon)
        if outcome is not None:
            result = self.result
            result.busy_ms += outcome.duration_ms
            result.worker_busy_ms[number] += outcome.duration_ms
            result.steps += outcome.steps
            result.preemptions += outcome.preemptions
            if outcome.decode_tokens:
                result.itl_ms.append((outcome.duration_ms / outcome.steps, outcome.decode_tokens))
        return outcome

    def step_ended(self, number: int, now: float, outcome: StepOutcome) -> None:
        """Let the router and ``on_fact`` know what a step brought."""
        result = self.result
        result.span_ms = now
        events: list[AnyEvent] = [*outcome.facts, *self._recorders[number].take()]
        if not events:
            return
        self._books[number].observe(events)
        for fact in outcome.facts:
            if self._on_fact is not None:
                self._on_fact(fact, now)
            if isinstance(fact, RequestStarted):
                result.cached_tokens += fact.cached_tokens
            elif isinstance(fact, PrefillCompleted):
                arrived = self._arrived[fact.request_id]
                ttft_ms = now - arrived.arrival_ms
                result.ttft_ms.append(ttft_ms)
                if self._targets is not None:
                    result.targets_met += ttft_ms <= self._targets.of(fact.request_id)
                session = arrived.session
                if session is not None:
                    result.classes.setdefault((session.kind, session.tenant), []).append(ttft_ms)
                    if session.calls and not arrived.turn and not session.parent_id:
                        result.first_turn_ms.append(ttft_ms)
                if arrived.isl < SHORT_PROMPT_TOKENS:
                    result.short_ttft_ms.append(ttft_ms)
                expected = self._expected_ms.pop(fact.request_id, None)
                if expected is not None:
                    chosen_ms, expected_ms = expected
                    result.predicted.append((chosen_ms, number, expected_ms, now - chosen_ms))
            elif isinstance(fact, RequestFinished):
                result.requests += 1
                ended = self._arrived.pop(fact.request_id)
                result.output_tokens += ended.osl
                for line in self._lines:
                    self._turns_under_way.append((now + self.event_delay_ms, partial(line.finish, ended)))
        self._tell(number, now, events)

    def _tell(self, number: int, now: float, events: list[AnyEvent]) -> None:
        key = self._keys[number]
        record = JournalRecord(
            self._offset, key.worker_id, key.dp_rank, 1, self._seq[number], int(now), int(now), events
        )
        self._offset += 1
        self._seq[number] += 1
        self._under_way.append((now + self.event_delay_ms, record))
        if not self.event_delay_ms:
            self._deliver(now)

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            due, record = self._under_way.popleft()
            for projection in self._projections:
                projection.apply(record, min(due, now))
        while self._turns_under_way and self._turns_under_way[0][0] <= now:
            due, learn = self._turns_under_way.popleft()
            learn(min(due, now))


def play_workload(
    workload: Workload | AgentWorkload | MixedWorkload,
    pools: Sequence[SimulatedPool],
    choose: Callable[[SimulatedRequest, float], int],
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Play the whole workload over ``pools`` in one time; ``choose`` says which of them gets a request that arrives.

    ``on_progress`` is called with the number of requests finished, now and then.
    """
    arrivals = workload.arrivals()
    running: list[tuple[float, int, int, StepOutcome | None]] = []
    """Steps by their ends. Without an outcome, what was said reaches the routers of a pool; such items have numbers
    below 0, each its own, so that outcomes are never compared."""
    deliveries = count(1)
    idle = [[True] * len(pool.engines) for pool in pools]

    def begin(place: int, number: int, now: float) -> None:
        # What ends on another engine may bring a request to this one, a pause later at the earliest.
        horizon = arrivals.next_ms()
        if running:
            horizon = min(horizon, max(now, running[0][0]) + arrivals.look_ahead_ms)
        started = pools[place].begin_step(number, now, horizon)
        idle[place][number] = started is None
        if started is not None:
            heappush(running, (started.ended_ms, place, number, started))

    def begin_idle(place: int, numbers: Sequence[int], now: float) -> None:
        for number in numbers:
            if idle[place][number]:
                begin(place, number, now)

    def finished() -> int:
        return sum(pool.result.requests for pool in pools)

    while running or arrivals.next_ms() < NEVER:
        next_arrival = arrivals.next_ms()
        if running and running[0][0] <= next_arrival:
            now, place, number, outcome = heappop(running)
            pool = pools[place]
            before = pool.result.requests
            if outcome is not None:
                pool.step_ended(number, now, outcome)
                for fact in outcome.facts:
                    if isinstance(fact, RequestFinished):
                        arrivals.finished(fact.request_id, now)
                if pool.event_delay_ms and pool.holds:
                    heappush(running, (now + pool.event_delay_ms, place, -next(deliveries), None))
            touched = pool.take_sent(now)
            if outcome is not None:
                begin(place, number, now)
            begin_idle(place, touched, now)
            if pool.result.requests != before:
                on_progress(finished())
            continue
        now = next_arrival
        while arrivals.next_ms() == now:
            request = arrivals.pop()
            place = choose(request, now)
            pools[place].arrive(request, now)
        for place, pool in enumerate(pools):
            begin_idle(place, pool.take_sent(now), now)
    on_progress(finished())
