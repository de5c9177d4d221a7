"""`poolgrid explain`: one request's decisions."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.api_key import KEY_NOTE
from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson

app = CommandLine()


@app.command(epilog=KEY_NOTE)
def explain(
    request_id: Annotated[
        str,
        typer.Argument(help="The x-request-id or the id of an answer, with or without its index, or what `top` shows."),
    ],
    url: Annotated[
        str, typer.Option(help="Router or global router that served it.", envvar="POOLGRID_URL")
    ] = "http://127.0.0.1:8000",
    journal: Annotated[
        str | None,
        typer.Option(help="Read recorded decisions of a data_dir instead of asking a router."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a request went where it went: every candidate, every cost term, who was passed over and why."""
    from poolgrid.cli.explain import explain as run_explain
    from poolgrid.cli.explain import explain_from_journal

    if journal is not None:
        raise typer.Exit(explain_from_journal(request_id, journal, as_json))
    from poolgrid.cli.named_url import found_url

    raise typer.Exit(run_explain(request_id, found_url(url), as_json))
