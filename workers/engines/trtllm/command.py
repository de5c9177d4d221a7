"""`poolgrid engine-config ...`: check TensorRT-LLM engine configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poolgrid.cli.help_page import CommandLine
from poolgrid.cli.json_output import AsJson, print_json

app = CommandLine(help="Check TensorRT-LLM engine configurations.", no_args_is_help=True)


@app.callback()
def engine_config() -> None:
    """Check TensorRT-LLM engine configurations."""


def _finish(text: str, status: int, out: Path | None = None) -> None:
    if status == 0 and out is not None:
        out.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False, err=status != 0 and out is not None)
    raise typer.Exit(status)


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Engine configurations (YAML), or folders of them.")],
    model_path: Annotated[
        str, typer.Option(help="Model that the files are for; by default the one that each names, if any.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check files against the TensorRT-LLM contract, and pairs against each other; status 1 when there are faults."""
    from poolgrid.workers.engines.trtllm.arguments.engine_config import check_command, check_report

    if as_json:
        answer, status = check_report(paths, model_path)
        print_json(answer)
        raise typer.Exit(status)
    _finish(*check_command(paths, model_path))
