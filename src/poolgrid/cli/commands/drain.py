"""`poolgrid drain`: take workers out of use without losing a stream."""

from __future__ import annotations

import click

from poolgrid.cli.command_line import as_json, command, router_url
from poolgrid.cli.router_client import KEY_NOTE

SECONDS = click.FloatRange(0, 86_400)


@command(epilog=KEY_NOTE)
@click.argument("workers", nargs=-1, help="Workers to drain, as `top` names them.")
@router_url("Router of the pool they are in.")
@click.option("--all", "every", is_flag=True, help="Drain every worker of the pool.")
@click.option(
    "--worker-url", help="Drain the one worker whose health is here, without a router; on its own machine only."
)
@click.option(
    "--timeout-s",
    type=SECONDS,
    help="Running requests may take so many seconds to finish; then other workers continue them. By default each "
    "worker's --drain-timeout-ms.",
)
@click.option(
    "--wait-s",
    type=SECONDS,
    default=600.0,
    help="Wait so many seconds until nothing is left; 0 = do not wait. [default: 600]",
)
@as_json
def drain(
    workers: tuple[str, ...],
    url: str,
    every: bool,
    worker_url: str | None,
    timeout_s: float | None,
    wait_s: float,
    as_json: bool,
) -> None:
    """Take workers out of use: they take nothing new, finish or hand over what they have, and may be ended then."""
    from poolgrid.cli import drain as draining

    names = list(dict.fromkeys(workers))
    if bool(names) + every + (worker_url is not None) != 1:
        raise click.BadParameter("name workers, or give --all, or --worker-url: exactly one of the three")
    told = draining.Told(None if timeout_s is None else round(1000 * timeout_s), wait_s)
    if worker_url is not None:
        raise SystemExit(draining.drain_here(worker_url, told, as_json))
    from poolgrid.cli.router_client import found_url

    raise SystemExit(draining.drain(found_url(url), names, told, as_json))
