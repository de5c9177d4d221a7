"""`poolgrid router`: one router, or several that share a port."""

from __future__ import annotations

from poolgrid.server.cli.command_line import LogChoice, command, log_options
from poolgrid.server.cli.options import with_settings
from poolgrid.server.cli.router_group import serve_group
from poolgrid.server.cli.service_process import Main, run_service, say_ready
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.router.settings import RouterSettings

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
    from poolgrid.server.cli.hub_model import router_model

    frontend = router_model(frontend)

    def prepare() -> Main:
        if settings.http_workers > 1:
            return lambda stop: serve_group(settings, frontend, consolidator, log_choice, stop, say_ready)
        from poolgrid.server.router.bootstrap import Endpoints, serve

        def ready(endpoints: Endpoints) -> None:
            ingest = [f"ingest={endpoints.ingest}"] if endpoints.ingest else []
            ext_proc = [f"ext-proc={endpoints.ext_proc}"] if endpoints.ext_proc else []
            admin = [f"admin={endpoints.admin}"] if endpoints.admin else []
            say_ready(endpoints.http, *ingest, f"select={endpoints.select}", *ext_proc, *admin)

        place = GroupPlace.from_environment()
        return lambda stop: serve(settings, frontend, consolidator, stop, ready, place)

    run_service("router", log_choice, prepare, router=settings.router_id)
