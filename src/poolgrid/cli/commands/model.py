"""`poolgrid model ...`: models in a directory of this machine, fetched once and checked by their sums."""

from __future__ import annotations

from pathlib import Path

import click

from poolgrid.cli.command_line import Group, as_json

cache_dir = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="POOLGRID_MODEL_CACHE_DIR",
    help="Directory of the cache; by default $POOLGRID_MODEL_CACHE_DIR, else $XDG_CACHE_HOME/poolgrid/models, else "
    "~/.cache/poolgrid/models.",
)


@click.group(cls=Group)
def model() -> None:
    """Download models to a directory of this machine: once, completely, with checksums verified."""


@model.command(
    epilog="HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT: as for huggingface_hub. "
    "HTTPS_PROXY, NO_PROXY: as for curl."
)
@click.argument(
    "source",
    help="Directory, or ORG/MODEL[@REVISION] on a hub.",
)
@cache_dir
@click.option("--name", help="Name in the cache; by default that of the source, as ORG--MODEL.")
@click.option("--exclude", multiple=True, help="Leave files out whose path is like this, as 'original/*'; repeatable.")
@click.option("--check", is_flag=True, help="Verify files that are there already, and fetch changed ones again.")
@click.option(
    "--wait-s",
    type=click.FloatRange(0, 604_800),
    default=7200.0,
    help="Wait this long for another process that fetches the same model. [default: 7200]",
)
@click.option(
    "--max-size-gib",
    type=click.FloatRange(0, 1_048_576),
    default=4096.0,
    help="Fetch nothing of a model that is larger, in 2^30 bytes. [default: 4096]",
)
@click.option("--progress-lines", is_flag=True, help="Print the progress to standard error as JSON lines.")
@as_json
def fetch(
    source: str,
    cache_dir: Path | None,
    name: str | None,
    exclude: tuple[str, ...],
    check: bool,
    wait_s: float,
    max_size_gib: float,
    progress_lines: bool,
    as_json: bool,
) -> None:
    """Fetch a model into the cache unless it is there, and print its directory.

    Of several processes that fetch the same model one does, and the others wait for it. Whole files fetched before a
    process ended are kept, and the next one fetches the others. Until all is there, nothing takes it for a model.
    """
    from poolgrid.cli import model

    size_max = round(max_size_gib * 2**30)
    raise SystemExit(model.fetch(source, name, cache_dir, exclude, check, wait_s, size_max, progress_lines, as_json))


@model.command()
@click.argument("names", nargs=-1, help="Models, as `list` names them. All of the cache by default.")
@cache_dir
@as_json
def verify(names: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Read every file of models and hold it against its sum; status 1 when one is wrong, which is named.

    `poolgrid model fetch SOURCE --check` repairs what is wrong.
    """
    from poolgrid.cli import model

    raise SystemExit(model.verify(list(names), cache_dir, as_json))


@model.command("list")
@cache_dir
@as_json
def list_models(cache_dir: Path | None, as_json: bool) -> None:
    """Show the models of the cache, and those that are being fetched or were not fetched to their end."""
    from poolgrid.cli import model

    raise SystemExit(model.show(cache_dir, as_json))
