"""Reading a pool grid: text in, a valid document out, or every problem at once.

The order: JSON (``problems.read_json``), Dynamo's form turned into ours (``dynamo``), each field on its own (the strict
models of pydantic, whose complaints become a place and a sentence in our words), the rules that span fields
(``checks``). Problems of all four are collected; those of a document in Dynamo's form name the places of that form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from poolgrid.kernel.pool_grids.grid_document import (
    PROBLEMS_MAX,
    GridDocument,
    GridDocumentError,
    JsonPath,
    Problem,
    Severity,
    read_json,
    suggestion,
    value_text,
)
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.server.global_router.document.checks import RULES, check_document
from poolgrid.server.global_router.document.dynamo import Translation, is_dynamo_document, translate_document

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
    form: DocumentForm = "dynamo" if is_dynamo_document(value) else "poolgrid"
    translation = translate_document(value) if form == "dynamo" else Translation(value)
    data = frozen(translation.data)
    _, found = validate_model(GridDocument, data)
    clean, broken = check_document(sound_part(data, found), RULES if form == "dynamo" else frozenset())
    found = [*broken, *found]
    if form == "dynamo":
        clean["accept"] = tuple(sorted({problem.rule for problem in found if problem.rule}))
        found = [
            replace(problem, path=translation.place(problem.path))
            for problem in found
            if not translation.is_explained(translation.place(problem.path))
        ]
    problems += translation.problems + found
    problems = list(dict.fromkeys(problems))
    errors = tuple(problem for problem in problems if problem.severity is Severity.ERROR)
    warnings = tuple(problem for problem in problems if problem.severity is Severity.WARNING)
    document = None if errors else validate_model(GridDocument, clean)[0]
    if document is None:
        raise GridDocumentError(errors, warnings, source)
    return LoadedDocument(document, form, warnings, source)


Model = TypeVar("Model", bound=BaseModel)


def validate_model(model: type[Model], data: Any) -> tuple[Model | None, list[Problem]]:
    """Return the model of plain JSON, or ``None`` and every field that is wrong."""
    try:
        return model.model_validate(frozen(data)), []
    except ValidationError as error:
        problems: list[Problem] = []
        for detail in error.errors(include_url=False):
            path = tuple(step for step in detail["loc"] if step != "[key]")
            problems.append(Problem(path, _field_text(model, path, dict(detail), len(problems) < PROBLEMS_MAX)))
        return None, problems


def frozen(value: Any) -> Any:
    """Return the value with tuples for lists: what the strict, immutable models take."""
    if isinstance(value, dict):
        return {key: frozen(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return tuple(frozen(child) for child in value)
    return value


def sound_part(value: Any, problems: Sequence[Problem]) -> Any:
    """Return ``frozen`` JSON with ``None`` in the place of each value that a model refuses, and without nulls.

    What a pool calls itself stays, for the references to it.
    """
    refused: dict[str | int, list[Problem]] = {}
    for problem in problems:
        if not problem.path:
            return None
        refused.setdefault(problem.path[0], []).append(replace(problem, path=problem.path[1:]))

    def child(key: str | int, inner: Any) -> Any:
        return sound_part(inner, () if key == "name" and isinstance(inner, str) else refused.get(key, ()))

    if isinstance(value, dict):
        return {key: child(key, inner) for key, inner in value.items() if inner is not None or key in refused}
    return tuple(child(index, inner) for index, inner in enumerate(value)) if isinstance(value, tuple) else value


def _field_text(model: type[BaseModel], path: JsonPath, detail: Mapping[str, Any], suggests: bool) -> str:
    """Return a model's complaint about one field in our words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        hint = suggestion(str(path[-1]), known_keys(model, path[:-1])) if suggests else ""
        return f"is not a known key{hint}"
    value = detail["input"]
    if path and path[-1] == "url" and isinstance(value, str):
        value = without_credentials(value)
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
