"""Writes the table of parts into docs/attacks.md: ``python -m lab.attacks.page`` (`make docs`)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from lab.attacks.attack import Attack
from lab.attacks.catalogue import PARTS

VARIANTS_FROM = 3
"""So many attacks of one name are shown in one row, with the action of the first."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attacks.md"
BEGIN, END = "<!-- generated: python -m lab.attacks.page -->", "<!-- /generated -->"


def tables() -> str:
    """Return the parts and their attacks as Markdown."""
    lines: list[str] = []
    for part in PARTS.values():
        lines += [f"### {part.name}: {part.title}", "", "| attack | action | in CI |", "|---|---|---|"]
        families = Counter(_family(each) for each in part.attacks)
        shown: set[str] = set()
        for each in part.attacks:
            family = _family(each)
            if families[family] < VARIANTS_FROM:
                lines.append(f"| {each.name} | {each.does} | {'yes' if each.short else ''} |")
            elif family not in shown:
                shown.add(family)
                short = any(other.short for other in part.attacks if _family(other) == family)
                lines.append(f"| {family}, {families[family]} variants | {each.does} | {'yes' if short else ''} |")
        lines.append("")
    return "\n".join(lines)


def _family(attack: Attack) -> str:
    """Return the name up to its first comma: attacks that share it differ in their parameters."""
    return attack.name.partition(", ")[0]


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
