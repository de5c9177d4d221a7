"""Boards, panels and queries, and the classic JSON that any Grafana since 9 imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 36
"""Of Grafana 9.0. Newer ones bring it up to date when they load it."""

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "table", "bargauge", "heatmap"]

NO_TRAFFIC = "no traffic"


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ""
    """Grafana's form: ``{{label}}``."""

    @property
    def legend_labels(self) -> tuple[str, ...]:
        """Return the labels that the legend names."""
        return tuple(re.findall(r"\{\{\s*(\w+)\s*\}\}", self.legend))


@dataclass(frozen=True)
class Threshold:
    """From this value on a panel has this color."""

    value: float
    color: str


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    unit: str
    """Grafana's id of a unit."""
    queries: tuple[Query, ...]
    means: str
    """What it means."""
    do: str
    """What to do about it."""
    runbook: str
    """Page in ``docs/runbooks``, without its ending."""
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    no_value: str = NO_TRAFFIC
    """What is shown where a query returns nothing."""
    maximum: float | None = None
    decimals: int | None = None
    thresholds: tuple[Threshold, ...] = ()
    matrix: tuple[str, str] | None = None
    """For a table: the labels of its rows and columns."""
    dashed: str = ""
    """Legend of a query that is a target: a dashed line."""
    needs: str = ""
    """What must be there for the panel to show anything, in words; empty where every fleet has it."""
    mappings: tuple[tuple[str, str, str], ...] = ()
    """Value, text and color of values that are words."""

    @property
    def description(self) -> str:
        """Return what the panel says of itself."""
        needs = f" Shown with {self.needs}." if self.needs else ""
        return f"{self.means}{needs}\n\n**What to do:** {self.do}\n\n[Runbook]({runbook_url(self.runbook)})"


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the head of a board, of the values of a label."""

    name: str
    label: str
    query: str
    """``label_values(selector, label)``."""


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("poolgrid",))

    @property
    def panels(self) -> list[Panel]:
        """Return all panels in order."""
        return [panel for row in self.rows for panel in row.panels]

    def classic(self) -> dict[str, Any]:
        """Return the board as Grafana imports it."""
        panels: list[dict[str, Any]] = []
        top = 0
        for row in self.rows:
            panels.append(_row(len(panels) + 1, row.title, top))
            top += 1
            left = tallest = 0
            for panel in row.panels:
                if left + panel.width > COLUMNS:
                    left, top, tallest = 0, top + tallest, 0
                panels.append(_panel(len(panels) + 1, panel, left, top))
                left += panel.width
                tallest = max(tallest, panel.height)
            top += tallest
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": list(self.tags),
            "timezone": "browser",
            "editable": True,
            "graphTooltip": 1,
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_others()],
            "annotations": {"list": [_alerts()]},
            "templating": {"list": [_datasource(), _docs(), *map(_variable, self.variables)]},
            "panels": panels,
        }


def runbook_url(page: str) -> str:
    """Return where a runbook is; ``docs`` is a constant of the board that whoever imports it sets."""
    return f"${{docs}}/docs/runbooks/{page}.html"


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    position = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}


def _panel(number: int, panel: Panel, left: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": left, "y": top},
        "targets": [_target(panel, place, query) for place, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
        "transformations": _transformations(panel),
        "links": [_link("Runbook", runbook_url(panel.runbook))],
    }


def _target(panel: Panel, place: int, query: Query) -> dict[str, Any]:
    target = {
        "refId": chr(ord("A") + place),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "editorMode": "code",
        "format": "table" if panel.kind == "table" else "time_series",
    }
    return {**target, "range": False, "instant": True} if panel.kind == "table" else {**target, "range": True}


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": step.color, "value": step.value} for step in panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "noValue": panel.no_value,
        "color": {"mode": "thresholds" if panel.thresholds else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [
            {"type": "value", "options": {value: {"text": text, "color": color, "index": index}}}
            for index, (value, text, color) in enumerate(panel.mappings)
        ],
    }
    if panel.kind != "table":
        defaults["min"] = 0
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 5,
            "showPoints": "auto",
            # A hole in the data is a hole in the line: nothing was asked, or nothing was scraped.
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    if panel.kind == "table":
        defaults["custom"] = {"align": "auto", "displayMode": "color-background" if panel.matrix else "auto"}
    return defaults


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    if not panel.dashed:
        return []
    style = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}}
    color = {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}}
    return [{"matcher": {"id": "byName", "options": panel.dashed}, "properties": [style, color]}]


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind in ("stat", "bargauge"):
        reduce = {"values": False, "calcs": ["lastNotNull"], "fields": ""}
        common = {"reduceOptions": reduce, "orientation": "auto"}
        if panel.kind == "stat":
            return {
                **common,
                "colorMode": "background",
                "graphMode": "area",
                "justifyMode": "auto",
                "textMode": "value_and_name",
            }
        return {
            **common,
            "displayMode": "basic",
            "showUnfilled": True,
            "valueMode": "color",
            "minVizWidth": 0,
            "minVizHeight": 10,
        }
    return {"showHeader": True}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    if panel.kind != "table":
        return []
    if panel.matrix is None:
        return [{"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": {}, "renameByName": {}}}]
    row, column = panel.matrix
    return [
        {"id": "groupingToMatrix", "options": {"rowField": row, "columnField": column, "valueField": "Value"}},
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": f"{row}\\{column}"}]}},
    ]


def _link(title: str, url: str) -> dict[str, Any]:
    return {
        "title": title,
        "type": "link",
        "icon": "doc",
        "tooltip": title,
        "url": url,
        "tags": [],
        "asDropdown": False,
        "targetBlank": True,
        "includeVars": False,
        "keepTime": False,
    }


def _others() -> dict[str, Any]:
    """Return the list of the other boards, which keeps the time and what is chosen."""
    link = _link("poolgrid", "")
    return {
        **link,
        "type": "dashboards",
        "icon": "external link",
        "tooltip": "",
        "tags": ["poolgrid"],
        "asDropdown": True,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Poolgrid.*",alertstate="firing",namespace=~"$namespace"}',
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "refresh": 1,
        "regex": "",
        "skipUrlSync": False,
    }


DOCS_URL = "https://docs.example.com/poolgrid"
"""Stands for where an operator serves the pages; a constant of each dashboard."""


def _docs() -> dict[str, Any]:
    return {
        "name": "docs",
        "label": "URL of the documentation",
        "type": "constant",
        "query": DOCS_URL,
        "current": {"selected": False, "text": DOCS_URL, "value": DOCS_URL},
        "hide": 2,
        "skipUrlSync": False,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also what has no such label at all, which a list of all values would leave out.
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "hide": 0,
        "regex": "",
        "skipUrlSync": False,
    }


def quantile(share: float, buckets: str, by: Sequence[str] = ()) -> str:
    """Return a query for a quantile of what was observed lately; ``buckets`` is a selector of ``_bucket`` series."""
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({buckets}[$__rate_interval])))"


def rate(selector: str, by: Sequence[str] = ()) -> str:
    """Return a query for a rate, summed but for these labels."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate({selector}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return a query for a share: nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"
