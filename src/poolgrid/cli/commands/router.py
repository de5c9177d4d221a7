"""`poolgrid router`: one router, or several that share a port."""

from __future__ import annotations

import asyncio

from poolgrid.cli.command_line import LogChoice, command, log_options
from poolgrid.cli.options import with_settings
from poolgrid.cli.router_group import serve_group
from poolgrid.cli.service_process import run_service, say_ready
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.lifecycle import GroupPlace
from poolgrid.router.settings import RouterSettings

BASICS = (
    "host",
    "port",
    "model_path",
    "policy",
    "ingest_port",
    "feed_endpoint",
    "query_endpoint",
    "data_dir",
    "api_keys",
    "tls_certificate",
    "tls_key",
)


@command()
@with_settings(RouterSettings, FrontendSettings, ConsolidatorSettings, from_file=True, basics=BASICS)
@log_options
def router(
    settings: RouterSettings,
    frontend: FrontendSettings,
    consolidator: ConsolidatorSettings,
    log_choice: LogChoice,
) -> None:
    """Run a router with an OpenAI HTTP API; without --feed-endpoint, the consolidator runs inside it."""
    from poolgrid.cli.hub_model import router_model
    from poolgrid.router.bootstrap import Endpoints, serve

    frontend = router_model(frontend)

    def ready(endpoints: Endpoints) -> None:
        ingest = [f"ingest={endpoints.ingest}"] if endpoints.ingest else []
        ext_proc = [f"ext-proc={endpoints.ext_proc}"] if endpoints.ext_proc else []
        admin = [f"admin={endpoints.admin}"] if endpoints.admin else []
        say_ready(endpoints.http, *ingest, f"select={endpoints.select}", *ext_proc, *admin)

    async def main(stop: asyncio.Event) -> None:
        if settings.http_workers > 1:
            await serve_group(settings, frontend, consolidator, log_choice, stop, say_ready)
        else:
            await serve(settings, frontend, consolidator, stop, ready, GroupPlace.from_environment())

    run_service("router", log_choice, main, router=settings.router_id)
