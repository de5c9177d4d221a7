"""Bytes to plain JSON values, with every place noted that JSON allows and a document must not have.

Refused: text that is not JSON or not UTF-8, duplicate keys (of which JSON readers silently keep the last), NaN and
infinities (which Python reads and JSON does not know), nesting and sizes beyond the bounds below.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

from global_router.core.document.json_paths import JsonPath
from global_router.core.document.problems import PROBLEMS_MAX, Problem

DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
"""The largest grid (``CELLS_MAX`` cells with names of 100 characters) takes 7 MB."""

DEPTH_MAX = 16
"""A document is six levels deep."""


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys came twice."""

    duplicates: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice: dict[str, None] = {}
        for key, _ in pairs:
            if key in seen:
                twice[key] = None
            seen.add(key)
        made.duplicates = tuple(twice)
    return made


def read_json(text: bytes | str) -> tuple[Any, list[Problem]]:
    """Return the value of a JSON text, arrays as lists, and its problems; the value is ``None`` if it is no JSON."""
    size = len(text)
    if size > DOCUMENT_BYTES_MAX:
        return None, [Problem((), f"has {size} bytes, allowed are at most {DOCUMENT_BYTES_MAX}")]
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return None, [Problem((), f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}")]
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return None, [Problem((), f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}")]
    except RecursionError:
        return None, [Problem((), f"is nested too deeply, allowed are {DEPTH_MAX} levels")]
    except ValueError:
        return None, [Problem((), "has an integer of thousands of digits")]
    problems: list[Problem] = []
    plain = _plain(value, (), problems)
    return plain, problems


def _plain(value: Any, path: JsonPath, problems: list[Problem]) -> Any:
    """Return plain dicts and lists, non-finite numbers kept for whoever says what was expected there."""
    if len(path) > DEPTH_MAX:
        problems.append(Problem(path, f"is nested too deeply, allowed are {DEPTH_MAX} levels"))
        return None
    if isinstance(value, _Object):
        problems.extend(
            Problem((*path, key), "is there more than once; keep one") for key in value.duplicates[:PROBLEMS_MAX]
        )
        return {key: _plain(child, (*path, key), problems) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child, (*path, index), problems) for index, child in enumerate(value)]
    return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Tell whether a JSON value is an integer; ``true`` and ``1.0`` are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Tell whether a JSON value is a number that a float can hold; booleans, NaN and infinities are none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_integer(value) and -(2**53) <= value <= 2**53
