"""The requests of a pool's router: their entries in the load ledger, their decisions, and what came of them.

The clock of the ledger is read here: entries that no worker confirms expire, and what a worker reported of other
routers' load ends soon. What an entry is worth, and for how long, is the ledger's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.projection.stream_health import TOKENS_MIN
from poolgrid.kernel.requests.inference import Carrier, InferenceRequest
from poolgrid.kernel.requests.legs import (
    AvoidWorker,
    Dispatch,
    EndRequest,
    PlaceNext,
    WorkerFull,
    WorkerOvercommitted,
    WorkerReported,
)
from poolgrid.kernel.routing.inputs import Booked, Expired, Overcommitted, PromptComputed, Released
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Stage, WorkerKey, dispatch_of
from poolgrid.kernel.wire.requests import FinishReason, ForwardBegan, ForwardEnded
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.instruments import Counter
from poolgrid.server.router.engine_backlog import times_ms
from poolgrid.server.router.examiner import Examiner, uncached_of
from poolgrid.server.router.fleet_links import FleetLinks
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.placement import LocalRequest, Placement
from poolgrid.server.router.session_naming import SessionNaming
from poolgrid.server.serving.admission_queue import FULL, FullWorkers
from poolgrid.server.serving.prompt_paths import ReuseSketch
from poolgrid.server.serving.request_tracker import Placer, RequestTracker

if TYPE_CHECKING:
    from poolgrid.server.router.decision_journal.recorder import DecisionRecorder

log = logging.getLogger(__name__)

FAILURE_CHARS_MAX = 300
"""Longest reason that a decision keeps of what its worker did not do."""

DECISIONS_KEPT = 10_000
"""Decisions kept for ``/v1/decisions``, the oldest is forgotten first; their memory is bounded too."""


class RouterTracker(RequestTracker[LocalRequest]):
    """The requests of one router that have been on a worker."""

    def __init__(
        self,
        state: RouterState,
        links: FleetLinks,
        metrics: RouterMetrics,
        clock: Clock,
        placer: Placer[LocalRequest],
        full: FullWorkers[WorkerKey],
        naming: SessionNaming,
        not_sampled: TraceContext | None,
    ) -> None:
        super().__init__(links, metrics, clock, placer, not_sampled)
        self.decisions = DecisionLog(DECISIONS_KEPT)
        self.sketch = ReuseSketch()
        """What prompts were seen, of requests with a worker."""
        self.recorder: DecisionRecorder | None = None
        """Where decisions are kept beyond ``decisions``; it is the log of the state too."""
        self._counters: dict[tuple[str, str, Stage, str], tuple[Counter, Counter]] = {}
        """Of a decision and of its leg, by policy and reason of the one, stage and reason of the other."""
        self._state = state
        self._metrics = metrics
        self._full = full
        self._naming = naming
        self.examiner = Examiner(state.projection, self.decisions.of_dispatch, self._realised)
        self._plans = state.selector.planner is not None
        self._overcommit_timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        for observer in state.projection.observers:
            observer.report_ttft = self.first_token

    def enter(self, routed: LocalRequest, chosen: Placement, dispatch_id: str) -> None:
        """Book a leg that was sent to its worker; its delivery has the reason of the decision already.

        The ledger knows the dispatch, not the client's request: a migration is a new entry on another worker.
        """
        decision, leg, plan = chosen.decision, chosen.leg, routed.machine.plan
        self._state.book(Booked(decision, routed.path, dispatch_id, chosen.now_ms))
        self.decisions.add(decision)
        self.requests[plan.request.request_id] = routed
        self._naming.dispatched(plan.request)
        routed.latest = plan.current
        metrics = self._metrics
        kind = (decision.policy, routed.machine.delivery.decision_reason, leg.stage, leg.reason)
        counters = self._counters.get(kind)
        if counters is None:
            of_decisions = metrics.decisions.labels(decision.policy, kind[1])
            counters = self._counters[kind] = of_decisions, metrics.legs.labels(STAGE_WORD[leg.stage], leg.reason)
        counters[0].value += 1
        counters[1].value += 1
        if decision.behind_records:
            metrics.decisions_behind.inc()
        if leg.stage is not Stage.ENCODE and decision.attempt == plan.encode_legs:
            self._count_prompt(decision, routed.path)
        carrier = plan.request.carrier
        if carrier is not None and plan.current is not None:
            self._report_forward(plan.request, decision, plan.current)
            if not carrier.is_streamed and leg.stage in PROMPT_STAGES:
                self._expect_unseen(decision, plan.current)

    def _report_forward(self, request: InferenceRequest, decision: Decision, dispatch: Dispatch) -> None:
        """Report to the worker what went past it to its server: its events show other routers the load."""
        link = self._links.get(dispatch.endpoint)
        if link is not None:
            link.forward_began(
                ForwardBegan(
                    dispatch.id,
                    dispatch.worker.dp_rank,
                    decision.request.isl,
                    decision.overlap_tokens,
                    request.turn,
                    dispatch.stage is not Stage.DECODE,
                    request.cache_salt,
                )
            )

    def _expect_unseen(self, decision: Decision, dispatch: Dispatch) -> None:
        """Count a prompt as computed when that is expected: of an answer in one piece only the end is seen, and its
        worker would count as busy with the prompt while it generates."""
        card = self._state.projection.fleet.workers[decision.worker].card
        wait_s = max(0.001, times_ms(decision, card)[1] / 1000)
        asyncio.get_running_loop().call_later(wait_s, self._take_as_computed, dispatch)

    def _take_as_computed(self, dispatch: Dispatch) -> None:
        if self._is_stopped or not self._state.projection.ledger.knows(dispatch.worker, dispatch.id):
            return
        if self._state.note_prompt(PromptComputed(dispatch.worker, dispatch.id, untimed=True)):
            self._placer.room_changed(soon=True)
            if (link := self._links.get(dispatch.endpoint)) is not None:
                link.forward_computed(dispatch.id)

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
        # Others than this router may have shown a prompt to the pool: what is there was achieved.
        decision.seen_tokens = seen_tokens = self.sketch.note(path) * request.block_size
        metrics.prompt_tokens.value += request.isl
        metrics.overlap_found_tokens.value += decision.overlap_tokens
        metrics.achievable_tokens.value += min(request.isl, max(seen_tokens, decision.overlap_tokens))

    def gateway_realised(self, dispatch_id: str, path: Sequence[int], cached_tokens: int, isl: int | None) -> None:
        """Note what an engine reported in an answer that went past this router."""
        decision = self.decisions.of_dispatch(dispatch_id)
        if decision is not None:
            self._realised(decision, cached_tokens, isl)
            self.examiner.gateway_reported(decision, path, cached_tokens, isl)

    def _realised(self, decision: Decision, cached_tokens: int, isl: int | None = None) -> None:
        """Note what the chosen worker really reused, the first time that it is reported."""
        if decision.realised_cached_tokens is not None:
            return
        decision.realised_cached_tokens = cached_tokens
        request = decision.request
        # Nothing was promised of a prompt whose tokens are not known.
        if request.stage in PROMPT_STAGES and request.isl and not request.by_text:
            metrics = self._metrics
            error = cached_tokens - decision.overlap_tokens
            if error > 0:
                metrics.reused_more.value += error
            else:
                metrics.reused_less.value -= error
            metrics.prediction_error.observe(abs(error) / request.isl)
            if decision.attempt == 0 or decision.is_reservation:
                if decision.seen_tokens <= cached_tokens <= request.isl and not error:
                    metrics.cold_tokens.value += request.isl - cached_tokens
                else:
                    metrics.count_uncached(uncached_of(decision, cached_tokens))
            if decision.is_reservation and _is_first(decision):
                metrics.overlap_realised_tokens.value += cached_tokens
        if self.recorder is not None:
            self.recorder.realised(request.request_id, decision.attempt, cached_tokens, isl)

    def first_token(self, dispatch_id: str, expected_ms: float, real_ms: float) -> None:
        """Note how long a first token really took, of a policy that predicts it."""
        if real_ms > 0.0:
            self._metrics.ttft_error.observe(abs(real_ms - expected_ms) / real_ms)
        decision = self.decisions.first_token(dispatch_id, real_ms)
        if decision is not None and self.recorder is not None:
            self.recorder.first_token(decision.request.request_id, decision.attempt, real_ms)

    # -- effects ---------------------------------------------------------------------------------------------------

    def reported(self, routed: LocalRequest, report: WorkerReported) -> None:
        """Take note of how much of the prompt a leg's worker reused: at its first output, or at its end."""
        machine, delta, dispatch = routed.machine, report.delta, report.dispatch
        carrier = machine.request.carrier
        if carrier is not None:
            self._carried(routed, carrier, report)
            return
        # The worker's own events come some milliseconds later: too late for requests that wait for a step, or that ask
        # at once about the same prompt again.
        is_held = report.first and len(machine.request.token_ids) >= TOKEN_BYTES * TOKENS_MIN
        if (is_held or self._plans) and delta.token_ids:
            computed = self._state.note_prompt(PromptComputed(dispatch.worker, dispatch.id, is_held))
            if computed and self._plans:
                self._placer.room_changed(soon=True)
        if delta.cached_tokens is not None:
            decision = self.decisions.of_dispatch(dispatch.id)
            if decision is not None:
                self._realised(decision, delta.cached_tokens)
            if dispatch.number == machine.plan.encode_legs + machine.stale_loads:
                self._metrics.overlap_realised_tokens.value += delta.cached_tokens

    def _carried(self, routed: LocalRequest, carrier: Carrier, report: WorkerReported) -> None:
        """Take note of what passed by of an engine server's answer."""
        machine, delta, dispatch = routed.machine, report.delta, report.dispatch
        request = machine.request
        is_answered = delta.finish_reason is FinishReason.PREFILLED and carrier.is_prefilled
        if delta.token_ids or is_answered:
            is_timed = carrier.is_streamed or is_answered
            first_ms = self._clock.monotonic_ms() if is_timed else 0.0
            is_held = not request.by_text and len(request.token_ids) >= TOKEN_BYTES * TOKENS_MIN
            computed = self._state.note_prompt(PromptComputed(dispatch.worker, dispatch.id, is_held, first_ms))
            if computed and self._plans:
                self._placer.room_changed(soon=True)
            if is_timed and (link := self._links.get(dispatch.endpoint)) is not None:
                link.forward_computed(dispatch.id)
        if delta.cached_tokens is not None:
            decision = self.decisions.of_dispatch(dispatch.id)
            if decision is not None:
                self._realised(decision, delta.cached_tokens, carrier.prompt_tokens)
                decision.reported_isl = carrier.prompt_tokens
            if dispatch.number == 0:
                self._metrics.overlap_realised_tokens.value += delta.cached_tokens

    def release(self, routed: LocalRequest, dispatch: Dispatch) -> None:
        self._state.release(Released(dispatch.worker, dispatch.id))
        carrier = routed.machine.request.carrier
        if carrier is not None and (link := self._links.get(dispatch.endpoint)) is not None:
            is_first, is_known = dispatch.stage is Stage.PREFILL, not routed.machine.request.by_text
            # What a decode server fetched counts as cached there.
            cached = carrier.cached_tokens if is_known and dispatch.stage is not Stage.DECODE else None
            reason = FinishReason.PREFILLED if is_first and carrier.is_prefilled else carrier.finish_reason
            link.forward_ended(ForwardEnded(dispatch.id, dispatch.worker.dp_rank, reason, cached))

    def avoid(self, routed: LocalRequest, avoid: AvoidWorker) -> None:
        worker = avoid.dispatch.worker
        # A client's own bytes are sent twice to one server only to continue a stream. Of two servers that share a
        # request the other one may have been at fault.
        is_alone = avoid.dispatch.stage is Stage.WHOLE
        for_good = avoid.for_good or (is_alone and self._is_unanswered(routed))
        (routed.unable if for_good else routed.tried)[worker] = avoid.why
        if avoid.for_good:
            # What one rank cannot do, no rank of that engine can.
            ranks = (key for key in self._state.projection.fleet.workers if key.worker_id == worker.worker_id)
            routed.unable.update(dict.fromkeys(ranks, avoid.why))

    @staticmethod
    def _is_unanswered(routed: LocalRequest) -> bool:
        """Return whether a request is forwarded, and its client has nothing of an answer."""
        machine = routed.machine
        return machine.request.carrier is not None and not machine.delivery.output

    def failed(self, routed: LocalRequest, place: PlaceNext) -> None:
        """Note why a leg's worker did not serve it, for those that ask."""
        dispatch, why = place.after, place.why[:FAILURE_CHARS_MAX]
        decision = self.decisions.of_dispatch(dispatch.id)
        if decision is not None:
            decision.failure = why
        request = routed.machine.request
        if dispatch.stage is Stage.ENCODE:
            # Its next worker may refuse it for want of embeddings, which would be all that is seen.
            worker = str(dispatch.worker)
            log.warning(
                "request %s: worker %s did not encode its media: %r",
                request.request_id,
                worker,
                why,
                extra=request.named(worker=worker),
            )

    def worker_full(self, routed: LocalRequest, full: WorkerFull) -> None:
        if self._is_unanswered(routed):
            routed.unable[full.dispatch.worker] = FULL  # the client gets the server's own refusal; it does not wait
        self._full.note(full.dispatch.worker, full.retry_after_ms)

    def overcommitted(self, routed: LocalRequest, effect: WorkerOvercommitted) -> None:
        """Take note of what a worker has promised to others; it holds for a moment, until their events come."""
        self._metrics.crowded.inc()
        now_ms = self._clock.monotonic_ms()
        self._state.overcommit(Overcommitted(effect.dispatch.worker, effect.dispatch.id, effect.booked_tokens, now_ms))
        self._await_overcommit_end(now_ms)

    def ended(self, routed: LocalRequest, end: EndRequest) -> None:
        machine, latest = routed.machine, routed.latest
        turn = self._naming.ended(
            machine.request, routed.path, routed.block_size, machine.delivery.output, end.last.finish_reason or ""
        )
        if turn is not None and latest is not None and (link := self._links.get(latest.endpoint)) is not None:
            link.answered(turn)
        if self.recorder is not None:
            self.recorder.ended(routed.machine.request.request_id, routed.machine.delivery.tokens)

    # -- time ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Expire the ledger's entries that are due, but for those of legs that this router knows to run."""
        running = {leg.id for routed in self.requests.values() for leg in routed.machine.plan.legs}
        self._state.expire(Expired(self._clock.monotonic_ms(), running))

    def stop(self) -> None:
        self._is_stopped = True
        if self._overcommit_timer is not None:
            self._overcommit_timer.cancel()

    def _await_overcommit_end(self, now_ms: float) -> None:
        """Wait until the next such entry is due: a worker's report of others' load must not outlive their events."""
        due_ms = self._state.projection.ledger.crowding_ends_ms()
        if self._overcommit_timer is None and due_ms is not None:
            wait_s = max(0.001, (due_ms - now_ms) / 1000)
            self._overcommit_timer = asyncio.get_running_loop().call_later(wait_s, self._end_overcommit)

    def _end_overcommit(self) -> None:
        self._overcommit_timer = None
        self.expire()
        self._await_overcommit_end(self._clock.monotonic_ms())


def _is_first(decision: Decision) -> bool:
    """Return whether a reservation is for the first leg that computes a prompt; its request has a dispatch's name."""
    number = dispatch_of(decision.request.request_id)[1]
    return number == 0 or (number == 1 and bool(decision.request.media))
