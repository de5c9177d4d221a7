"""What chat templates use beyond Jinja: a tag, a filter and a function that transformers gives them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Leave the tag out and keep what is in it."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def raise_exception(message: str) -> NoReturn:
    """Let a template refuse what it is given."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is, without what keeps it from being HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
