"""What a router says of its pool when it is asked for its health: who serves which model in which role. Pure.

Rules
    1. An endpoint is all workers of one model, role and endpoint name; it is ready while one of them takes requests.
    2. A model that is served in stages is complete once each stage that it needs has a worker: prefill workers cannot
       go on alone, and decode workers that could compute prompts themselves are there for something else. A pool is
       not ready before; load balancers would send it requests that it serves slowly or not at all.
    3. What was complete once stays ready: the pool serves on with those that are left, and ``troubles`` says so.
    4. A pool is ready only while some model has a worker that can generate: without one every request would be answered
       503, and a load balancer has better routers to ask (decision 0046). It starts without workers all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from poolgrid.router.core.fleet import Worker
from poolgrid.wire.answers import EndpointRow, InstanceRow
from poolgrid.wire.identifiers import Role, WorkerKey
from poolgrid.wire.names import COMPONENTS

INSTANCES_SHOWN_MAX = 64
"""Workers of an endpoint that are named; of more than these only the number is told. Probes ask every few seconds."""

GENERATING = ("aggregated", "decode")
"""Roles of workers that answer a request; the others only do a part of the work before."""


def endpoint_name(worker: Worker) -> str:
    """Return what a worker is called in a deployment."""
    return worker.card.endpoint_name or f"poolgrid.{COMPONENTS[worker.card.role]}.generate"


def endpoint_rows(workers: Iterable[Worker], unreachable: Mapping[WorkerKey, str]) -> list[EndpointRow]:
    """Return every endpoint of a pool, by model and role."""
    found: dict[tuple[str, Role, str], list[InstanceRow]] = {}
    for worker in workers:
        state = "draining" if worker.draining else "unreachable" if worker.key in unreachable else "ready"
        key = (worker.card.model, worker.card.role, endpoint_name(worker))
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
            instances=instances[:INSTANCES_SHOWN_MAX],
        )
        for (model, role, name), instances in sorted(found.items())
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
        if any(row.ready and row.role in GENERATING for row in rows):
            return None
        return "no worker takes requests" if not rows else "no aggregated or decode worker takes requests"

    def troubles(self, rows: Sequence[EndpointRow]) -> list[str]:
        """Return what a pool that was complete lacks now."""
        return [
            f"model {model!r} has no {role} worker any more"
            for model, role in incomplete_models(rows).items()
            if model in self._complete
        ]
