"""The table of a run: one row for each attack, for people and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Verdict = Literal["held", "fell", "skipped"]


class Row(msgspec.Struct):
    """What came of one attack."""

    part: str
    attack: str
    verdict: Verdict
    got: str
    """What the attacker saw, or why it was skipped."""
    faults: list[str] = []
    requests: int = 0
    errors: int = 0
    wrong: int = 0
    p99_idle_ms: float = 0.0
    p99_ms: float = 0.0
    latency_ratio: float | None = None
    memory_ratio: float = 0.0
    peak_growth_mb: float = 0.0
    took_s: float = 0.0


def show(rows: list[Row], console: Console) -> None:
    """Print the table, and below it what did not hold."""
    table = Table("attack", "the attacker got", "others", "p99", "memory", "verdict")
    for row in rows:
        latency = "not judged" if row.latency_ratio is None else f"× {row.latency_ratio:.1f}"
        table.add_row(
            escape(f"{row.part}: {row.attack}"),
            escape(row.got),
            f"{row.requests} asked, {row.errors} failed, {row.wrong} wrong" if row.requests else "",
            f"{latency} ({row.p99_ms:.0f} ms)" if row.requests else "",
            f"× {row.memory_ratio:.2f}, +{row.peak_growth_mb:.0f} MB at most" if row.requests else "",
            row.verdict,
        )
    console.print(table)
    for row in rows:
        for fault in row.faults:
            console.print(f"FELL {row.part}: {row.attack}: {fault}", markup=False, soft_wrap=True)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("held", "fell", "skipped")}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def write(rows: list[Row], path: Path) -> None:
    """Write the rows as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def status(rows: list[Row]) -> int:
    """Return the exit status: 0 when everything that was tried held and something was tried, 1 otherwise."""
    tried = [row for row in rows if row.verdict != "skipped"]
    return 0 if tried and all(row.verdict == "held" for row in tried) else 1
