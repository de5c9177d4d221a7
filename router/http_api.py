"""What a pool's router adds to the HTTP API: workers, decisions, dry runs, the drain of a worker, the pool's health.

Rules of the pool's health
    1. An endpoint is all workers of one model, role and endpoint name; it is ready while one of them takes requests.
    2. A model that is served in stages is complete once each stage that it needs has a worker: prefill workers cannot
       continue alone, and decode workers that could compute prompts themselves are there for something else. A pool is
       not ready before; load balancers would send it requests that it serves slowly or not at all.
    3. What was complete once stays ready: the pool serves on with those that are left, and ``troubles`` lists the
       others.
    4. A pool is ready only while some model has a worker that can generate: without one every request would be answered
       503, and a load balancer has better routers to ask (decision 0046). It starts without workers all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import StreamingResponse
from msgspec import Raw, Struct, structs
from msgspec.structs import asdict

from poolgrid.kernel.consolidation.session_table import SessionTable
from poolgrid.kernel.index.prefix_index import HASHES_END
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import Refused
from poolgrid.kernel.wire.addresses import COMPONENTS
from poolgrid.kernel.wire.answers import (
    DecisionList,
    DoctorAnswer,
    DrainAnswer,
    DryRun,
    EndpointRow,
    InstanceRow,
    JournalRow,
    LoadingRow,
    ModelFinding,
    PoolAnswer,
    PoolStatusRow,
    QueueRow,
    RecordingRow,
    RequestExplanation,
    SessionList,
    SessionRow,
    SourceRow,
    StreamRow,
    VerdictRow,
    WaitingTurnRow,
    WorkerList,
    WorkerRow,
)
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.kernel.wire.limits import DRAIN_TIMEOUT_MS_MAX, IDENTIFIER_BYTES_MAX
from poolgrid.kernel.wire.selection import PoolStatus, RoleStatus
from poolgrid.kernel.wire.sessions import SessionRecord, TurnEnding
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.server.diagnosis.rules import ReuseVerdict
from poolgrid.server.frontend.app import Readiness
from poolgrid.server.frontend.description import error_answers
from poolgrid.server.frontend.errors import RequestError, invalid, refused
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.openapi import ROUTE_REQUEST, ROUTE_STATUSES
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompts import tokenize
from poolgrid.server.frontend.request_body import RequestIds
from poolgrid.server.frontend.schema import parse
from poolgrid.server.frontend.sequences import sequences_of
from poolgrid.server.process.clock import Clock
from poolgrid.server.router.placement import LocalRequest
from poolgrid.server.router.select_plane import SelectPlane
from poolgrid.server.router.service import RouterService
from poolgrid.server.serving.fair_queue import QueuedRequest
from poolgrid.server.serving.router_process import decision_not_found

if TYPE_CHECKING:
    from poolgrid.server.router.decision_journal.recorder import DecisionRecorder

DECISIONS_LISTED_MAX = 1000
SESSIONS_LISTED_MAX = 1000

LINES_PER_TURN = 1024
"""Lines of a worker's blocks written between two turns of the event loop: a millisecond or two."""


def add_router_endpoints(
    app: FastAPI,
    service: RouterService,
    clock: Clock,
    who_loads: Callable[[], Sequence[LoadingWorker]],
    found_of_models: Callable[[], Sequence[ModelFinding]],
) -> None:
    """Add ``/v1/workers``, ``/v1/sessions``, ``/v1/decisions`` and ``/v1/decisions/{request_id}``."""

    @app.get("/v1/workers", tags=["router"])
    async def list_workers() -> dict[str, Any]:
        """List every worker of the pool: its state, its load, what it holds, how late its events are; and the queue.

        ``loading`` has those that are not in the pool yet because they still load, and how far they are.
        """
        projection = service.projection
        now_ms = clock.wall_ms()
        rows = [
            worker_row(projection, projection.fleet.workers[key], service.unreachable.get(key, ""), now_ms)
            for key in sorted(projection.fleet.workers)
        ]
        queue = msgspec.convert(service.queue.view(), QueueRow, from_attributes=True)
        members = {row.worker_id for row in rows}
        examiner = service.tracker.examiner
        rows = [
            structs.replace(row, verdict=examiner.verdict(WorkerKey(WorkerId(row.worker_id), row.dp_rank)).cause.value)
            for row in rows
        ]
        # Who has just joined may still be among them.
        loading = [loading_row(each) for each in who_loads() if each.worker_id not in members]
        return WorkerList(
            offset=projection.next_offset,
            queue=queue,
            data=rows,
            loading=loading,
            uncached_tokens=service.metrics.uncached(),
        ).to_json()

    @app.get("/v1/doctor", tags=["router"])
    async def doctor() -> dict[str, Any]:
        """Compare promised and reported reuse of each worker, and name the cause where they differ.

        ``models`` has why prompts of a model are placed by their text, and why its engines get no token ids.
        """
        verdicts = service.tracker.examiner.verdicts()
        return DoctorAnswer(
            data=[verdict_row(each) for each in verdicts],
            uncached_tokens=service.metrics.uncached(),
            models=list(found_of_models()),
        ).to_json()

    @app.get("/v1/sessions", tags=["router"])
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=SESSIONS_LISTED_MAX, description="How many, the latest first.")] = 50,
    ) -> dict[str, Any]:
        """List the pool's sessions (turns, footprint in blocks by worker, state), and the turns without room.

        ``admission`` has whether turns wait for room at all, and why.
        """
        sessions, now_ms = service.projection.sessions, clock.wall_ms()
        rows = [session_row(sessions, each, now_ms) for each in sessions.latest(limit)]
        waiting = [waiting_row(each, clock.monotonic_ms()) for each in service.queue.turns_without_place()[:limit]]
        offset, total = service.projection.next_offset, len(sessions)
        admission = None if service.admission is None else service.admission.row(clock.monotonic_ms())
        return SessionList(offset=offset, total=total, data=rows, waiting=waiting, admission=admission).to_json()

    @app.get("/v1/decisions", tags=["router"])
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=DECISIONS_LISTED_MAX, description="How many, newest first.")] = 20,
    ) -> dict[str, Any]:
        """List the last routing decisions, newest first."""
        return DecisionList(data=[each.summary() for each in service.decisions.newest(limit)]).to_json()

    @app.get("/v1/decisions/{request_id}", tags=["router"], responses=error_answers({"404": "Not kept (any more)"}))
    async def explain(request_id: Annotated[str, Path(max_length=256)]) -> dict[str, Any]:
        """Explain one request's decisions: every candidate, every cost term, the workers filtered out and why."""
        attempts = [each.explanation() for each in service.decisions.of_request(request_id)]
        if not attempts:
            kept, is_recorded = service.decisions, service.tracker.recorder is not None
            raise decision_not_found(request_id, len(kept), kept.oldest_ms, is_recorded=is_recorded)
        return RequestExplanation(request_id=request_id, attempts=attempts).to_json()


def session_row(sessions: SessionTable, session: SessionRecord, now_ms: int) -> SessionRow:
    """Return the row of one session in ``/v1/sessions``."""
    blocks = sessions.blocks_of(session)
    return SessionRow(
        session=session.name,
        tenant=f"{session.tenant:016x}" if session.tenant else "",
        parent=session.parent,
        state=sessions.state(session),
        turns=session.turns,
        footprint_blocks=sum(blocks.values()),
        workers={str(worker): count for worker, count in blocks.items()},
        isl=session.isl,
        cached_tokens=session.cached_tokens,
        last_request_id=session.request_id,
        last_ms_ago=max(0, now_ms - session.last_ms),
        expected_return_ms=sessions.return_ms(session, now_ms),
        gaps_ms={kind.value: gap.mean_ms for kind, gap in zip(TurnEnding, session.gaps, strict=True) if gap.count},
    )


def waiting_row(queued: QueuedRequest[LocalRequest], now_ms: float) -> WaitingTurnRow:
    """Return what ``/v1/sessions`` says of a turn that waits for room."""
    request = queued.item.machine.request
    turn = request.turn
    assert turn is not None, "only turns of sessions wait for that"
    return WaitingTurnRow(
        session=turn.session,
        tenant=f"{turn.tenant:016x}" if turn.tenant else "",
        request_id=request.request_id,
        isl=len(request.token_ids) // TOKEN_BYTES,
        waited_ms=max(0, round(now_ms - queued.entered_ms)),
    )


def verdict_row(verdict: ReuseVerdict) -> VerdictRow:
    """Return a verdict for people and programs."""
    cause = verdict.cause
    return VerdictRow(
        worker=verdict.worker,
        cause=cause.value,
        is_fault=cause.is_fault,
        meaning=cause.meaning,
        evidence=list(verdict.evidence),
        fix=cause.fix,
        first_request=verdict.first_request,
        requests=verdict.requests,
        promised_tokens=verdict.promised_tokens,
        reported_tokens=verdict.reported_tokens,
    )


def loading_row(worker: LoadingWorker) -> LoadingRow:
    """Return the row of a worker that still loads in ``/v1/workers``."""
    left_bytes = max(0, worker.total_bytes - worker.done_bytes)
    return msgspec.convert({**asdict(worker), "left_bytes": left_bytes}, LoadingRow)


def worker_row(projection: Projection, worker: Worker, unreachable: str, now_ms: int) -> WorkerRow:
    """Return the row of one worker in ``/v1/workers``; ``unreachable`` is the reason, if it cannot be reached."""
    load = worker.load
    slot = projection.index.slot(worker.key)
    ledger = projection.ledger
    ledger.ensure_slot(slot)
    state = "draining" if worker.draining else "unreachable" if unreachable else "ready"
    lag_ms = worker.last_recorded_ms - worker.last_event_ms if worker.last_event_ms else None
    return WorkerRow(
        worker_id=worker.key.worker_id,
        dp_rank=worker.key.dp_rank,
        model=worker.card.model,
        role=worker.card.role.name.lower(),
        state=state,
        unreachable_because=unreachable or None,
        epoch=worker.epoch,
        engine=worker.card.engine,
        block_size=worker.card.block_size,
        running_requests=load.running_requests if load else 0,
        waiting_requests=load.waiting_requests if load else 0,
        prefill_tokens=int(ledger.prefill_tokens[slot]),
        active_blocks=int(ledger.active_blocks[slot]),
        active_requests=int(ledger.requests[slot]),
        cached_blocks=load.cached_blocks if load else 0,
        indexed_blocks=projection.index.held_blocks(worker.key),
        total_blocks=worker.card.limits.total_kv_blocks,
        requests_total=worker.requests_total,
        event_lag_ms=max(0, lag_ms) if lag_ms is not None else None,
        last_event_ms_ago=max(0, now_ms - worker.last_recorded_ms) if worker.last_recorded_ms else None,
        http_endpoint=worker.card.http_endpoint,
        stream=stream_row(projection, worker),
    )


def stream_row(projection: Projection, worker: Worker) -> StreamRow:
    """Return how far a worker's event stream can be trusted, and the numbers of the cross-check."""
    trust = projection.trust
    state, reason = trust.stream(worker.key)
    check = trust.checks.get(worker.key)
    why = trust.untrusted.get(worker.key)
    return StreamRow(
        state=state.name.lower(),
        reason=reason,
        trusted=why is None,
        untrusted_because=why,
        sources={
            name: SourceRow(state=stream.state.name.lower(), reason=stream.reason)
            for name, stream in sorted(worker.streams.items())
        },
        checked_requests=len(check) if check else 0,
        predicted_tokens=check.predicted_tokens if check else 0,
        realised_tokens=check.realised_tokens if check else 0,
        disagreement=round(check.disagreement, 4) if check else 0.0,
        fault=worker.events_fault,
    )


def add_index_endpoint(app: FastAPI, service: RouterService) -> None:
    """Add ``/v1/workers/{worker_id}/blocks``: the index's view of one worker, for checks against the worker's own."""

    @app.get("/v1/workers/{worker_id}/blocks", tags=["router"], response_class=StreamingResponse)
    async def blocks(worker_id: str, dp_rank: int = 0) -> StreamingResponse:
        """Return the sorted sequence hashes that a worker holds by the index, one per line, with their tiers.

        The index is looked at bit by bit: of a worker that is not idle, lines may be of different moments.
        """
        key = WorkerKey(WorkerId(worker_id), dp_rank)

        async def lines() -> AsyncIterator[str]:
            first, between = 0, ""
            while first < HASHES_END and key in service.projection.fleet.workers:
                found, first = service.projection.index.holdings_from(key, first)
                for at in range(0, len(found), LINES_PER_TURN):
                    part = found[at : at + LINES_PER_TURN]
                    yield between + "\n".join(f"{each:016x} {tier.name.lower()}" for each, tier in part)
                    between = "\n"
                    await asyncio.sleep(0)
                await asyncio.sleep(0)

        return StreamingResponse(lines(), media_type="text/plain")


def add_pool_endpoint(
    app: FastAPI, plane: SelectPlane, service: RouterService, recorder: DecisionRecorder | None = None
) -> None:
    """Add ``/v1/pool``: how a global router that knows this router's URL finds its select plane."""

    @app.get("/v1/pool", tags=["router"])
    async def pool() -> dict[str, Any]:
        """Say where the select plane listens, and how the pool is."""
        return PoolAnswer(
            select_endpoint=plane.endpoint,
            status=pool_status(plane.status(0)),
            journal=JournalRow(offset=service.projection.next_offset, trouble=service.trouble),
            decisions=RecordingRow(
                recorded=recorder is not None,
                trouble=recorder.failing if recorder is not None else "",
                unrecorded=recorder.counters.lost_decisions if recorder is not None else 0,
            ),
        ).to_json()


def pool_status(status: PoolStatus) -> PoolStatusRow:
    """Return a pool's status, as global routers get it, for people."""
    models = [{**asdict(model), "roles": [_role_fields(role) for role in model.roles]} for model in status.models]
    return msgspec.convert({**asdict(status), "models": models}, PoolStatusRow)


def _role_fields(role: RoleStatus) -> dict[str, Any]:
    return {**asdict(role), "role": role.role.name.lower()}


def endpoints(service: RouterService) -> list[EndpointRow]:
    """Return which endpoints serve which model in which role; none while the router cannot serve."""
    if not service.ready:
        return []
    workers = service.projection.fleet.workers
    return endpoint_rows((workers[key] for key in sorted(workers)), service.unreachable)


def troubles(
    service: RouterService, recorder: DecisionRecorder | None, completeness: Completeness | None = None
) -> list[str]:
    """Return what is wrong while requests are served, in words."""
    found = [service.trouble] if service.trouble else []
    if completeness is not None:
        found += completeness.troubles(endpoints(service))
    if recorder is not None and recorder.failing:
        found.append(f"decisions are not being recorded: {recorder.failing}")
    return found


def readiness(service: RouterService, completeness: Completeness | None = None) -> Readiness:
    """Return the check behind ``/ready``: the router's state is that of the pool, some worker
    generates, and no model is served in stages of which one is still missing."""

    def missing() -> str | None:
        if not service.ready:
            return "the router is rebuilding its state from the journal"
        return None if completeness is None else completeness.missing(endpoints(service))

    return missing


ERRORS = {"404": "The pool has no such worker", "503": "The worker cannot be reached now"}


def add_drain_endpoint(app: FastAPI, service: RouterService) -> None:
    """Add ``POST /v1/workers/{worker_id}/drain``, which any router of a pool answers.

    The worker takes nothing new, hands over what does not finish in time, and waits to be ended.
    """

    @app.post("/v1/workers/{worker_id}/drain", tags=["router"], status_code=202, responses=error_answers(ERRORS))
    async def drain(
        worker_id: Annotated[str, Path(max_length=IDENTIFIER_BYTES_MAX)],
        timeout_ms: Annotated[
            int | None,
            Query(
                ge=0,
                le=DRAIN_TIMEOUT_MS_MAX,
                description="How long running requests may take to end; by default the worker's shutdown_timeout_ms.",
            ),
        ] = None,
    ) -> dict[str, Any]:
        """Tell a worker to drain: to take nothing new, and to hand over what does not finish in time."""
        if not any(key.worker_id == worker_id for key in service.projection.fleet.workers):
            raise RequestError(404, "worker_not_found", f"there is no worker {worker_id!r}; GET /v1/workers has them")
        if not service.links.drain(WorkerId(worker_id), timeout_ms):
            raise RequestError(
                503,
                "worker_unreachable",
                f"worker {worker_id!r} cannot be drained from here: this router has no connection to it; "
                "GET /v1/workers shows why, and SIGTERM to its process does the same",
            )
        return DrainAnswer(worker_id=worker_id, timeout_ms=timeout_ms).to_json()


INSTANCES_SHOWN_MAX = 64
"""Workers of an endpoint that are named; of more than these only the number is given. Probes ask every few seconds."""

GENERATING = ("aggregated", "decode", *(role.name.lower() for role in TASK_ROLES.values()))
"""Roles of workers that answer a request; the others only do a part of the work before."""


def endpoint_name(worker: Worker) -> str:
    """Return what a worker is called in a deployment."""
    return worker.card.endpoint_name or f"poolgrid.{COMPONENTS[worker.card.role]}.generate"


def endpoint_rows(workers: Iterable[Worker], unreachable: Mapping[WorkerKey, str]) -> list[EndpointRow]:
    """Return every endpoint of a pool, by model and role."""
    found: dict[tuple[str, Role, str, bool], list[InstanceRow]] = {}
    for worker in workers:
        state = "draining" if worker.draining else "unreachable" if worker.key in unreachable else "ready"
        key = (worker.card.model, worker.card.role, endpoint_name(worker), worker.card.decodes_only)
        found.setdefault(key, []).append(
            InstanceRow(worker_id=worker.key.worker_id, dp_rank=worker.key.dp_rank, state=state)
        )
    return [
        EndpointRow(
            endpoint=name,
            model=model,
            role=role.name.lower(),
            workers=len(instances),
            ready=sum(each.state == "ready" for each in instances),
            decodes_only=decodes_only,
            instances=instances[:INSTANCES_SHOWN_MAX],
        )
        for (model, role, name, decodes_only), instances in sorted(found.items())
    ]


def incomplete_models(rows: Sequence[EndpointRow]) -> dict[str, str]:
    """Return what is missing of each model that is served in stages and not in all of them."""
    ready: dict[str, set[str]] = {}
    for row in rows:
        ready.setdefault(row.model, set())
        if row.ready:
            ready[row.model].add(row.role)
    missing: dict[str, str] = {}
    for model, roles in ready.items():
        if "aggregated" in roles:
            continue
        if "decode" in roles and "prefill" not in roles:
            missing[model] = "prefill"
        elif "prefill" in roles and "decode" not in roles:
            missing[model] = "decode"
        elif "encode" in roles and not roles & {"prefill", "decode"}:
            missing[model] = "prefill and decode"
    return missing


class Completeness:
    """Which models were complete once, and what the others lack."""

    def __init__(self) -> None:
        self._complete: set[str] = set()

    def missing(self, rows: Sequence[EndpointRow]) -> str | None:
        """Return what keeps the pool from being ready, in words."""
        missing = incomplete_models(rows)
        self._complete.update(row.model for row in rows if row.ready and row.model not in missing)
        for model, role in missing.items():
            if model not in self._complete:
                return f"model {model!r} has no {role} worker yet"
        generating = [row for row in rows if row.ready and row.role in GENERATING]
        if any(row.model not in missing or not row.decodes_only for row in generating):
            return None
        if generating:
            model = generating[0].model
            return f"model {model!r} has no prefill worker any more, and its decode workers take no whole request"
        return "no worker takes requests" if not rows else "no aggregated or decode worker takes requests"

    def troubles(self, rows: Sequence[EndpointRow]) -> list[str]:
        return [
            f"model {model!r} has no {role} worker any more"
            for model, role in incomplete_models(rows).items()
            if model in self._complete
        ]


class RouteBody(Struct, kw_only=True):
    """The field that distinguishes kinds of bodies; the rest is checked as in the real request."""

    messages: Raw = Raw()
    token_ids: Raw = Raw()
    prompt: Raw = Raw()


_decoder = msgspec.json.Decoder(RouteBody)

DRY_RUN_PREFIX = "dry-run-"
"""Begins the request id of a dry run without ``x-request-id``: ties and samples are drawn from it."""


def add_route_endpoint(front: FrontEnd, service: RouterService) -> None:
    """Add ``POST /v1/route``: where a request would go now, and why.

    The body is that of a chat or text completion, or ``{"model": ..., "token_ids": [...]}``. It is checked, rendered
    and tokenized as the real one would be, and its media are loaded; then the selector is asked on a dry run.
    """
    media, request_ids = front.media, RequestIds(DRY_RUN_PREFIX)

    @front.app.post("/v1/route", tags=["router"], responses=error_answers(ROUTE_STATUSES), openapi_extra=ROUTE_REQUEST)
    async def route(request: Request) -> dict[str, Any]:
        """Say where a request would go now and why; nothing is dispatched or reserved."""
        body = await front.bodies.read(request)
        job = _job(front.preparation, body)
        with closing(media.lease()) as lease:
            # The hashes of blocks depend on the bytes of media, so there is no telling a prefix without them.
            job.items = await media.load(job.media, lease, None)
            prompts = await front.tokenization.run(len(body), partial(tokenize, job))
            given = request.headers.get("x-request-id")
            wanted = request_ids.wanted(None if given is None else given.encode("latin-1"))
            count = len(prompts) * job.choices_per_prompt
            ids = request_ids.of_sequences(wanted, count)
            try:
                routes = [service.preview(each).explanation() for each in sequences_of(job, prompts, ids)]
            except Refused as refusal:
                raise refused(refusal) from None
        return DryRun(routes=routes).to_json()


def _job(preparation: Preparation, body: bytes) -> PreparedRequest:
    fields = parse(_decoder, body)
    if fields.messages:
        return preparation.chat(body)
    if fields.token_ids:
        if fields.prompt:
            raise invalid("token_ids", "token_ids and prompt are both given: allowed is one of them")
        named = msgspec.json.decode(body)
        named["prompt"] = named.pop("token_ids")
        body = msgspec.json.encode(named)
    return preparation.completion(body)
