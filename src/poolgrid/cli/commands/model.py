"""`poolgrid model ...`: models in a directory of this machine, fetched once and checked by their sums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson

app = CommandLine(
    help="Keep models in a directory of this machine: fetched once, whole or not there, checked by their sums.",
    no_args_is_help=True,
)

CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="Directory of the cache; by default $POOLGRID_MODEL_CACHE_DIR, else $XDG_CACHE_HOME/poolgrid/models, else "
        "~/.cache/poolgrid/models.",
        envvar="POOLGRID_MODEL_CACHE_DIR",
    ),
]


@app.command(
    epilog="HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT: as for huggingface_hub. "
    "HTTPS_PROXY, NO_PROXY: as for curl."
)
def fetch(
    source: Annotated[
        str,
        typer.Argument(help="Directory, or ORG/MODEL[@REVISION] on a hub."),
    ],
    cache_dir: CacheDirectory = None,
    name: Annotated[
        str | None, typer.Option(help="Name in the cache; by default that of the source, as ORG--MODEL.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave files out whose path is like this, as 'original/*'; repeat for more."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read what is there already, and fetch again what is not what it was.")
    ] = False,
    wait_s: Annotated[
        float,
        typer.Option(min=0, max=604_800, help="Wait so long for another process that fetches the same model."),
    ] = 7200.0,
    max_size_gib: Annotated[
        float, typer.Option(min=0, max=1_048_576, help="Fetch nothing of a model that is larger, in 2^30 bytes.")
    ] = 4096.0,
    progress_lines: Annotated[
        bool, typer.Option("--progress-lines", help="Print the progress to standard error as JSON lines, for programs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model into the cache unless it is there, and print its directory.

    Of several processes that fetch the same model one does, and the others wait for it. Whole
    files that were fetched when a process ended are kept, and the next one fetches the others. Until all is there,
    nothing takes it for a model.
    """
    from poolgrid.cli import model

    size_max = round(max_size_gib * 2**30)
    raise typer.Exit(
        model.fetch(source, name, cache_dir, tuple(exclude or ()), check, wait_s, size_max, progress_lines, as_json)
    )


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models, as `list` names them. All of the cache by default.")
    ] = None,
    cache_dir: CacheDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Read every file of models and hold it against its sum; status 1 when one is wrong, which is named.

    `poolgrid model fetch SOURCE --check` mends what is wrong.
    """
    from poolgrid.cli import model

    raise typer.Exit(model.verify(names or [], cache_dir, as_json))


@app.command("list")
def list_command(cache_dir: CacheDirectory = None, as_json: AsJson = False) -> None:
    """Show the models of the cache, and those that are being fetched or were not fetched to their end."""
    from poolgrid.cli import model

    raise typer.Exit(model.show(cache_dir, as_json))
