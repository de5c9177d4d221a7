"""The body of `poolgrid model`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click
import msgspec
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from poolgrid.cli.command_line import print_json
from poolgrid.process.figures import counted, percent, size
from poolgrid.process.terminal_table import Heading, TerminalTable, terminal
from poolgrid.workers.model_cache.cache import Manifest, ModelCache, ModelCacheError, default_directory
from poolgrid.workers.model_cache.fetching import ModelFetch, Report, counter, parse_source
from poolgrid.workers.model_fetch import ProgressLine

PIPED_LINE_S = 10.0
"""Between two lines of progress without a terminal: enough to tell work from a hang."""

LINE_S = 0.5
"""Least time between two lines for programs, in one phase."""

PHASES = {
    "wait": "waiting for another process that has the model's lock",
    "list": "asking what the model consists of",
    "fetch": "fetching",
    "verify": "reading what is there",
}


def fetch(
    source: str,
    name: str | None,
    cache_dir: Path | None,
    exclude: tuple[str, ...],
    check: bool,
    wait_s: float,
    size_max: int,
    progress_lines: bool,
    as_json: bool,
) -> int:
    """Fetch a model and print where it is; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        cache = _cache(cache_dir)
        found = parse_source(source)
        name = name or found.name
        path = cache.path(name)
        with _ended_at_once(), _lines() if progress_lines else _bars(name) as report:
            manifest = ModelFetch(cache, found, name, report, wait_s, size_max, exclude, check).run()
    except ModelCacheError as error:
        click.echo(str(error), err=True)
        return 1
    if as_json:
        print_json({"path": str(path), **_row(manifest)})
    else:
        click.echo(str(path))
    return 0


def verify(names: list[str], cache_dir: Path | None, as_json: bool) -> int:
    """Read models and print faults; return the exit status."""
    cache = _cache(cache_dir)
    rows = []
    try:
        for name in names or cache.names():
            manifest = cache.manifest(name)
            if manifest is None:
                raise ModelCacheError(
                    f"{cache.path(name)} is no whole model; `poolgrid model list` shows what there is"
                )
            with _bars(name) as report:
                wrong = cache.wrong_files(name, manifest, counter(report, "verify", manifest.total_bytes))
            rows.append(
                {"name": name, "files": len(manifest.files), "wrong": {each.path: each.problem for each in wrong}}
            )
            if as_json:
                continue
            for each in wrong:
                click.echo(f"{cache.path(name) / each.path}: {each.problem}", err=True)
            if not wrong:
                click.echo(f"{name}: {counted(len(manifest.files), 'file')} as fetched, {size(manifest.total_bytes)}")
    except ModelCacheError as error:
        click.echo(str(error), err=True)
        return 1
    if as_json:
        print_json(rows)
    elif not rows:
        click.echo(f"{cache.directory} has no model", err=True)
    return 1 if any(row["wrong"] for row in rows) else 0


def show(cache_dir: Path | None, as_json: bool) -> int:
    """List the models of a cache; return the exit status."""
    cache = _cache(cache_dir)
    whole: list[Manifest] = []
    try:
        for name in cache.names():
            manifest = cache.manifest(name)
            if manifest is not None:
                whole.append(manifest)
        partials = cache.partials()
    except ModelCacheError as error:
        click.echo(str(error), err=True)
        return 1
    if as_json:
        print_json(
            {
                "directory": str(cache.directory),
                "models": [_row(each) for each in whole],
                "partial": [{"name": each.name, "bytes": each.bytes, "fetching": each.fetching} for each in partials],
            }
        )
        return 0
    table = TerminalTable(
        [
            Heading("model", numeric=False),
            Heading("state", numeric=False),
            Heading("size"),
            Heading("files", optional=True),
            Heading("from", numeric=False, optional=True),
        ],
        title=str(cache.directory),
    )
    for each in whole:
        table.add(each.name, "whole", size(each.total_bytes), f"{len(each.files):,}", _origin(each))
    for partial in partials:
        table.add(partial.name, "being fetched" if partial.fetching else "broken off", size(partial.bytes), "", "")
    if table.rows:
        terminal().print(table)
    else:
        click.echo(f"{cache.directory} has no model", err=True)
    return 0


def _cache(directory: Path | None) -> ModelCache:
    return ModelCache(directory or default_directory(os.environ))


def _origin(manifest: Manifest) -> str:
    return manifest.source + (f" at {manifest.revision[:12]}" if manifest.revision else "")


def _row(manifest: Manifest) -> dict[str, object]:
    return {
        "name": manifest.name,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "source": manifest.source,
        "revision": manifest.revision,
    }


def reported(name: str) -> AbstractContextManager[Report]:
    """Return what shows the progress of a fetch to people."""
    return _bars(name)


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Have Ctrl-C end the process: threads that fetch would hold it, and whole files stay for the next time."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _lines() -> Iterator[Report]:
    """Write progress as lines of JSON, at most one every half second in a phase."""
    last = ("", 0.0)

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now_s = time.monotonic()
        if phase != last[0] or now_s - last[1] >= LINE_S or (total and done == total):
            last = (phase, now_s)
            sys.stderr.write(msgspec.json.encode(ProgressLine(phase, done, total)).decode() + "\n")
            sys.stderr.flush()

    yield report


@contextmanager
def _bars(name: str) -> Iterator[Report]:
    """Show progress on standard error: as a bar on a terminal, as a line now and then elsewhere."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield _piped(name)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        task = bars.add_task(name, total=None)
        yield lambda phase, done, total: bars.update(
            task, completed=done, total=total or None, description=PHASES[phase]
        )


def _piped(name: str) -> Report:
    """Return what writes a line for each phase that takes long, and one now and then."""
    last = ("", 0.0)

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now_s = time.monotonic()
        if phase != last[0]:
            last = (phase, now_s)
            if total:
                click.echo(f"{name}: {PHASES[phase]}, {size(total)}", err=True)
        elif now_s - last[1] >= PIPED_LINE_S:
            last = (phase, now_s)
            share = percent(done / total if total else None)
            click.echo(f"{name}: {PHASES[phase]}, {size(done)} of {size(total)} ({share})", err=True)

    return report
