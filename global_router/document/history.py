"""The documents that were in force, and the one that is: hot reload as a value.

Rules
    1. A text that is no valid document changes nothing: the old one stays in force, and the problems are returned.
    2. An equal document changes nothing either. Another one becomes a new revision; revisions count from 1 and never
       go back.
    3. Rollback puts the previous document in force, as a new revision: rolling back twice goes two documents back,
       and what was rolled back can be proposed again.
    4. The last ``capacity`` documents are kept.

What changed between two grid documents, place by place.

Pools are compared by name and not by position, so that a pool inserted in the middle is one change:
``$.prefill.pools[name=fast].url``. Mappings of the same shape are compared cell by cell, others as a whole.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from poolgrid.kernel.pool_grids.grid_document import (
    GridDocument,
    GridDocumentError,
    Problem,
    path_text,
    value_text,
)
from poolgrid.kernel.wire.answers import ReloadAnswer
from poolgrid.server.global_router.document.reader import LoadedDocument, load_document

CHANGES_MAX = 1000
"""Changes listed; a new grid may change every cell, too many to read."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; ``before`` or ``after`` is ``None`` where the place did not or does not exist."""

    path: str
    kind: Literal["added", "removed", "changed"]
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.kind == "added":
            return f"{self.path}: added, {value_text(self.after)}"
        if self.kind == "removed":
            return f"{self.path}: removed, was {value_text(self.before)}"
        return f"{self.path}: {value_text(self.before)} is now {value_text(self.after)}"


def diff_documents(before: GridDocument, after: GridDocument) -> tuple[Change, ...]:
    """Return the changes from one document to another, at most ``CHANGES_MAX``; none when they are equal."""
    changes: list[Change] = []
    for change in _differences(before.model_dump(mode="json"), after.model_dump(mode="json"), "$"):
        changes.append(change)
        if len(changes) >= CHANGES_MAX:
            break
    return tuple(changes)


def _differences(before: Any, after: Any, path: str) -> Iterator[Change]:
    if before == after:
        return
    if before is None:
        yield Change(path, "added", None, after)
    elif after is None:
        yield Change(path, "removed", before, None)
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _differences(before.get(key), after.get(key), path + path_text((key,))[1:])
    elif isinstance(before, list) and isinstance(after, list):
        if path.endswith(".pools"):
            old, new = ({pool["name"]: pool for pool in pools} for pools in (before, after))
            for name in [*old, *(name for name in new if name not in old)]:
                yield from _differences(old.get(name), new.get(name), f"{path}[name={name}]")
            if list(old) != list(new) and set(old) == set(new):
                yield Change(f"{path}", "changed", "order " + ", ".join(old), "order " + ", ".join(new))
        elif len(before) == len(after):
            for index, (old_item, new_item) in enumerate(zip(before, after, strict=True)):
                yield from _differences(old_item, new_item, f"{path}[{index}]")
        else:
            yield Change(path, "changed", before, after)
    else:
        yield Change(path, "changed", before, after)


def document_text(document: GridDocument) -> str:
    """Return the canonical text of a document, ending with a newline.

    Pools by name, defaults left out, innermost arrays of the mapping on one line each. Reading the text gives an equal
    document.
    """
    data = document.model_dump(mode="json", exclude_defaults=True)
    return json_text({"version": document.version, "mode": document.mode, **data}) + "\n"


def json_text(value: Any, indent: int = 0) -> str:
    """Return indented JSON in which an array of plain values takes one line."""
    pad = "  " * (indent + 1)
    end = "  " * indent
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(key)}: {json_text(child, indent + 1)}" for key, child in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{end}}}"
    if isinstance(value, list) and any(isinstance(child, list | dict) for child in value):
        return "[\n" + ",\n".join(pad + json_text(child, indent + 1) for child in value) + f"\n{end}]"
    if isinstance(value, list):
        return "[" + ", ".join(json_text(child, indent) for child in value) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return json.dumps(value)


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
