"""The argument facts of TensorRT-LLM 1.2.1, as a pydantic model that finds all faults of a configuration by path.

The facts are data (``arguments_1_2_1.json``): each field's type, default and range. Types are written as Python writes
them; ``object`` is a Python object, which cannot come from a file, and other names are sections, unions or enums of the
data. ``later_arguments.json`` and ``arguments_1_4.json`` have what came after 1.2.1: it passes here, and the installed
version refuses it where it does not have it. Where a later version is installed, its own source is the data instead
(``installed``): what it has passes, what it has no more is a fault.

Checks need neither an import of the package nor a GPU. They are stricter than TensorRT-LLM's own: ``"16"`` is not an
integer. An argument that is not known is a fault, because TensorRT-LLM refuses it too (``extra=forbid``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    create_model,
)
from pydantic import Field as ModelField
from pydantic_core import ErrorDetails

from poolgrid.plugins.trtllm.arguments.installed import installed_facts

KV_CACHE = "kv_cache_config"
REQUIRED = "<required>"
TOP = "llm_args"

SUGGESTION_CUTOFF = 0.6
"""Least similarity (``difflib``) of a suggested name; below it a suggestion misleads more than it helps."""

DEPTH_MAX = 6
"""Sections within each other whose fields are known by path."""

_ELSEWHERE = {
    "_autodeploy": "run trtllm-serve MODEL --backend _autodeploy and give its URL to poolgrid up --engine-url",
}
"""Values of ``backend`` that a worker does not take, and what does."""

_ALLOWED = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a number",
    "too_short": "a list with at least one entry",
}
"""What is allowed, by the type of pydantic's error; it says the others itself."""


@dataclass(frozen=True, slots=True)
class ArgumentFault:
    """One thing that is wrong with an engine configuration, and where."""

    path: str
    """Keys from the top, joined by dots; list positions in brackets."""
    message: str
    warning: bool = False
    """Whether the engine runs nevertheless."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ContractError(ValueError):
    """An engine configuration breaks the contract; ``faults`` has every place."""

    def __init__(self, what: str, faults: Sequence[ArgumentFault]) -> None:
        self.faults = tuple(faults)
        super().__init__(f"{what}: " + "; ".join(map(str, faults)))


class Contract:
    """The facts of one TensorRT-LLM version."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        later: Mapping[str, Any],
        unions: Mapping[str, Any] = MappingProxyType({}),
        newest: str = "",
    ) -> None:
        """``later`` has further fields of sections, ``unions`` further kinds and fields of unions, up to ``newest``."""
        self.version: str = facts["version"]
        self.covers = f"{self.version} to {newest}" if newest else self.version
        """The versions whose arguments pass."""
        self._sections: dict[str, dict[str, Any]] = {
            name: {**facts["sections"].get(name, {}), **later.get(name, {})} for name in {*facts["sections"], *later}
        }
        self._unions = {name: _widened(union, unions.get(name)) for name, union in facts["unions"].items()}
        self._refusals: Mapping[str, str] = facts["refusals"]
        self.fields: dict[str, dict[str, Any]] = {}
        """Facts of every argument, by dotted path."""
        self._collect(TOP, "")
        self._model = self._make_model(facts["enums"], frozenset(facts["case_insensitive_enums"]))

    def check(self, arguments: Mapping[str, Any]) -> list[ArgumentFault]:
        """Return every fault of ``LLM`` arguments; none of the top ones has to be there."""
        try:
            self._model.model_validate(arguments)
        except ValidationError as error:
            return self._faults(arguments, error.errors(include_url=False))
        return []

    def default(self, path: str) -> Any:
        default = self.fields.get(path, {}).get("default")
        if not isinstance(default, str) or default == REQUIRED:
            return None if default == REQUIRED else default
        # A section's default is written as a constructor call: an empty mapping says the same.
        return {} if default.endswith("()") else default

    def _collect(self, section: str, path: str) -> None:
        if path.count(".") >= DEPTH_MAX:
            return  # a section that has itself among its fields
        variants = self._unions.get(section, {}).get("variants", {"": self._sections.get(section, {})})
        for fields in variants.values():
            for name, field in fields.items():
                where = f"{path}.{name}" if path else name
                self.fields[where] = field
                for word in re.findall(r"\w+", field["type"]):
                    if word in self._sections or word in self._unions:
                        self._collect(word, where)

    def _make_model(self, enums: Mapping[str, Sequence[str]], folded: frozenset[str]) -> type[BaseModel]:
        names: dict[str, Any] = {
            "Anything": Any,
            "Literal": Literal,
            "Positive": PositiveInt,
            "NonNegative": NonNegativeInt,
        }
        names["PythonObject"] = Annotated[Any, BeforeValidator(_refuse)]
        names["NumberKey"] = Annotated[int, ModelField(strict=False)]  # JSON has no other keys than text
        for name, members in enums.items():
            words: Any = Literal[tuple(members)]
            names[name] = Annotated[words, BeforeValidator(_upper)] if name in folded else words
        for name, fields in self._sections.items():
            names[name] = _model(name, fields, {}, all_optional=name == TOP)
        for name, union in self._unions.items():
            kinds = [
                _model(kind, fields, union["aliases"], more={union["discriminator"]: (Literal[kind], ...)})
                for kind, fields in union["variants"].items()
            ]
            names |= {kind.__name__: kind for kind in kinds}
            names[name] = Annotated[Union[tuple(kinds)], ModelField(discriminator=union["discriminator"])]  # noqa: UP007
        for each in list(names.values()):
            if isinstance(each, type) and issubclass(each, BaseModel):
                each.model_rebuild(_types_namespace=names)
        model: type[BaseModel] = names[TOP]
        return model

    def _faults(self, arguments: Mapping[str, Any], errors: Iterable[ErrorDetails]) -> list[ArgumentFault]:
        found: dict[str, list[str]] = {}
        for error in errors:
            path = _path_of(arguments, error)
            found.setdefault(path, []).append(self._message(path, error))
        # Of several types that a value may have, one that was looked into says more than that it is no other.
        return [
            ArgumentFault(
                path, " or ".join([messages[0], *(each.rpartition("allowed is ")[2] for each in messages[1:])])
            )
            for path, messages in found.items()
            if not any(other.startswith((f"{path}.", f"{path}[")) for other in found)
        ]

    def _message(self, path: str, error: ErrorDetails) -> str:
        kind, value, said = error["type"], error["input"], error["msg"]
        match kind:
            case "extra_forbidden":
                return self._unknown(path)
            case "missing" | "union_tag_not_found":
                return "is required and absent"
            case "invalid_key":
                return "the key is no text"
            case "union_tag_invalid":
                value, said = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        allowed = _ALLOWED.get(kind) or said.removeprefix("Input should be ").removeprefix("Value error, ")
        message = f"is {shown(value)}, allowed is {re.sub('^(?=greater|less)', 'a value ', allowed)}"
        if isinstance(value, str):
            if path == "backend" and value in _ELSEWHERE:
                return f"{message}; {_ELSEWHERE[value]}"
            near = nearest(value, re.findall(r"'([^']*)'", allowed))
            if near:
                message += f"; did you mean {near!r}?"
            elif kind in ("int_type", "float_type") and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I):
                message += "; it is text here: write the number without quotes (in YAML 1.0e-3, not 1e-3)"
        return message

    def _unknown(self, path: str) -> str:
        """Return what is wrong with a key that no field has, with what may have been meant."""
        above, _, key = path.rpartition(".")
        if path in self._refusals:
            return self._refusals[path]
        beside = {name.rpartition(".")[2] for name in self.fields if name.rpartition(".")[0] == above} - {key}
        elsewhere = next((name for name in self.fields if name.rpartition(".")[2] == key), None)
        meant = elsewhere if elsewhere and not above else nearest(key, beside)
        return "is not a known argument" + (f"; did you mean {meant!r}?" if meant else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, if one is similar enough."""
    by_folded = {each.lower(): each for each in known}
    found = get_close_matches(word.lower(), by_folded, n=1, cutoff=SUGGESTION_CUTOFF)
    return by_folded[found[0]] if found else None


@cache
def contract() -> Contract:
    """Return the contract that poolgrid is written against."""
    files = resources.files(__package__)
    facts, *later = (
        json.loads(files.joinpath(name).read_text(encoding="utf-8"))
        for name in ("arguments_1_2_1.json", "later_arguments.json", "arguments_1_4.json")
    )
    sections: dict[str, dict[str, Any]] = {}
    unions: dict[str, Any] = {}
    for each in later:
        unions |= each.pop("unions", {})
        for name, members in each.pop("enums", {}).items():
            facts["enums"][name] += members
        for name, fields in each.items():
            if not name.startswith("_"):
                sections[name] = {**sections.get(name, {}), **fields}
    return Contract(facts, sections, unions, later[-1]["_version"])


@cache
def installed_contract() -> Contract:
    """Return the contract of the version that is installed, where it came after 1.2; else the one of ``contract``."""
    facts = installed_facts()
    found = re.match(r"(\d+)\.(\d+)", facts["version"]) if facts else None
    if not (facts and found and (int(found[1]), int(found[2])) > (1, 2)):
        return contract()
    return contract_of(facts)


def contract_of(facts: dict[str, Any]) -> Contract:
    """Return the contract of a later version; what 1.2.1 had and it has no more is refused as such."""
    gone = f"is no argument of TensorRT-LLM {facts['version']}; {contract().version} had it"
    return Contract({**facts, "refusals": dict.fromkeys(contract().fields, gone)}, {})


def look_up(arguments: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or the contract's default; ``None`` below a null."""
    value: Any = arguments
    where = ""
    for key in path.split("."):
        where = f"{where}.{key}" if where else key
        if value is None:
            return None
        value = value[key] if isinstance(value, Mapping) and key in value else contract().default(where)
    return value


def shown(value: Any) -> str:
    """Return a value as an error shows it: JSON-like, at most 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _model(
    name: str,
    fields: Mapping[str, Any],
    aliases: Mapping[str, str],
    *,
    all_optional: bool = False,
    more: Mapping[str, Any] | None = None,
) -> type[BaseModel]:
    """Return the model of a section; a name may be written as its alias too."""
    made: dict[str, Any] = dict(more or {})
    for field, facts in fields.items():
        spelled = facts["type"].replace("dict[int,", "dict[NumberKey,")
        # Words that Python has with another meaning.
        spelled = re.sub(r"\bany\b", "Anything", re.sub(r"\bobject\b", "PythonObject", spelled))
        options: dict[str, Any] = {}
        limit = facts.get("range") or ""
        if limit.startswith("["):
            options["ge"], options["le"] = map(float, limit[1:-1].split(","))
        elif limit.startswith(">"):
            options["ge" if limit[1] == "=" else "gt"] = float(limit.lstrip(">= "))
        elif limit.startswith("non-empty"):
            options["min_length"] = 1
            if "> 0" in limit:
                spelled = spelled.replace("list[int]", "list[Positive]")
        options |= facts.get("limits", {})
        if field in aliases.values():
            others = [alias for alias, meant in aliases.items() if meant == field]
            options["validation_alias"] = AliasChoices(field, *others)
        required = facts["default"] == REQUIRED and not all_optional
        # The name of a field may be one of pydantic's own methods.
        made[f"of_{field}"] = (spelled, ModelField(... if required else None, **{"validation_alias": field, **options}))
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: type[BaseModel] = create_model(name, __config__=config, **made)
    return model


def _widened(union: Mapping[str, Any], later: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a union with further kinds; of these it is not known which fields they have, so they have all."""
    if later is None:
        return union
    variants = {kind: {**fields, **later["fields"]} for kind, fields in union["variants"].items()}
    every = {name: {**facts, "default": None} for fields in variants.values() for name, facts in fields.items()}
    return {**union, "variants": {**variants, **dict.fromkeys(later["kinds"], every)}}


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _refuse(value: Any) -> Any:
    raise ValueError("only null: it is a Python object, which a file cannot hold")


def _path_of(arguments: Any, error: ErrorDetails) -> str:
    """Return the dotted path of an error, whose location also names members of unions."""
    path = ""
    value: Any = arguments
    for at, step in enumerate(error["loc"], 1):
        if isinstance(value, Mapping):
            found = step if step in value else next((key for key in value if str(key) == str(step)), None)
            if found is None and not (error["type"] == "missing" and at == len(error["loc"])):
                continue
            path = f"{path}.{step}" if path else str(step)
            value = value.get(found)
        elif isinstance(value, list | tuple) and isinstance(step, int):
            path, value = f"{path}[{step}]", value[step]
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        path += "." + error["ctx"]["discriminator"].strip("'")
    return path
