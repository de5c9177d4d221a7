"""The body of `poolgrid model`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from poolgrid.cli.command_line import print_json
from poolgrid.process.clock import SystemClock
from poolgrid.process.figures import counted, percent, size
from poolgrid.process.terminal_table import Heading, TerminalTable, terminal
from poolgrid.workers.model_cache.cache import ModelCache, default_directory
from poolgrid.workers.model_cache.fetching import Ended, Fetching, FetchLimits
from poolgrid.workers.model_cache.fetching import Progress as FetchProgress
from poolgrid.workers.model_cache.manifest import Manifest, ModelCacheError
from poolgrid.workers.model_cache.opening import open_source
from poolgrid.workers.model_cache.progress import ProgressLines

PIPED_LINE_MS = 10_000.0
"""Between two lines of progress where nobody sees a bar: enough to tell work from a hang."""

PHASES = {
    "wait": "waiting for another process that has the model's lock",
    "list": "asking what the model consists of",
    "fetch": "fetching",
    "verify": "reading what is there",
}

__all__ = ["FetchLimits", "Wanted", "fetch", "show", "verify"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be fetched, and how."""

    source: str
    name: str | None
    exclude: tuple[str, ...]
    check: bool
    timeout_s: float
    limits: FetchLimits


def fetch(wanted: Wanted, cache_dir: Path | None, progress_lines: bool, as_json: bool) -> int:
    """Fetch a model and print where it is; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        cache = _cache(cache_dir)
        source = open_source(wanted.source, wanted.timeout_s)
        name = wanted.name or source.name
        path = cache.path(name)
        with _lines() if progress_lines else _bars(name) as progress:
            fetching = Fetching(cache, source, name, progress, wanted.limits, wanted.exclude, wanted.check)
            manifest = fetching.run()
    except (ModelCacheError, Ended) as error:
        click.echo(str(error) or "ended before the model was whole", err=True)
        return 1
    if as_json:
        print_json({"path": str(path), **_row(manifest)})
    else:
        click.echo(str(path))
    return 0


def verify(names: list[str], cache_dir: Path | None, as_json: bool) -> int:
    """Read models and say what is wrong; return the exit status."""
    cache = _cache(cache_dir)
    rows = []
    try:
        for name in names or cache.names():
            manifest = cache.manifest(name)
            if manifest is None:
                raise ModelCacheError(
                    f"{cache.path(name)} is no whole model; `poolgrid model list` shows what there is"
                )
            with _bars(name) as progress:
                progress.phase("verify", manifest.total_bytes)
                wrong = cache.wrong_files(name, manifest, progress.moved)
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


@contextmanager
def _lines() -> Iterator[FetchProgress]:
    def write(line: str) -> None:
        sys.stderr.write(line)
        sys.stderr.flush()

    yield ProgressLines(write, SystemClock())


@contextmanager
def _bars(name: str) -> Iterator[FetchProgress]:
    """Show progress on standard error: as a bar on a terminal, as a line now and then elsewhere."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield _PipedWords(name)
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
        yield _Bar(bars, name)


class _Bar:
    """A bar for each phase."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars = bars
        self._task: TaskID = bars.add_task(name, total=None)

    def phase(self, name: str, total_bytes: int) -> None:
        self._bars.reset(self._task, total=total_bytes or None, description=PHASES[name])

    def moved(self, count: int) -> None:
        self._bars.advance(self._task, count)


class _PipedWords:
    """A line for each phase that takes long, and one now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._phase = ""
        self._done = self._total = 0
        self._told_ms = 0.0

    def phase(self, name: str, total_bytes: int) -> None:
        with self._lock:
            self._phase, self._done, self._total = name, 0, total_bytes
            self._told_ms = self._clock.monotonic_ms()
            if total_bytes:
                click.echo(f"{self._name}: {PHASES[name]}, {size(total_bytes)}", err=True)

    def moved(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = self._clock.monotonic_ms()
            if now - self._told_ms < PIPED_LINE_MS:
                return
            self._told_ms = now
            done = percent(self._done / self._total if self._total else None)
            click.echo(
                f"{self._name}: {PHASES[self._phase]}, {size(self._done)} of {size(self._total)} ({done})", err=True
            )
