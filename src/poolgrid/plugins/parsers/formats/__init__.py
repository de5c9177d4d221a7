"""How families of models write reasoning and tool calls, as data: one file a format, read when it is asked for.

A file's name is the format's; ``aliases`` are the names that other engines have for it. ``signs`` show a format: every
marker of one of these lists stands in the chat template, or one of ``vocabulary`` was added to the vocabulary. Formats
of a lower ``order`` are looked for first: a format whose signs are parts of others' comes later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

VOCABULARY_ORDER = 4
"""What is only in the vocabulary counts less than a template's own markers: a model may be tuned to another format."""

_DIRECTORY = Path(__file__).parent


class Guide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a call is written where an engine is guided to write some.

    ``{}`` stands for the function's name and ``{json}`` for it in quotes; in ``value`` for the argument's name, and
    ``{text}`` for whether it is text.
    """

    kind: Literal["json", "tagged", "pythonic"]
    template: str = ""
    """What the chat template has where this variant is meant."""
    begin: str = ""
    end: str = ""
    """Empty = there is no end, and so one call at most."""
    single: bool = False
    """Whether an answer has one call at most."""
    separator: str = "\n"
    around: tuple[str, str] = ("", "")
    number: str = ""
    """What follows the call's number, for forms that number calls."""
    value: tuple[str, str] = ("", "")
    """Around an argument of a call in tags."""


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tags of calls in tags."""

    key_begin: str
    key_end: str
    value_end: str
    end: str
    opener: str = ""
    """Before the name; empty = the name begins at once."""
    name_end: str = ""
    """After the name; empty = the next tag ends it."""
    head_end: str = ""
    """Ends the attributes that follow ``name_end``; empty = there are none."""
    value_begin: str = ""
    """Empty = the value begins after ``key_end``."""
    attributes: bool = False
    """Whether there may be attributes between ``key_end`` and ``value_begin``."""
    text_attribute: str = ""
    """Of a value that is text; with other attributes it is JSON. Empty = the function's schema decides."""
    drops_line_breaks: bool = False
    """Whether one line break at either end of a value belongs to the tags."""
    after: tuple[str, ...] = ()
    """Tags around the call that may follow its end."""
    openers: tuple[str, ...] = ()
    """Tags that begin another call."""


class CallFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a family of models writes calls."""

    form: Literal["json", "keyed", "given", "headed", "pythonic", "tagged", "elements", "harmony"]
    models: str = ""
    """Whose format it is, for people."""
    example: str = ""
    """How a call looks, for people."""
    aliases: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    vocabulary: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    """Markers of templates that are of another format although they have the signs."""
    order: int = 0
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    """Markers that may follow a call (outside a list), each once, in this order."""
    drops: tuple[str, ...] = ()
    """Markers without a meaning of their own: they are left out everywhere."""
    inside: tuple[str, ...] = ()
    """Special tokens within a call, and parts of other markers that are some."""
    separators: str = ""
    """Characters that may stand between calls outside a list."""
    following: str = ""
    """Characters that begin a call which follows another one with nothing between them."""
    bare: bool = False
    """Whether calls begin an answer without an opener."""
    json: bool = False
    """Whether calls may be JSON objects with a name as well."""
    head: str = ""
    """Pattern of what precedes the arguments, with a group ``name``."""
    notation: Literal["json", "gemma"] = "json"
    mark: str = ""
    """Before every tag of a call in elements."""
    tags: tuple[Tags, ...] = ()
    """Variants, by their first opener."""
    guides: tuple[Guide, ...] = ()
    """Variants: the first whose ``template`` fits is meant."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that may be special tokens of the vocabulary."""
        return (*self.openers, *self.closers, *self.drops, *self.inside)


class ReasoningFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a family of models marks reasoning; of several openers and closers templates write the last."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    models: str = ""
    example: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    vocabulary: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    order: int = 0
    begins_inside: bool = False
    """Whether an answer at a turn's beginning that has neither marker is reasoning."""
    drops: tuple[str, ...] = ()
    """Markers that are left out of the content."""
    inside: tuple[str, ...] = ()
    """Special tokens that are parts of these markers."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that may be special tokens of the vocabulary."""
        return (*self.openers, *self.closers, *self.drops, *self.inside)


Format = TypeVar("Format", CallFormat, ReasoningFormat)


def _names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_DIRECTORY / kind).glob("*.toml")))


REASONING_NAMES = _names("reasoning")
CALL_NAMES = _names("tool_calls")


@cache
def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of reasoning with this name."""
    return _read("reasoning", name, ReasoningFormat)


@cache
def call_format(name: str) -> CallFormat:
    """Return the format of calls with this name."""
    return _read("tool_calls", name, CallFormat)


def _read(kind: str, name: str, type_: type[Format]) -> Format:
    return msgspec.toml.decode((_DIRECTORY / kind / f"{name}.toml").read_bytes(), type=type_)


@cache
def reasoning_aliases() -> dict[str, str]:
    """Return the format's name for each other name of it."""
    return {alias: name for name in REASONING_NAMES for alias in reasoning_format(name).aliases}


@cache
def call_aliases() -> dict[str, str]:
    """Return the format's name for each other name of it."""
    return {alias: name for name in CALL_NAMES for alias in call_format(name).aliases}


class FormatNames(NamedTuple):
    """The names of one kind of formats: what an entry point names, for options."""

    names: tuple[str, ...]
    aliases: Callable[[], Mapping[str, str]]


REASONING = FormatNames(REASONING_NAMES, reasoning_aliases)
TOOL_CALLS = FormatNames(CALL_NAMES, call_aliases)


@cache
def reasoning_formats() -> tuple[tuple[str, ReasoningFormat], ...]:
    """Return all formats of reasoning in the order in which they are looked for."""
    return _in_order([(name, reasoning_format(name)) for name in REASONING_NAMES])


@cache
def call_formats() -> tuple[tuple[str, CallFormat], ...]:
    """Return all formats of calls in the order in which they are looked for."""
    return _in_order([(name, call_format(name)) for name in CALL_NAMES])


def _in_order(formats: Sequence[tuple[str, Format]]) -> tuple[tuple[str, Format], ...]:
    return tuple(sorted(formats, key=lambda each: (each[1].order, each[0])))


def shown(
    formats: Sequence[tuple[str, CallFormat | ReasoningFormat]], template: str, vocabulary: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    """Return the format that a model shows and the markers that show it; empty where it shows none."""
    best: float = math.inf
    found: tuple[str, tuple[str, ...]] = "", ()
    for name, each in formats:
        order = each.order
        signs = next((signs for signs in each.signs if all(sign in template for sign in signs)), None)
        if signs is None:
            order = max(order, VOCABULARY_ORDER)
            signs = tuple(token for token in each.vocabulary if token in vocabulary)[:1]
        if signs and order < best and not any(marker in template for marker in each.unless):
            best, found = order, (name, signs)
    return found
