"""Who serves which model in which role, and when a pool that serves in stages is complete."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import WorkerJoined
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.server.router.http_api import (
    INSTANCES_SHOWN_MAX,
    Completeness,
    endpoint_rows,
    endpoints,
    readiness,
    troubles,
)
from tests.frontend.server import application, in_process
from tests.router.test_service import routed

LIMITS = WorkerLimits(8, 8192, 100, 4096)


def worker(
    name: str, role: Role, model: str = "m", endpoint: str = "", draining: bool = False, decodes_only: bool = False
) -> Worker:
    card = WorkerCard(model, role, 32, LIMITS, "tcp://127.0.0.1:1", endpoint_name=endpoint, decodes_only=decodes_only)
    return Worker(WorkerKey(WorkerId(name), 0), 1, card, draining)


def rows(*workers: Worker, unreachable: Sequence[str] = ()) -> list[EndpointRow]:
    return endpoint_rows(workers, {WorkerKey(WorkerId(name), 0): "silent" for name in unreachable})


DECODES_ONLY = worker("only", Role.DECODE, decodes_only=True)
PREFILL, DECODE, ENCODE = worker("p", Role.PREFILL), worker("d", Role.DECODE), worker("e", Role.ENCODE)


def test_endpoints_are_named_with_their_models_roles_and_workers() -> None:
    found = rows(
        worker("p0", Role.PREFILL, endpoint="dynamo.prefill.generate"),
        worker("p1", Role.PREFILL, endpoint="dynamo.prefill.generate", draining=True),
        worker("p2", Role.PREFILL, endpoint="dynamo.prefill.generate"),
        worker("d0", Role.DECODE),
        worker("w0", Role.AGGREGATED, model="other"),
        unreachable=["p2"],
    )
    assert [(row.endpoint, row.model, row.role, row.workers, row.ready) for row in found] == [
        ("dynamo.prefill.generate", "m", "prefill", 3, 1),
        ("poolgrid.decode.generate", "m", "decode", 1, 1),
        ("poolgrid.worker.generate", "other", "aggregated", 1, 1),
    ]
    assert [(each.worker_id, each.state) for each in found[0].instances] == [
        ("p0", "ready"),
        ("p1", "draining"),
        ("p2", "unreachable"),
    ]


def test_of_many_workers_only_some_are_named() -> None:
    (row,) = rows(*(worker(f"w{at:03}", Role.AGGREGATED) for at in range(INSTANCES_SHOWN_MAX + 5)))
    assert (row.workers, row.ready, len(row.instances)) == (69, 69, 64)


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "no worker takes requests"),
        ([worker("w", Role.AGGREGATED, draining=True)], "no aggregated or decode worker takes requests"),
        ([worker("w", Role.AGGREGATED)], None),
        ([PREFILL, DECODE], None),
        ([DECODE], "model 'm' has no prefill worker yet"),
        ([PREFILL], "model 'm' has no decode worker yet"),
        ([ENCODE], "model 'm' has no prefill and decode worker yet"),
        ([ENCODE, PREFILL], "model 'm' has no decode worker yet"),
        ([ENCODE, worker("w", Role.AGGREGATED)], None),
        ([worker("p", Role.PREFILL, draining=True), DECODE], "model 'm' has no prefill worker yet"),
        ([DECODE, worker("w", Role.AGGREGATED)], None),
        ([DECODE, worker("p", Role.PREFILL, model="other")], "model 'm' has no prefill worker yet"),
    ],
)
def test_a_pool_is_not_ready_before_every_stage_has_a_worker(workers: list[Worker], missing: str | None) -> None:
    assert Completeness().missing(rows(*workers)) == missing


def test_a_pool_that_was_complete_stays_ready_and_says_what_it_lacks() -> None:
    completeness = Completeness()
    assert completeness.missing(rows(DECODE)) is not None
    assert completeness.troubles(rows(DECODE)) == []
    assert completeness.missing(rows(PREFILL, DECODE)) is None
    assert completeness.missing(rows(DECODE)) is None
    assert completeness.troubles(rows(DECODE)) == ["model 'm' has no prefill worker any more"]


@pytest.mark.parametrize(
    ("complete", "left", "missing"),
    [
        ([worker("w", Role.AGGREGATED)], [], "no worker takes requests"),
        ([PREFILL, DECODE], [PREFILL], "no aggregated or decode worker takes requests"),
        ([PREFILL, DECODE], [PREFILL, worker("d", Role.DECODE, draining=True)], "no aggregated or decode worker"),
        ([PREFILL, DECODE], [DECODE], None),
        ([PREFILL, DECODES_ONLY], [DECODES_ONLY], "model 'm' has no prefill worker any more, and its decode workers"),
        ([PREFILL, DECODES_ONLY, DECODE], [DECODES_ONLY, DECODE], None),
        ([PREFILL, DECODES_ONLY, worker("w", Role.AGGREGATED)], [DECODES_ONLY, worker("w", Role.AGGREGATED)], None),
        ([PREFILL, DECODE, worker("w", Role.AGGREGATED, model="other")], [worker("w", Role.AGGREGATED)], None),
    ],
)
def test_a_pool_that_could_only_answer_503_is_not_ready_any_more(
    complete: list[Worker], left: list[Worker], missing: str | None
) -> None:
    completeness = Completeness()
    assert completeness.missing(rows(*complete)) is None
    found = completeness.missing(rows(*left))
    assert found == missing if missing is None else found is not None and found.startswith(missing)
    assert completeness.missing(rows(*complete)) is None, "workers come back"


async def test_a_router_is_not_ready_before_it_can_reach_a_prefill_worker_beside_its_decode_workers() -> None:
    """Over HTTP, with a router that is told of its workers: what the process puts together, too."""

    async with routed() as router:
        service, completeness = router.service, Completeness()
        app = application(
            service,
            ready=readiness(service, completeness),
            endpoints=lambda: endpoints(service),
            troubles=lambda: troubles(service, None, completeness),
        )

        def joins(name: str, role: Role, endpoint: str) -> None:
            card = WorkerCard("m", role, 16, WorkerLimits(8, 1024, 100, 1600), endpoint)
            router.feed.tell((WorkerKey(WorkerId(name), 0), WorkerJoined(card)))

        async with in_process(app) as client:

            async def asked(path: str) -> tuple[int, str | None]:
                answer = await client.get(path)
                return answer.status_code, answer.json().get("reason")

            assert await asked("/ready") == (503, "no worker takes requests")
            assert (await client.get("/live")).status_code == 200, "it has started"
            joins("d", Role.DECODE, "tcp://127.0.0.1:1")
            router.bring_up("tcp://127.0.0.1:1")
            assert await asked("/ready") == (503, "model 'm' has no prefill worker yet")
            assert await asked("/ready?role=decode") == (200, None)
            joins("p", Role.PREFILL, "tcp://127.0.0.1:2")
            assert await asked("/ready") == (503, "model 'm' has no prefill worker yet"), "it is not reachable"
            router.bring_up("tcp://127.0.0.1:2")
            assert await asked("/ready") == (200, None)
            assert await asked("/ready?role=prefill&model=m") == (200, None)
            router.lose("tcp://127.0.0.1:2")
            assert await asked("/ready") == (200, None)
            assert await asked("/ready?role=prefill") == (503, "no prefill worker takes requests")
            health = (await client.get("/health")).json()
            assert health["status"] == "degraded"
            assert health["troubles"] == ["model 'm' has no prefill worker any more"]
            assert [(row["role"], row["ready"]) for row in health["served"]] == [("prefill", 0), ("decode", 1)]
            service.ready = False
            assert await asked("/ready?role=decode") == (503, "no decode worker takes requests")
            service.ready = True
