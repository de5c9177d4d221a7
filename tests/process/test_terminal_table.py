"""Tables of the command line: whatever the width, every value is there whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from poolgrid.server.process.figures import UNKNOWN, counted, milliseconds, number, percent, plural, size
from poolgrid.server.process.terminal_table import PIPED_COLUMNS, Heading, TerminalTable, terminal

POD = "trtllm-decode-6f9c7d5b44-x2x9q.inference.svc.cluster.local/3"


def drawn(table: TerminalTable | Tree, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def workers() -> TerminalTable:
    headings = (Heading("worker", False), Heading("model", False, optional=True), Heading("run"), Heading("cached"))
    table = TerminalTable(headings, "workers", "and no more")
    table.add(POD, "tiny", "5", "12,345")
    table.add("w-1", "tiny", "–", "0")
    return table


def test_with_room_a_row_is_a_line_under_headings() -> None:
    lines = [line.rstrip() for line in drawn(workers(), 100).splitlines()]

    assert lines[0] == "workers"
    assert lines[1].split() == ["worker", "model", "run", "cached"]
    assert set(lines[2]) == {"─"}
    assert lines[3].split() == [POD, "tiny", "5", "12,345"]
    assert lines[4].split() == ["w-1", "tiny", "–", "0"]
    assert lines[5] == "and no more"
    assert lines[3].index("12,345") + len("12,345") == lines[4].index("0") + 1, "numbers end together"


def test_where_there_is_little_room_optional_columns_go_first() -> None:
    lines = drawn(workers(), len(POD) + 15).splitlines()

    assert lines[1].split() == ["worker", "run", "cached"]
    assert lines[3].split() == [POD, "5", "12,345"]


def test_where_there_is_less_rows_are_paragraphs_and_say_everything() -> None:
    tree = Tree("request")
    tree.add("attempt").add(workers())
    for text in (drawn(workers(), 66), drawn(tree, 74)):
        assert POD in text
        assert " ".join(text.split("w-1")[0].split()[-6:]) == "model tiny run 5 cached 12,345"
        assert "…" not in text


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 values to a table of 2 columns"):
        TerminalTable((Heading("a"), Heading("b"))).add(Text("1"))


def test_what_is_piped_has_no_width_unless_columns_says_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal(io.StringIO()).width == PIPED_COLUMNS
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal(io.StringIO()).width == 80


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "file", "0 files"),
        (1, "file", "1 file"),
        (1200, "prompt token", "1,200 prompt tokens"),
        (2, "entry", "2 entries"),
        (1, "entry", "1 entry"),
        (3, "simulated worker", "3 simulated workers"),
    ],
)
def test_counts_come_with_their_noun_in_the_right_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text
    assert plural("entry") == "entries"


def test_numbers_have_one_form() -> None:
    assert percent(0.2097) == "21.0%"
    assert percent(0.374, 0) == "37%"
    assert percent(None) == UNKNOWN
    assert number(1234.5) == "1,234.50"
    assert number(1234.5, 0) == "1,234"
    assert number(None) == UNKNOWN
    assert [milliseconds(value) for value in (None, 12.3, 3400.0, 300_000.0)] == [UNKNOWN, "12 ms", "3.4 s", "5 min"]
    assert [size(value) for value in (12, 1536, 3 * 1024**2, 5000 * 1024**3)] == [
        "12 B", "1.5 KiB", "3.0 MiB", "5,000.0 GiB",
    ]  # fmt: skip
