"""`poolgrid replay`: every recorded decision derived again."""

from __future__ import annotations

import click

from poolgrid.cli.command_line import as_json, command


@command()
@click.argument("directory", help="Directory of the pool's journal (a data_dir), or nats://HOST:PORT/POOL.")
@click.option(
    "--decisions",
    help="Where the decisions are, when not in `decisions` below the journal.",
)
@click.option("--strict", is_flag=True, help="Status 1 also when a decision cannot be derived.")
@as_json
def replay(directory: str, decisions: str | None, strict: bool, as_json: bool) -> None:
    """Derive every recorded decision again from the journal and compare bit for bit; status 1 at a difference."""
    from poolgrid.cli.replay import replay as run_replay

    raise SystemExit(run_replay(directory, decisions, strict, as_json))
