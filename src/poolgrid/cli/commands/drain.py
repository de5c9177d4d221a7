"""`poolgrid drain`: take workers out of use without losing a stream."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.api_key import KEY_NOTE
from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson

app = CommandLine()


@app.command(epilog=KEY_NOTE)
def drain(
    workers: Annotated[list[str] | None, typer.Argument(help="Workers to drain, as `top` names them.")] = None,
    url: Annotated[
        str, typer.Option(help="Router of the pool they are in.", envvar="POOLGRID_URL")
    ] = "http://127.0.0.1:8000",
    every: Annotated[bool, typer.Option("--all", help="Drain every worker of the pool.")] = False,
    worker_url: Annotated[
        str | None,
        typer.Option(help="Drain the one worker whose health is here, without a router; on its own machine only."),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="Running requests may take so many seconds to finish; then other workers go on with them. By default "
            "each worker's --drain-timeout-ms.",
        ),
    ] = None,
    wait_s: Annotated[
        float, typer.Option(min=0, max=86_400, help="Wait so many seconds until nothing is left; 0 = do not wait.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Take workers out of use: they take nothing new, finish or hand over what they have, and may be ended then."""
    from poolgrid.cli import drain as draining

    names = list(dict.fromkeys(workers or []))
    if bool(names) + every + (worker_url is not None) != 1:
        raise typer.BadParameter("name workers, or give --all, or --worker-url: exactly one of the three")
    told = draining.Told(None if timeout_s is None else round(1000 * timeout_s), wait_s)
    if worker_url is not None:
        raise typer.Exit(draining.drain_here(worker_url, told, as_json))
    from poolgrid.cli.named_url import found_url

    raise typer.Exit(draining.drain(found_url(url), names, told, as_json))
