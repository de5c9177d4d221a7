"""The tables of metrics in the pages: which metrics there are, with type, labels and help, as the code says.

``python -m lab.website.metrics_tables`` writes them (``make docs``); a test fails while a page differs. A table stands
between ``<!-- metrics: poolgrid_worker_ -->`` and ``<!-- /metrics -->``. It holds the metrics whose names begin with
one of the words of its mark. A row has the labels of its metric in braces, and the metric's own help; ``FURTHER`` adds
links to where more is said. Rows keep their order: a new metric goes below those that begin like it, and a row leaves
with its metric.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.exported_metrics import Exported, exported

DOCS = Path(__file__).parents[2] / "docs"

EVERY_METRIC = "metrics.md"
"""The page that has a table for each metric; other pages show the metrics of one process."""

PAGES = (EVERY_METRIC,)

FURTHER = {
    "poolgrid_consolidator_source_state": "[States](internals/consolidator.md#stream-states).",
    "poolgrid_frontend_media_refused_total": "[Codes](multimodal.md).",
    "poolgrid_frontend_refusals_total": "[Codes](http_api.md#refusals).",
    "poolgrid_http_certificate_stale": "[TLS](security.md#tls).",
    "poolgrid_http_refused_total": "[Reasons](security.md#http-connection-limits).",
    "poolgrid_plane_refused_peers_total": "[CURVE](security.md#curve).",
    "poolgrid_router_further_sources": "[Further sources](internals/consolidator.md#further-sources-of-a-worker).",
    "poolgrid_router_recorded_decisions_total": "[Decision journal](measuring.md#replay).",
}
"""Where more is said of a metric: a help is plain text, which has no links."""

HEAD = "| metric | description |\n|---|---|\n"

_TABLE = re.compile(r"(<!-- metrics: ([a-z_ ]+) -->\n)(.*?)(<!-- /metrics -->)", re.DOTALL)
_NAME = re.compile(r"^\| `(poolgrid_\w+)(?:\{[a-z_,]+\})?` \|", re.MULTILINE)


def with_tables(page: str, metrics: Sequence[Exported]) -> str:
    """Return the page with its tables as the metrics are."""
    shown: dict[str, str] = {}
    return _TABLE.sub(
        lambda table: f"{table[1]}{_table(table[3], _belonging(table[2], metrics), shown)}{table[4]}", page
    )


def without_table(page: str, metrics: Sequence[Exported]) -> list[str]:
    """Return the names of the metrics that belong to no table of the page."""
    shown = {name for table in _TABLE.finditer(page) for name in _belonging(table[2], metrics)}
    return [each.name for each in metrics if each.name not in shown]


def _belonging(beginnings: str, metrics: Sequence[Exported]) -> dict[str, Exported]:
    return {each.name: each for each in metrics if each.name.startswith(tuple(beginnings.split()))}


def _table(written: str, metrics: dict[str, Exported], shown: dict[str, str]) -> str:
    names = [name for name in dict.fromkeys(_NAME.findall(written)) if name in metrics]
    for name in metrics:
        if name not in names:
            names.insert(_place_of(name, names), name)
    return HEAD + "".join(_row(metrics[name], shown) for name in names)


def _place_of(name: str, names: Sequence[str]) -> int:
    """Return the place after the last name that begins like this one, for as many words as any does; else the end."""
    words = name.split("_")
    for count in range(len(words) - 1, 1, -1):
        beginning = "_".join(words[:count]) + "_"
        alike = [number for number, each in enumerate(names) if each.startswith(beginning)]
        if alike:
            return alike[-1] + 1
    return len(names)


def _row(metric: Exported, shown: dict[str, str]) -> str:
    """Return a row; a help that ``shown`` has of a metric above is named by that metric."""
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    kind = "Histogram." if metric.family.type == "histogram" else ""
    first = shown.setdefault(metric.family.documentation, metric.name)
    text = metric.family.documentation if first == metric.name else f"As `{first}`."
    words = " ".join(filter(None, (kind, text, FURTHER.get(metric.name))))
    return f"| `{metric.name}{labels}` | {words} |\n"


if __name__ == "__main__":
    if lost := without_table((DOCS / EVERY_METRIC).read_text(encoding="utf-8"), exported()):
        raise SystemExit(
            f"docs/{EVERY_METRIC} has no table for {', '.join(lost)}: no mark has the beginning of the name"
        )
    for name in PAGES:
        page = DOCS / name
        page.write_text(with_tables(page.read_text(encoding="utf-8"), exported()), encoding="utf-8")
