"""What is wrong with a document: the place, the problem, and whether the document can be used all the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeGuard

from poolgrid.wire.strict_json import read_strictly

PROBLEMS_MAX = 200
"""More problems than an operator reads; the rest is counted."""


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


JsonPath = tuple[str | int, ...]
"""Keys and indices from the root of a document."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXT_MAX = 60
"""A value in a message is cut here: the place is named anyway, and a line stays a line."""


def path_text(path: JsonPath) -> str:
    """Return a path as text; a key that is not a plain word is quoted: ``$["a b"]``."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif _PLAIN_KEY.fullmatch(step) and len(step) <= _TEXT_MAX:
            parts.append(f".{step}")
        else:
            parts.append(f"[{json.dumps(step if len(step) <= _TEXT_MAX else step[:_TEXT_MAX] + '…')}]")
    return "".join(parts)


def value_text(value: Any) -> str:
    """Return a value as a short piece of JSON for a message: ``0.5``, ``true``, ``NaN``, ``an array of 3``."""
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value) if isinstance(value, str | bool | int | float | None) else repr(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "…"


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return ``; did you mean "..."?`` or nothing."""
    near = get_close_matches(key[:64], known, n=1, cutoff=0.6)
    return f"; did you mean {value_text(near[0])}?" if near else ""


DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
"""The largest grid (``CELLS_MAX`` cells with names of 100 characters) takes 7 MB."""

DEPTH_MAX = 16
"""A document is six levels deep."""


def read_json(text: bytes | str) -> tuple[Any, list[Problem]]:
    """Return the value of a JSON text, arrays as lists, and its problems; the value is ``None`` if it is no JSON.

    Numbers that are not finite are kept for the check that reports what was expected there.
    """
    value, faults = read_strictly(text, bytes_max=DOCUMENT_BYTES_MAX, depth_max=DEPTH_MAX)
    return value, [Problem(*fault) for fault in faults]


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer; ``true`` and ``1.0`` are none."""
    return isinstance(value, int) and not isinstance(value, bool)
