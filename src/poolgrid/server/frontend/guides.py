"""What an output must keep to (guided decoding), in all the spellings that clients send, as fields of ``Sampling``.

| spelling | where it comes from |
|---|---|
| ``response_format`` | OpenAI: ``json_object``, ``json_schema``; others: ``regex``, ``ebnf``, ``structural_tag`` |
| ``guided_json``, ``guided_regex``, ``guided_grammar``, ``guided_choice``, ``structural_tag`` | vLLM, Dynamo |
| ``structured_outputs`` | vLLM: an object of the same without the prefix |
| ``nvext.guided_decoding``, ``nvext.guided_json``, … | Dynamo: likewise |

A request has one guide at most. Whether a guide can be kept to is for the worker to say, which refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec

from poolgrid.kernel.wire.limits import GUIDE_BYTES_MAX, GUIDE_CHOICES_MAX
from poolgrid.server.frontend.errors import invalid, quoted, wrong_type
from poolgrid.server.frontend.field_words import without_nulls

Guide = dict[str, Any]
"""Fields of ``Sampling``: none, or one."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_guide(schema: Any, param: str) -> Guide:
    """Return the guide towards a JSON schema: an object, a boolean, or either as a string."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(param, f"{param} is {quoted(schema)}: allowed is a JSON schema ({error})") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise wrong_type(param, schema, "a JSON schema, an object")
    return {"guided_json": _bounded(msgspec.json.encode(schema), param)}


def _text_guide(field: str) -> Callable[[Any, str], Guide]:
    def guide(value: Any, param: str) -> Guide:
        if not isinstance(value, str) or not value:
            raise wrong_type(param, value, "a string that is not empty")
        _bounded(value.encode(), param)
        return {field: value}

    return guide


def _choice_guide(value: Any, param: str) -> Guide:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise wrong_type(param, value, "a list of strings that are not empty")
    if len(value) > GUIDE_CHOICES_MAX:
        raise invalid(param, f"{param} has {len(value)} texts: allowed are up to {GUIDE_CHOICES_MAX}")
    _bounded("".join(value).encode(), param)
    return {"guided_choice": tuple(value)}


def tag_guide(value: Any, param: str) -> Guide:
    """Return the guide of a structural tag: an object, or one as a string."""
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    return _text_guide("structural_tag")(value, param)


def _object_guide(value: Any, param: str) -> Guide:
    if not isinstance(value, bool):
        raise wrong_type(param, value, "true or false")
    return json_guide(dict(ANY_OBJECT), param) if value else {}


_KINDS: Mapping[str, Callable[[Any, str], Guide]] = {
    "json": json_guide,
    "regex": _text_guide("guided_regex"),
    "grammar": _text_guide("guided_grammar"),
    "choice": _choice_guide,
    "structural_tag": tag_guide,
    "json_object": _object_guide,
}
_FIELDS: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "structural_tag": "structural_tag",
}


_SPELLINGS = ("response_format", *_FIELDS, "structured_outputs")
_asked: Final = attrgetter(*_SPELLINGS)
_NOTHING: Final = (None,) * len(_SPELLINGS)


def guide_of(body: Any, nvext: Any) -> tuple[Guide, str]:
    """Return the guide that a body asks for, or none, and the field it is from; raises ``RequestError``."""
    if nvext is None and _asked(body) == _NOTHING:
        return {}, ""
    found: dict[str, Guide] = {}
    if body.response_format is not None:
        _found(found, "response_format", _response_format(body.response_format))
    for field, kind in _FIELDS.items():
        for prefix, holder in (("", body), ("nvext.", nvext)):
            value = getattr(holder, field, None)
            if value is not None:
                _found(found, prefix + field, _KINDS[kind](value, prefix + field))
    for param, group in (
        ("structured_outputs", body.structured_outputs),
        ("nvext.guided_decoding", None if nvext is None else nvext.guided_decoding),
    ):
        if group is None:
            continue
        if not isinstance(group, dict):
            raise wrong_type(param, group, "an object")
        for kind, value in group.items():
            if value is not None and kind in _KINDS:
                _found(found, f"{param}.{kind}", _KINDS[kind](value, f"{param}.{kind}"))
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"{second} is set together with {first}: allowed is one guide. The request was not run.")
    param, guide = next(iter(found.items()), ("", {}))
    return guide, param


def _found(found: dict[str, Guide], param: str, guide: Guide) -> None:
    if guide:
        found[param] = guide


def _response_format(value: Any) -> Guide:
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case None if isinstance(value, dict) and not without_nulls(value):
            return {}
        case "text":
            return {}
        case "json_object" | "json_schema":
            place, inner = (param, value) if kind == "json_object" else (f"{param}.json_schema", value.get(kind))
            if not isinstance(inner, dict):
                raise wrong_type(place, inner, "an object with a schema", "invalid_value")
            schema = inner.get("schema")
            return json_guide(dict(ANY_OBJECT) if schema is None else schema, f"{place}.schema")
        case "regex" | "ebnf" | "grammar":
            return _KINDS["regex" if kind == "regex" else "grammar"](value.get(kind), f"{param}.{kind}")
        case "structural_tag":
            return tag_guide(without_nulls(value), param)
    raise invalid(
        f"{param}.type" if kind is not None else param,
        f"{param} is {quoted(value)}: allowed are the types text, json_object, json_schema, regex, ebnf and "
        "structural_tag. The request was not run.",
    )


def _bounded(encoded: bytes, param: str) -> bytes:
    if len(encoded) > GUIDE_BYTES_MAX:
        raise invalid(param, f"{param} has {len(encoded)} bytes: allowed are up to {GUIDE_BYTES_MAX}")
    return encoded
