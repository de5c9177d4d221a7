"""`poolgrid consolidator`: the pool's event store, alone or with what follows engine servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from poolgrid.server.cli.command_line import LogChoice, command, log_options
from poolgrid.server.cli.options import with_settings
from poolgrid.server.cli.service_process import Main, run_service, say_ready
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.workers.engines.server.settings import FollowedServersSettings, FollowerSettings

if TYPE_CHECKING:
    from poolgrid.server.consolidator.bootstrap import MakePlanes
    from poolgrid.server.consolidator.service import ConsolidatorService
    from poolgrid.server.http.guard import Application
    from poolgrid.server.http.health_app import HealthApp
    from poolgrid.server.workers.bootstrap import FollowedServers

log = logging.getLogger(__name__)

BASICS = (
    "host",
    "ingest_port",
    "feed_port",
    "query_port",
    "http_port",
    "data_dir",
    "engine_url",
    "engine_urls_file",
    "lease_ms",
    "event_plane",
    "nats_url",
    "pub_sources",
)


@command()
@with_settings(ConsolidatorProcessSettings, FollowedServersSettings, basics=BASICS)
@log_options
def consolidator(
    settings: ConsolidatorProcessSettings, servers: FollowedServersSettings, log_choice: LogChoice
) -> None:
    """Run a consolidator alone, for several routers or for one that may restart.

    With --engine-url or --engine-urls-file it follows engine servers in the same process.
    """

    def prepare() -> Main:
        from poolgrid.server.consolidator.bootstrap import ConsolidatorEndpoints, serve

        def ready(endpoints: ConsolidatorEndpoints) -> None:
            # With an event plane on NATS it stands by first: its ingest address is then published on NATS.
            planes = (("ingest", endpoints.ingest), ("feed", endpoints.feed), ("query", endpoints.query))
            say_ready(endpoints.http, *(f"{name}={endpoint}" for name, endpoint in planes if endpoint))

        def follows(url: str) -> None:
            log.info("engine servers are followed, their list is at %s/v1/servers", url)

        async def main(stop: asyncio.Event) -> None:
            if not servers.follows_servers:
                await serve(settings, stop, ready)
                return
            from poolgrid.server.workers.bootstrap import FollowedServers, serve_followed

            follower = follower_settings(settings, servers)
            if settings.on_nats:
                # Any of the consolidators may be the active one: events go to it over its plane.
                await both(serve(settings, stop, ready), serve_followed(follower, stop, follows))
            else:
                await serve(settings, stop, ready, companion=ServersBeside(FollowedServers(follower)))

        return main

    run_service("consolidator", log_choice, prepare)


async def both(*halves: Coroutine[Any, Any, None]) -> None:
    """Run the parts of a process until they end; the first one that fails ends the other, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for half in halves:
                group.create_task(half)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


class ServersBeside(NamedTuple):
    """Implements ``poolgrid.server.consolidator.bootstrap.Companion``: engine servers whose events need no socket."""

    followed: FollowedServers

    def around(self, app: HealthApp) -> Application:
        """Return an application that answers for the servers, too."""
        return self.followed.around(app)

    async def run(self, service: ConsolidatorService, make_context: MakePlanes, stop: asyncio.Event) -> None:
        """Follow until ``stop`` is set."""
        await self.followed.run(stop, make_context(), lambda endpoint, on_frames: service.open_local(on_frames))


def follower_settings(settings: ConsolidatorProcessSettings, servers: FollowedServersSettings) -> FollowerSettings:
    """Return the settings of what follows servers in a consolidator's process; its workers' ports are any free ones."""
    given = {
        name: getattr(each, name)
        for each in (settings, servers)
        for name in each.model_fields_set
        if name in FollowerSettings.model_fields and name != "http_port"
    }
    return FollowerSettings.model_validate(given)
