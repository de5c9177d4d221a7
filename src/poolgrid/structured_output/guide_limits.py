"""How deep and how large a guide (JSON schema, expression, grammar, structural tag) may be, whatever compiles it.

Libraries that compile guides recurse: over nesting, over ``$ref`` after ``$ref``, over rules that call rules. A guide
of some kilobytes overflows their stack, which no handler catches. So the depth of a recursion that could follow a guide
is bounded before any library sees it, by counting what can be counted in one pass:

- the *nesting* of objects and lists, of groups and of brackets;
- the *depth* of a schema, references followed: the longest chain of objects and lists that lead to each other, where
  those that lead back to one another (a recursive schema) all count, for a walk may pass through each of them once;
- the *rules* of a grammar, for one may call the next;
- the size of an expression *written out*: ``((a{1000}){1000})`` is a million states in 17 characters.

``objection`` runs in a process that may die (``poolgrid.frontend.guide_compiler``), and once more at a worker that
compiles in its own. It is linear in the guide's size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from poolgrid.wire.requests import Sampling

NESTING_MAX = 128
"""Objects and lists in each other, groups in each other. ``serde`` and others read no JSON that is nested deeper; tools
that people write stay below 20."""

DEPTH_MAX = 512
"""Objects and lists on the longest way through a schema, references followed: 170 objects in each other. ``llguidance``
takes about 10 KiB of stack for each of those, so 2 of a thread's 8 MiB."""

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
    edges: list[list[int]] = [[]]
    within_values = [False]
    references: list[tuple[int, str]] = []
    names: dict[str, list[int]] = {}
    at = 0
    while at < len(nodes):
        node = nodes[at]
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                if levels[at] >= NESTING_MAX:
                    return f"{_place(parents, at)} is nested {NESTING_MAX + 1} deep: allowed are {NESTING_MAX} levels"
                if len(nodes) >= NODES_MAX:
                    return f"it has more than {NODES_MAX} objects and lists, the limit"
                edges[at].append(len(nodes))
                nodes.append(value)
                parents.append((at, key))
                levels.append(levels[at] + 1)
                edges.append([])
                within_values.append(within_values[at] or key in _VALUES)
            elif isinstance(value, str):
                if key in ("$ref", "$dynamicRef", "$recursiveRef"):
                    references.append((at, value))
                elif key in ("$id", "id", "$anchor", "$dynamicAnchor"):
                    names.setdefault(value.lstrip("#"), []).append(at)
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
    numbers = {id(node): number for number, node in enumerate(nodes)}
    for origin, reference in references:
        targets = _targets(schema, reference, names, numbers)
        if targets is None:
            if len(nodes) > DEPTH_MAX:
                return (
                    f"{_place(parents, origin)}.$ref is {reference[:80]!r}, which leads nowhere inside the schema: "
                    f"allowed is that in schemas of up to {DEPTH_MAX} objects and lists"
                )
            targets = [0]
        edges[origin].extend(targets)
    depth, end = _longest_way(edges)
    if depth > DEPTH_MAX:
        return (
            f"it is {depth} objects and lists deep, references followed, by way of {_place(parents, end)}: allowed are "
            f"{DEPTH_MAX}"
        )
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


def _targets(root: Any, reference: str, names: dict[str, list[int]], numbers: dict[int, int]) -> list[int] | None:
    """Return the nodes that a reference may mean, ``None`` when it cannot be told."""
    base, _, fragment = reference.partition("#")
    if not base and (not fragment or fragment.startswith("/")):
        node = root
        for step in unquote(fragment).split("/")[1:] if fragment else ():
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        number = numbers.get(id(node))
        return [] if number is None else [number]
    # Names are not resolved against their base: whoever has the name may be meant.
    return None if fragment.startswith("/") else names.get(fragment) or names.get(base)


def _longest_way(edges: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the nodes on the longest way from node 0, and where it begins to be too long (or ends).

    Nodes of a cycle count together (Tarjan's strongly connected components, without recursion). Node 0 reaches all.
    """
    size = len(edges)
    order, low, component = [-1] * size, [0] * size, [-1] * size
    depths: list[int] = []
    members: list[int] = []
    stack: list[int] = []
    clock = 0
    work: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        nonlocal clock
        order[node] = low[node] = clock
        clock += 1
        stack.append(node)
        work.append((node, iter(edges[node])))

    enter(0)
    while work:
        node, rest = work[-1]
        for target in rest:
            if order[target] < 0:
                enter(target)
                break
            if component[target] < 0:
                low[node] = min(low[node], order[target])
        else:
            work.pop()
            if work:
                above = work[-1][0]
                low[above] = min(low[above], low[node])
            if low[node] == order[node]:
                together: list[int] = []
                while not together or together[-1] != node:
                    together.append(stack.pop())
                    component[together[-1]] = len(depths)
                below = [
                    depths[component[to]] for each in together for to in edges[each] if component[to] < len(depths)
                ]
                depths.append(len(together) + max(below, default=0))
                members.append(node)
    end = next((node for node, depth in zip(members, depths, strict=True) if depth > DEPTH_MAX), 0)
    return depths[component[0]], end


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
