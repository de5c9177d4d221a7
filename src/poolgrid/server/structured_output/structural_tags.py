"""Structural tags as a grammar: for engines and checks whose library takes grammars and no tags.

A structural tag describes in JSON the parts of an output: texts that are given, JSON that keeps to a schema, free text
up to an end. XGrammar takes it as it is. ``llguidance`` takes a grammar in its own form of Lark, which is made here.

| ``type`` of a part | what the output has there |
|---|---|
| ``const_string`` | ``value`` |
| ``json_schema`` | JSON that keeps to ``json_schema`` |
| ``any_text`` | anything; inside a ``tag`` up to its end |
| ``sequence``, ``or`` | all ``elements`` one after the other, or one of them |
| ``tag`` | ``begin``, the part ``content``, ``end`` |
| ``tags_with_separator`` | ``tags`` with ``separator`` between them (``at_least_one``, ``stop_after_first``) |
| ``triggered_tags`` | anything; but each text of ``triggers`` begins one of ``tags`` (likewise) |

An older form, ``structures`` and ``triggers`` at the top, is ``triggered_tags`` with schemas.

A request's guide as ``llguidance`` takes it: for the simulated engine, and for the check of a guide before a worker.

Both go one way, so that what the one has compiled the other can compile. Nothing of the library is loaded on import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.kernel.wire.requests import Sampling

_TEXT = r"/(.|\n)*/"
_ESCAPES = {"\n": r"\n", "/": r"\/", "\\": r"\\", "]": r"\]", "^": r"\^", "-": r"\-"}
"""Characters that mean something else in a class of a regular expression, or end it."""

_KINDS = "const_string, json_schema, any_text, sequence, or, tag, tags_with_separator, triggered_tags"


def newer_form(text: str) -> str:
    """Return a structural tag with a ``format``, also for one of the older form; what is neither stays as it is."""
    try:
        tag = json.loads(text)
        if isinstance(tag, dict) and "structures" in tag and "format" not in tag:
            return json.dumps({"type": "structural_tag", "format": _of_older_form(tag)}, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass  # for the engine to refuse
    return text


def lark_grammar(text: str, *, terse: bool = False) -> str:
    """Return the grammar of a structural tag, given as JSON; raises ``ValueError`` for what a grammar cannot express.

    ``terse`` is for random text that has to come to an end: no white space between the tokens of JSON, and in
    text that a tag ends neither quotes nor the character that its end begins with.
    """
    tag = json.loads(text)
    parts = tag.get("format") if isinstance(tag, dict) and "format" in tag else _of_older_form(tag)
    made = _Grammar(terse)
    start = made.part(parts)
    return "\n".join(("%llguidance {}", f"start: {start or _quoted('')}", *made.rules)) + "\n"


class _Grammar:
    """The rules of one grammar, as far as they have names."""

    def __init__(self, terse: bool) -> None:
        self._terse = terse
        self._has_text = False
        self._schemas: dict[str, str] = {}
        """Names of rules by the schema that they are of: the same one may come often."""
        self.rules: list[str] = []

    def part(self, part: Any) -> str:
        """Return the expression of one part; empty where nothing comes."""
        kind = part.get("type") if isinstance(part, dict) else None
        match kind:
            case "const_string":
                return _quoted(_text(part, "value"))
            case "json_schema":
                return self._json(part.get("json_schema"))
            case "any_text":
                return self._any_text()
            case "sequence":
                return _group([self.part(each) for each in _list(part, "elements")], " ")
            case "or":
                return self._one_of([self.part(each) for each in _list(part, "elements")])
            case "tag":
                return self._tag(part)
            case "tags_with_separator":
                return self._separated(part)
            case "triggered_tags":
                return self._triggered(part)
        raise ValueError(f"a part of the structural tag is {_shown(part)}: allowed are the types {_KINDS}")

    def _json(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema is {_shown(schema)}: allowed is a JSON schema, an object")
        if self._terse:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        text = json.dumps(schema, ensure_ascii=False)
        name = self._schemas.get(text)
        if name is None:
            name = self._schemas[text] = f"json_{len(self._schemas)}"
            self.rules.append(f"{name}: %json {text}")
        return name

    def _any_text(self) -> str:
        if not self._has_text:
            self._has_text = True
            self.rules.append(f"ANY_TEXT: {_TEXT}")
        return "ANY_TEXT"

    def _up_to(self, end: str) -> str:
        """Return the name of a rule for any text that ends with the first ``end``."""
        name = f"up_to_{len(self.rules)}"
        text = self._any_text()
        self.rules.append(f"{name}[lazy]: {text} {_quoted(end)}")
        return name

    def _without(self, character: str) -> str:
        name = f"PLAIN_{len(self.rules)}"
        self.rules.append(f'{name}: /[^"{_ESCAPES.get(character, character)}]*/')
        return name

    def _one_of(self, expressions: Sequence[str]) -> str:
        some = [each for each in expressions if each]
        either = _group(some, " | ")
        return f"{either}?" if len(some) < len(expressions) and some else either

    def _tag(self, tag: Any) -> str:
        begin, end, content = _text(tag, "begin"), _text(tag, "end"), tag.get("content")
        return _group([_quoted(begin), *self._content(content, end)], " ")

    def _content(self, content: Any, end: str) -> list[str]:
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return [self._without(end[0]), _quoted(end)] if self._terse else [self._up_to(end)]
        return [self.part(content), _quoted(end)]

    def _separated(self, part: Mapping[str, Any]) -> str:
        one = self._one_of([self._tag(tag) for tag in _tags(part)])
        separator = _quoted(_text(part, "separator"))
        several = one if part.get("stop_after_first") else _group([one, f"{_group([separator, one], ' ')}*"], " ")
        return several if part.get("at_least_one") else f"({several})?"

    def _triggered(self, part: Mapping[str, Any]) -> str:
        triggers = [each for each in _list(part, "triggers") if isinstance(each, str) and each]
        choices: list[str] = []
        for tag in _tags(part):
            begin, end = _text(tag, "begin"), _text(tag, "end")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {begin!r}")
            rest = [_quoted(begin[len(trigger) :]), *self._content(tag.get("content"), end)]
            choices.append(_group([self._up_to(trigger), *rest], " "))
        one = self._one_of(choices)
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"({one} | {self._any_text()})"
        return f"({one}{'+' if part.get('at_least_one') else '*'} {self._any_text()})"


def _of_older_form(tag: Any) -> dict[str, Any]:
    structures, triggers = (tag.get(name) if isinstance(tag, dict) else None for name in ("structures", "triggers"))
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError(
            "allowed is an object with a format, or with lists of structures (begin, schema, end) and of triggers"
        )
    tags = []
    for structure in structures:
        known = structure if isinstance(structure, dict) else {}
        begin, schema, end = (known.get(name) for name in ("begin", "schema", "end"))
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            raise ValueError(f"a structure is {structure!r}: allowed are a begin, a schema and an end")
        tags.append(
            {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        )
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _group(expressions: Sequence[str], between: str) -> str:
    some = [each for each in expressions if each]
    return some[0] if len(some) == 1 else f"({between.join(some)})" if some else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _tags(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    tags = _list(part, "tags")
    if not tags or not all(isinstance(tag, dict) for tag in tags):
        raise ValueError(
            f"tags are {_shown(tags)}: allowed is a list of at least one object with begin, content and end"
        )
    return tags


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} of a {part['type']} is {_shown(value)}: allowed is a list")
    return value


def _text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} of a {part.get('type', 'tag')} is {_shown(value)}: allowed is a string")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def matcher(tokenizer: Any, sampling: Sampling) -> Any:
    """Return the ``LLMatcher`` of a request's guide over an ``LLTokenizer``; raises ``ValueError`` with the reason."""
    from llguidance import LLMatcher

    try:
        # Its constructor never raises: it makes a matcher in error.
        made = LLMatcher(tokenizer, _grammar(sampling), log_level=0)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if made.is_error():
        raise ValueError(error_of(made))
    return made


def error_of(matcher: Any) -> str:
    """Return what a matcher in error reports, without the library's state, which is of no use to a client."""
    text: str = matcher.get_error()
    said = " ".join(text.partition("<state>")[0].split())
    return NOTHING_KEEPS_TO_IT if said in ("", "NoExtensionBias") else said


NOTHING_KEEPS_TO_IT = "no text keeps to it"


def _grammar(sampling: Sampling) -> str:
    """Return the grammar of a request's guide in the library's own form; raises ``ValueError``."""
    from llguidance import LLMatcher, grammar_from

    if sampling.guided_json is not None:
        # No white space between tokens: its length would be one more thing that has to end.
        return LLMatcher.grammar_from_json_schema(
            sampling.guided_json.decode(), overrides={"whitespace_flexible": False}
        )
    if sampling.guided_regex is not None:
        return grammar_from("regex", sampling.guided_regex)
    if sampling.guided_grammar is not None:
        return grammar_from("ebnf", sampling.guided_grammar)
    if sampling.guided_choice is not None:
        return grammar_from("choice", json.dumps(sampling.guided_choice))
    assert sampling.structural_tag is not None, "the request has a guide"
    return LLMatcher.grammar_from_lark(lark_grammar(sampling.structural_tag, terse=True))
