"""One rule for JSON: ``--json`` prints it to standard output in place of what people read, ``--out`` writes a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output instead.")]
"""Option of every command that has something to tell programs."""


def json_text(answer: Any) -> str:
    """Return an answer as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n"


def print_json(answer: Any) -> None:
    """Print an answer for programs."""
    typer.echo(json_text(answer), nl=False)


def cannot_write(out: Path | None) -> str:
    """Return why a file cannot be written; empty when it can, or none is wanted."""
    if out is None:
        return ""
    if out.is_dir():
        return f"{out} is a directory"
    place = out if out.exists() else out.parent
    return "" if os.access(place, os.W_OK) else f"{place} cannot be written to"
