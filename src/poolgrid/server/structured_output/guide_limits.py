"""How deep and how large a guide (JSON schema, expression, grammar, structural tag) may be, whatever compiles it.

Libraries that compile guides recurse: over nesting, over ``$ref`` after ``$ref``, over rules that call rules. A guide
of some kilobytes overflows their stack, which no handler catches. So the depth of a recursion that could follow a guide
is bounded before any library sees it, by counting what can be counted in one pass:

- the *nesting* of objects and lists, of groups and of brackets;
- the *depth* of a schema, references followed: its nesting and that of every part that is referred to, together, for a
  walk may go through each of these parts once;
- the *rules* of a grammar, for one may call the next;
- the size of an expression *written out*: ``((a{1000}){1000})`` is a million states in 17 characters.

``objection`` runs in a process that may die (``poolgrid.server.frontend.guide_compiler``), and once more at a worker
that compiles in its own. It is linear in the guide's size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from poolgrid.kernel.wire.requests import Sampling

NESTING_MAX = 128
"""Objects and lists in each other, groups in each other. ``serde`` and others read no JSON that is nested deeper; tools
that people write stay below 20."""

DEPTH_MAX = 1024
"""Objects and lists in each other on the way through a schema, references followed: some 200 definitions that refer to
one another. ``llguidance`` takes about 10 KiB of stack for three of those, so 3.4 of a thread's 8 MiB at most."""

NODES_MAX = 32_768
"""Objects and lists of one schema; the largest published ones (FHIR, Kubernetes) have some ten thousand."""

RULES_MAX = 1024
"""Rules of one grammar: those of SQL or C have some 300. ``llguidance`` takes about 2 KiB of stack for each."""

WRITTEN_OUT_MAX = 20_000
"""Characters of an expression with its repetitions written out; ``llguidance`` takes 30 ms for so many states."""

REPETITIONS_MAX = 1_000_000
"""Largest ``maxLength``, ``minItems`` and their like: some libraries write repetitions out."""

_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords below which there are values and no schemas."""

Path = tuple[str | int, ...]


def objection(sampling: Sampling) -> str | None:
    """Return why a guide is too much, with the place inside it, or ``None``; whether it can be kept to is not asked."""
    try:
        if sampling.guided_json is not None:
            return _of_schema(json.loads(sampling.guided_json))
        if sampling.guided_regex is not None:
            return _of_expression(sampling.guided_regex)
        if sampling.guided_grammar is not None:
            return _of_grammar(sampling.guided_grammar)
        if sampling.structural_tag is not None:
            return _of_tag(sampling.structural_tag)
    except RecursionError:
        return f"it is nested too deeply: allowed are {NESTING_MAX} levels"
    except ValueError as error:
        return f"it is not JSON: {error}"
    return None


def _of_tag(text: str) -> str | None:
    """Return why a structural tag is too much; each of its schemas has references of its own."""
    todo: list[Any] = [json.loads(text)]
    levels = [1]
    while todo:
        node, level = todo.pop(), levels.pop()
        if level > NESTING_MAX:
            return f"it is nested more than {NESTING_MAX} deep, the limit"
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            wrong = None
            if key in ("schema", "json_schema"):
                wrong = _of_schema(value)
            elif isinstance(value, str):
                if key == "pattern":
                    wrong = _of_expression(value)
                elif key == "grammar":
                    wrong = _of_grammar(value)
            else:
                todo.append(value)
                levels.append(level + 1)
            if wrong is not None:
                what = "schema" if key in ("schema", "json_schema") else key
                return f"the {what} that follows {node.get('begin', key)!r:.40}: {wrong}"
    return None


# -- JSON schemas ----------------------------------------------------------------------------------------------------


def _of_schema(schema: Any) -> str | None:
    if not isinstance(schema, dict | list):
        return None
    nodes: list[Any] = [schema]
    parents: list[tuple[int, str | int]] = [(-1, "")]
    levels = [1]
    within_values = [False]
    references: list[tuple[int, str]] = []
    at = 0
    while at < len(nodes):
        node = nodes[at]
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                if levels[at] >= NESTING_MAX:
                    return f"{_place(parents, at)} is nested {NESTING_MAX + 1} deep: allowed are {NESTING_MAX} levels"
                if len(nodes) >= NODES_MAX:
                    return f"it has more than {NODES_MAX} objects and lists, the limit"
                nodes.append(value)
                parents.append((at, key))
                levels.append(levels[at] + 1)
                within_values.append(within_values[at] or key in _VALUES)
            elif isinstance(value, str):
                if key in ("$ref", "$dynamicRef", "$recursiveRef"):
                    references.append((at, value))
                elif key == "pattern" and not within_values[at]:
                    wrong = _of_expression(value)
                    if wrong is not None:
                        return f"{_place(parents, at)}.pattern: {wrong}"
            elif (
                key in _COUNTS and not within_values[at] and isinstance(value, int | float) and value > REPETITIONS_MAX
            ):
                return f"{_place(parents, at)}.{key} is {str(value)[:20]}: allowed is up to {REPETITIONS_MAX}"
        if parents[at][1] == "patternProperties" and isinstance(node, dict) and not within_values[at]:
            for pattern in node:
                wrong = _of_expression(pattern)
                if wrong is not None:
                    return f"{_place(parents, at)}: {wrong}"
        at += 1
    if not references:
        return None  # then nesting is all there is
    heights = [1] * len(nodes)
    for number in range(len(nodes) - 1, 0, -1):
        above = parents[number][0]
        heights[above] = max(heights[above], heights[number] + 1)
    numbers = {id(node): number for number, node in enumerate(nodes)}
    targets: set[int] = set()
    for origin, reference in references:
        target = _target(schema, reference, numbers)
        if target is None and len(nodes) > DEPTH_MAX:
            return (
                f"{_place(parents, origin)}.$ref is {reference[:80]!r}, which is no place in the schema: allowed is "
                f"that in schemas of up to {DEPTH_MAX} objects and lists"
            )
        targets.add(0 if target is None else target)
    depth = heights[0] + sum(heights[target] for target in targets)
    if depth > DEPTH_MAX:
        return f"it is {depth} objects and lists deep, references followed: allowed are {DEPTH_MAX}"
    return None


def _place(parents: Sequence[tuple[int, str | int]], at: int) -> str:
    """Return the JSON path of a node, its middle left out when it is long."""
    steps: list[str] = []
    while at > 0:
        at, key = parents[at]
        steps.append(f"[{key}]" if isinstance(key, int) else f".{key[:40]}")
    steps.reverse()
    if len(steps) > 12:
        steps = [*steps[:6], " … ", *steps[-5:]]
    return "$" + "".join(steps)


def _target(root: Any, reference: str, numbers: dict[int, int]) -> int | None:
    """Return the node that a reference leads to by its path; ``None`` when there is none."""
    base, _, fragment = reference.partition("#")
    if base or (fragment and not fragment.startswith("/")):
        return None
    node = root
    for step in unquote(fragment).split("/")[1:] if fragment else ():
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return numbers.get(id(node), 0)


# -- expressions and grammars ----------------------------------------------------------------------------------------

_PIECE = re.compile(
    r"""\\x\{[^}]{0,16}\}|\\[pPuU]\{[^}]{0,64}\}|\\.          # an escape
      | \[\^?\]?(?:\\.|\[:\^?\w{1,16}:\]|[^\]\\])*+\]?        # a class
      | \((?:\?[^:=!)]{0,64}(?:[:=!]|(?=\))))?                # a group begins, with its flags or name
      | \{\s*+(\d*)\s*+(?:,\s*+(\d*)\s*+)?\}                  # so often
      | .""",
    re.VERBOSE | re.DOTALL,
)
"""One step for every piece, and none goes back over what was read: expressions are read in linear time."""


def _of_expression(text: str) -> str | None:
    """Return why an expression is too much: its nesting, or its size with repetitions written out."""
    groups: list[int] = []
    size = last = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece[0] == "(":
            groups.append(size)
            if len(groups) > NESTING_MAX:
                return f"groups are nested more than {NESTING_MAX} deep, the limit (character {found.start()})"
            size = 0
        elif piece == ")":
            last = size + 1
            size = last + (groups.pop() if groups else 0)
        elif piece[0] == "{" and len(piece) > 1:
            times = max(1, *(int(each.lstrip("0")[:10] or "0") for each in found.groups("0")))
            size += last * (times - 1) + 1
            last *= times
        else:
            size, last = size + 1, (last if piece in "*+?" else 1)
        if size > WRITTEN_OUT_MAX:
            return (
                f"it has more than {WRITTEN_OUT_MAX} characters with its repetitions written out, the limit "
                f"(character {found.start()})"
            )
    return None


_JSON_IN_GRAMMAR = re.compile(r"%json\s*+(?=\{)")
_TOKEN = re.compile(r""""(?:\\.|[^"\\\n])*+"?|//[^\n]*+|\#[^\n]*+|/((?:\\.|[^/\\\n])*+)/?""")
_CLASS = re.compile(r"\[(?:\\.|[^\]\\\n])*+\]?")
_DEFINES = re.compile(r":+")
_BRACKET = re.compile(r"[][(){}]")
_decoder = json.JSONDecoder()


def _of_grammar(text: str) -> str | None:
    """Return why a grammar (Lark, EBNF, GBNF) is too much: its schemas, expressions, rules or brackets."""
    pieces: list[str] = []
    begin = 0
    for found in _JSON_IN_GRAMMAR.finditer(text):
        if found.start() < begin:
            continue  # inside another schema
        try:
            schema, end = _decoder.raw_decode(text, found.end())
        except ValueError:
            # One look, for each costs a pass over the text before it.
            return f"what follows %json at character {found.end()} is no JSON"
        wrong = _of_schema(schema)
        if wrong is not None:
            return f"the schema at character {found.end()}: {wrong}"
        pieces.append(text[begin : found.start()])
        begin = end
    pieces.append(text[begin:])
    rest = " ".join(pieces)
    for found in _TOKEN.finditer(rest):
        wrong = None if found[1] is None else _of_expression(found[1])
        if wrong is not None:
            return f"the expression {found[0][:40]}: {wrong}"
    plain = _TOKEN.sub("", rest)
    rules = len(_DEFINES.findall(_CLASS.sub("", plain)))
    if rules > RULES_MAX:
        return f"it has {rules} rules: allowed are up to {RULES_MAX}"
    depth = 0
    for bracket in _BRACKET.finditer(plain):
        depth = max(0, depth + (1 if bracket[0] in "([{" else -1))
        if depth > NESTING_MAX:
            return f"brackets are nested more than {NESTING_MAX} deep, the limit"
    return None
