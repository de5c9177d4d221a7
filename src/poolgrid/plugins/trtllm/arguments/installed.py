"""The argument facts of the installed TensorRT-LLM, read out of its ``llmapi/llm_args.py`` without importing it.

Importing takes tens of seconds and needs the compiled library; the source names every class, field, type, default and
range. What comes of it has the form of ``arguments_1_2_1.json``, so one ``Contract`` checks both. A type that the
source alone does not settle (a class of another module, a union with a discriminator, a field whose validator takes
other shapes) is ``any``: the engine checks it when it starts.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP_CLASS = "TorchLlmArgs"
PLAIN = frozenset({"int", "str", "bool", "float", "dict", "list"})
NARROWED = {
    "PositiveInt": ("int", {"gt": 0}),
    "NonNegativeInt": ("int", {"ge": 0}),
    "PositiveFloat": ("float", {"gt": 0}),
    "NonNegativeFloat": ("float", {"ge": 0}),
    "StrictInt": ("int", {}),
    "Path": ("str", {}),
}
"""Names of a type with a range, or of one that a file writes otherwise."""

RANGED: dict[tuple[str, tuple[tuple[str, Any], ...]], str] = {
    ("int", (("gt", 0),)): "Positive",
    ("int", (("ge", 0),)): "NonNegative",
}
"""What the facts call the members of a list that have a range."""

ANY = "any"

Limits = dict[str, Any]
"""Limits of a value, as pydantic calls them."""


def installed_facts() -> dict[str, Any] | None:
    """Return the facts of the package that is installed; ``None`` where there is none, or none that can be read."""
    try:
        spec = importlib.util.find_spec("tensorrt_llm")
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "llmapi", "llm_args.py")
        if file.is_file():
            return read_facts(file.read_text(encoding="utf-8"), version_in(Path(folder)))
    return None


def version_in(folder: Path) -> str:
    """Return the version that a package's folder names; empty where it names none."""
    file = folder / "version.py"
    found = (
        re.search(r'^__version__\s*=\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.M) if file.is_file() else None
    )
    return found[1] if found else ""


def read_facts(source: str, version: str) -> dict[str, Any] | None:
    """Return the facts of a source text; ``None`` where it does not define the arguments."""
    reader = _Source(ast.parse(source))
    if not reader.fields(TOP_CLASS):
        return None
    still_taken = {name: {"type": spelled, "default": None} for name, spelled in reader.still_taken()}
    top = {**reader.fields(TOP_CLASS), **still_taken}
    return {
        "version": version,
        "sections": {**reader.sections, "llm_args": top},
        "unions": {},
        "enums": reader.enums,
        "case_insensitive_enums": [name for name in reader.enums if name == "LoadFormat"],
        "refusals": {},
    }


class _Source:
    def __init__(self, module: ast.Module) -> None:
        self._classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
        self._functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
        self._aliases: dict[str, ast.expr] = {}
        for each in module.body:
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                self._aliases[each.targets[0].id] = each.value
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
                self._aliases[each.target.id] = each.value
        self.sections: dict[str, dict[str, Any]] = {}
        self.enums: dict[str, list[str]] = {}

    def still_taken(self) -> Iterator[tuple[str, str]]:
        """Yield arguments that are no field any more and are taken on some conditions, with the type of what is taken.

        A check that raises for all but some constants names them; one of another form is the engine's business.
        """
        for name, value in self._aliases.items():
            if name.endswith("REMOVED_ARG_CHECKS") and isinstance(value, ast.Dict):
                for key, check in zip(value.keys, value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value, self._taken_by(ast.unparse(check))

    def _taken_by(self, check: str) -> str:
        found = self._functions.get(check)
        statements = found.body if found else []
        if statements and isinstance(statements[-1], ast.Raise):
            for each in ast.walk(ast.Module(statements, [])):
                if (
                    isinstance(each, ast.If)
                    and isinstance(each.test, ast.Compare)
                    and isinstance(each.body[-1], ast.Return)
                ):
                    taken = _constant(each.test.comparators[0])
                    if isinstance(each.test.ops[0], ast.In) and isinstance(taken, tuple):
                        return f"Literal[{','.join(map(repr, taken))}]"
        return ANY

    def fields(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the fields of a class, those of its bases first."""
        node = self._classes.get(name)
        if node is None:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                found.update(self.fields(base.id))
        reshaped = set(_reshaped(node))
        for each in node.body:
            if not (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)):
                continue
            field = each.target.id
            if field.startswith("_") or ast.unparse(each.annotation).startswith(("ClassVar", "typing.ClassVar")):
                continue
            facts, other_names = self._field(each.annotation, each.value)
            if field in reshaped:
                facts |= {"type": ANY, "limits": {}}
            found[field] = facts
            found.update({other: {**facts, "default": None} for other in other_names})
        return found

    def _field(self, annotation: ast.expr, value: ast.expr | None) -> tuple[dict[str, Any], list[str]]:
        spelled, limits = self._type(annotation)
        facts: dict[str, Any] = {
            "type": spelled,
            "default": None if value is not None else "<required>",
            "limits": limits,
        }
        if not (isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2].endswith("Field")):
            return facts, []
        given = {each.arg: each.value for each in value.keywords if each.arg}
        first = value.args[0] if value.args else None
        if not given.keys() & {"default", "default_factory"} and (first is None or _constant(first) is ...):
            facts["default"] = "<required>"
        facts["limits"] = limits | _limits(given, spelled)
        others = [
            text.value
            for name in ("alias", "validation_alias")
            if name in given
            for text in ast.walk(given[name])
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
        ]
        if others:
            facts["default"] = None
        return facts, others

    def _type(self, node: ast.expr) -> tuple[str, Limits]:
        match node:
            case ast.Constant(value=None):
                return "None", {}
            case ast.Constant(value=str(text)):
                return self._type(ast.parse(text, mode="eval").body)
            case ast.Name(id=name):
                return self._named(name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._union([left, right])
            case ast.Subscript(value=outer, slice=inner):
                members = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
                return self._subscript(ast.unparse(outer).rpartition(".")[2], members)
        return ANY, {}

    def _named(self, name: str) -> tuple[str, Limits]:
        if name in PLAIN:
            return name, {}
        if name in NARROWED:
            return NARROWED[name]
        if name in self._aliases:
            return self._type(self._aliases[name])
        node = self._classes.get(name)
        if node is None:
            return ANY, {}
        bases = [ast.unparse(base) for base in node.bases]
        if any(base.endswith("Enum") for base in bases):
            members = [
                each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
            ]
            values = [_constant(each.value) for each in members]
            texts = all(isinstance(value, str) for value in values)
            self.enums[name] = values if texts else [each.targets[0].id for each in members]  # type: ignore[attr-defined]
            return (name, {}) if self.enums[name] else (ANY, {})
        if name not in self.sections:
            if not self._is_model(name):
                return ANY, {}
            self.sections[name] = {}  # it may name itself
            self.sections[name] = self.fields(name)
        return name, {}

    def _is_model(self, name: str) -> bool:
        node = self._classes.get(name)
        if node is None:
            return name.endswith("BaseModel")
        if re.search(r"extra\s*=\s*['\"](allow|ignore)", ast.unparse(node)):
            return False
        return any(isinstance(base, ast.Name) and self._is_model(base.id) for base in node.bases)

    def _union(self, members: list[ast.expr]) -> tuple[str, Limits]:
        found = [self._type(member) for member in members]
        limits = {name: value for _, each in found for name, value in each.items()}
        spelled = [each for each, _ in found]
        return (ANY, {}) if ANY in spelled else (" | ".join(spelled), limits)

    def _subscript(self, outer: str, members: list[ast.expr]) -> tuple[str, Limits]:
        match outer:
            case "Optional":
                return self._union([*members, ast.Constant(None)])
            case "Union":
                return self._union(members)
            case "Annotated" if "discriminator" not in "".join(map(ast.unparse, members[1:])):
                spelled, limits = self._type(members[0])
                given = [each for call in members[1:] if isinstance(call, ast.Call) for each in call.keywords]
                return spelled, limits | _limits({each.arg: each.value for each in given if each.arg}, spelled)
            case "List" | "list" | "Sequence":
                spelled, limits = self._type(members[0])
                return f"list[{RANGED.get((spelled, tuple(limits.items())), spelled)}]", {}
            case "Dict" | "dict" if len(members) == 2:
                return f"dict[{self._type(members[0])[0]},{self._type(members[1])[0]}]", {}
            case "Literal" if all(isinstance(each, ast.Constant) for each in members):
                return f"Literal[{','.join(map(ast.unparse, members))}]", {}
        return ANY, {}


def _reshaped(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields whose validators take other shapes than their types say."""
    for each in node.body:
        for mark in getattr(each, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("field_validator"):
                modes = [_constant(given.value) for given in mark.keywords if given.arg == "mode"]
                if modes and modes[0] in ("before", "plain", "wrap"):
                    yield from (name for name in map(_constant, mark.args) if isinstance(name, str))


def _limits(given: dict[str, ast.expr], spelled: str) -> Limits:
    """Return the limits of a field, where its type is one that they are about."""
    limits: Limits = {name: _constant(given[name]) for name in ("ge", "gt", "le", "lt", "min_length") if name in given}
    words = set(spelled.split(" | ")) - {"None"}
    if "min_length" in limits:
        return limits if all(word == "str" or word.startswith("list[") for word in words) else {}
    return limits if words <= {"int", "float"} else {}


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
