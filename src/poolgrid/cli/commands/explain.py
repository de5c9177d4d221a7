"""`poolgrid explain`: one request's decisions."""

from __future__ import annotations

import click

from poolgrid.cli.command_line import as_json, command, router_url
from poolgrid.cli.router_client import KEY_NOTE


@command(epilog=KEY_NOTE)
@click.argument(
    "request_id", help="The x-request-id or the id of an answer, with or without its index, or what `top` shows."
)
@router_url("Router or global router that served it.")
@click.option(
    "--journal",
    help="Read recorded decisions instead of asking a router, those of a data_dir.",
)
@as_json
def explain(request_id: str, url: str, journal: str | None, as_json: bool) -> None:
    """Explain why a request went where it went: every candidate, every cost term, who was passed over and why."""
    from poolgrid.cli.explain import explain as run_explain
    from poolgrid.cli.explain import explain_from_journal

    if journal is not None:
        raise SystemExit(explain_from_journal(request_id, journal, as_json))
    from poolgrid.cli.router_client import found_url

    raise SystemExit(run_explain(request_id, found_url(url), as_json))
