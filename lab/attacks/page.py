"""Writes the table of parts into lab/attacks/README.md: ``python -m lab.attacks.page`` (`make docs`)."""

from __future__ import annotations

import re
from pathlib import Path

from lab.attacks.catalogue import PARTS

PAGE = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- generated: python -m lab.attacks.page -->", "<!-- /generated -->"


def tables() -> str:
    """Return the parts with the number of their attacks as Markdown."""
    lines = ["| part | attacks by | number | of them in CI |", "|---|---|--:|--:|"]
    for part in PARTS.values():
        short = sum(1 for each in part.attacks if each.short)
        lines.append(f"| `{part.name}` | {part.title} | {len(part.attacks)} | {short} |")
    return "\n".join([*lines, ""])


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
