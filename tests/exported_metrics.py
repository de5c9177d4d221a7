"""What real processes put into their registries: every metric of ours, with its type, its labels and its help."""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import zmq
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.registration import Registration, encode_registration
from poolgrid.plugins.endpoint_picker.metrics import PickerMetrics
from poolgrid.plugins.nats.connection import foreign_counter
from poolgrid.plugins.nats.election import LeaderElectionMetrics
from poolgrid.server.consolidator.bootstrap import create as create_consolidator
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.discovery.discovery import DiscoveryMetrics
from poolgrid.server.discovery.registry import Registry, Seen
from poolgrid.server.frontend.media.loader import MediaMetrics
from poolgrid.server.frontend.metrics import FrontendMetrics
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.document_file import read_document_file
from poolgrid.server.global_router.http_api import register_views as register_pool_views
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import Pools
from poolgrid.server.global_router.router_link import PoolNetwork
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.http.connections import HttpConnections
from poolgrid.server.http.http_settings import HttpLimits
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.lifecycle import LoopMetrics
from poolgrid.server.router.decision_journal.recorder import DecisionRecorder, DecisionSegments, settings_noted
from poolgrid.server.router.feeds import EmbeddedFeed
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import load_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.router.state_metrics import DecisionRecordCollector, register_views
from poolgrid.server.serving.links import LinksOnDemand, link_opener
from poolgrid.server.transport.planes import PlaneMetrics
from poolgrid.server.transport.security import SecuritySettings, Tls
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.tensor_transfer.tensor_store import TensorMetrics
from tests.consolidator.journal_builder import FakeDisk

GRID = Path(__file__).parents[1] / "pool_configs" / "disagg_two_by_two.json"

REGISTERED = Registration(
    namespace="pool", component="router", instance="r", life="0" * 24, endpoints={}, lease_ms=10_000
)


class Exported(NamedTuple):
    """One metric."""

    family: Metric
    labels: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name as people write it."""
        return self.family.name + ("_total" if self.family.type == "counter" else "")


@cache
def exported() -> tuple[Exported, ...]:
    """Return them all, in the order in which they are registered."""
    return tuple(asyncio.run(_registered()))


def _of(registry: CollectorRegistry) -> list[Exported]:
    found = []
    for collector in list(registry._collector_to_names):
        if isinstance(collector, ProcessCollector):
            continue  # of every Python process, and described by prometheus_client
        for family in collector.collect():
            declared = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            told = {name: None for sample in family.samples for name in sample.labels if name != "le"}
            found.append(Exported(family, tuple(declared) or tuple(told)))
    return found


async def _nowhere(url: str) -> str:
    raise OSError(url)


async def _registered() -> list[Exported]:
    clock = SystemClock()
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    TensorMetrics(registry)
    PlaneMetrics(registry)
    LoopMetrics(registry)
    HttpConnections(HttpLimits(), registry)
    Tls.load(SecuritySettings(), registry)
    with contextlib.suppress(ModuleNotFoundError):  # its folder may be absent
        from poolgrid.plugins.trtllm.metrics import TrtllmMetrics

        TrtllmMetrics(registry)
    known = Registry()
    known.look([Seen(REGISTERED.key, encode_registration(REGISTERED))], 0.0)
    DiscoveryMetrics(registry, known)
    FrontendMetrics(registry)
    MediaMetrics(registry)
    metrics = RouterMetrics(registry)
    projection = Projection(PrefixIndex(), LoadLedger())
    settings = RouterSettings.model_validate({})
    consolidator = create_consolidator(ConsolidatorSettings(), registry, clock)
    LeaderElectionMetrics(registry)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    state = RouterState(Selector(projection, load_policy(settings)))
    open_link = link_opener(context, settings.worker_timeout_ms, clock, lambda: None)
    service = RouterService(settings, state, EmbeddedFeed(consolidator), metrics, clock, open_link)
    PickerMetrics(registry)
    foreign_counter(registry)
    register_views(registry, service)
    recorder = DecisionRecorder(DecisionSegments(FakeDisk(), 1, 1), state, settings_noted("r", "", {}), clock, 1, 1)
    registry.register(DecisionRecordCollector(recorder))
    pool_metrics = GlobalRouterMetrics(registry)
    configuration = Configuration(read_document_file(GRID), GRID, clock)
    pools = Pools({}, PoolNetwork(context, _nowhere, clock, 250, 2000))
    links = LinksOnDemand(open_link, 1.0, clock)
    global_settings = GlobalRouterSettings(config=GRID)
    register_pool_views(
        registry, GlobalRouterService(global_settings, configuration, pools, links, pool_metrics, clock)
    )
    await service.start()
    try:
        return _of(registry)
    finally:
        await service.stop()
        context.term()
