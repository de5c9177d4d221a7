"""Counts of what our style forbids, per text, and the budget that only falls.

``python -m lab.prose`` prints the findings, ``--write`` lowers the budget to today's counts.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.prose.harper import Finding, findings
from lab.prose.texts import (
    OPTION_HELP_CHARACTERS,
    deployment_comments,
    documents,
    option_helps,
    sources,
    words_in_code,
)

BUDGET = Path(__file__).parent / "budget.toml"

SENTENCE_WORDS = 30
"""Longest sentence: style asks for 25, and names, paths and options count as words of their own."""

CHANGELOG_WORDS = 25
"""Longest entry of the change log: what changes for the person who upgrades fits into it."""

DIALECT = re.compile(
    r"\b(?:(?:no|some|every|any)body|whoever|anew|amid|mend(?:s|ed|ing)?|in earnest|until now|beside|under way"
    r"|for ever|in turns|go(?:es|ing)? on|went on|gone on|believ(?:e|es|ed)|let(?:s|ting)? go of"
    r"|some (?:hundred|thousand)"
    r"|(?:card|consolidator|engine|log|peer|pool|process|publisher|router|server|source|worker)s?"
    r" (?:says?|tells?|hears?|speaks?|told|said))\b",
    re.IGNORECASE,
)
"""Words that no docstring, comment or message in the code may have, nor a comment of a deployment file. Harper would
read 180,000 words for the same."""

_CLAUSE = re.compile(r"#+ (?:What|Who|Where|Which|How|When|Why)\b(?!.*\?)")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*`\[(])")
_LINK_TARGET = re.compile(r"\]\([^)]*\)")
_MARK = re.compile(r"<!-- /?[a-z].*? ?-->")


def every_finding() -> list[Finding]:
    """Return what Harper and our own rules find in every text, and words of our dialect in the code."""
    texts = documents()
    own = [found for name, text in texts.items() for found in _own_findings(name, text)]
    own += [
        Finding("help", 0, "OptionLength", f"{option}: {len(text)} characters")
        for option, text in option_helps()
        if len(text) > OPTION_HELP_CHARACTERS
    ]
    for path, source in sources():
        own += [Finding(path, line, "Dialect", words) for line, words in words_in_code(source, DIALECT)]
    for path, line, comment in deployment_comments():
        own += [Finding(path, line, "Dialect", found[0]) for found in DIALECT.finditer(comment)]
    return findings(texts) + own


def _own_findings(name: str, text: str) -> Iterator[Finding]:
    for number, block in _blocks(text):
        if _CLAUSE.match(block):
            yield Finding(name, number, "HeadingClause", block)
        if block.startswith(("#", "|")):
            continue
        words = len(block.split())
        if name == "CHANGELOG.md" and block.startswith("- ") and words > CHANGELOG_WORDS + 1:
            yield Finding(name, number, "ChangelogEntry", f"{words - 1} words: {block[:60]}")
        for sentence in _SENTENCE_END.split(_MARK.sub("", _LINK_TARGET.sub("]", block))):
            if len(sentence.split()) > SENTENCE_WORDS:
                yield Finding(name, number, "SentenceLength", f"{len(sentence.split())} words: {sentence[:60]}")


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items, rows and headings outside code, each with the number of its first line."""
    block: list[str] = []
    start, code = 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith(("```", "~~~"))
        begins = re.match(r"\s*(?:[-*] |\d+\. |#|\||<!--)", line) is not None
        if block and (fence or begins or not line.strip()):
            yield start, " ".join(block)
            block = []
        code ^= fence
        if not code and not fence and line.strip() and not line.lstrip().startswith("<!--"):
            start = start if block else number
            block.append(line.strip())


def counts(found: list[Finding]) -> Mapping[str, int]:
    """Return the number of findings by document, without those that have none."""
    return dict(sorted(Counter(each.document for each in found).items()))


def budget() -> Mapping[str, int]:
    """Return how many findings each document may have."""
    allowed: dict[str, int] = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["findings"]
    return allowed


def write_budget(found: list[Finding]) -> None:
    """Set the budget to the counts; a document without findings has no line."""
    lines = [f'"{name}" = {number}' for name, number in counts(found).items()]
    head = "# Findings that each text may have: only down, by `python -m lab.prose --write`.\n[findings]\n"
    BUDGET.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
