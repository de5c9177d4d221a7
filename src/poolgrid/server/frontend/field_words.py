"""What a field of a request's body may be, in words: read off its type, for the message of who wrote something else.

Numbers, texts, lists, objects and words to choose from are described by their type and its bounds. A field whose type
gives too little (``Any``) or too much has its words attached: ``Annotated[Any, allowed("a regular expression")]``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta
from msgspec import inspect as kinds

from poolgrid.kernel.wire.limits import U32_MAX

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")
_WIDTHS = {(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1): f"a signed {bits}-bit integer" for bits in (32, 64)}


def allowed(words: str, plural: str | None = None) -> Meta:
    """Return what says in words what a field may be; ``plural`` for several of them in a list."""
    return Meta(extra={"allowed": words} if plural is None else {"allowed": words, "plural": plural})


def refused(reason: str, *inert: object) -> Meta:
    """Return what marks a field that is known elsewhere and not served here; ``inert`` values ask for nothing."""
    described = {"enum": [None, *inert], "description": f"Not supported: {reason}."}
    return Meta(extra={"refused": reason, "inert": inert}, extra_json_schema=described)


FOR_ENGINE = Meta(extra={"for_engine": True})
"""Marks a field that only the engine reads: it goes there as it is, under its name."""


def words_at(body: type, path: str) -> str | None:
    """Return what is allowed at a path of a body, such as ``messages[0].role``; ``None`` when its type does not say."""
    found: list[kinds.Type] = [_type_info(body)]
    for step in _STEP.finditer(path):
        found = [inner for each in found for inner in _inside(each, step[1])]
    return next((words for each in found if (words := _words(each)) is not None), None)


@cache
def engine_fields(body: type) -> tuple[str, ...]:
    """Return the fields of a body that are marked with ``FOR_ENGINE``."""
    info = _type_info(body)
    assert isinstance(info, kinds.StructType), "bodies are structs"
    return tuple(field.name for field in info.fields if _is_for_engine(field.type))


def _is_for_engine(kind: kinds.Type) -> bool:
    match kind:
        case kinds.Metadata(type=inner, extra=extra):
            return "for_engine" in (extra or {}) or _is_for_engine(inner)
        case kinds.UnionType(types=types):
            return any(map(_is_for_engine, types))
    return False


@cache
def _type_info(body: type) -> kinds.Type:
    return kinds.type_info(body)


def _inside(kind: kinds.Type, name: str | None) -> list[kinds.Type]:
    """Return the types of a field, or of an item when ``name`` is ``None``."""
    match kind:
        case kinds.Metadata(type=inner):
            return _inside(inner, name)
        case kinds.UnionType(types=types):
            return [inner for each in types for inner in _inside(each, name)]
        case kinds.StructType(fields=fields):
            return [field.type for field in fields if field.encode_name == name]
        case kinds.ListType(item_type=item) if name is None:
            return [item]
        case kinds.DictType(value_type=value):
            return [value]
    return []


def _words(kind: kinds.Type) -> str | None:
    match kind:
        case kinds.Metadata(type=inner, extra=extra):
            told = (extra or {}).get("allowed")
            return _words(inner) if told is None else str(told)
        case kinds.BoolType():
            return "true or false"
        case kinds.IntType(ge=low, le=high):
            return _integer(low, high)
        case kinds.FloatType(ge=low, gt=above, le=high):
            return f"a number above {above:g} and up to {high:g}" if above is not None else _number(low, high)
        case kinds.StrType(max_length=length):
            return "a string" if length is None else f"a string of at most {length} characters"
        case kinds.LiteralType(values=values):
            *most, last = (str(value) for value in values)
            return f"{', '.join(most)} or {last}" if most else last
        case kinds.ListType(item_type=item, min_length=least, max_length=most_items):
            return f"a list of {_bounds(least, most_items)}{_several(item)}"
        case kinds.DictType() | kinds.StructType():
            return "an object"
        case kinds.UnionType(types=types):
            each = [_words(inner) for inner in types if not isinstance(inner, kinds.NoneType)]
            return " or ".join(word for word in each if word is not None) or None
    return None


def _integer(low: int | None, high: int | None) -> str:
    if low is not None and high is not None and (low, high) in _WIDTHS:
        return _WIDTHS[low, high]
    if low is None:
        return "an integer"
    # The largest that fits the wire is no bound that a client aims at.
    return f"an integer from {low}" if high is None or high == U32_MAX else f"an integer from {low} to {high}"


def _number(low: float | None, high: float | None) -> str:
    return "a number" if low is None or high is None else f"a number from {low:g} to {high:g}"


def _bounds(least: int | None, most: int | None) -> str:
    if most is not None:
        return f"at most {most} "
    return "" if not least else f"at least {least} "


def _several(item: kinds.Type) -> str:
    match item:
        case kinds.Metadata(type=inner, extra=extra):
            told = (extra or {}).get("plural")
            return _several(inner) if told is None else str(told)
        case kinds.StrType():
            return "strings"
        case kinds.IntType():
            return "integers"
        case kinds.DictType() | kinds.StructType():
            return "objects"
    return "items"


def loosen(body: type, value: Any) -> None:
    """Write what clients mean by a body, in place: floats without a fraction as integers where only integers are
    allowed, and no ``null`` in a field that may be left out. Only fields by name are looked at, of the body, of objects
    in it and in its lists of objects: of token ids there may be a million.
    """
    _loosen(_type_info(body), value)


def _loosen(kind: kinds.Type, value: Any) -> Any:
    match kind:
        case kinds.Metadata(type=inner):
            return _loosen(inner, value)
        case kinds.UnionType(types=types) if isinstance(value, float):
            if not any(isinstance(_bare(each), kinds.FloatType) for each in types):
                return next((whole for each in types if (whole := _loosen(each, value)) is not value), value)
        case kinds.UnionType(types=types):
            for each in types:
                _loosen(each, value)
        case kinds.IntType() if isinstance(value, float) and value.is_integer():
            return int(value)
        case kinds.ListType(item_type=item) if isinstance(value, list) and isinstance(_bare(item), kinds.StructType):
            for each in value:
                _loosen(item, each)
        case kinds.DictType(value_type=inner) if isinstance(value, dict) and not isinstance(inner, kinds.AnyType):
            for name in [name for name, each in value.items() if each is None]:
                del value[name]
        case kinds.StructType(fields=fields) if isinstance(value, dict):
            for field in fields:
                name = field.encode_name
                if value.get(name) is not None:
                    value[name] = _loosen(field.type, value[name])
                elif not field.required:
                    value.pop(name, None)
    return value


def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its fields that are ``null``: these ask for nothing."""
    return {name: each for name, each in value.items() if each is not None} if None in value.values() else value


def _bare(kind: kinds.Type) -> kinds.Type:
    return _bare(kind.type) if isinstance(kind, kinds.Metadata) else kind


def body_type(decoder: msgspec.json.Decoder[Any]) -> type:
    """Return what a decoder decodes to."""
    kind = decoder.type
    assert isinstance(kind, type), "bodies are structs"
    return kind
