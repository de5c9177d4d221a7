"""`poolgrid bench`: load against any OpenAI endpoint."""

from __future__ import annotations

import typer

from poolgrid.cli.options import with_settings
from poolgrid.loadgen.settings import BenchSettings

app = typer.Typer(add_completion=False)


@app.command()
@with_settings(BenchSettings, renamed={"json_out": "--json"}, aliases={"duration_s": "--duration"})
def bench(settings: BenchSettings) -> None:
    """Measure any OpenAI endpoint: closed loop, open loop (--rate), or the replay of a trace (--trace)."""
    from poolgrid.cli.bench import run_bench

    raise typer.Exit(run_bench(settings))
