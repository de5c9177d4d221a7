"""`poolgrid top`: live view of a router."""

from __future__ import annotations

import click

from poolgrid.cli.command_line import command, router_url
from poolgrid.cli.router_client import KEY_NOTE


@command(epilog=KEY_NOTE)
@router_url("Router or global router to watch.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    help="Seconds between two looks. [default: 1]",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--fleet", is_flag=True, help="Show who has a name, in all namespaces, where the router has names.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the router's answers as JSON.")
def top(url: str, interval: float, once: bool, fleet: bool, as_json: bool) -> None:
    """Watch a router's workers, or a global router's pools, its queue and its last decisions, live.

    With --fleet, the processes of all pools that share names.
    """
    from functools import partial

    from poolgrid.cli.router_client import found_url, other_url_of
    from poolgrid.cli.top import top as watch
    from poolgrid.wire.names import is_name

    other = partial(other_url_of, url) if is_name(url) else None
    raise SystemExit(watch(found_url(url), interval, once, as_json, fleet, other))
