"""What the router adds to the OpenAI surface: who the workers are, and why requests went where they went."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query
from fastapi.responses import StreamingResponse

from poolgrid.frontend.app import Readiness
from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.openapi import error_answers
from poolgrid.process.clock import Clock
from poolgrid.router.core.fleet import Worker
from poolgrid.router.core.prefix_index import HASHES_END
from poolgrid.router.core.projection import Projection
from poolgrid.router.health import Completeness, endpoint_rows
from poolgrid.router.select_plane import SelectPlane
from poolgrid.router.service import RouterService
from poolgrid.wire.answers import (
    DecisionList,
    EndpointRow,
    JournalRow,
    LoadingRow,
    ModelStatusRow,
    PoolAnswer,
    PoolStatusRow,
    QueueRow,
    RecordingRow,
    RequestExplanation,
    RoleStatusRow,
    SourceRow,
    StreamRow,
    WorkerList,
    WorkerRow,
)
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.loading import LoadingWorker
from poolgrid.wire.selection import PoolStatus

if TYPE_CHECKING:
    from poolgrid.router.decision_journal.recorder import DecisionRecorder

DECISIONS_LISTED_MAX = 1000

LINES_PER_TURN = 1024
"""Lines of a worker's blocks written between two turns of the event loop: a millisecond or two."""


def add_router_endpoints(
    app: FastAPI,
    service: RouterService,
    clock: Clock,
    who_loads: Callable[[], Sequence[LoadingWorker]],
) -> None:
    """Add ``/v1/workers``, ``/v1/decisions`` and ``/v1/decisions/{request_id}``."""

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
        # Who has just joined may still be among them.
        loading = [loading_row(each) for each in who_loads() if each.worker_id not in members]
        return WorkerList(offset=projection.next_offset, queue=queue, data=rows, loading=loading).to_json()

    @app.get("/v1/decisions", tags=["router"])
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=DECISIONS_LISTED_MAX, description="How many, newest first.")] = 20,
    ) -> dict[str, Any]:
        """List the last routing decisions, newest first."""
        return DecisionList(data=[each.summary() for each in service.decisions.newest(limit)]).to_json()

    @app.get("/v1/decisions/{request_id}", tags=["router"], responses=error_answers({"404": "Not kept (any more)"}))
    async def explain(request_id: Annotated[str, Path(max_length=256)]) -> dict[str, Any]:
        """Explain one request's decisions: every candidate, every cost term, who was filtered out and why."""
        attempts = [each.explanation() for each in service.decisions.of_request(request_id)]
        if not attempts:
            raise RequestError(
                404,
                "decision_not_found",
                f"no decision about request {request_id!r} is kept; the last {len(service.decisions)} are",
                param="request_id",
            )
        return RequestExplanation(request_id=request_id, attempts=attempts).to_json()


def loading_row(worker: LoadingWorker) -> LoadingRow:
    """Return what ``/v1/workers`` says of a worker that still loads."""
    return LoadingRow(
        worker_id=worker.worker_id,
        model=worker.model,
        role=worker.role,
        phase=worker.phase,
        done_bytes=worker.done_bytes,
        total_bytes=worker.total_bytes,
        left_bytes=max(0, worker.total_bytes - worker.done_bytes),
    )


def worker_row(projection: Projection, worker: Worker, unreachable: str, now_ms: int) -> WorkerRow:
    """Return what ``/v1/workers`` says of one worker; ``unreachable`` says why it cannot be reached, if so."""
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
    )


def add_index_endpoint(app: FastAPI, service: RouterService) -> None:
    """Add ``/v1/workers/{worker_id}/blocks``: the index's view of one worker, for checks against the worker's own."""

    @app.get("/v1/workers/{worker_id}/blocks", tags=["router"], response_class=StreamingResponse)
    async def blocks(worker_id: str, dp_rank: int = 0) -> StreamingResponse:
        """Return the sorted sequence hashes that the index says a worker holds, one per line, with their tiers.

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
    models = [
        ModelStatusRow(
            model=model.model,
            block_size=model.block_size,
            hash_spec=model.hash_spec,
            max_sequence_length=model.max_sequence_length,
            roles=[
                RoleStatusRow(
                    role=each.role.name.lower(),
                    ready=each.ready,
                    draining=each.draining,
                    unreachable=each.unreachable,
                    requests=each.requests,
                    capacity=each.capacity,
                )
                for each in model.roles
            ],
            loras=list(model.loras),
        )
        for model in status.models
    ]
    return PoolStatusRow(
        ready=status.ready,
        models=models,
        waiting_requests=status.waiting_requests,
        saturation=status.saturation,
        retry_after_s=status.retry_after_s,
    )


def endpoints(service: RouterService) -> list[EndpointRow]:
    """Return who serves which model in which role; nobody while the router cannot serve."""
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
