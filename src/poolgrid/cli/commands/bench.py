"""`poolgrid bench`: load against any OpenAI endpoint."""

from __future__ import annotations

import typer

from poolgrid.cli.api_key import API_KEY_VARIABLE
from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.options import with_settings
from poolgrid.tools.bench.settings import BenchSettings

app = CommandLine()


@app.command(epilog=f"An endpoint that takes API keys gets the one of --api-key ({API_KEY_VARIABLE}).")
@with_settings(BenchSettings, renamed={"as_json": "--json"}, aliases={"duration_s": "--duration"})
def bench(settings: BenchSettings) -> None:
    """Measure any OpenAI endpoint: closed loop, open loop (--rate), or the replay of a trace (--trace)."""
    from poolgrid.cli.bench import run_bench

    raise typer.Exit(run_bench(settings))
