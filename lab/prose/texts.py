"""The texts that a person reads: Markdown pages, and what the program prints, taken from the code.

Texts out of the code become one Markdown document per kind, a paragraph each, so that the same checker reads them.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parents[2]

OPTION_HELP_CHARACTERS = 160
"""Longest help of an option: two lines at 80 columns, so that a panel of twelve options fits a screen."""


def pages() -> dict[str, str]:
    """Return every Markdown page for users and contributors, by its path."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "CHANGELOG.md")]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def option_helps() -> Iterator[tuple[str, str]]:
    """Yield the command with its option, and the option's help without its default and its allowed words."""
    from poolgrid.server.cli.main import app

    for path, command in _commands(app, ()):
        for parameter in command.params:
            text = getattr(parameter, "help", None)
            if isinstance(parameter, click.Option) and text:
                yield f"{' '.join(path)} {parameter.opts[0]}", text.partition(" One of: ")[0].partition(" [default:")[0]


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _commands(below, (*path, name))
    else:
        yield path, command


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path and the source of each module of the product."""
    for folder in ("src/poolgrid", "router", "global_router", "workers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def deployment_comments() -> Iterator[tuple[str, int, str]]:
    """Yield path, line and text of each comment line of the files that operators install; manifests are rendered."""
    for path in sorted((ROOT / "deploy").rglob("*")):
        if path.is_file() and path.suffix != ".json" and "manifests" not in path.parts:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.lstrip().startswith("#"):
                    yield str(path.relative_to(ROOT)), number, line


def log_messages() -> Iterator[str]:
    """Yield the message of each call of a logger in the product."""
    for _, source in sources():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="log" | "logger"), attr=level),
                    args=[ast.Constant(value=str(message)), *_],
                ) if level in ("debug", "info", "warning", "error", "exception"):
                    yield message


def words_in_code(source: str, words: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each match in a docstring, a comment or another string; names of the code are free."""
    if words.search(source) is None:
        return  # tokens of all files would take seconds
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            for found in words.finditer(re.sub(r"\{[^{}\n]*\}", "", token.string)):
                yield token.start[0] + token.string.count("\n", 0, found.start()), found[0]


def alert_texts() -> Iterator[str]:
    """Yield the summary and description of each alert."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield from (str(text) for text in rule.get("annotations", {}).values() if " " in str(text))


def board_texts() -> Iterator[str]:
    """Yield titles and descriptions of the Grafana boards."""
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        yield from _titles(json.loads(path.read_text(encoding="utf-8")))


def _titles(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (str(node[key]) for key in ("title", "description") if node.get(key))
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _titles(below)


def documents() -> dict[str, str]:
    """Return every text by its name: pages by their paths, texts of the code by their kind."""
    return {
        **pages(),
        "help": _paragraphs(text for _, text in option_helps()),
        "log": _paragraphs(log_messages()),
        "alerts": _paragraphs(alert_texts()),
        "boards": _paragraphs(board_texts()),
    }


def _paragraphs(texts: Iterator[str]) -> str:
    return "".join(f"{text.strip()}\n\n" for text in dict.fromkeys(texts))
