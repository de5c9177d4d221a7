"""Writes the table of parts into docs/attacks.md: ``python -m lab.attacks.page`` (`make docs`)."""

from __future__ import annotations

import re
from pathlib import Path

from lab.attacks.catalogue import PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attacks.md"
BEGIN, END = "<!-- generated: python -m lab.attacks.page -->", "<!-- /generated -->"


def tables() -> str:
    """Return the parts and their attacks as Markdown."""
    lines: list[str] = []
    for part in PARTS.values():
        lines += [f"### {part.name}: {part.title}", "", "| attack | what it does | short form |", "|---|---|---|"]
        lines += [f"| {each.name} | {each.does} | {'yes' if each.short else ''} |" for each in part.attacks]
        lines.append("")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with the tables of now; raises ``ValueError`` when it has no place for them."""
    made, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n\n{tables()}\n{END}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"writing {PAGE}: it has {count} places between {BEGIN} and {END}, allowed is one")
    return made


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
