"""Puts the fleet page together for a router or a global router; both look this module up, so that it may be absent."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx

from poolgrid.consolidator.core.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.consolidator.service import ConsolidatorService
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.fleet_page.endpoints import open_fleet_page
from poolgrid.fleet_page.global_source import GlobalFleetSource
from poolgrid.fleet_page.playback.player import Player
from poolgrid.fleet_page.router_source import RouterFleetSource
from poolgrid.fleet_page.router_watch import FleetWatch
from poolgrid.fleet_page.served_seconds import open_served_seconds
from poolgrid.frontend.app import Application
from poolgrid.global_router.service import GlobalRouterService
from poolgrid.process.clock import Clock
from poolgrid.process.process_group import GroupPlace
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.service import RouterService
from poolgrid.router.settings import RouterSettings


def open_router_page(
    opened: AsyncExitStack,
    app: Application,
    settings: RouterSettings,
    consolidator: ConsolidatorSettings,
    embedded: ConsolidatorService | None,
    service: RouterService,
    state: RouterState,
    clock: Clock,
    place: GroupPlace | None,
) -> None:
    """Add the page of a router."""
    kept = embedded.kept_records if embedded is not None and consolidator.data_dir is None else None
    # A data_dir next to a stream has no journal in it, only decisions.
    directory = None if consolidator.on_nats else consolidator.data_dir
    player = Player(directory, kept, BLOCKS_PER_WORKER_MAX)
    watch = FleetWatch(state)
    served = open_served_seconds(opened, app.served, clock)
    source = RouterFleetSource(settings, service, watch, player, served, place)
    open_fleet_page(opened, app, source, clock)


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
