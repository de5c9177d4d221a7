"""`poolgrid config ...`: check, draw, convert and build pool-grid documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolgrid.cli.api_key import KEY_NOTE
from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson

app = CommandLine(help="Check, draw, convert and build pool-grid documents.", no_args_is_help=True)

Document = Annotated[Path, typer.Argument(help="Pool-grid document (JSON), in poolgrid's or Dynamo's form.")]


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Pool-grid documents (JSON), in poolgrid's or Dynamo's form.")],
    as_json: AsJson = False,
) -> None:
    """Find every problem of documents at once, one a line: `JSON-path: problem`. Status 1 when there is any."""
    from poolgrid.cli.config import check as run

    raise typer.Exit(run(files, as_json))


@app.command()
def show(
    file: Document,
    as_json: AsJson = False,
) -> None:
    """Draw each grid as a heat map: which pool serves which cell."""
    from poolgrid.cli.config import show as run

    raise typer.Exit(run(file, as_json))


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="Pool grid in Dynamo's form (JSON), or a DynamoGraphDeployment (YAML).")],
    out: Annotated[Path | None, typer.Option(help="Write here instead of to standard output.")] = None,
) -> None:
    """Rewrite a grid of Dynamo's form into poolgrid's, or a DynamoGraphDeployment into values of the Helm chart."""
    from poolgrid.cli.config import convert as run

    raise typer.Exit(run(file, out))


@app.command()
def build(
    profiles: Annotated[
        Path, typer.Argument(help="Pool profiles: TTFT by ISL and load, ITL by context and load, cost.")
    ],
    out: Annotated[Path, typer.Option(help="Document to write.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="A cell stands for its longest length and tightest target, not its middle.")
    ] = False,
    evidence: Annotated[
        Path | None, typer.Option(help="Where the evidence goes (default: beside the document).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Derive a grid from profiles: each cell gets the cheapest pool that meets its target, with the evidence."""
    from poolgrid.cli.config import build as run

    raise typer.Exit(run(profiles, out, strict, evidence, as_json))


@app.command(epilog=KEY_NOTE)
def rollback(
    url: Annotated[str, typer.Option(help="Global router to talk to.", envvar="POOLGRID_URL")] = (
        "http://127.0.0.1:8000"
    ),
    as_json: AsJson = False,
) -> None:
    """Put the previous document of a running global router in force. Status 1 when there is none, or no router."""
    from poolgrid.cli.named_url import found_url
    from poolgrid.cli.rollback import rollback as run

    raise typer.Exit(run(found_url(url), as_json))


@app.command()
def schema() -> None:
    """Print the JSON Schema of pool-grid documents."""
    from poolgrid.cli.config import schema_text

    typer.echo(schema_text(), nl=False)
