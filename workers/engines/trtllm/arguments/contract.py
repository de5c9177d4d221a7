"""The argument facts of TensorRT-LLM 1.2.1, and a checker that finds all faults of an engine configuration by path.

The facts are data (``arguments_1_2_1.json``): each field's type, default and range. Types are written in a small
language: ``int``, ``float``, ``bool``, ``str``, ``any``, ``object`` (a Python object: cannot come from a file),
``dict``, ``list[T]``, ``dict[K,V]``, ``Literal['a','b']``, the name of a section, union or enum of the data, and ``|``.

Rules:

1. Checking never stops at the first fault, and never changes the value.
2. It is stricter than pydantic: ``"16"`` is not an integer, ``1`` is not a boolean. An integer is a good float.
3. A key that is not known is a fault with the nearest known key: TensorRT-LLM refuses it too (``extra=forbid``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, Literal

from poolgrid.workers.engines.trtllm.arguments.later_arguments import LATER_FIELDS

REQUIRED = "<required>"
PYTORCH = "pytorch"
AUTODEPLOY = "_autodeploy"
Backend = Literal["pytorch", "_autodeploy"]

SUGGESTION_CUTOFF = 0.6
"""Least similarity (``difflib``) of a suggested name; below it a suggestion misleads more than it helps."""


@dataclass(frozen=True, slots=True)
class Fault:
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

    def __init__(self, what: str, faults: Sequence[Fault], notes: Sequence[str] = ()) -> None:
        self.faults = tuple(faults)
        self.notes = tuple(notes)
        """What may explain the faults, without being one."""
        lines = [str(fault) for fault in faults] + [f"note: {note}" for note in notes]
        super().__init__(f"{what}: " + "; ".join(lines))


@dataclass(frozen=True, slots=True)
class Field:
    """One argument."""

    name: str
    type: str
    default: Any
    range: str | None = None
    frozen: bool = False
    """Only the default is accepted."""

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return isinstance(self.default, str) and self.default == REQUIRED


@dataclass(frozen=True, slots=True)
class Variants:
    """A nested configuration whose fields depend on a discriminating key."""

    discriminator: str
    aliases: dict[str, str]
    variants: dict[str, dict[str, Field]]
    known: tuple[str, ...]
    accepted_by: dict[str, tuple[str, ...]]


class Contract:
    """The facts of one TensorRT-LLM version."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.version: str = facts["version"]
        self.sections = {name: _fields(section) for name, section in facts["sections"].items()}
        for name, later in LATER_FIELDS.items():
            self.sections[name] = self.sections.get(name, {}) | _fields(later)
        self.unions = {
            name: Variants(
                union["discriminator"],
                dict(union["aliases"]),
                {variant: _fields(fields) for variant, fields in union["variants"].items()},
                tuple(union["known"]),
                {backend: tuple(accepted) for backend, accepted in union["accepted_by"].items()},
            )
            for name, union in facts["unions"].items()
        }
        self.enums: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in facts["enums"].items()}
        self.case_insensitive_enums = frozenset(facts["case_insensitive_enums"])
        self.auto_deploy = _fields(facts["auto_deploy"]["fields"])
        self.auto_deploy_rejected: tuple[str, ...] = tuple(facts["auto_deploy"]["rejected_when_not_default"])
        self.tensorrt_engine_only = frozenset(facts["tensorrt_engine_only"])
        self.later_versions = frozenset(facts["later_versions"])

    @property
    def llm_args(self) -> dict[str, Field]:
        """The arguments of ``LLM`` on the PyTorch backend."""
        return self.sections["llm_args"]

    def check(self, arguments: Mapping[str, Any], backend: str = PYTORCH, required: Iterable[str] = ()) -> list[Fault]:
        """Return every fault of ``LLM`` arguments for a backend.

        ``required`` names the top-level arguments that must be there (``model``, before an engine starts); an engine
        file has none.
        """
        faults: list[Fault] = []
        if backend not in (PYTORCH, AUTODEPLOY):
            return [Fault("backend", f"is {backend!r}, allowed are {PYTORCH!r} and {AUTODEPLOY!r}")]
        known = self.auto_deploy if backend == AUTODEPLOY else self.llm_args
        backend_field = {"backend": self.llm_args["backend"]}
        _Checker(self, backend, faults).mapping(arguments, known | backend_field, "", set(required))
        return faults

    def unknown_key(self, key: str, known: Iterable[str], backend: str, top: bool) -> str:
        """Return what is wrong with a key that no field has, with what may have been meant."""
        if top and key in self.tensorrt_engine_only:
            return "belongs to the TensorRT engine backend; the PyTorch backend of 1.2.1 refuses it"
        if top and backend == PYTORCH and key in self.auto_deploy:
            return f"belongs to the {AUTODEPLOY} backend; the PyTorch backend of {self.version} refuses it"
        if top and backend == AUTODEPLOY and key in self.llm_args:
            return f"is not an argument of the {AUTODEPLOY} backend"
        if top and key in self.later_versions:
            return f"came after TensorRT-LLM {self.version}, which refuses it"
        holders = [name for name, fields in self.sections.items() if key in fields and name in self.llm_args]
        if top and holders:
            return f"is not an argument at the top; did you mean '{holders[0]}.{key}'?"
        near = nearest(key, known)
        return "is not a known argument" + (f"; did you mean {near!r}?" if near else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, if one is similar enough."""
    by_folded: dict[str, str] = {}
    for each in known:
        by_folded.setdefault(each.lower(), each)
    found = get_close_matches(word.lower(), by_folded, n=1, cutoff=SUGGESTION_CUTOFF)
    return by_folded[found[0]] if found else None


@cache
def contract() -> Contract:
    """Return the contract that poolgrid is written against."""
    text = resources.files(__package__).joinpath("arguments_1_2_1.json").read_text(encoding="utf-8")
    return Contract(json.loads(text))


def _fields(section: Mapping[str, Any]) -> dict[str, Field]:
    return {
        name: Field(name, each["type"], each["default"], each.get("range"), bool(each.get("frozen")))
        for name, each in section.items()
    }


def alternatives(expression: str) -> list[str]:
    """Split a type expression at its top-level bars."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(expression):
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "|" and not depth:
            parts.append(expression[start:at].strip())
            start = at + 1
    parts.append(expression[start:].strip())
    return parts


def literals(expression: str) -> list[str]:
    """Return the words of ``Literal['a','b']``."""
    return [word.strip().strip("'") for word in expression.removeprefix("Literal[").removesuffix("]").split(",")]


def _split_pair(inner: str) -> tuple[str, str]:
    key, _, value = inner.partition(",")
    return key.strip(), value.strip()


def shown(value: Any) -> str:
    """Return a value as an error shows it: JSON-like, at most 80 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_SCALARS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}


def _is_scalar(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "str":
        return isinstance(value, str)
    return value is None


class _Checker:
    """One walk over a configuration; collects faults."""

    def __init__(self, facts: Contract, backend: str, faults: list[Fault]) -> None:
        self._facts = facts
        self._backend = backend
        self._faults = faults

    def mapping(
        self,
        value: Mapping[Any, Any],
        fields: Mapping[str, Field],
        path: str,
        required: set[str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Check a mapping against named fields; ``required`` replaces what the fields themselves require."""
        renamed = aliases or {}
        seen: dict[str, str] = {}
        for key, each in value.items():
            where = _join(path, key)
            if not isinstance(key, str):
                self._fault(where, f"the key is {shown(key)}, allowed is text")
                continue
            name = renamed.get(key, key)
            field = fields.get(name)
            if field is None:
                words = [*fields, *renamed]
                self._fault(where, self._facts.unknown_key(key, words, self._backend, top=not path))
                continue
            if name in seen:
                self._fault(where, f"says again what {seen[name]!r} says; keep one of the two")
                continue
            seen[name] = key
            self.value(each, field.type, where)
            if each is not None:
                self._range(each, field, where)
            if field.frozen and each != field.default:
                self._fault(where, f"is {shown(each)}, allowed is only {shown(field.default)}")
        for name in required if required is not None else (f.name for f in fields.values() if f.required):
            if name not in seen:
                self._fault(_join(path, name), "is required and absent")

    def value(self, value: Any, expression: str, path: str) -> None:
        """Check a value against a type expression."""
        options = alternatives(expression)
        if "any" in options or (value is None and "None" in options):
            return
        if isinstance(value, Mapping):
            for option in options:
                if self._as_mapping(value, option, path):
                    return
        elif isinstance(value, list | tuple):
            for option in options:
                if option.startswith("list["):
                    inner = option[5:-1]
                    for at, each in enumerate(value):
                        self.value(each, inner, f"{path}[{at}]")
                    return
        else:
            for option in options:
                if option in _SCALARS and _is_scalar(value, option):
                    return
                if value in self._words(option):
                    return
                folds = option in self._facts.case_insensitive_enums and isinstance(value, str)
                if folds and value.upper() in self._facts.enums[option]:
                    return
        self._fault(path, f"is {shown(value)}, allowed {self._allowed(options, value)}")

    def _as_mapping(self, value: Mapping[Any, Any], option: str, path: str) -> bool:
        if option in self._facts.sections:
            fields = self._facts.sections[option]
            self.mapping(value, fields, path)
            return True
        if option in self._facts.unions:
            self._union(value, option, path)
            return True
        if option == "dict":
            return True
        if option.startswith("dict["):
            key_type, value_type = _split_pair(option[5:-1])
            for key, each in value.items():
                # JSON has no other keys than text.
                as_json = key_type == "int" and isinstance(key, str) and key.lstrip("-").isdigit()
                if not as_json and not _is_scalar(key, key_type):
                    self._fault(_join(path, key), f"the key is {shown(key)}, allowed is {_SCALARS[key_type]}")
                self.value(each, value_type, _join(path, key))
            return True
        return False

    def _union(self, value: Mapping[Any, Any], name: str, path: str) -> None:
        union = self._facts.unions[name]
        where = _join(path, union.discriminator)
        if union.discriminator not in value:
            self._fault(where, f"is required and absent, allowed are {_listed(union.known)}")
            return
        kind = value[union.discriminator]
        if not isinstance(kind, str) or kind not in union.known:
            near = nearest(kind, union.known) if isinstance(kind, str) else None
            hint = f"; did you mean {near!r}?" if near else ""
            self._fault(where, f"is {shown(kind)}, allowed are {_listed(union.known)}{hint}")
            return
        accepted = union.accepted_by[self._backend]
        if kind not in accepted:
            self._fault(
                where,
                f"is {shown(kind)}, which the {self._backend} backend of {self._facts.version} is not known to "
                f"accept; allowed are {_listed(accepted) or 'none'}",
            )
            return
        rest = {key: each for key, each in value.items() if key != union.discriminator}
        self.mapping(rest, union.variants[kind], path, aliases=union.aliases)

    def _words(self, option: str) -> tuple[str, ...]:
        if option.startswith("Literal["):
            return tuple(literals(option))
        return self._facts.enums.get(option, ())

    def _allowed(self, options: Sequence[str], value: Any) -> str:
        words = [word for option in options for word in self._words(option)]
        kinds = [_SCALARS[option] for option in options if option in _SCALARS]
        for option in options:
            if option in self._facts.sections or option in self._facts.unions or option.startswith("dict"):
                kinds.insert(0, "a mapping")
            elif option.startswith("list["):
                kinds.insert(0, "a list")
            elif option == "object":
                return "is only null: it is a Python object, which a file cannot hold"
        text = "are " + " or ".join([_listed(words), *kinds]) if words else "is " + " or ".join(kinds)
        if isinstance(value, str):
            near = nearest(value, words)
            if near:
                text += f"; did you mean {near!r}?"
            elif any(option in ("int", "float") for option in options) and _reads_as_number(value):
                text += "; it is text here: write the number without quotes (in YAML 1.0e-3, not 1e-3)"
        return text

    def _range(self, value: Any, field: Field, path: str) -> None:
        if field.range is None:
            return
        if field.range.startswith("non-empty"):
            if isinstance(value, list | tuple):
                if not value:
                    self._fault(path, "is an empty list, allowed are lists with at least one entry")
                elif "> 0" in field.range:
                    for at, each in enumerate(value):
                        if _is_scalar(each, "float") and each <= 0:
                            self._fault(f"{path}[{at}]", f"is {shown(each)}, allowed are integers from 1")
            return
        if not _is_scalar(value, "float"):
            return
        text = field.range
        if text.startswith("["):
            low, high = (float(each) for each in text[1:-1].split(","))
            fits = low <= value <= high
        elif text.startswith(">="):
            fits = value >= float(text[2:])
        else:
            fits = value > float(text[1:])
        if not fits:
            self._fault(path, f"is {shown(value)}, allowed are {_range_words(text)}")

    def _fault(self, path: str, message: str) -> None:
        self._faults.append(Fault(path, message))


def _range_words(text: str) -> str:
    if text.startswith("["):
        low, high = text[1:-1].split(",")
        return f"{low.strip()} to {high.strip()}"
    return f"values {text}"


def _reads_as_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _listed(words: Iterable[str]) -> str:
    return ", ".join(repr(word) for word in words)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
