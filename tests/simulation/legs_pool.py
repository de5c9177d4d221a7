"""A pool with prefill and decode workers in virtual time: the router's own rule for legs before simulated engines.

Requests are placed leg by leg as a router does: the first by the selector or always apart, the decode leg once the
prompt is computed. Workers can be killed and come back; what ran there begins again on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Policy, RoutingRequest
from poolgrid.kernel.decision.stage_plan import SECOND_LEG, RoleAvailability, first_leg
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits, StepOutcome
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder
from poolgrid.plugins.simulated.core.kv_transfer import KvSource, TransferModel, read_ticket
from poolgrid.plugins.simulation.pool import MODEL, UNLIMITED_QUEUE
from poolgrid.plugins.simulation.workload import SimulatedRequest, Workload
from poolgrid.server.workers.timing import PolynomialTiming, TimingModel, step_times_of


@dataclass(frozen=True, slots=True)
class Outage:
    """A worker that is killed, and comes back."""

    worker: int
    from_ms: float
    to_ms: float = float("inf")


@dataclass(slots=True)
class ServedRequest:
    """One request, from its arrival to its last token."""

    request: SimulatedRequest
    first_token_ms: float = -1.0
    ended_ms: float = -1.0
    dispatches: int = 0
    reason: str = ""
    """Of its last first leg (``LegChoice.reason``)."""
    holder: tuple[int, str] | None = None
    """The engine that keeps its KV, and the transfer's id."""

    @property
    def ttft_ms(self) -> float:
        return self.first_token_ms - self.request.arrival_ms


@dataclass(slots=True)
class SimulatedWorker:
    """One worker's engine and what runs there."""

    key: WorkerKey
    role: Role
    engine: SimulatedEngine
    recorder: CacheRecorder
    seq: int = 0
    epoch: int = 1
    is_up: bool = True
    running: StepOutcome | None = None
    requests: dict[str, ServedRequest] = field(default_factory=dict)
    """By dispatch."""


class LegsPool:
    """One run of one workload over workers of the given roles; ``always_two`` never uses decode workers for prompts."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        roles: Sequence[Role],
        limits: SimulatedLimits,
        timing: TimingModel | None = None,
        transfer: TransferModel | None = None,
        outages: Sequence[Outage] = (),
        always_two: bool = False,
    ) -> None:
        self._workload, self._limits = workload, limits
        self._timing = timing or PolynomialTiming()
        self._transfer = transfer or TransferModel()
        self._outages = outages
        self._always_two = always_two
        projection = Projection(PrefixIndex(), LoadLedger(reservation_ttl_ms=float("inf")))
        self.selector = Selector(projection, policy, requests_per_worker_factor=UNLIMITED_QUEUE)
        self.served = {each.request_id: ServedRequest(each) for each in workload.requests}
        self.gaps_ms: list[tuple[float, int]] = []
        """Gaps between tokens and how often each occurred."""
        self._offset = 0
        self._moments: list[tuple[float, int, int, StepOutcome | None]] = []
        """What ends when: time, a number that no other has, worker, and the step (``None``: look at the engine)."""
        self._numbers = count()
        self.workers = [self._start(number, role, 1) for number, role in enumerate(roles)]
        for number in range(len(self.workers)):
            self._join(number, 0.0)

    def run(self) -> list[ServedRequest]:
        """Play the whole workload."""
        happenings: list[tuple[float, int, SimulatedRequest | Outage, bool]] = []
        order = count()
        for request in self._workload.requests:
            heappush(happenings, (request.arrival_ms, next(order), request, False))
        for outage in self._outages:
            heappush(happenings, (outage.from_ms, next(order), outage, False))
            if outage.to_ms != float("inf"):
                heappush(happenings, (outage.to_ms, next(order), outage, True))
        while happenings or self._moments:
            if self._moments and (not happenings or self._moments[0][0] <= happenings[0][0]):
                now, _, number, outcome = heappop(self._moments)
                self._step_ended(number, now, outcome)
                continue
            now, _, what, ends = heappop(happenings)
            if isinstance(what, SimulatedRequest):
                self._place(self.served[what.request_id], now)
            elif ends:
                self._return(what.worker, now)
            else:
                self._kill(what.worker, now)
        return list(self.served.values())

    # -- workers ---------------------------------------------------------------------------------------------------

    def _start(self, number: int, role: Role, epoch: int) -> SimulatedWorker:
        key, recorder = WorkerKey(WorkerId(f"worker-{number:03}")), CacheRecorder()
        engine = SimulatedEngine(
            self._limits,
            timing=self._timing,
            recorder=recorder,
            report_tokens=role is Role.PREFILL,
            transfer=self._transfer,
            source=KvSource(f"tcp://127.0.0.1:{1 + number}", key.worker_id, epoch),
        )
        return SimulatedWorker(key, role, engine, recorder, epoch=epoch)

    def _join(self, number: int, now: float) -> None:
        limits = self._limits
        card = WorkerCard(
            MODEL,
            self.workers[number].role,
            limits.block_size,
            WorkerLimits(
                limits.max_batch_size, limits.max_num_tokens, limits.total_kv_blocks, limits.max_sequence_length
            ),
            f"tcp://127.0.0.1:{1 + number}",
            step_times=step_times_of(self._timing),
        )
        self._report(number, now, [WorkerJoined(card)])

    def _kill(self, number: int, now: float) -> None:
        worker = self.workers[number]
        worker.is_up, lost = False, worker.requests
        self._report(number, now, [WorkerLeft("killed")])
        self.workers[number] = SimulatedWorker(
            worker.key, worker.role, worker.engine, worker.recorder, worker.seq, worker.epoch, is_up=False
        )
        for served in lost.values():
            served.holder = None
            self._place(served, now)
        # Who fetched its KV from there begins again, too.
        for other in self.workers:
            fetching = [
                (dispatch, served)
                for dispatch, served in other.requests.items()
                if served.holder is not None and served.holder[0] == number
            ]
            for dispatch, served in fetching:
                other.engine.cancel(dispatch)
                del other.requests[dispatch]
                served.holder = None
                self._place(served, now)

    def _return(self, number: int, now: float) -> None:
        before = self.workers[number]
        self.workers[number] = self._start(number, before.role, before.epoch + 1)
        self._join(number, now)

    def _report(self, number: int, now: float, events: list[AnyEvent]) -> None:
        worker = self.workers[number]
        key = worker.key
        record = JournalRecord(
            self._offset, key.worker_id, key.dp_rank, worker.epoch, worker.seq, int(now), int(now), events
        )
        self._offset += 1
        worker.seq += 1
        self.selector.projection.apply(record, now)

    # -- legs ------------------------------------------------------------------------------------------------------

    def _place(self, served: ServedRequest, now: float, params: bytes | None = None) -> None:
        """Choose a worker for a request's first leg, or with ``params`` for its decode leg, and hand it over."""
        request, selector, size = served.request, self.selector, self._workload.block_size
        leg = SECOND_LEG
        if params is None:
            aggregated, prefill, decode = (
                selector.available(MODEL, (role,)) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
            )
            leg = first_leg(RoleAvailability(aggregated, prefill, decode, whole=aggregated or decode), self._always_two)
        routing = RoutingRequest(request.request_id, MODEL, request.isl, size, -(-request.isl // size), stage=leg.stage)
        found = selector.select(WorkerWanted(routing, request.path, now, int(now), roles=leg.roles))
        if not isinstance(found, Decision):
            raise RuntimeError(f"simulating request {request.request_id}: {found}")
        if params is None:
            served.reason = leg.reason if found.legs is None else found.legs.reason
        dispatch = f"{request.request_id}~{served.dispatches}"
        served.dispatches += 1
        selector.book(found, request.path, now, dispatch)
        number = next(at for at, each in enumerate(self.workers) if each.key == found.worker)
        worker = self.workers[number]
        generate = msgspec.structs.replace(
            request.generate, request_id=dispatch, stage=found.request.stage, disaggregated_params=params
        )
        offer = None
        if params is not None:
            assert served.holder is not None, "its prefill leg has just ended"
            source, transfer = served.holder
            offer = self.workers[source].engine.offer(transfer, now)
        worker.engine.submit(generate, now, request.path, offer)
        worker.requests[dispatch] = served
        self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        """Let an idle engine begin a step, or look at it again when it has something to do by itself."""
        worker = self.workers[number]
        if worker.running is not None or not worker.is_up:
            return
        worker.running = worker.engine.step(now)
        if worker.running is not None:
            heappush(self._moments, (worker.running.ended_ms, next(self._numbers), number, worker.running))
        elif (moment := worker.engine.next_moment_ms) is not None:
            heappush(self._moments, (max(now, moment), next(self._numbers), number, None))

    def _step_ended(self, number: int, now: float, outcome: StepOutcome | None) -> None:
        worker = self.workers[number]
        if worker.running is not outcome or not worker.is_up:
            return  # of a worker that was killed meanwhile, or that began something else
        worker.running = None
        if outcome is not None:
            if outcome.decode_tokens:
                self.gaps_ms.append((outcome.duration_ms, outcome.decode_tokens))
            self._take(number, now, outcome)
        self._begin(number, now)

    def _take(self, number: int, now: float, outcome: StepOutcome) -> None:
        """Let the router know what a step brought, and do what follows."""
        worker = self.workers[number]
        tickets = {
            delta.request_id: delta.disaggregated_params
            for delta in outcome.deltas
            if delta.disaggregated_params is not None
        }
        events: list[AnyEvent] = [*outcome.facts, *worker.recorder.take()]
        if events:
            self._report(number, now, events)
        for arrival in outcome.arrivals:
            served = worker.requests.get(arrival.request_id)
            if served is not None and served.holder is not None:
                source, transfer = served.holder
                served.holder = None
                self.workers[source].engine.release(transfer)
                self._begin(source, now)
        for fact in outcome.facts:
            if not isinstance(fact, PrefillCompleted | RequestFinished):
                continue
            served = worker.requests.get(fact.request_id)
            if served is None:
                continue
            if isinstance(fact, RequestFinished):
                del worker.requests[fact.request_id]
                if served.holder is None or worker.role is not Role.PREFILL:
                    served.ended_ms = now
                continue
            if served.first_token_ms < 0:
                served.first_token_ms = now
            ticket = tickets.get(fact.request_id)
            if ticket is not None:
                request = msgspec.structs.replace(served.request.generate, disaggregated_params=ticket)
                served.holder = number, read_ticket(request).transfer_id
                self._place(served, now, ticket)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of some values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
