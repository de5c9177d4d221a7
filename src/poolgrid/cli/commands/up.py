"""`poolgrid up`: a whole pool on this machine."""

from __future__ import annotations

import click

from poolgrid.cli.command_line import command
from poolgrid.cli.local_pool import UpSettings
from poolgrid.cli.options import with_settings
from poolgrid.cli.up import run_up

BASICS = (
    "engine",
    "engine_url",
    "model_path",
    "workers",
    "prefill",
    "decode",
    "pools",
    "port",
    "policy",
    "data_dir",
    "dry_run",
)


@command()
@with_settings(UpSettings, basics=BASICS)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print the plan as JSON.")
def up(settings: UpSettings, as_json: bool) -> None:
    """Run a whole pool on this machine: a consolidator, a router and simulated workers, as separate processes."""
    raise SystemExit(run_up(settings, as_json))
