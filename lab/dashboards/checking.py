"""Whether a board can show anything: each metric and label that it names is one that some code defines.

PromQL is read as far as that takes: selectors with their matchers, groupings, and what the labels of a result can be.
What a query really returns, ``python -m tests.observability_proof`` finds out on a live fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from lab.dashboards.foreign import TARGET_LABELS
from lab.dashboards.model import Board, Panel

Known = Mapping[str, frozenset[str]]
"""The labels of each series, by its name as PromQL writes it."""

UNITS = {
    "seconds": {"s"},
    "bytes": {"bytes", "Bps", "percentunit"},
    "ratio": {"percentunit"},
    "celsius": {"celsius"},
    "watts": {"watt"},
}
"""Units that fit a metric by the end of its name; what is divided may have another."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR = re.compile(rf"(?<![\w:$.\"])({_NAME})(?![\w:])\s*(\{{[^}}]*\}})?(?!\s*\()")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_STRING = re.compile(r'"[^"]*"')
_WORDS = frozenset(
    {
        *("by", "without", "on", "ignoring", "group_left", "group_right"),
        *("and", "or", "unless", "bool", "offset", "inf", "nan", "vector", "scalar", "time"),
    }
)
_LABEL_VALUES = re.compile(r"^label_values\((.*), (\w+)\)$")


def selectors(expr: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each series that a query reads, with the labels that it is matched by."""
    # What stands in a string is a value, whatever it looks like.
    bare = _STRING.sub(lambda text: f'"{"x" * (len(text[0]) - 2)}"', _GROUPING.sub(" ", expr))
    for found in _SELECTOR.finditer(bare):
        name, matchers = found[1], found[2] or ""
        before = bare[: found.start()]
        if name in _WORDS or before.count('"') % 2 or before.count("{") > before.count("}") or before.endswith("["):
            continue
        yield name, tuple(_MATCHER.findall(matchers))


def problems(board: Board, known: Known) -> list[str]:
    """Return what is wrong with a board; empty when nothing is."""
    found = [f"{board.title}: {panel.title}: {each}" for panel in board.panels for each in _of_panel(panel, known)]
    for variable in board.variables:
        asked = _LABEL_VALUES.match(variable.query)
        if asked is None:
            found.append(f"{board.title}: variable {variable.name}: is not label_values(selector, label)")
            continue
        found += [f"{board.title}: variable {variable.name}: {each}" for each in _of_query(asked[1], known, [asked[2]])]
    titles = [panel.title for panel in board.panels]
    found += [f"{board.title}: two panels are called {title!r}" for title in set(titles) if titles.count(title) > 1]
    return found


def _of_panel(panel: Panel, known: Known) -> Iterator[str]:
    if not panel.unit:
        yield "has no unit"
    if not (panel.means.endswith(".") and panel.do.endswith(".")):
        yield "has no description that says what it means and what to do"
    for query in panel.queries:
        legend = list(query.legend_labels) + list(panel.matrix or ())
        yield from _of_query(query.expr, known, legend)
        yield from _wrong_unit(panel, query.expr)


def _of_query(expr: str, known: Known, wanted: Iterable[str]) -> Iterator[str]:
    read = list(selectors(expr))
    if not read:
        yield f"reads no series: {expr}"
    labels: set[str] = set(TARGET_LABELS)
    for name, matchers in read:
        if name not in known:
            yield f"reads {name}, which no code defines"
            continue
        labels |= known[name]
        for label in matchers:
            if label not in known[name] | TARGET_LABELS:
                yield f"matches {name} by {label}, which it does not have"
    grouped = [label.strip() for group in _GROUPING.findall(expr) for label in group.split(",") if label.strip()]
    for label in (*grouped, *wanted):
        if label not in labels:
            yield f"names the label {label}, which nothing that it reads has"


def _wrong_unit(panel: Panel, expr: str) -> Iterator[str]:
    if not panel.unit or "/" in _STRING.sub("", expr) or "count" in expr.split("(")[0]:
        return
    for name, _ in selectors(expr):
        base = re.sub(r"_(bucket|sum|count|total)$", "", name)
        allowed = UNITS.get(base.rpartition("_")[2])
        rate_of_seconds = "rate(" in expr and name.endswith("_seconds_total")
        if allowed is not None and panel.unit not in allowed and not rate_of_seconds:
            yield f"shows {name} in the unit {panel.unit!r}, which fits no {base.rpartition('_')[2]}"
