"""What is wrong with a document: the place, the problem, and whether the document can be used all the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from poolgrid.global_router.core.document.json_paths import JsonPath, path_text

PROBLEMS_MAX = 200
"""More problems than anybody reads; the rest is counted."""


class Severity(StrEnum):
    """Whether a document with the problem is refused."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding at one place of a document."""

    path: JsonPath
    text: str
    severity: Severity = Severity.ERROR
    rule: str = ""
    """The rule that is broken, when it is one that a document may accept."""

    def __str__(self) -> str:
        mark = "warning: " if self.severity is Severity.WARNING else ""
        return f"{path_text(self.path)}: {mark}{self.text}"


class GridDocumentError(Exception):
    """A pool grid document cannot be used; ``problems`` holds every reason, ``warnings`` what else was noticed.

    It is the only exception with which reading a document fails.
    """

    def __init__(self, problems: tuple[Problem, ...], warnings: tuple[Problem, ...] = (), source: str = "") -> None:
        self.problems = problems[:PROBLEMS_MAX]
        self.warnings = warnings[:PROBLEMS_MAX]
        self.left_off = len(problems) - len(self.problems)
        self.source = source
        count = len(problems)
        head = f"reading the pool grid {source or 'document'}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *map(str, self.problems)]))
