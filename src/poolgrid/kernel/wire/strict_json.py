"""JSON texts that people write, read more strictly than the parser does, with every fault and its place.

Refused: text that is not JSON or not UTF-8, keys that are written twice (of which parsers silently keep the last),
nesting and sizes beyond what the caller allows, integers of thousands of digits. NaN and infinities, which Python reads
and JSON does not know, are faults where the caller asks for it.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

TWICE_NAMED_MAX = 200
"""Keys of one object that are named when they are written twice."""


class JsonFault(NamedTuple):
    """What is wrong at a place: keys and indices from the root, and the rest of a sentence about it."""

    path: tuple[str | int, ...]
    message: str


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


def read_strictly(
    text: bytes | str, *, bytes_max: int, depth_max: int, finite: bool = False
) -> tuple[Any, list[JsonFault]]:
    """Return the value of a JSON text, in plain dicts and lists, and its faults; ``None`` if it is no JSON.

    ``depth_max`` counts levels of objects and lists. With ``finite`` a number that no float holds is a fault; without,
    it is left for the caller that reports what was expected in its place.
    """
    size = len(text)
    if size > bytes_max:
        return None, [JsonFault((), f"has {size} bytes, allowed are at most {bytes_max}")]
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return None, [JsonFault((), f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}")]
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return None, [JsonFault((), f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}")]
    except RecursionError:
        return None, [JsonFault((), f"is nested too deeply, allowed are {depth_max} levels")]
    except ValueError:
        return None, [JsonFault((), "has an integer of thousands of digits")]
    faults: list[JsonFault] = []
    return _plain(value, (), depth_max, finite, faults), faults


def _plain(value: Any, path: tuple[str | int, ...], depth_max: int, finite: bool, faults: list[JsonFault]) -> Any:
    if len(path) > depth_max:
        faults.append(JsonFault(path, f"is nested too deeply, allowed are {depth_max} levels"))
        return None
    if isinstance(value, _Object):
        faults.extend(
            JsonFault((*path, key), "is there more than once; keep one") for key in value.duplicates[:TWICE_NAMED_MAX]
        )
        return {key: _plain(child, (*path, key), depth_max, finite, faults) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child, (*path, index), depth_max, finite, faults) for index, child in enumerate(value)]
    if finite and isinstance(value, float) and not math.isfinite(value):
        faults.append(JsonFault(path, "is not a number that JSON has"))
    return value
