"""`poolgrid global-router`: the OpenAI API over several pools."""

from __future__ import annotations

from poolgrid.server.cli.command_line import LogChoice, command, log_options
from poolgrid.server.cli.global_router_group import serve_global_group
from poolgrid.server.cli.options import with_settings
from poolgrid.server.cli.service_process import Main, run_service, say_ready
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.lifecycle import GroupPlace

BASICS = (
    "config",
    "host",
    "port",
    "pool_url",
    "pool_api_key",
    "model_path",
    "api_keys",
    "tls_certificate",
    "tls_key",
    "max_queue_requests",
    "http_workers",
)


@command()
@with_settings(GlobalRouterSettings, FrontendSettings, basics=BASICS)
@log_options
def global_router(
    settings: GlobalRouterSettings,
    frontend: FrontendSettings,
    log_choice: LogChoice,
) -> None:
    """Run a global router: the OpenAI HTTP API over several pools, chosen by a grid."""
    from poolgrid.server.cli.hub_model import router_model

    frontend = router_model(frontend)

    def prepare() -> Main:
        if settings.http_workers > 1:
            return lambda stop: serve_global_group(settings, frontend, log_choice, stop, say_ready)
        from poolgrid.server.global_router.bootstrap import serve

        place = GroupPlace.from_environment()
        return lambda stop: serve(settings, frontend, stop, say_ready, place)

    run_service("global-router", log_choice, prepare)
