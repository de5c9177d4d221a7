"""Every query of every panel and variable, sent to a Prometheus that scrapes a live fleet."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from lab.dashboards.boards import BOARDS
from lab.dashboards.model import Board, Panel, Query
from tests.observability_proof.stack import SCRAPE_S, Stack, pause

RATE_INTERVAL_S = 15 * SCRAPE_S
"""What Grafana takes is four scrapes at least; on a busy machine some of them are late."""

RANGE_S = 900
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Shown:
    """What one query of one panel showed."""

    board: str
    panel: str
    unit: str
    series: int
    example: str
    value: float
    wrong: str


def expanded(expr: str) -> str:
    """Return a query with Grafana's variables put in, as they are when everything is chosen."""
    expr = expr.replace("$__rate_interval", f"{RATE_INTERVAL_S}s").replace("$__range", f"{RANGE_S}s")
    return re.sub(r"\$\{?\w+\}?", ".*", expr)


def look(stack: Stack, board: Board, panel: Panel, query: Query) -> Shown:
    """Send a query, and say what it shows."""
    labels = (*query.legend_labels, *(panel.matrix or ()))
    found = stack.query(expanded(query.expr))
    wrong = _wrong(found, labels)
    metric, value = max(found, key=lambda each: each[1], default=({}, math.nan))
    example = ", ".join(f"{label}={metric.get(label, '')}" for label in labels)
    return Shown(board.title.removeprefix("poolgrid: "), panel.title, panel.unit, len(found), example, value, wrong)


def _wrong(found: list[tuple[dict[str, str], float]], labels: tuple[str, ...]) -> str:
    if not found:
        return "shows nothing"
    if odd := [value for _, value in found if not math.isfinite(value)]:
        return f"{len(odd)} of {len(found)} series are {odd[0]}"
    without = {label for label in labels if not all(metric.get(label) for metric, _ in found)}
    return f"has series without {', '.join(sorted(without))}" if without else ""


def prove(stack: Stack) -> list[Shown]:
    """Send all queries of all panels and variables; those that show nothing again, until patience ends."""
    shown = []
    asked = [(board, panel, query) for board in BOARDS for panel in board.panels for query in panel.queries]
    answers = [look(stack, *each) for each in asked]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(each.wrong for each in answers):
        pause(SCRAPE_S)
        answers = [look(stack, *each) if had.wrong else had for each, had in zip(asked, answers, strict=True)]
    for board in BOARDS:
        for variable in board.variables:
            selector, _, label = variable.query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
            values = stack.label_values(expanded(selector), label)
            wrong = "" if values else "has no values"
            shown.append(
                Shown(
                    board.title.removeprefix("poolgrid: "),
                    f"${variable.name}",
                    "",
                    len(values),
                    ", ".join(values[:3]),
                    math.nan,
                    wrong,
                )
            )
    return [*shown, *answers]
