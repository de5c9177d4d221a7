"""`poolgrid engine-check`: whether an engine server's KV events can be routed by."""

from __future__ import annotations

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.options import with_settings
from poolgrid.tools.engine_check.settings import EngineCheckSettings

app = CommandLine()


@app.command(
    epilog="The status is 0 when nothing keeps the events from being used, 1 when something does, and 2 when nothing "
    "could be checked. A server that takes an API key gets the one in POOLGRID_API_KEY."
)
@with_settings(EngineCheckSettings, renamed={"as_json": "--json"})
def engine_check(settings: EngineCheckSettings) -> None:
    """Compare what a vLLM, SGLang or trtllm-serve server says of its KV cache with what its tokens imply.

    It sends about ten short prompts, listens to the events, compares the two with each other and with the cached
    tokens that the server reports, and names what does not match, and what to set. With --measure-timing it measures
    the server's step times instead, for simulated engines.
    """
    from poolgrid.cli.engine_check import run_engine_check

    raise typer.Exit(run_engine_check(settings))
