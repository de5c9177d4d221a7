"""What the fleet page shows of a global router: its grids, its pools, its requests and the cells they fell into."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from poolgrid import __version__
from poolgrid.kernel.wire.answers import QueueRow
from poolgrid.kernel.wire.identifiers import STAGE_WORD, Stage
from poolgrid.kernel.wire.secret_texts import without_received_bytes
from poolgrid.kernel.wire.selection import PoolStatus
from poolgrid.plugins.fleet_page.endpoints import open_fleet_page
from poolgrid.plugins.fleet_page.hub import Picture, Row
from poolgrid.plugins.fleet_page.router_watch import Leg, ServedSeconds, open_served_seconds
from poolgrid.server.frontend.app import Application
from poolgrid.server.frontend.metrics import SERVED_COLUMNS
from poolgrid.server.global_router.configuration import Active
from poolgrid.server.global_router.decisions import IN_FLIGHT, RequestDecision
from poolgrid.server.global_router.pools import PoolConnection
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.lifecycle import GroupPlace

log = logging.getLogger(__name__)

REQUESTS_SHOWN = 240
"""Of the last requests, how many are watched for changes."""

STEPS_SHOWN = 20
"""Last steps of the closed loop."""

ASK_TIMEOUT_S = 5.0
"""Longest wait for a pool's router to report on a request."""

ANSWER_BYTES_MAX = 8 * 1024 * 1024
"""Largest answer of a pool's router about one request: a decision over thousands of workers."""

COLUMNS: Mapping[str, Sequence[str]] = {
    "pools": (
        "stage",
        "pool",
        "url",
        "rank",
        "state",
        "reason",
        "breaker",
        "in_flight",
        "saturation",
        "waiting",
        "ready",
        "draining",
        "unreachable",
        "requests",
        "capacity",
    ),
    "requests": (
        "time_ms",
        "request_id",
        "model",
        "isl",
        "status",
        "queued_ms",
        "ttft_ms",
        "itl_ms",
        "output_tokens",
        "places",
    ),
    "seconds": ("requests", "prompt_tokens", "found_tokens", "moves"),
    "served": SERVED_COLUMNS,
}


class GlobalFleetSource:
    """Implements ``poolgrid.plugins.fleet_page.hub.FleetSource``."""

    columns = COLUMNS

    def __init__(
        self,
        service: GlobalRouterService,
        client: httpx.AsyncClient,
        clock: Clock,
        served: ServedSeconds,
        place: GroupPlace | None = None,
        namespace: str = "",
    ) -> None:
        """``client`` asks the pools' routers, with their key where they have keys; ``namespace`` is where names are."""
        self._service = service
        self._client = client
        self._clock = clock
        self._served = served
        self._about = {
            "kind": "global-router",
            "name": "global router",
            "pool": namespace,
            "version": __version__,
            "process": 0 if place is None else place.index,
            "processes": 1 if place is None else place.size,
        }
        self._grids: tuple[Active, dict[str, Any]] | None = None

    def begin(self) -> None:
        """Begin: all that is shown is kept anyway."""

    def end(self) -> None:
        self._grids = None

    async def look(self) -> Picture:
        service = self._service
        active = service.configuration.active
        if self._grids is None or self._grids[0] is not active:
            self._grids = (active, await asyncio.to_thread(grids, active))
        in_flight = service.in_flight()
        pools: dict[str, Row] = {}
        now_ms = self._clock.monotonic_ms()
        for name, stage in active.document.stages.items():
            ranks = stage.speed_ranks()
            for each in stage.pools:
                pool = service.pools.get(each.name)
                if pool is not None:
                    breaker, count = pool.breaker.state.value, in_flight.get(each.name, 0)
                    pools[f"{name}/{each.name}"] = (name, *_pool(pool, ranks[each.name], breaker, count, now_ms))
        active_requests, waiting = service.counts()
        values = {
            "about": self._about,
            "grids": self._grids[1],
            "queue": msgspec.convert(service.queue.view(), QueueRow, from_attributes=True).to_json(),
            "totals": {
                "ready": service.view.missing() is None,
                "trouble": service.view.missing() or "",
                "active": active_requests,
                "waiting": waiting,
                "decisions": service.decisions.added,
                "since_ms": self._served.since_ms,
            },
            "loop_steps": [step.explanation().to_json() for step in service.tracker.loop_steps[-STEPS_SHOWN:]],
        }
        tables = {
            "pools": pools,
            "requests": self._requests(),
            "seconds": dict(service.decisions.seconds.rows()),
            "served": dict(self._served.rows()),
        }
        return Picture(values, tables)

    def _requests(self) -> dict[str, Row]:
        records = self._service.decisions.newest(REQUESTS_SHOWN)
        return {record.request_id: _request(record) for record in reversed(records)}

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return a request's record, with what the pools' own routers recorded of each of its dispatches."""
        record = self._service.decisions.get(request_id)
        if record is None:
            return None
        placed = [(placement.pool, placement.dispatch_id) for placement in record.placements]
        answers = await asyncio.gather(*(self._ask(pool, name) for pool, name in placed))
        of_pools = {name: answer for (_, name), answer in zip(placed, answers, strict=True) if answer is not None}
        return {
            "explanation": record.explanation().to_json(),
            "pools": of_pools,
            "legs": [] if not record.placements else [msgspec.to_builtins(whole_leg(record))],
            "legs_from": "router",
        }

    async def _ask(self, name: str, dispatch_id: str) -> dict[str, Any] | None:
        """Return what a pool's router recorded of a dispatch; ``None`` when it keeps nothing, or does not answer."""
        pool = self._service.pools.get(name)
        if pool is None or not pool.url:
            return None
        url = f"{pool.url}/v1/decisions/{quote(dispatch_id, safe='')}"
        try:
            answer = await self._client.get(url, timeout=ASK_TIMEOUT_S)
            if answer.status_code == 200 and len(answer.content) <= ANSWER_BYTES_MAX:
                return msgspec.json.decode(answer.content, type=dict[str, Any])
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            log.info("asking pool %s about %s: %s", name, dispatch_id, without_received_bytes(error))
        return None


def whole_leg(record: RequestDecision) -> Leg:
    """Return a request's times as one leg, by this router's clock, whatever workers it ran on."""
    last = record.placements[-1]
    leg = Leg(last.dispatch_id, last.worker, STAGE_WORD[Stage.WHOLE], queued_ms=round(record.queued_ms, 3))
    leg.placed_ms = record.time_ms + round(record.queued_ms)
    if record.ttft_ms is not None:
        # It is not known when its engine began: waiting there and prefill are one step.
        leg.started_ms = leg.prefilled_ms = max(leg.placed_ms, record.time_ms + round(record.ttft_ms))
    if record.outcome != IN_FLIGHT:
        spent_ms = (record.itl_ms or 0.0) * max(0, record.output_tokens - 1)
        leg.ended_ms, leg.end = (leg.prefilled_ms or leg.placed_ms) + round(spent_ms), record.outcome
    return leg


def grids(active: Active) -> dict[str, Any]:
    """Return the grids of a revision: axes, pools by speed, and the pool of every cell as runs of (pool, cells)."""
    stages = []
    for name, stage in active.document.stages.items():
        order = {pool.name: index for index, pool in enumerate(stage.pools)}
        ranks = stage.speed_ranks()
        cells = (order[pool] for pool in _cells(stage.mapping))
        stages.append(
            {
                "stage": name,
                "axes": [
                    {
                        "name": axis.name,
                        "unit": axis.unit,
                        "minimum": axis.minimum,
                        "maximum": axis.maximum,
                        "resolution": axis.resolution,
                    }
                    for axis in stage.axes
                ],
                "pools": [{"name": pool.name, "rank": ranks[pool.name], "url": pool.url} for pool in stage.pools],
                "cells": [(pool, sum(1 for _ in run)) for pool, run in groupby(cells)],
                "overrides": [each.model_dump(mode="json") for each in stage.priority_overrides],
            }
        )
    return {"revision": active.revision, "source": active.source, "stages": stages}


def _cells(rows: Any) -> Iterator[str]:
    if isinstance(rows, str):
        yield rows
    else:
        for row in rows:
            yield from _cells(row)


def _pool(pool: PoolConnection, rank: int, breaker: str, in_flight: int, now_ms: float) -> Row:
    state = pool.overall_state(now_ms)
    status: PoolStatus | None = pool.status
    roles = [role for model in status.models for role in model.roles] if status is not None else []
    return (
        pool.name,
        pool.url,
        rank,
        state.value,
        pool.last_error if status is None else "",
        breaker,
        in_flight,
        None if status is None else status.saturation,
        None if status is None else status.waiting_requests,
        sum(role.ready for role in roles),
        sum(role.draining for role in roles),
        sum(role.unreachable for role in roles),
        sum(role.requests for role in roles),
        sum(role.capacity for role in roles),
    )


def _request(record: RequestDecision) -> Row:
    return (
        record.time_ms,
        record.request_id,
        record.model,
        record.isl,
        record.outcome,
        round(record.queued_ms, 3),
        None if record.ttft_ms is None else round(record.ttft_ms, 3),
        None if record.itl_ms is None else round(record.itl_ms, 3),
        record.output_tokens,
        [
            (placed.stage, placed.work, placed.pool, placed.worker, placed.how, placed.selection.cell)
            for placed in record.placements
        ],
    )


def open_global_page(
    opened: AsyncExitStack,
    app: Application,
    service: GlobalRouterService,
    client: httpx.AsyncClient,
    namespace: str,
    clock: Clock,
    awake: Clock,
    place: GroupPlace | None,
) -> None:
    """Add the page of a global router."""
    served = open_served_seconds(opened, app.served, clock)
    source = GlobalFleetSource(service, client, awake, served, place, namespace)
    open_fleet_page(opened, app, source, clock)
