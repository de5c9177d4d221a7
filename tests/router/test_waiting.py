"""The line of requests that wait for a worker: whoever is in it stays until it is placed, gives up or leaves."""

from __future__ import annotations

import asyncio
from array import array
from typing import cast

from prometheus_client import CollectorRegistry

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import NoWorker, Selector
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.choosing import Chooser
from poolgrid.server.router.fleet_links import FleetLinks
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.placement import LocalRequest, PlacementFailure, WaitCause
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.queue import RouterQueue
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.admission_queue import FullWorkers
from poolgrid.server.serving.metrics import LegTimer

BUSY = PlacementFailure(NoWorker("m", {}), busy=True)


class Scene:
    def __init__(self) -> None:
        self.room = False
        self.placed = 0
        self.given_up: list[str] = []
        self.registry = CollectorRegistry()
        settings, clock = RouterSettings(), SystemClock()
        policy = make_policy("least-loaded")  # which does not plan: who is placed is up to the queue alone
        state = RouterState(Selector(Projection(PrefixIndex(), LoadLedger()), policy))
        self.queue = RouterQueue(
            settings,
            # Asked for nothing in this order of the queue, and neither are its links.
            Chooser(settings, state, cast("FleetLinks", None), clock, lambda: 0, FullWorkers(clock)),
            RouterMetrics(self.registry),
            clock,
            self._place,
            lambda routed, why, retry_after_s: self.given_up.append(why),
        )

    def _place(self, routed: LocalRequest) -> PlacementFailure | None:
        if not self.room:
            return BUSY
        self.placed += 1
        return None


def routed() -> LocalRequest:
    request = InferenceRequest("r", "m", pack_tokens(range(20)), Sampling(max_tokens=4))
    return LocalRequest(
        RequestMachine(request, TokenDelivery("r", lambda delivery: None), 3), LegTimer(0.0), array("Q")
    )


async def test_a_request_whose_worker_is_lost_in_the_turn_in_which_it_was_placed_waits_for_the_next_one() -> None:
    scene, request = Scene(), routed()
    waiting = asyncio.ensure_future(scene.queue.wait(request, WaitCause.WORKERS_FULL))
    await asyncio.sleep(0)
    assert len(scene.queue) == 1

    scene.room = True
    scene.queue.pump()
    scene.room = False
    scene.queue.resume(request, WaitCause.WORKER_LOST)  # before the task that waited has its turn
    await waiting

    assert scene.queue.resumed() == [request]
    scene.room = True
    scene.queue.pump()
    assert scene.placed == 2
    assert len(scene.queue) == 0
    assert scene.given_up == []
    for cause in (WaitCause.WORKERS_FULL, WaitCause.WORKER_LOST):
        labels = {"cause": cause.value}
        assert scene.registry.get_sample_value("poolgrid_router_queue_seconds_count", labels) == 1
