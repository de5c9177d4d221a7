"""The tables of parsers in ``docs/internals/parsers.md``, as the data files of the formats say.

``python -m lab.website.parser_tables`` writes them (``make docs``); a test fails while the page differs. A table stands
between ``<!-- parsers: reasoning -->`` and ``<!-- /parsers -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from poolgrid.plugins.parsers.formats import CallFormat, ReasoningFormat, call_formats, reasoning_formats

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "parsers.md"

HEAD = "| parser | models | format | other names |\n|---|---|---|---|\n"

_TABLE = re.compile(r"(<!-- parsers: (\w+) -->\n)(.*?)(<!-- /parsers -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with its tables as the formats are."""
    rows = {
        "reasoning": [_row(name, each) for name, each in reasoning_formats()],
        "calls": [_row(name, each) for name, each in call_formats()],
    }
    return _TABLE.sub(lambda table: f"{table[1]}{HEAD}{''.join(rows[table[2]])}{table[4]}", page)


def _row(name: str, known: CallFormat | ReasoningFormat) -> str:
    others = ", ".join(f"`{alias}`" for alias in sorted(known.aliases))
    return f"| `{name}` | {known.models} | {_code(known.example)} | {others} |\n"


def _code(text: str) -> str:
    code = f"```` {text} ````" if "`" in text else f"`{text}`"
    return code.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
