"""A journal's directory as commands read it: opened, its faults printed in a line, the reading shown as it goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.server.cli.options import environment_name
from poolgrid.server.consolidator.journal.inspection import NotKept
from poolgrid.server.consolidator.journal.posix_disk import ReadOnlyDirectory
from poolgrid.server.process.nats_settings import SCHEMES
from poolgrid.server.process.plugins import EVENT_PLANES, load_plugin
from poolgrid.server.router.decision_journal.reader import decision_directories

STREAM_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)
"""How the name of a stream begins."""


class UsageError(ValueError):
    """An argument cannot be used."""


@contextmanager
def journal_errors(what: str = "reading a journal") -> Iterator[None]:
    """Turn what can go wrong with a journal into a line on standard error and an exit status."""
    try:
        yield
    except JournalCorrupt as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from None
    except NotKept as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from None
    except (UsageError, NotADirectoryError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        click.echo(f"{what}: {text}", err=True)
        raise SystemExit(2) from None
    except BrokenPipeError:
        # The reader of our rows has closed the pipe; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        click.echo(f"{what}: {error}", err=True)
        raise SystemExit(1) from None


class JournalFiles(ReadableDisk, Protocol):
    """A journal for those who only look: a directory, or a stream that reads like one."""

    def is_in_use(self) -> bool: ...


def open_journal(where: str) -> JournalFiles:
    """Return a journal for reading: of a directory, or of a stream, ``nats://HOST:PORT/POOL``."""
    if where.startswith(STREAM_SCHEMES):
        try:
            plane = load_plugin(EVENT_PLANES, "nats")
            return cast(JournalFiles, plane.open_journal(where, lambda name: os.environ.get(environment_name(name))))
        except ValueError as error:
            raise UsageError(str(error)) from None
    return open_directory(Path(where))


def open_decisions(where: str) -> list[tuple[str, JournalFiles]]:
    """Return the decisions of each router with its id: of a data_dir, or of one router's directory."""
    if where.startswith(STREAM_SCHEMES):
        raise UsageError(
            f"{where}: decisions are recorded in the routers' data_dir and not on NATS; name that directory with "
            "--decisions (a stream of decisions that an earlier version recorded is read by that version)"
        )
    return [(path.name, ReadOnlyDirectory(path)) for path in decision_directories(Path(where))]


def decisions_below(where: str) -> list[tuple[str, JournalFiles]]:
    """Return the decisions that are with a pool's journal; a stream has none."""
    return [] if where.startswith(STREAM_SCHEMES) else open_decisions(where)


def open_directory(directory: Path) -> ReadOnlyDirectory:
    """Return a journal's directory for reading; refuses one without a journal in it."""
    disk = ReadOnlyDirectory(directory)
    if not any(name.endswith((".segment", ".snapshot")) for name in disk.names()):
        raise UsageError(f"{directory} has no segment and no snapshot in it: it is no journal")
    return disk


@contextmanager
def progress_bar(what: str, total: int, as_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error on a terminal; yields what to call with how much is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *((*columns, DownloadColumn()) if as_bytes else columns),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def survey_bytes(disk: ReadableDisk) -> int:
    """Return the size of all files of a journal; of a stream, as its servers count it."""
    stored = getattr(disk, "stored_bytes", None)
    if stored is not None:
        return int(stored)
    return sum(disk.size(name) for name in disk.names() if name.endswith((".segment", ".snapshot")))
