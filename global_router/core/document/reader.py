"""Reading a pool grid: text in, a valid document out, or every problem at once.

The order: JSON (``problems.read_json``), Dynamo's form turned into ours (``dynamo``), the rules that span fields
(``checks``), each field on its own (the models). Problems of all four are collected; those of a document in
Dynamo's form name the places of that form.

Plain JSON into a strict pydantic model, with each complaint as a place and a sentence in our words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from poolgrid.global_router.core.document.checks import RULES, check_document
from poolgrid.global_router.core.document.dynamo import is_dynamo_document, translate_document
from poolgrid.global_router.core.document.grid_document import GridDocument
from poolgrid.global_router.core.document.problems import (
    PROBLEMS_MAX,
    GridDocumentError,
    JsonPath,
    Problem,
    Severity,
    read_json,
    suggestion,
    value_text,
)

DocumentForm = Literal["poolgrid", "dynamo"]


@dataclass(frozen=True, slots=True)
class LoadedDocument:
    """A valid document, the form it was written in, and what is odd about it."""

    document: GridDocument
    form: DocumentForm
    warnings: tuple[Problem, ...]
    source: str


def load_document(text: bytes | str, source: str = "") -> LoadedDocument:
    """Read a pool grid in our form or in Dynamo's; raise ``GridDocumentError`` with every problem."""
    value, problems = read_json(text)
    if problems and value is None:
        raise GridDocumentError(tuple(problems), (), source)
    if not isinstance(value, dict):
        problems.append(Problem((), f"is {value_text(value)}, must be an object"))
        raise GridDocumentError(tuple(problems), (), source)
    value.pop("$schema", None)
    if is_dynamo_document(value):
        form: DocumentForm = "dynamo"
        translation = translate_document(value)
        clean, found = check_document(translation.data, RULES)
        document, field_problems = validate_model(GridDocument, clean)
        problems += translation.problems
        problems += [
            replace(problem, path=translation.place(problem.path))
            for problem in [*found, *field_problems]
            if not translation.is_explained(translation.place(problem.path))
        ]
        broken = _accepted_rules(found)
        if document is not None and broken:
            document = document.model_copy(update={"accept": broken})
    else:
        form = "poolgrid"
        clean, found = check_document(value)
        document, field_problems = validate_model(GridDocument, clean)
        problems += found + field_problems
    problems = list(dict.fromkeys(problems))
    errors = tuple(problem for problem in problems if problem.severity is Severity.ERROR)
    warnings = tuple(problem for problem in problems if problem.severity is Severity.WARNING)
    if errors or document is None:
        raise GridDocumentError(errors, warnings, source)
    return LoadedDocument(document, form, warnings, source)


def _accepted_rules(found: list[Problem]) -> tuple[str, ...]:
    return tuple(sorted({problem.rule for problem in found if problem.rule}))


Model = TypeVar("Model", bound=BaseModel)


def validate_model(model: type[Model], data: Any) -> tuple[Model | None, list[Problem]]:
    """Return the model of plain JSON, or ``None`` and every field that is wrong."""
    try:
        return model.model_validate(_frozen(data)), []
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            path = tuple(step for step in detail["loc"] if step != "[key]")
            problems.append(Problem(path, _field_text(model, path, dict(detail), len(problems) < PROBLEMS_MAX)))
        return None, problems


def _frozen(value: Any) -> Any:
    """Return the value with tuples for lists: what the strict, immutable models take."""
    if isinstance(value, dict):
        return {key: _frozen(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_frozen(child) for child in value)
    return value


def _field_text(model: type[BaseModel], path: JsonPath, detail: Mapping[str, Any], suggests: bool) -> str:
    """Return a model's complaint about one field in our words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        hint = suggestion(str(path[-1]), known_keys(model, path[:-1])) if suggests else ""
        return f"is not a known key{hint}"
    value = detail["input"]
    if kind == "tuple_type":
        return f"is {value_text(value)}, must be an array"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"is {value_text(value)}, must be an object"
    if kind in ("too_short", "too_long"):
        word, limit = ("at least", context["min_length"]) if kind == "too_short" else ("at most", context["max_length"])
        return f"has {len(value)} items, allowed are {word} {limit}"
    if kind == "string_pattern_mismatch":
        form = (
            "http://HOST:PORT or https://HOST:PORT, without a path, or dyn://NAMESPACE.router.select"
            if path[-1] == "url"
            else "of letters, digits and ._:/@${}-, and not digits alone"
        )
        return f"is {value_text(value)}, must be {form}"
    if kind == "literal_error":
        allowed = str(context["expected"])
        names = [name.strip(" '") for name in allowed.replace(" or ", ",").split(",")]
        hint = suggestion(value, names) if isinstance(value, str) else ""
        return f"is {value_text(value)}, must be {allowed.replace(chr(39), chr(34))}{hint}"
    message = str(detail["msg"])
    for start in ("Input should be ", "String should "):
        if message.startswith(start):
            return f"is {value_text(value)}, must {'be ' if start.startswith('Input') else ''}{message[len(start) :]}"
    return f"is {value_text(value)}: {message}"


def known_keys(root: type[BaseModel], path: JsonPath) -> tuple[str, ...]:
    """Return the keys that an object at ``path`` may have; none when it is no object of the format."""
    model: type[BaseModel] | None = root
    for step in path:
        if isinstance(step, int):
            continue
        found = None if model is None else model.model_fields.get(step)
        model = None if found is None else _model_in(found.annotation)
    return () if model is None else tuple(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field holds, directly, optionally or in an array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, Union, UnionType):
        for argument in get_args(annotation):
            model = _model_in(argument)
            if model is not None:
                return model
    return None
