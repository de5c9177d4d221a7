"""What the global router adds to the OpenAI surface: the pools, why requests went where they went, the document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.grid import PoolStanding
from poolgrid.kernel.wire.answers import (
    BreakerRow,
    ConfigAnswer,
    PlacedList,
    PoolList,
    PoolModelRow,
    PoolRouterRow,
    PoolRow,
    QueueRow,
    ReloadRow,
)
from poolgrid.kernel.wire.selection import ModelStatus
from poolgrid.server.frontend.description import error_answers
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.global_router.document.history import Reload
from poolgrid.server.global_router.pools import PoolConnection
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.process.clock import Clock
from poolgrid.server.serving.admission_queue import queue_metrics
from poolgrid.server.serving.router_process import decision_not_found

DECISIONS_LISTED_MAX = 1000
STEPS_LISTED_MAX = 100


def add_global_router_endpoints(
    app: FastAPI,
    service: GlobalRouterService,
    clock: Clock,
) -> None:
    """Add ``/v1/pools``, ``/v1/decisions``, ``/v1/decisions/{request_id}``, ``/v1/config`` and its changes."""

    @app.get("/v1/pools", tags=["global router"])
    async def list_pools() -> dict[str, Any]:
        """List every pool of the document in force: its state, its last status, its breaker; and the requests that
        wait for room."""
        active = service.configuration.active
        in_flight = service.in_flight()
        rows: list[PoolRow] = []
        for stage_name, stage in active.document.stages.items():
            for pool in stage.pools:
                connection = service.pools.get(pool.name)
                if connection is not None:
                    rank = stage.speed_ranks()[pool.name]
                    count = in_flight.get(pool.name, 0)
                    rows.append(pool_row(connection, stage_name, rank, count, clock.monotonic_ms()))
        queue = msgspec.convert(service.queue.view(), QueueRow, from_attributes=True)
        return PoolList(revision=active.revision, queue=queue, data=rows).to_json()

    @app.get("/v1/decisions", tags=["global router"])
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=DECISIONS_LISTED_MAX, description="How many, newest first.")] = 20,
    ) -> dict[str, Any]:
        """List the last requests, newest first: their pools, workers and outcome."""
        return PlacedList(data=[record.summary() for record in service.decisions.newest(limit)]).to_json()

    @app.get("/v1/decisions/{request_id}", tags=["global router"], responses=error_answers({"404": "Not kept"}))
    async def explain(request_id: Annotated[str, Path(max_length=256)]) -> dict[str, Any]:
        """Explain one request: cell, override, spill, fallback, refusals, worker, for each of its dispatches."""
        record = service.decisions.get(request_id)
        if record is None:
            raise decision_not_found(request_id, len(service.decisions), service.decisions.oldest_ms)
        return record.explanation().to_json()

    @app.get("/v1/config", tags=["global router"])
    async def config() -> dict[str, Any]:
        """Return the document in force, the last attempts to change it, and the last steps of the closed loop."""
        configuration = service.configuration
        active = configuration.active
        return ConfigAnswer(
            revision=active.revision,
            source=active.source,
            document=active.document.model_dump(mode="json", exclude_defaults=True),
            reloads=[
                ReloadRow(time_ms=time_ms, **msgspec.structs.asdict(outcome.explanation()))
                for time_ms, outcome in configuration.reloads
            ],
            loop_steps=[step.explanation() for step in service.tracker.loop_steps[-STEPS_LISTED_MAX:]],
        ).to_json()

    @app.post("/v1/config/reload", tags=["global router"], responses=error_answers({"409": "The file is no document"}))
    async def reload() -> dict[str, Any]:
        """Read the document's file now; what was in force stays when the file is not valid."""
        outcome = await service.configuration.reload()
        if outcome is None:
            raise RequestError(
                409, "document_unreadable", "reading the document: its file cannot be read; nothing changed"
            )
        if outcome.outcome == "refused":
            lines = "; ".join(str(problem) for problem in outcome.problems)
            raise RequestError(409, "document_refused", f"reading the document: {lines}. What was in force stays.")
        return outcome.explanation().to_json()

    @app.post("/v1/config/rollback", tags=["global router"], responses=error_answers({"409": "There is none before"}))
    async def rollback() -> dict[str, Any]:
        """Put the previous document in force, as a new revision."""
        outcome: Reload = await service.configuration.rollback()
        if outcome.outcome == "unchanged":
            raise RequestError(
                409, "no_previous_document", "rolling back: no earlier document is kept; nothing changed"
            )
        return outcome.explanation().to_json()


def pool_row(pool: PoolConnection, stage: StageName, speed_rank: int, in_flight: int, now_ms: float) -> PoolRow:
    """Return the row of one pool in ``/v1/pools``."""
    status = pool.status
    state = pool.overall_state(now_ms)
    return PoolRow(
        name=pool.name,
        stage=stage,
        url=pool.url,
        state=state.value,
        reason=pool.last_error if state is PoolStanding.DOWN else "",
        select_endpoint=pool.endpoint,
        in_flight=in_flight,
        breaker=BreakerRow(
            state=pool.breaker.state.value,
            retry_after_ms=pool.breaker.retry_after_ms(now_ms),
            steps=[step.explanation() for step in pool.breaker_steps],
        ),
        saturation=None if status is None else status.saturation,
        waiting_requests=None if status is None else status.waiting_requests,
        models=[] if status is None else [_model_row(model) for model in status.models],
        speed_rank=speed_rank,
        routers=[PoolRouterRow(url=url, state=word, reason=why) for url, word, why in pool.routers()],
    )


def _model_row(model: ModelStatus) -> PoolModelRow:
    roles = {role.role.name.lower(): asdict(role) for role in model.roles}
    return msgspec.convert({**asdict(model), "roles": roles}, PoolModelRow)


class PoolStateCollector(Collector):
    """Reads the global router's state at a scrape."""

    def __init__(self, service: GlobalRouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        pools = GaugeMetricFamily(
            "poolgrid_global_router_pools",
            "1 for the state that a pool is in.",
            labels=["pool", "state"],
        )
        for name, state in service.view.pool_states().items():
            for each in PoolStanding:
                pools.add_metric([name, each.value], 1.0 if each is state else 0.0)
        dispatched = GaugeMetricFamily(
            "poolgrid_global_router_in_flight",
            "Dispatches in flight, by pool.",
            labels=["pool"],
        )
        for name, count in service.in_flight().items():
            dispatched.add_metric([name], count)
        yield from (pools, dispatched)
        yield from queue_metrics("poolgrid_global_router", service.counts()[0], service.queue)
        yield GaugeMetricFamily(
            "poolgrid_global_router_revision",
            "Revision of the document in force. If it differs between replicas, one has not reloaded.",
            value=service.configuration.active.revision,
        )


def register_views(registry: CollectorRegistry, service: GlobalRouterService) -> None:
    """Have the state read at every scrape."""
    registry.register(PoolStateCollector(service))
