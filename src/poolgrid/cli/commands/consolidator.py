"""`poolgrid consolidator`: the pool's event store alone."""

from __future__ import annotations

import asyncio

from poolgrid.cli.command_line import LogChoice, command, log_options
from poolgrid.cli.options import with_settings
from poolgrid.cli.service_process import run_service, say_ready
from poolgrid.consolidator.settings import ConsolidatorProcessSettings

BASICS = (
    "host",
    "ingest_port",
    "feed_port",
    "query_port",
    "http_port",
    "data_dir",
    "lease_ms",
    "event_plane",
    "nats_url",
    "pub_sources",
)


@command()
@with_settings(ConsolidatorProcessSettings, basics=BASICS)
@log_options
def consolidator(settings: ConsolidatorProcessSettings, log_choice: LogChoice) -> None:
    """Run a consolidator alone, for several routers or for one that may restart."""
    from poolgrid.consolidator.bootstrap import ConsolidatorEndpoints, serve

    def ready(endpoints: ConsolidatorEndpoints) -> None:
        # With an event plane on NATS it stands by first: its ingest address is then published on NATS.
        planes = (("ingest", endpoints.ingest), ("feed", endpoints.feed), ("query", endpoints.query))
        say_ready(endpoints.http, *(f"{name}={endpoint}" for name, endpoint in planes if endpoint))

    async def main(stop: asyncio.Event) -> None:
        await serve(settings, stop, ready)

    run_service("consolidator", log_choice, main)
