"""The functions behind ``poolgrid config``: check, show, convert, build, schema, rollback.

Each takes paths, prints, and returns an exit status: 0, or 1 with every problem on a line of its own,
``JSON-path: problem`` on standard output. Remarks about the work itself go to standard error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridDocumentError, GridStage, Problem
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.answers import ReloadAnswer
from poolgrid.server.cli.command_line import print_json
from poolgrid.server.cli.graph_deployment import GraphDeploymentError, convert_graph, is_graph_deployment
from poolgrid.server.cli.router_client import api_key_headers, refusal
from poolgrid.server.global_router.document.history import document_text, json_text
from poolgrid.server.global_router.document.reader import LoadedDocument, load_document
from poolgrid.server.global_router.document_file import read_bytes, read_document_file
from poolgrid.server.global_router.heat_map import terminal_map
from poolgrid.server.process.figures import counted
from poolgrid.server.process.plugins import PARTS, load_plugin
from poolgrid.server.process.terminal_table import terminal
from poolgrid.server.workers.engines.registry import engine_definition, engines

ROLLBACK_TIMEOUT_S = 10.0


def _print(text: str, to_stderr: bool = False) -> None:
    Console(stderr=to_stderr, soft_wrap=True).print(text, markup=False, highlight=False, emoji=False)


def _refused(error: GridDocumentError, as_json: bool = False) -> int:
    """Say why a document cannot be used; return the exit status."""
    if as_json:
        print_json(_row(error.problems, error.warnings, error.left_off))
        return 1
    return _print_problems(error)


def _print_problems(error: GridDocumentError, place: str = "") -> int:
    for problem in (*error.problems, *error.warnings):
        _print(f"{place}{problem}")
    if error.left_off:
        _print(f"{place}$: and {counted(error.left_off, 'more problem')}")
    return 1


def check(paths: Sequence[Path], as_json: bool = False) -> int:
    """Print every problem and warning of documents, one per line; return 1 if any cannot be used, else 0."""
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        # Of one document the lines are its problems alone; of several each names its document.
        place = f"{path}: " if len(paths) > 1 else ""
        try:
            loaded = read_document_file(path)
        except GridDocumentError as error:
            rows[str(path)] = _row(error.problems, error.warnings, error.left_off)
            if not as_json:
                _print_problems(error, place)
            continue
        rows[str(path)] = _row((), loaded.warnings, 0)
        if not as_json:
            for warning in loaded.warnings:
                _print(f"{place}{warning}")
            _print(f"{path}: {_summary(loaded)}", to_stderr=True)
    if as_json:
        print_json(rows)
    return 0 if all(row["usable"] for row in rows.values()) else 1


def _row(problems: Sequence[Problem], warnings: Sequence[Problem], left_off: int) -> dict[str, Any]:
    return {
        "usable": not problems,
        "problems": [str(problem) for problem in problems],
        "warnings": [str(warning) for warning in warnings],
        "left_off": left_off,
    }


def _summary(loaded: LoadedDocument) -> str:
    document = loaded.document
    stages = ", ".join(
        f"{name} with {counted(len(stage.pools), 'pool')} over "
        f"{' × '.join(str(axis.resolution) for axis in stage.axes)} cells"
        for name, stage in document.stages.items()
    )
    form = "" if loaded.form == "poolgrid" else " (Dynamo's form; poolgrid config convert rewrites it)"
    return f"ok, {stages}{form}"


def show(path: Path, as_json: bool = False) -> int:
    """Draw the grids of a document as heat maps in the terminal."""
    try:
        loaded = read_document_file(path)
    except GridDocumentError as error:
        return _refused(error, as_json)
    if as_json:
        print_json({name: _grid_row(stage) for name, stage in loaded.document.stages.items()})
    else:
        console = terminal()
        console.print(terminal_map(loaded.document, console.width))
    return 0


def _grid_row(stage: GridStage) -> dict[str, Any]:
    """Return what a heat map shows of a grid: the bounds of its cells, and the pool of each."""
    axes = [
        {"name": axis.name, "unit": axis.unit, "bounds": [axis.bounds(index) for index in range(axis.resolution)]}
        for axis in stage.axes
    ]
    ranks = stage.speed_ranks()
    pools = [{"name": pool.name, "speed_rank": ranks[pool.name], "url": pool.url} for pool in stage.pools]
    return {"axes": axes, "pools": pools, "cells": stage.mapping}


def convert(path: Path, out: Path | None = None) -> int:
    """Write a document in our canonical form, to ``out`` or standard output; it reads back as an equal document.

    Of a DynamoGraphDeployment the values of the Helm chart are written, for each release in a file of its own.
    """
    try:
        text = read_bytes(path).decode("utf-8", "replace")
        if is_graph_deployment(text):
            return _convert_graph(path, text, out)
        loaded = read_document_file(path)
    except GridDocumentError as error:
        return _print_problems(error)
    for warning in loaded.warnings:
        _print(str(warning), to_stderr=True)
    text = document_text(loaded.document)
    assert load_document(text).document == loaded.document, "the canonical text must read back as the same document"
    if out is None:
        _print(text.rstrip("\n"))
        return 0
    return _write(out, text)


def _convert_graph(path: Path, text: str, out: Path | None) -> int:
    options = {
        engine: {name.replace("_", "-") for name in engine_definition(engine).settings.model_fields}
        if engine in engines()
        else set()
        for engine in ("trtllm", "simulated")
    }

    def beside(name: str) -> str | None:
        """Return an engine file that lies where the manifest names it, from its folder or from here."""
        for place in (path.parent / name, Path(name)):
            if place.is_file():
                return read_bytes(place).decode("utf-8", "replace")
        return None

    try:
        made = convert_graph(text, options["trtllm"], options["simulated"], beside)
    except GraphDeploymentError as error:
        _print(f"{path}: {error}", to_stderr=True)
        return 1
    for remark in made.remarks:
        _print(remark, to_stderr=True)
    texts = made.texts()
    if out is None:
        _print("---\n".join(texts.values()).rstrip("\n"))
        return 0
    for name, values in texts.items():
        place = out.with_name(f"{out.stem}.{name}{out.suffix}") if name else out
        if status := _write(place, values):
            return status
        if name:
            _print(f"{place}: helm install {name}", to_stderr=True)
    return 0


def build(profiles: Path, out: Path, strict: bool = False, evidence: Path | None = None, as_json: bool = False) -> int:
    """Build a grid from pool profiles into ``out``, with the evidence next to it (``out`` with ``.evidence.json``)."""
    try:
        build_from = load_plugin(PARTS, "grid-builder")
    except ValueError as error:
        _print(str(error), to_stderr=True)
        return 2
    try:
        built = build_from(read_bytes(profiles), str(profiles), strict)
    except GridDocumentError as error:
        return _refused(error, as_json)
    beside = evidence or out.with_name(f"{out.stem}.evidence.json")
    status = _write(beside, json_text(built.evidence) + "\n") or _write(out, built.text)
    if status == 0:
        for warning in built.loaded.warnings:
            _print(str(warning), to_stderr=True)
        for name in built.left_out:
            _print(f"{profiles}: pool {name} is left out, no cell needs it", to_stderr=True)
        missed = f", {built.missed} of them with a target that no pool meets" if built.missed else ""
        _print(f"{out}: {counted(built.cells, 'cell')}{missed}; evidence in {beside}", to_stderr=True)
    if as_json:
        files = {"out": str(out), "evidence": str(beside), "written": status == 0}
        print_json({**files, "cells": built.cells, "missed": built.missed, "left_out": built.left_out})
    return status


def _write(path: Path, text: str) -> int:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        _print(f"writing {path}: {error.strerror or error}; it is unchanged", to_stderr=True)
        partial.unlink(missing_ok=True)
        return 1
    return 0


def schema() -> dict[str, Any]:
    """Return the JSON Schema of grid documents in our form.

    It covers single fields; rules between fields (shapes, references, overlaps) are found by ``check``.
    """
    made = GridDocument.model_json_schema()
    made["properties"] = {"$schema": {"type": "string"}, **made["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def schema_text() -> str:
    """Return the text of ``docs/schemas/pool_grid.schema.json``."""
    return json.dumps(schema(), indent=2) + "\n"


def rollback(url: str, as_json: bool = False) -> int:
    """Put the previous document of a running global router in force, print what changed, return the exit status."""
    place = f"{url.rstrip('/')}/v1/config/rollback"
    shown = without_credentials(place)
    try:
        answer = httpx.post(place, timeout=ROLLBACK_TIMEOUT_S, headers=api_key_headers())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _print(f"asking {shown}: {error}; nothing is known to have changed", to_stderr=True)
        return 1
    if answer.status_code != 200:
        words = refusal(answer.status_code, answer.content)
        _print(f"asking {shown}: status {answer.status_code}: {words}", to_stderr=True)
        return 1
    try:
        done = msgspec.json.decode(answer.content, type=ReloadAnswer)
    except (msgspec.MsgspecError, ValueError) as error:
        _print(f"asking {shown}: the answer is not a global router's: {error}", to_stderr=True)
        return 1
    if as_json:
        print_json(done)
        return 0
    for line in (f"rolled back: revision {done.revision} is in force", *(f"  {change}" for change in done.changes)):
        _print(line)
    return 0
