"""The command for attackers: what is chosen, what the table says, the exit status, and that its page is true."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lab.attacks import __main__ as command
from lab.attacks.catalogue import PARTS
from lab.attacks.page import PAGE, with_tables
from lab.attacks.table import Row, show, status, write

HELD = Row("connections", "resets", "held", "5000 connections reset", requests=300, latency_ratio=1.5, memory_ratio=1.0)
FELL = Row("guides", "[lists]", "fell", "12 × 200", ["w ended with status -11"], requests=300, errors=4)
SKIPPED = Row("slow-disk", "one write", "skipped", "there is no C compiler (cc)")


def test_the_page_names_every_attack() -> None:
    page = PAGE.read_text()

    assert page == with_tables(page), "run make docs"


def test_names_are_unique_and_every_part_is_tried() -> None:
    names = [attack.name for part in PARTS.values() for attack in part.attacks]

    assert len(set(names)) == len(names)
    before = {"connections", "guides", "media", "frames", "engine", "timing", "slow-disk", "pauses", "up"}
    assert set(PARTS) == before | {"members", "tasks", "picker", "nats", "names"}
    assert all(part.attacks for part in PARTS.values())


def test_parts_and_attacks_are_chosen_by_name() -> None:
    (guides,) = command.chosen(["guides"], [], False)
    (one,) = command.chosen([], ["gzip bomb"], False)
    short = command.chosen([], [], True)

    assert guides == PARTS["guides"]
    assert [attack.name for attack in one.attacks] == ["gzip bomb"]
    assert all(attack.short for part in short for attack in part.attacks)
    assert command.chosen(["pauses"], [], True) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "part 'nobody' is unknown, allowed are connections"),
        (["--only", "nothing"], "attack 'nothing' is unknown"),
        (["--seconds", "0"], "--seconds is 0.0, allowed are 0.5 to 600"),
        (["--share", "2"], "--share is 2.0, allowed are values above 0 up to 1"),
        (["pauses", "--short"], "no attack of pauses is part of the short form"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(attack.name in listed for part in PARTS.values() for attack in part.attacks)


def test_the_table_says_what_held_and_why_something_fell(tmp_path: Path) -> None:
    out = io.StringIO()
    show([HELD, FELL, SKIPPED], Console(file=out, width=200))
    write([HELD, FELL, SKIPPED], tmp_path / "table.json")

    printed = out.getvalue()
    assert "guides: [lists]" in printed
    assert "FELL guides: [lists]: w ended with status -11" in printed
    assert "there is no C compiler (cc)" in printed
    assert "1 held, 1 fell, 1 skipped" in printed
    assert [row["verdict"] for row in json.loads((tmp_path / "table.json").read_text())] == ["held", "fell", "skipped"]


def test_the_exit_status_is_good_only_when_everything_tried_held() -> None:
    assert status([HELD, SKIPPED]) == 0
    assert status([HELD, FELL]) == 1
    assert status([SKIPPED]) == 1, "nothing was tried"
    assert status([]) == 1
