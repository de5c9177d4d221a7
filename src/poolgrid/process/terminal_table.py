"""The one table of the command line: never cut, whatever the width.

Rules
    1. With room for it, a table has a line of headings, a rule, and a line a row.
    2. Where that is too wide, columns that are optional are left out, the last one first.
    3. Where that is too wide as well, each row is a paragraph: its first value on a line, then every other with its
       heading, those of optional columns too. So a name that is longer than half a line costs height and no letters.
    4. What is piped has no width: rows are lines of any length, for ``grep`` and ``awk``. ``COLUMNS`` sets one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

GAP = "  "

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
    """Rows of values under headings, which adapts to the room that there is when it is drawn."""

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
        """Yield the table as lines for the room that ``options`` says there is."""
        room = options.max_width
        if self.title:
            yield Text(self.title, style="bold")
        shown = self._columns_that_fit(room)
        yield from self._lines(shown) if shown else self._paragraphs(room)
        if self.note:
            yield Text(self.note, style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the best width."""
        best = max(self.width, len(self.title))
        return Measurement(min(20, options.max_width), min(best, options.max_width))

    def _widths(self) -> list[int]:
        return [
            max([len(heading.name), *(row[index].cell_len for row in self.rows)])
            for index, heading in enumerate(self.headings)
        ]

    def _width(self, columns: Iterable[int]) -> int:
        widths = self._widths()
        chosen = [widths[index] for index in columns]
        return sum(chosen) + len(GAP) * (len(chosen) - 1)

    def _columns_that_fit(self, room: int) -> list[int]:
        """Return the columns to show as a table; none when rows have to be paragraphs."""
        shown = list(range(len(self.headings)))
        while self._width(shown) > room:
            optional = [index for index in shown if self.headings[index].optional]
            if not optional:
                return []
            shown.remove(optional[-1])
        return shown

    def _lines(self, shown: Sequence[int]) -> RenderResult:
        widths = self._widths()

        def line(values: Sequence[Text]) -> Text:
            made = Text(no_wrap=True)
            for at, index in enumerate(shown):
                blank = " " * (widths[index] - values[index].cell_len)
                numeric = self.headings[index].numeric
                last = at == len(shown) - 1
                made.append(GAP if at else "")
                made.append(blank if numeric else "")
                made.append_text(values[index])
                made.append("" if numeric or last else blank)
            return made

        headings = line([Text(heading.name) for heading in self.headings])
        headings.stylize("bold")
        yield headings
        yield Text("─" * self._width(shown), style="dim", no_wrap=True)
        for row in self.rows:
            yield line(row)

    def _paragraphs(self, room: int) -> RenderResult:
        for row in self.rows:
            yield Text(overflow="fold").append_text(row[0])
            line = Text("  ", overflow="fold")
            for heading, value in zip(self.headings[1:], row[1:], strict=True):
                if not value.plain:
                    continue
                item = Text.assemble((heading.name, "dim"), " ", value)
                begun = len(line.plain.strip()) > 0
                if begun and line.cell_len + len(GAP) + item.cell_len > room:
                    yield line
                    line, begun = Text("  ", overflow="fold"), False
                line.append(GAP if begun else "")
                line.append_text(item)
            if line.plain.strip():
                yield line
