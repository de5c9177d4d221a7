"""`poolgrid config ...`: check, draw, convert and build pool-grid documents."""

from __future__ import annotations

from pathlib import Path

import click

from poolgrid.server.cli.command_line import Group, as_json, router_url
from poolgrid.server.cli.router_client import KEY_NOTE

PATH = click.Path(path_type=Path)
READABLE = click.Path(path_type=Path, exists=True)


@click.group(cls=Group)
def config() -> None:
    """Check, draw, convert and build pool-grid documents."""


@config.command()
@click.argument("files", nargs=-1, required=True, type=READABLE, help="Pool-grid documents, in our form or Dynamo's.")
@as_json
def check(files: tuple[Path, ...], as_json: bool) -> None:
    """Find every problem of documents at once, one a line: `JSON-path: problem`. Status 1 when there is any."""
    from poolgrid.server.cli.config import check as run

    raise SystemExit(run(files, as_json))


@config.command()
@click.argument("file", type=READABLE, help="Pool-grid document (JSON), in poolgrid's or Dynamo's form.")
@as_json
def show(file: Path, as_json: bool) -> None:
    """Draw each grid as a heat map: which pool serves which cell."""
    from poolgrid.server.cli.config import show as run

    raise SystemExit(run(file, as_json))


@config.command()
@click.argument("file", type=READABLE, help="Pool grid in Dynamo's form (JSON), or a DynamoGraphDeployment (YAML).")
@click.option("--out", type=PATH, help="Write here instead of to standard output.")
def convert(file: Path, out: Path | None) -> None:
    """Rewrite a grid of Dynamo's form into poolgrid's, or a DynamoGraphDeployment into values of the Helm chart."""
    from poolgrid.server.cli.config import convert as run

    raise SystemExit(run(file, out))


@config.command()
@click.argument("profiles", type=READABLE, help="Pool profiles: TTFT by ISL and load, ITL by context and load, cost.")
@click.option("--out", type=PATH, required=True, help="Document to write.")
@click.option("--strict", is_flag=True, help="Take a cell's longest length and tightest target, not its middle.")
@click.option("--evidence", type=PATH, help="Where the evidence goes (default: next to the document).")
@as_json
def build(profiles: Path, out: Path, strict: bool, evidence: Path | None, as_json: bool) -> None:
    """Derive a grid from profiles: each cell gets the cheapest pool that meets its target, with the evidence."""
    from poolgrid.server.cli.config import build as run

    raise SystemExit(run(profiles, out, strict, evidence, as_json))


@config.command(epilog=KEY_NOTE)
@router_url("Global router to talk to.")
@as_json
def rollback(url: str, as_json: bool) -> None:
    """Put the previous document of a running global router in force. Status 1 when there is none, or no router."""
    from poolgrid.server.cli.config import rollback as run
    from poolgrid.server.cli.router_client import found_url

    raise SystemExit(run(found_url(url), as_json))


@config.command()
def schema() -> None:
    """Print the JSON Schema of pool-grid documents."""
    from poolgrid.server.cli.config import schema_text

    click.echo(schema_text(), nl=False)
