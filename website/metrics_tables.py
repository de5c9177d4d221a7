"""The tables of ``docs/metrics.md``: which metrics there are, of which type and with which labels, as the code says.

``python -m website.metrics_tables`` writes them (``make docs``), and a test fails while the page differs. The last
column is for people and stays as it is; a metric that has none yet gets its help. A new metric goes to the table of
its process, by the beginning of its name, and a row leaves the page with its metric.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.exported_metrics import Exported, exported

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_ROW = re.compile(r"\| `(poolgrid_\w+)` \| \w+ \| [^|]*\| (.*) \|")


def with_tables(page: str, metrics: Sequence[Exported]) -> str:
    """Return the page with its tables as the metrics are; raises ``ValueError`` when one has no table to go to."""
    by_name = {each.name: each for each in metrics}
    lines = page.splitlines()
    rows = [match[1] if (match := _ROW.fullmatch(line)) else None for line in lines]
    for name in by_name.keys() - set(rows):
        lines.insert(_place_of(name, rows), _row(by_name[name], by_name[name].family.documentation))
        rows = [match[1] if (match := _ROW.fullmatch(line)) else None for line in lines]
    written = []
    for line in lines:
        match = _ROW.fullmatch(line)
        if match is None:
            written.append(line)
        elif match[1] in by_name:
            written.append(_row(by_name[match[1]], match[2]))
    return "\n".join(written) + "\n"


def _place_of(name: str, rows: Sequence[str | None]) -> int:
    """Return the line after the last row that begins like a metric, for as many words as any does."""
    words = name.split("_")
    for count in range(len(words) - 1, 1, -1):
        beginning = "_".join(words[:count]) + "_"
        alike = [number for number, row in enumerate(rows) if row is not None and row.startswith(beginning)]
        if alike:
            return alike[-1] + 1
    raise ValueError(f"docs/metrics.md has no table for {name}: none has a row that begins like it")


def _row(metric: Exported, words: str) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.family.type} | {labels}{' ' if labels else ''}| {words} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), exported()), encoding="utf-8")
