"""`poolgrid engine-config ...`: check TensorRT-LLM engine configurations."""

from __future__ import annotations

from pathlib import Path

import click

from poolgrid.server.cli.command_line import Group, as_json, print_json

PATH = click.Path(path_type=Path)
READABLE = click.Path(path_type=Path, exists=True)


@click.group(cls=Group)
def engine_config() -> None:
    """Check TensorRT-LLM engine configurations."""


def _finish(text: str, status: int, out: Path | None = None) -> None:
    if status == 0 and out is not None:
        out.write_text(text, encoding="utf-8")
    else:
        click.echo(text, nl=False, err=status != 0 and out is not None)
    raise SystemExit(status)


@engine_config.command()
@click.argument("paths", nargs=-1, required=True, type=READABLE, help="Engine configurations (YAML) or folders.")
@click.option("--model-path", default="", help="Model of the files; by default the one that each names, if any.")
@as_json
def check(paths: tuple[Path, ...], model_path: str, as_json: bool) -> None:
    """Check files against the TensorRT-LLM contract, and pairs against each other; status 1 when there are faults."""
    from poolgrid.plugins.trtllm.arguments.engine_config import check_command, check_report

    if as_json:
        answer, status = check_report(list(paths), model_path)
        print_json(answer)
        raise SystemExit(status)
    _finish(*check_command(list(paths), model_path))
