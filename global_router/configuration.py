"""The document in force, what it makes of requests, and how it is replaced while the process runs.

Rules
    1. ``active`` is replaced as a whole, between two requests: a request that began under one revision ends under it.
    2. A file that is no valid document changes nothing; its problems are logged, counted and kept for ``/v1/config``.
    3. Files are read and checked in a thread, one at a time.
    4. A rollback stands until the file changes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from poolgrid.kernel.pool_grids.closed_loop import ClosedLoop
from poolgrid.kernel.pool_grids.grid import Grid
from poolgrid.kernel.pool_grids.grid_document import DOCUMENT_BYTES_MAX, GridDocument, TargetDefaults
from poolgrid.kernel.pool_grids.request_hints import OutputLengths
from poolgrid.server.global_router.document.history import DocumentHistory, Reload
from poolgrid.server.global_router.document.reader import LoadedDocument
from poolgrid.server.process.clock import Clock

log = logging.getLogger(__name__)

RELOADS_KEPT = 100
"""Outcomes kept for ``/v1/config``."""


NO_DEFAULTS = TargetDefaults()

Version = tuple[int, int, int]
"""State of a file: time of change, size, inode."""


@dataclass(frozen=True, slots=True)
class Active:
    """One revision of the document and what was made from it."""

    revision: int
    source: str
    document: GridDocument
    grid: Grid
    loop: ClosedLoop
    outputs: OutputLengths


class Configuration:
    """Holds the revisions of one document."""

    def __init__(
        self, loaded: LoadedDocument, path: Path, clock: Clock, defaults: TargetDefaults = NO_DEFAULTS
    ) -> None:
        """``defaults`` count where the document has none of its own."""
        self._defaults = defaults
        self._history = DocumentHistory(loaded, clock.wall_ms())
        self._path = path
        self._clock = clock
        self._turn = asyncio.Lock()
        self.seen = _version(path)
        """The state of the file that was read last; ``None`` when it was not there."""
        self.active = self._make(None)
        self.reloads: list[tuple[int, Reload]] = []
        """The last attempts to change the document, with their time (Unix ms), newest last."""
        self._listeners: list[Callable[[Reload], None]] = []

    def listen(self, listener: Callable[[Reload], None]) -> None:
        self._listeners.append(listener)

    def _make(self, before: Active | None) -> Active:
        revision = self._history.current
        document = revision.loaded.document
        keep = before is not None and before.document.output_length == document.output_length
        outputs = before.outputs if before is not None and keep else OutputLengths(document.output_length)
        loop = ClosedLoop(document, before=None if before is None else before.loop)
        grid = Grid(document.with_defaults(self._defaults))
        return Active(revision.number, revision.loaded.source, document, grid, loop, outputs)

    async def watch(self, interval_s: float, wake: asyncio.Event) -> None:
        """Look at the file at an interval, and at once when ``wake`` is set; runs until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await wake.wait()
            except TimeoutError:
                version = await asyncio.to_thread(_version, self._path)
                if version == self.seen or version is None:
                    continue
            wake.clear()
            await self.reload()

    async def reload(self) -> Reload | None:
        """Read the file and put its document in force if it is valid and different; ``None``: it cannot be read."""
        async with self._turn:
            try:
                self.seen, text = await asyncio.to_thread(_read, self._path)
            except OSError as error:
                log.error("reading %s: %s; the document in force stays", self._path, error.strerror or error)
                return None
            outcome = await asyncio.to_thread(self._history.propose, text, str(self._path), self._clock.wall_ms())
            self._note(outcome)
            return outcome

    async def propose(self, text: bytes, source: str) -> Reload:
        """Put a document from elsewhere than the file in force, if it is valid and different."""
        async with self._turn:
            outcome = await asyncio.to_thread(self._history.propose, text, source, self._clock.wall_ms())
            self._note(outcome)
            return outcome

    async def rollback(self) -> Reload:
        async with self._turn:
            outcome = self._history.rollback(self._clock.wall_ms())
            self._note(outcome)
            return outcome

    def _note(self, outcome: Reload) -> None:
        if outcome.outcome in ("replaced", "rolled-back"):
            self.active = self._make(self.active)
        level = logging.ERROR if outcome.outcome == "refused" else logging.INFO
        lines = [str(each) for each in (outcome.problems if outcome.outcome == "refused" else outcome.changes)]
        log.log(level, "document %s, revision %d: %s", outcome.outcome, self.active.revision, "; ".join(lines[:20]))
        self.reloads = [*self.reloads, (self._clock.wall_ms(), outcome)][-RELOADS_KEPT:]
        for listener in self._listeners:
            listener(outcome)


def _version(path: Path) -> Version | None:
    """Return the state of a file; ``None`` while it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[Version | None, bytes]:
    version = _version(path)
    with path.open("rb") as file:
        return version, file.read(DOCUMENT_BYTES_MAX + 1)
