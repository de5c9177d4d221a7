"""Upstream's argument classes, made by pydantic from the field lines of its source, and values to try them with.

The module itself needs the compiled library. Its classes are executed one by one with what they hold of fields, enums
and configuration. A name that belongs to another module is ``Foreign``, and so is a field whose validator takes other
shapes, or that is a Python object: nothing is claimed of those. Validators do not run.
"""

from __future__ import annotations

import ast
import copy
import enum
import json
import typing
from collections.abc import Iterator
from typing import Any

import pydantic
from pydantic_core import core_schema

from poolgrid.plugins.trtllm.arguments.installed import _reshaped

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.0, 0.5, 1.0, 1.5, 33.0, -0.5, "", "auto", "x", "UCX", "AUTO"),
    *([], [1], [0], [1.5], ["x"], {}, {"x": 1}, {"x": "y"}),
)
"""Tried with every field, beside the words of its own type and its default."""


class Foreign:
    """What the source alone does not settle."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return core_schema.any_schema()


class StrictBaseModel(pydantic.BaseModel):
    """Upstream's own base, which newer versions import from another file."""

    model_config = pydantic.ConfigDict(extra="forbid")


class ArgumentClasses:
    """The classes of one ``llm_args.py``."""

    def __init__(self, source: str) -> None:
        module = ast.parse(source)
        self._nodes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
        names = {each.id for each in ast.walk(module) if isinstance(each, ast.Name)}
        known = {name: getattr(typing, name) for name in names if name in typing.__all__}
        known |= {name: getattr(pydantic, name) for name in names if name in pydantic.__all__}
        known |= {"Enum": enum.Enum, "StrEnum": enum.StrEnum, "Field": _field, "PydanticField": _field}
        builtin = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
        known |= {
            name: Foreign for name in names if name not in known and name not in builtin and name not in self._nodes
        }
        known |= {"Path": str, "Foreign": Foreign, "object": Foreign}
        if "StrictBaseModel" not in self._nodes:
            known["StrictBaseModel"] = StrictBaseModel
        self._known = known
        for each in module.body:
            name, statement = self._statement(each)
            if statement is not None:
                try:
                    exec(compile(ast.unparse(statement), name, "exec"), self._known)
                except Exception:  # it needs what is not there
                    self._known[name] = Foreign
        for kind in self._known.values():
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and kind is not pydantic.BaseModel:
                kind.model_rebuild(_types_namespace=self._known, raise_errors=False)

    def fields(self, kind: str) -> dict[str, Any] | None:
        """Return a class's fields, by the name that is written; ``None`` where it could not be made."""
        made = self._known.get(kind)
        if not (isinstance(made, type) and issubclass(made, pydantic.BaseModel)):
            return None
        return {each.alias or name: each for name, each in made.model_fields.items()}

    def values(self, kind: str, name: str) -> Iterator[Any]:
        """Yield values to try a field with."""
        field = (self.fields(kind) or {})[name]
        yield from VALUES
        yield from _words(field.annotation)
        if isinstance(field.default, bool | int | float | str) and not isinstance(field.default, enum.Enum):
            yield field.default

    def verdict(self, kind: str, name: str, value: Any) -> bool | None:
        """Return whether a value is valid; ``None`` where upstream takes it for something else (text for a number), or
        where that is not settled.
        """
        made = self._known[kind]
        if _is_foreign((self.fields(kind) or {})[name].annotation):
            return None
        text = json.dumps({name: value})
        if not _wrong(lambda: made.model_validate_json(text, strict=True), name):
            return True
        return False if _wrong(lambda: made.model_validate({name: value}), name) else None

    def _statement(self, node: ast.stmt) -> tuple[str, ast.stmt | None]:
        if isinstance(node, ast.ClassDef):
            bases = [each for each in node.bases if self._known.get(ast.unparse(each), Foreign) is not Foreign]
            if not bases:
                self._known[node.name] = Foreign
                return node.name, None
            reshaped = set(_reshaped(node))
            body = [kept for each in node.body if (kept := _kept(each, reshaped)) is not None]
            made = copy.copy(node)
            made.bases, made.keywords, made.decorator_list, made.body = bases, [], [], body or [ast.Pass()]
            return node.name, made
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and "discriminator=" in ast.unparse(node.value):
                self._known[target.id] = Foreign  # its variants may be of other modules
            elif isinstance(target, ast.Name):
                return target.id, ast.Assign([target], node.value, lineno=node.lineno)
        return "", None


def _kept(node: ast.stmt, reshaped: set[str]) -> ast.stmt | None:
    if isinstance(node, ast.Assign):
        return node
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        if node.target.id.startswith("_") or "ClassVar" in ast.unparse(node.annotation):
            return None
        if node.target.id in reshaped:
            return ast.AnnAssign(node.target, ast.Name("Foreign"), node.value, 1)
        return node
    return None


def _field(default: Any = ..., **given: Any) -> Any:
    for name in ("status", "telemetry", "exclude_json_schema", "json_schema_extra", "validate_default"):
        given.pop(name, None)
    if "default_factory" in given:
        given["default_factory"] = lambda: None  # it may need methods that are left out, and is no value to try
        return pydantic.Field(**given)
    return pydantic.Field(default, **given)


def _wrong(call: Any, name: str) -> bool:
    try:
        call()
    except pydantic.ValidationError as error:
        return any(each["loc"][:1] == (name,) for each in error.errors())
    return False


def _is_foreign(annotation: Any) -> bool:
    return annotation is Foreign or any(map(_is_foreign, typing.get_args(annotation)))


def _words(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (each.value for each in annotation)
    elif typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for each in typing.get_args(annotation):
            yield from _words(each)
