"""`poolgrid consolidator`: the pool's event store alone."""

from __future__ import annotations

import asyncio

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.log_options import LogChoice, LogFormat, LogLevel
from poolgrid.cli.options import with_settings
from poolgrid.cli.service_process import run_service, say_ready
from poolgrid.consolidator.settings import ConsolidatorProcessSettings

app = CommandLine()


@app.command()
@with_settings(ConsolidatorProcessSettings)
def consolidator(
    settings: ConsolidatorProcessSettings, log_level: LogLevel = "info", log_format: LogFormat = None
) -> None:
    """Run a consolidator alone, for several routers or for one that may restart."""
    from poolgrid.consolidator.bootstrap import ConsolidatorEndpoints, serve

    def ready(endpoints: ConsolidatorEndpoints) -> None:
        # With an event plane on NATS it stands by first: where it takes events in is for NATS to say.
        planes = (("ingest", endpoints.ingest), ("feed", endpoints.feed), ("query", endpoints.query))
        say_ready(endpoints.http, *(f"{name}={endpoint}" for name, endpoint in planes if endpoint))

    async def main(stop: asyncio.Event) -> None:
        await serve(settings, stop, ready)

    run_service("consolidator", LogChoice(log_level, log_format), main)
