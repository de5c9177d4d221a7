"""The one table of the command line.

Where it is too wide, columns that are optional are left out, the last one first. Where that is too wide as well, each
row is a paragraph: its first value, then every other with its heading, so that no name is cut. What is piped has no
width: rows are lines of any length, for ``grep`` and ``awk``. ``COLUMNS`` sets one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP = 2
"""Cells between two columns."""

PIPED_COLUMNS = 100_000
"""The width of what is no terminal: nothing that we print has lines of this length."""


def terminal(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console: as wide as the terminal, or as what is written into a pipe needs. Numbers have no colours."""
    stream = file if file is not None else sys.stderr if stderr else sys.stdout
    piped = not stream.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    return Console(file=file, stderr=stderr, highlight=False, width=PIPED_COLUMNS if piped else None)


@dataclass(frozen=True, slots=True)
class Heading:
    """A column: what it is called, how its values are aligned, whether a narrow terminal can do without it."""

    name: str
    numeric: bool = True
    optional: bool = False


@dataclass(slots=True)
class TerminalTable:
    """Rows of values under headings, drawn by rich, which adapts to the room that there is."""

    headings: Sequence[Heading]
    title: str = ""
    note: str = ""
    """A line below the table."""
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *values: Text | str, style: str = "") -> None:
        """Add a row, a value for each heading; what is no ``Text`` is taken as it is, without markup."""
        if len(values) != len(self.headings):
            raise ValueError(f"adding a row of {len(values)} values to a table of {len(self.headings)} columns")
        self.rows.append([value if isinstance(value, Text) else Text(value, style) for value in values])

    @property
    def width(self) -> int:
        return self._width(range(len(self.headings)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(self.title, style="bold"),) if self.title else ()
        shown = list(range(len(self.headings)))
        while self._width(shown) > options.max_width:
            optional = [index for index in shown if self.headings[index].optional]
            if not optional:
                yield from self._paragraphs()
                break
            shown.remove(optional[-1])
        else:
            yield self._table(shown)
        yield from (Text(self.note, style="dim"),) if self.note else ()

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in map(self.headings.__getitem__, shown):
            table.add_column(Text(heading.name), justify="right" if heading.numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*(row[index] for index in shown))
        return table

    def _paragraphs(self) -> RenderResult:
        for row in self.rows:
            yield Text("", overflow="fold").append_text(row[0])
            named = zip(self.headings[1:], row[1:], strict=True)
            items = [Text.assemble((heading.name, "dim"), " ", value) for heading, value in named if value.plain]
            yield Padding(Text("  ", overflow="fold").join(items), (0, 0, 0, 2))

    def _width(self, columns: Sequence[int]) -> int:
        cells = [max(len(self.headings[at].name), *(row[at].cell_len for row in self.rows), 0) for at in columns]
        return sum(cells) + GAP * (len(cells) - 1)
