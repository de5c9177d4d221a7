"""The pool's side of the select plane: global routers ask here for a worker, and get it reserved in one go.

Rules
    1. Select and book happen in one callback: two askers never see the same idle worker.
    2. A reservation is an entry of the pool's load ledger like any other. The worker's events confirm it; without them
       it expires with its lease. Nothing else of an asker is kept, so an asker that dies leaves nothing behind. One
       that has gone since it asked gets no answer and has no reservation: after a pause of this
       process its socket holds questions of clients that gave them up meanwhile.
    3. Whatever arrives is answered or dropped; an undecodable frame costs only its sender the answer.
    4. An asker that does not read its answers loses them at the high-water mark of its queue; it asks again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import zmq

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import DECODE_ROLES, ENCODE_ROLES, ONE_LEG_ROLES, PREFILL_ROLES, WHOLE_ROLES
from poolgrid.kernel.projection.fleet import Worker, chat_of, inabilities_of, media_of
from poolgrid.kernel.requests.trace_record import SpanRecord
from poolgrid.kernel.routing.inputs import Booked, Released, Renewed, WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Found, NoWorker, PolicyFailed
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.kernel.wire.limits import LORAS_PER_WORKER_MAX, POOL_MODELS_MAX, REFUSAL_REASONS_MAX, TEXT_CHARS_MAX
from poolgrid.kernel.wire.selection import (
    ALL_RANKS,
    AskStatus,
    FromPool,
    ModelStatus,
    PoolStatus,
    Probe,
    Probed,
    Release,
    Renew,
    RoleStatus,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
    WorkerRank,
)
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints, shown_peer
from poolgrid.server.process.tracing.tracing import Tracing
from poolgrid.server.router.placement import tell_decision
from poolgrid.server.router.service import RouterService
from poolgrid.server.transport.planes import name_plane
from poolgrid.server.transport.zmq_socket import CallbackSocket, bind, make_socket

log = logging.getLogger(__name__)

ANSWERS_QUEUED_MAX = 10_000
"""Answers that wait for one asker; far more than it has questions open."""

QUESTIONS_QUEUED_MAX = 64
"""Questions of one asker that ZMQ keeps while we are busy; the rest wait at the asker. They may be large."""

EXCLUDED = "excluded by the asker"
NOT_READY_RETRY_S = 1.0


class SelectPlane:
    """Answers global routers over one ROUTER socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        pool: RouterService,
        state: RouterState,
        clock: Clock,
        tracing: Tracing | None = None,
        who_loads: Callable[[], Sequence[LoadingWorker]] = tuple,
    ) -> None:
        """Bind ``host:port`` (0 = any free port); raises ``OSError`` that names the setting."""
        self._pool = pool
        self._who_loads = who_loads
        self._state = state
        self._selector = state.selector
        self._clock = clock
        self._tracing = tracing
        self._complaints = Complaints(log, clock)
        socket = make_socket(context, zmq.ROUTER)
        name_plane(socket, "select")
        socket.setsockopt(zmq.SNDHWM, ANSWERS_QUEUED_MAX)
        socket.setsockopt(zmq.RCVHWM, QUESTIONS_QUEUED_MAX)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = bind(socket, host, port, "select_port")
        self._socket = CallbackSocket(socket, self._on_frames)

    def close(self) -> None:
        self._socket.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = codec.to_pool.decode(frames[-1])
        except DecodeError as error:
            self._complaints.about(f"{shown_peer(frames[0])} on the select plane", error)
            return
        answer: FromPool
        if isinstance(message, Select):
            answer = self._select_traced(message)
        elif isinstance(message, Probe):
            answer = self.probe(message)
        elif isinstance(message, AskStatus):
            answer = self.status(message.ask)
        else:
            self._on_reservation(message)
            return
        if not self._tell(frames[0], answer) and isinstance(message, Select) and isinstance(answer, Selected):
            self._give_back(answer.worker, message.request_id)

    def _tell(self, asker: bytes, answer: FromPool) -> bool:
        """Answer; ``False`` when the asker has gone, or has not read for too long."""
        try:
            return self._socket.send([asker, codec.from_pool.encode(answer)])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    def _on_reservation(self, message: Renew | Release) -> None:
        if isinstance(message, Renew):
            now_ms = self._clock.monotonic_ms()
            for reservation in message.reservations:
                self._state.renew(Renewed(_key(reservation.worker), reservation.request_id, now_ms))
        else:
            self._give_back(message.reservation.worker, message.reservation.request_id)

    def _give_back(self, worker: WorkerRank, request_id: str) -> None:
        self._state.release(Released(_key(worker), request_id))
        self._pool.room_changed()

    def _select_traced(self, message: Select) -> Selected | SelectRefused:
        """Choose, with a span for an asker whose trace is kept."""
        tracing = self._tracing
        record = None if tracing is None else tracing.begin_work("select", message.trace)
        if tracing is None or record is None:
            return self.select(message)
        record.root.attributes["poolgrid.dispatch_id"] = message.request_id
        answer = self.select(message, record.root)
        tracing.end(record, answer.code.value if isinstance(answer, SelectRefused) else "")
        return answer

    def select(self, message: Select, span: SpanRecord | None = None) -> Selected | SelectRefused:
        """Choose a worker and book it, or give the reason why not; ``span`` gets the decision."""
        if not self._pool.ready:
            return SelectRefused(
                message.ask, SelectRefusal.NOT_READY, "the pool's router is rebuilding its state", NOT_READY_RETRY_S
            )
        now_ms = self._clock.monotonic_ms()
        path = unpack_hashes(message.sequence_hashes)
        whole = {rank.worker_id for rank in message.excluded if rank.dp_rank == ALL_RANKS}
        excluded = {_key(rank): EXCLUDED for rank in message.excluded}
        if whole:
            excluded |= {key: EXCLUDED for key in self._pool.projection.fleet.workers if key.worker_id in whole}
        decision = self._decide(
            message.request_id,
            message.model,
            message.stage,
            message.isl,
            path,
            excluded,
            message.priority,
            unpack_hashes(message.media_hashes),
            message.media_kinds,
        )
        if not isinstance(decision, Decision):
            return self._refusal(message.ask, decision)
        lease_ms = self._pool.projection.ledger.lease_ms(message.lease_ms)
        self._state.book(Booked(decision, path, message.request_id, now_ms, lease_ms))
        self._pool.reserved(decision, path)
        if span is not None:
            tell_decision(span, decision)
        worker = self._pool.projection.fleet.workers[decision.worker]
        return Selected(
            message.ask,
            WorkerRank(decision.worker.worker_id, decision.worker.dp_rank),
            worker.card.request_endpoint,
            worker.epoch,
            decision.overlap_blocks,
            worker.card.block_size,
            decision.reason,
            int(lease_ms),
        )

    def probe(self, message: Probe) -> Probed:
        """Say what ``select`` would find; change nothing."""
        if not self._pool.ready:
            return Probed(message.ask, SelectRefusal.NOT_READY)
        path = unpack_hashes(message.sequence_hashes)
        best = self._selector.best_overlap_blocks(message.model, self._roles(message.model, message.stage), path)
        decision = self._decide("", message.model, message.stage, message.isl, path, {}, 0, dry_run=True)
        if not isinstance(decision, Decision):
            return Probed(message.ask, _code(decision), 0, best, self._block_size(message.model))
        row = decision.choice.row
        return Probed(
            message.ask,
            None,
            decision.overlap_blocks,
            best,
            decision.request.block_size,
            int(decision.candidates.prefill_tokens[row]),
            int(decision.candidates.requests[row]),
        )

    def status(self, ask: int) -> PoolStatus:
        if not self._pool.ready:
            return PoolStatus(ask, False)
        models: list[ModelStatus] = []
        requests = capacity = 0
        for name, workers in list(self._pool.projection.fleet.models().items())[:POOL_MODELS_MAX]:
            roles: list[RoleStatus] = []
            for role in Role:
                serving = [worker for worker in workers if worker.card.role is role]
                if not serving:
                    continue
                draining = sum(worker.draining for worker in serving)
                ready, busy, room = self._selector.room(name, (role,), self._pool.unreachable)
                unreachable = len(serving) - draining - ready
                decodes_only = all(each.card.decodes_only for each in serving)
                roles.append(RoleStatus(role, ready, draining, unreachable, busy, room, decodes_only))
                requests += busy
                capacity += room
            card = workers[0].card
            loras = sorted({lora for worker in workers for lora in worker.card.loras})[:LORAS_PER_WORKER_MAX]
            longest = max(worker.card.limits.max_sequence_length for worker in workers)
            models.append(
                ModelStatus(
                    name,
                    card.block_size,
                    card.hash_spec,
                    longest,
                    tuple(roles),
                    tuple(loras),
                    media_of(workers),
                    chat_of(workers),
                    tuple(sorted({alias for worker in workers for alias in worker.card.aliases}))[
                        :LORAS_PER_WORKER_MAX
                    ],
                    inabilities_of(workers),
                    _server_kind(workers) if self._pool.forwards(name) else "",
                )
            )
        return PoolStatus(
            ask,
            True,
            tuple(models),
            self._pool.counts()[1],
            requests / capacity if capacity else 0.0,
            self._pool.retry_after_s(),
            self._loading_workers(),
        )

    def _loading_workers(self) -> int:
        loading = self._who_loads()
        if not loading:
            return 0
        members = {key.worker_id for key in self._pool.projection.fleet.workers}
        return sum(each.worker_id not in members for each in loading)

    def _decide(
        self,
        request_id: str,
        model: str,
        stage: Stage,
        isl: int,
        path: tuple[int, ...],
        excluded: Mapping[WorkerKey, str],
        priority: int,
        media: tuple[int, ...] = (),
        media_kinds: tuple[str, ...] = (),
        dry_run: bool = False,
    ) -> Found:
        block_size = max(1, self._block_size(model))
        request = RoutingRequest(
            request_id,
            model,
            isl,
            block_size,
            -(-isl // block_size),
            priority,
            stage,
            media,
            media_kinds,
        )
        unavailable = {**self._pool.unreachable, **excluded} if excluded else self._pool.unreachable
        wanted = WorkerWanted(
            request,
            path,
            self._clock.monotonic_ms(),
            self._clock.wall_ms(),
            unavailable,
            roles=self._roles(model, stage),
            behind_records=self._pool.behind_records,
        )
        return self._state.preview(wanted) if dry_run else self._state.select(wanted)

    def _roles(self, model: str, stage: Stage) -> tuple[Role, ...]:
        """Return who can do a stage: workers of that role; an aggregated one can do all but
        encode, a decode one the whole."""
        if stage is Stage.ENCODE:
            return ENCODE_ROLES
        own = {Stage.WHOLE: WHOLE_ROLES, Stage.PREFILL: PREFILL_ROLES, Stage.DECODE: DECODE_ROLES}[stage]
        missing = self._pool.unreachable
        if self._selector.available(model, own, missing):
            return own
        other = ONE_LEG_ROLES if stage is Stage.WHOLE else WHOLE_ROLES
        return other if self._selector.available(model, other, missing) else own

    def _block_size(self, model: str) -> int:
        workers = self._pool.projection.fleet.models().get(model)
        return workers[0].card.block_size if workers else 0

    def _refusal(self, ask: int, none: NoWorker | PolicyFailed) -> SelectRefused:
        code = _code(none)
        if isinstance(none, PolicyFailed):
            log.error("choosing a worker for a global router: %s", none, exc_info=none.error)
            return SelectRefused(ask, code, str(none)[:TEXT_CHARS_MAX])
        reasons = tuple(
            (WorkerRank(worker.worker_id, worker.dp_rank), why[:TEXT_CHARS_MAX])
            for worker, why in list(none.reasons.items())[:REFUSAL_REASONS_MAX]
        )
        retry_after_s = self._pool.retry_after_s() if code is SelectRefusal.BUSY else None
        return SelectRefused(ask, code, str(none)[:TEXT_CHARS_MAX], retry_after_s, reasons)


def _server_kind(workers: Sequence[Worker]) -> str:
    """Return the kind of a model's servers."""
    kinds = {worker.card.server_kind for worker in workers}
    return "openai" if "openai" in kinds else min(kinds)


def _code(none: NoWorker | PolicyFailed) -> SelectRefusal:
    if isinstance(none, PolicyFailed):
        return SelectRefusal.POLICY_FAILED
    if none.busy:
        return SelectRefusal.BUSY
    return SelectRefusal.DRAINING if none.draining else SelectRefusal.NO_WORKER


def _key(rank: WorkerRank) -> WorkerKey:
    return WorkerKey(WorkerId(rank.worker_id), rank.dp_rank)
