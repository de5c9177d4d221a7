"""The documents that were in force, and the one that is: hot reload as a value.

Rules
    1. A text that is no valid document changes nothing: the old one stays in force, and the problems are returned.
    2. An equal document changes nothing either. Another one becomes a new revision; revisions count from 1 and never
       go back.
    3. Rollback puts the previous document in force, as a new revision: rolling back twice goes two documents back,
       and what was rolled back can be proposed again.
    4. The last ``capacity`` documents are kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from poolgrid.global_router.core.document.diff import Change, diff_documents
from poolgrid.global_router.core.document.problems import GridDocumentError, Problem
from poolgrid.global_router.core.document.reader import LoadedDocument, load_document
from poolgrid.wire.answers import ReloadAnswer

CAPACITY = 16
"""Documents kept for rollback: enough for a day of changes, and little memory."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A document and when it came into force."""

    number: int
    loaded: LoadedDocument
    time_ms: int


@dataclass(frozen=True, slots=True)
class Reload:
    """What became of an attempt to change the document."""

    outcome: Literal["replaced", "unchanged", "refused", "rolled-back"]
    revision: Revision
    """The revision in force afterwards."""
    changes: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()

    def explanation(self) -> ReloadAnswer:
        return ReloadAnswer(
            outcome=self.outcome,
            revision=self.revision.number,
            source=self.revision.loaded.source,
            changes=[str(change) for change in self.changes],
            problems=[str(problem) for problem in self.problems],
        )


class DocumentHistory:
    """The document in force and those before it."""

    def __init__(self, loaded: LoadedDocument, time_ms: int, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"making a document history: capacity is {capacity}, allowed are integers from 1")
        self._kept: deque[Revision] = deque([Revision(1, loaded, time_ms)], maxlen=capacity)
        self._last_number = 1

    @property
    def current(self) -> Revision:
        return self._kept[-1]

    @property
    def kept(self) -> tuple[Revision, ...]:
        return tuple(self._kept)

    def propose(self, text: bytes | str, source: str, time_ms: int) -> Reload:
        """Put the document of a text in force if it is valid and different."""
        try:
            loaded = load_document(text, source)
        except GridDocumentError as error:
            return Reload("refused", self.current, problems=error.problems)
        changes = diff_documents(self.current.loaded.document, loaded.document)
        if not changes:
            return Reload("unchanged", self.current, problems=loaded.warnings)
        self._last_number += 1
        self._kept.append(Revision(self._last_number, loaded, time_ms))
        return Reload("replaced", self.current, changes, loaded.warnings)

    def rollback(self, time_ms: int) -> Reload:
        """Put the previous document in force; unchanged when none is kept."""
        if len(self._kept) < 2:
            return Reload("unchanged", self.current)
        undone = self._kept.pop()
        previous = self._kept.pop()
        self._last_number += 1
        self._kept.append(Revision(self._last_number, previous.loaded, time_ms))
        return Reload("rolled-back", self.current, diff_documents(undone.loaded.document, previous.loaded.document))
