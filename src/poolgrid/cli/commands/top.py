"""`poolgrid top`: live view of a router."""

from __future__ import annotations

from typing import Annotated

import typer

from poolgrid.cli.api_key import KEY_NOTE
from poolgrid.cli.help_page import CommandLine

app = CommandLine()


@app.command(epilog=KEY_NOTE)
def top(
    url: Annotated[
        str, typer.Option(help="Router or global router to watch.", envvar="POOLGRID_URL")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Show who has a name, in all namespaces, where the router has names.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print the router's answers as JSON.")] = False,
) -> None:
    """Watch a router's workers, or a global router's pools, its queue and its last decisions, live.

    With --fleet, the processes of all pools that share names.
    """
    from functools import partial

    from poolgrid.cli.named_url import found_url, other_url_of
    from poolgrid.cli.top import top as watch
    from poolgrid.wire.names import is_name

    other = partial(other_url_of, url) if is_name(url) else None
    raise typer.Exit(watch(found_url(url), interval, once, as_json, fleet, other))
