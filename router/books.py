"""What a router has on its books for each request: entries of the load ledger, decisions, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

from poolgrid.process.clock import Clock
from poolgrid.process.instruments import Counter
from poolgrid.router.chosen import Chosen
from poolgrid.router.core.computed_prompts import TOKENS_MIN
from poolgrid.router.core.decision import Decision, DecisionLog
from poolgrid.router.core.inputs import Booked, PromptComputed, Released
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.router.metrics import RouterMetrics
from poolgrid.router.ports import DecisionRecord
from poolgrid.router.reservations import Reservations
from poolgrid.router.routed import Routed
from poolgrid.router.settings import RouterSettings
from poolgrid.serving.effects import Avoid, End, Full, Heard
from poolgrid.serving.full_workers import FullWorkers
from poolgrid.serving.legs import Dispatch
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.serving.reuse_sketch import ReuseSketch
from poolgrid.wire.hashing import TOKEN_BYTES
from poolgrid.wire.identifiers import STAGE_WORD, Stage, WorkerKey
from poolgrid.wire.request_ids import dispatch_of

# A compiled module looks up what it imports at each use.
_perf_counter: Final = perf_counter
_ENCODE: Final = Stage.ENCODE


class RequestBooks:
    """Implements ``poolgrid.serving.in_flight.Books``."""

    def __init__(
        self,
        settings: RouterSettings,
        state: RouterState,
        metrics: RouterMetrics,
        clock: Clock,
        on_ended: Callable[[Routed | None], None],
        on_free: Callable[[], None],
        full: FullWorkers[WorkerKey],
    ) -> None:
        """``on_ended`` is told of each request that is over; ``None`` for one that never was on a worker. ``on_free``
        is told, where requests wait for workers without a prompt to compute, when one was seen to be computed."""
        self.active: dict[str, Routed] = {}
        """Requests that have been on a worker, by id."""
        self.decisions = DecisionLog(settings.decision_log_length, settings.decision_log_bytes)
        self.sketch = ReuseSketch(settings.reuse_sketch_bytes)
        """What prompts were seen, of requests with a worker."""
        self.record: DecisionRecord | None = None
        """Where decisions are kept beyond ``decisions``; whoever sets it also makes it the log of the state."""
        self._counters: dict[tuple[str, str, Stage, str], tuple[Counter, Counter]] = {}
        """Of a decision and of its leg, by policy and reason of the one, stage and reason of the other."""
        self._state = state
        self._metrics = metrics
        self._clock = clock
        self._on_ended = on_ended
        self._on_free = on_free
        self._full = full
        self._plans = state.selector.planner is not None
        self.reservations = Reservations(state, clock, self._under_way)
        for observer in state.projection.observers:
            observer.report_ttft = self.first_token

    def enter(self, routed: Routed, chosen: Chosen, dispatch_id: str) -> None:
        """Book a leg that was sent to its worker; its delivery has the reason of the decision already.

        The ledger knows the dispatch, not the client's request: a migration is a new entry on another worker.
        """
        decision, leg, plan = chosen.decision, chosen.leg, routed.machine.plan
        self._state.apply(Booked(decision, routed.path, dispatch_id, chosen.now_ms))
        self.decisions.add(decision)
        self.active[plan.request.request_id] = routed
        metrics = self._metrics
        metrics.leg_times.sent(routed.watch, decision.attempt, _perf_counter())
        kind = (decision.policy, routed.machine.delivery.decision_reason, leg.stage, leg.reason)
        counters = self._counters.get(kind)
        if counters is None:
            of_decisions = metrics.decisions.labels(decision.policy, kind[1])
            counters = self._counters[kind] = of_decisions, metrics.legs.labels(STAGE_WORD[leg.stage], leg.reason)
        counters[0].value += 1
        counters[1].value += 1
        if decision.behind_records:
            metrics.decisions_behind.inc()
        if leg.stage is not _ENCODE and decision.attempt == plan.encode_legs:
            self._count_prompt(decision, routed.path)

    def reserved(self, decision: Decision, path: Sequence[int]) -> None:
        """Keep and count what was chosen for a global router."""
        decision.is_reservation = True
        self.decisions.add(decision)
        metrics = self._metrics
        metrics.decisions.labels(decision.policy, decision.reason).inc()
        if decision.behind_records:
            metrics.decisions_behind.inc()
        if decision.request.stage in PROMPT_STAGES and _is_first(decision):
            self._count_prompt(decision, path)

    def _count_prompt(self, decision: Decision, path: Sequence[int]) -> None:
        metrics, request = self._metrics, decision.request
        found_tokens = decision.overlap_blocks * request.block_size
        # Others than this router may have shown a prompt to the pool: what is there was achieved.
        seen_tokens = self.sketch.note(path) * request.block_size
        metrics.prompt_tokens.value += request.isl
        metrics.overlap_found_tokens.value += min(request.isl, found_tokens)
        metrics.achievable_tokens.value += min(request.isl, max(seen_tokens, found_tokens))

    def realised(self, dispatch_id: str, cached_tokens: int) -> None:
        """Note what the chosen worker really reused."""
        decision = self.decisions.realised(dispatch_id, cached_tokens)
        if decision is None:
            return
        request = decision.request
        if request.stage in PROMPT_STAGES and request.isl:
            metrics = self._metrics
            error = cached_tokens - min(request.isl, decision.overlap_blocks * request.block_size)
            if error > 0:
                metrics.reused_more.value += error
            else:
                metrics.reused_less.value -= error
            metrics.prediction_error.observe(abs(error) / request.isl)
            if decision.is_reservation and _is_first(decision):
                metrics.overlap_realised_tokens.value += cached_tokens
        if self.record is not None:
            self.record.realised(request.request_id, decision.attempt, cached_tokens)

    def first_token(self, dispatch_id: str, expected_ms: float, real_ms: float) -> None:
        """Note how long a first token really took, of a policy that predicts it."""
        metrics = self._metrics
        error_ms = real_ms - expected_ms
        if error_ms > 0:
            metrics.ttft_later.value += error_ms / 1000
        else:
            metrics.ttft_sooner.value -= error_ms / 1000
        if real_ms > 0.0:
            metrics.ttft_error.observe(abs(error_ms) / real_ms)
        decision = self.decisions.first_token(dispatch_id, real_ms)
        if decision is not None and self.record is not None:
            self.record.first_token(decision.request.request_id, decision.attempt, real_ms)

    def heard(self, machine: RequestMachine, heard: Heard) -> None:
        """Take note of how much of the prompt a leg's worker reused: at its first output, or at its end."""
        routed = self.active.get(machine.request.request_id)
        if routed is not None:
            self._metrics.leg_times.heard(routed.watch, heard, _perf_counter())
            routed.waits_since_ms = None
        cached_tokens = heard.delta.cached_tokens
        # The worker's own events come some milliseconds later: too late for whoever waits for a step, or asks at once
        # about the same prompt again.
        is_held = routed is not None and heard.first and len(machine.request.token_ids) >= TOKEN_BYTES * TOKENS_MIN
        if (is_held or self._plans) and heard.delta.token_ids:
            computed = self._state.apply(PromptComputed(heard.dispatch.worker, heard.dispatch.id, is_held))
            if computed and self._plans:
                self._on_free()
        if cached_tokens is not None:
            self.realised(heard.dispatch.id, cached_tokens)
            if heard.dispatch.number == machine.plan.encode_legs + machine.crowded:
                self._metrics.overlap_realised_tokens.value += cached_tokens

    def release(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Take a leg off its worker's books."""
        self._state.apply(Released(dispatch.worker, dispatch.id))

    def avoid(self, machine: RequestMachine, avoid: Avoid) -> None:
        """Have a leg's worker come last when the request is placed again, or not at all."""
        routed = self.active[machine.request.request_id]
        (routed.unable if avoid.for_good else routed.tried)[avoid.dispatch.worker] = avoid.why
        self._metrics.leg_times.withdrawn(routed.watch, _perf_counter())

    def full(self, machine: RequestMachine, full: Full) -> None:
        """Send a leg's worker nothing for the time that it reported."""
        routed = self.active[machine.request.request_id]
        if routed.waits_since_ms is None:
            routed.waits_since_ms = self._clock.monotonic_ms()
        self._full.note(full.dispatch.worker, full.retry_after_ms)
        self._metrics.leg_times.withdrawn(routed.watch, _perf_counter())

    def blame(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Hold nothing against a worker beyond this request: links and events say whether it lives."""

    def crowded(self, machine: RequestMachine, dispatch: Dispatch, booked_tokens: int) -> None:
        """Take note of what a worker has really promised to compute."""
        self._metrics.crowded.inc()
        self.reservations.crowded(dispatch.worker, dispatch.id, booked_tokens)

    def ended(self, machine: RequestMachine, end: End) -> None:
        """Close the books of a request."""
        if end.last.poison:
            self._metrics.poison_requests.inc()
        request_id = machine.request.request_id
        routed = self.active.get(request_id)
        if routed is None or routed.machine is not machine:
            self._on_ended(None)
            return
        del self.active[request_id]
        if self.record is not None:
            self.record.ended(request_id, machine.delivery.tokens)
        self._on_ended(routed)

    def _under_way(self) -> set[str]:
        return {leg.id for routed in self.active.values() for leg in routed.machine.plan.legs}


def _is_first(decision: Decision) -> bool:
    """Tell whether a reservation is for the first leg that computes a prompt; its request has a dispatch's name."""
    number = dispatch_of(decision.request.request_id)[1]
    return number == 0 or (number == 1 and bool(decision.request.media))
