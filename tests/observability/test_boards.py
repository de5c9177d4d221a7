"""The dashboards: as the code says, of Grafana's own types, and about series that exist."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import grafana_foundation_sdk.models.dashboard as grafana
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins

from lab.dashboards.__main__ import WRITTEN, known_series, stale
from lab.dashboards.boards import BOARDS
from lab.dashboards.checking import Known, problems, selectors
from lab.dashboards.model import Board, Panel, Query, Row, Variable
from tests.forms import needs_checkout
from tests.observability_proof.drills import DRILLS
from tests.observability_proof.stack import at_pace

pytestmark = needs_checkout

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"
FILES = sorted(WRITTEN.glob("*.json"))

ANNOTATED = {"expr", "datasource"}
"""What a data source adds to an annotation beside what the type knows."""


@pytest.fixture(scope="module")
def known() -> Known:
    return known_series()


def test_the_files_are_what_the_code_says() -> None:
    assert stale(WRITTEN) == [], "write them with make boards"


def test_a_file_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text())
    assert stale(tmp_path) == []

    (tmp_path / FILES[0].name).write_text("{}")
    (tmp_path / "another.json").write_text("{}")
    assert stale(tmp_path) == sorted([FILES[0].name, "another.json"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.title)
def test_a_board_shows_series_and_labels_that_exist(board: Board, known: Known) -> None:
    assert problems(board, known) == []


# -- Grafana's types ---------------------------------------------------------------------------------------------------


def _strip(value: Any) -> Any:
    """Leave out what is empty: the encoder leaves out what has its default."""
    if isinstance(value, dict):
        return {key: found for key, each in value.items() if (found := _strip(each)) not in (None, {}, [], "", False)}
    return [_strip(each) for each in value] if isinstance(value, list) else value


def _missing(written: Any, kept: Any, place: str) -> list[str]:
    """What of a document Grafana's types do not keep."""
    if isinstance(written, dict):
        if not isinstance(kept, dict):
            return [place]
        return [
            lost
            for key in written
            if key not in ANNOTATED
            for lost in _missing(written[key], kept.get(key), f"{place}.{key}")
        ]
    if isinstance(written, list):
        if not isinstance(kept, list) or len(kept) != len(written):
            return [place]
        return [
            lost for number, each in enumerate(written) for lost in _missing(each, kept[number], f"{place}[{number}]")
        ]
    return [] if written == kept else [f"{place}: {written!r} became {kept!r}"]


def _wrong_types(value: Any, wanted: Any, place: str) -> list[str]:
    """Where an object of the types holds what its declaration does not allow."""
    origin = typing.get_origin(wanted)
    if wanted is Any or wanted is object or value is None:
        return []
    if origin in (typing.Union, types.UnionType):
        found = [_wrong_types(value, each, place) for each in typing.get_args(wanted) if each is not type(None)]
        return [] if any(not each for each in found) else min(found, key=len)
    if origin is typing.Literal:
        return [] if value in typing.get_args(wanted) else [f"{place} is {value!r}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{place} is no list"]
        [item] = typing.get_args(wanted)
        return [each for number, one in enumerate(value) for each in _wrong_types(one, item, f"{place}[{number}]")]
    if origin is dict:
        return [] if isinstance(value, dict) else [f"{place} is no object"]
    if not inspect.isclass(wanted):
        return []
    if issubclass(wanted, Enum):
        return [] if value in [each.value for each in wanted] else [f"{place} is {value!r}"]
    if wanted is float:
        return [] if isinstance(value, (int, float)) and not isinstance(value, bool) else [f"{place} is {value!r}"]
    if wanted in (str, int, bool):
        return [] if type(value) is wanted else [f"{place} is {value!r}, wanted {wanted.__name__}"]
    hints = typing.get_type_hints(type(value).__init__, vars(inspect.getmodule(type(value))))
    return [
        each
        for name, hint in hints.items()
        if name != "return"
        for each in _wrong_types(getattr(value, name, None), hint, f"{place}.{name}")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_classic_dashboard_by_grafanas_published_types(path: Path) -> None:
    register_default_plugins()
    written = json.loads(path.read_text())

    made = grafana.Dashboard.from_json(written)
    kept = json.loads(json.dumps(made, cls=JSONEncoder))

    assert _missing(_strip(written), kept, "$") == []
    assert _wrong_types(made, grafana.Dashboard, "$") == []


def test_the_check_by_grafanas_types_finds_what_is_wrong() -> None:
    register_default_plugins()
    written = json.loads(FILES[0].read_text())
    panel = next(each for each in written["panels"] if each["type"] != "row")
    panel["gridPos"]["h"] = "8"
    panel["colour"] = "red"

    made = grafana.Dashboard.from_json(written)
    kept = json.loads(json.dumps(made, cls=JSONEncoder))

    assert [each for each in _missing(_strip(written), kept, "$") if "colour" in each]
    assert [each for each in _wrong_types(made, grafana.Dashboard, "$") if "is '8'" in each]


# -- what the check finds ----------------------------------------------------------------------------------------------

GOOD = Panel("Lag", "s", (Query("max by (pool) (lag_seconds{pool='a'})", "{{pool}}"),), "Is it.", "Do it.", "page")
SERIES: Known = {"lag_seconds": frozenset({"worker"}), "lag_seconds_total": frozenset()}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"queries": (Query("rate(lags_seconds[1m])"),)}, "reads lags_seconds, which no code defines"),
        ({"queries": (Query('lag_seconds{wroker="a"}'),)}, "matches lag_seconds by wroker"),
        ({"queries": (Query("sum by (tier) (lag_seconds)"),)}, "names the label tier"),
        ({"queries": (Query("lag_seconds", "{{rank}}"),)}, "names the label rank"),
        ({"queries": (Query("vector(1)"),)}, "reads no series"),
        ({"unit": "bytes"}, "in the unit 'bytes'"),
        ({"unit": ""}, "has no unit"),
        ({"do": ""}, "has no description"),
    ],
)
def test_a_panel_that_could_not_show_anything_is_named(changed: dict[str, Any], said: str) -> None:
    panel = replace(GOOD, **changed)
    found = problems(Board("u", "B", "", (), (Row("R", (panel,)),)), SERIES)

    assert [said in each for each in found] == ([True] if said else [])


def test_a_variable_of_a_label_that_is_not_there_is_named() -> None:
    variables = (
        Variable("w", "W", "label_values(lag_seconds, worker)"),
        Variable("x", "X", "label_values(lag_seconds, y)"),
    )
    found = problems(Board("u", "B", "", variables, (Row("R", (GOOD,)),)), SERIES)

    assert len(found) == 1
    assert "names the label y" in found[0]


def test_selectors_are_read_out_of_promql() -> None:
    query = (
        'sum by (a, le) (rate(x_total{b="c_total{", d=~"$e"}[$__rate_interval])) '
        "/ on (f) group_left (g) y:z or vector(0)"
    )

    assert list(selectors(query)) == [("x_total", ("b", "d")), ("y:z", ())]


# -- rules and runbooks ------------------------------------------------------------------------------------------------


def _rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_read_series_that_exist(known: Known) -> None:
    rules = [*_rules("recording.yml"), *_rules("alerts.yml")]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    by_name = {"__name__"}

    for rule in rules:
        for name, labels in selectors(rule["expr"]):
            assert name in known or name in recorded, (rule, name)
            if name in known:
                assert set(labels) <= known[name] | {"job", "pool", "namespace"} | by_name, (rule, name)
    for name in re.findall(r"(poolgrid_\w+)\|(poolgrid_\w+)", (RULES / "alerts.yml").read_text()):
        assert set(name) <= set(known)


def test_every_alert_has_a_reason_a_severity_and_a_runbook_that_names_it() -> None:
    text = (RULES / "alerts.yml").read_text()
    for rule in _rules("alerts.yml"):
        name = rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["summary"], name
        page = re.search(r"/docs/runbooks/([\w-]+)\.html$", rule["annotations"]["runbook_url"])
        assert page is not None, name
        assert f"`{name}`" in (RUNBOOKS / f"{page[1]}.md").read_text(), name
    # A comment before each, or before the alerts that share it.
    assert text.count("      # ") >= len(_rules("alerts.yml")) - 3


def test_every_alert_has_a_drill_in_the_proof() -> None:
    drilled = [alert for drill in DRILLS for alert in drill.alerts]

    assert sorted(drilled) == sorted(rule["alert"] for rule in _rules("alerts.yml"))


def test_the_proof_changes_the_pace_of_rules_and_not_their_thresholds() -> None:
    rules = "expr: rate(x[6h]) > 14 * 86400 and y[10m] > 0\nfor: 10m\nfor: 30s\nrecord: a:ratio_rate1h"

    assert at_pace(rules) == (
        "expr: rate(x[360s]) > 14 * 86400 and y[15s] > 0\nfor: 10s\nfor: 3s\nrecord: a:ratio_rate1h"
    )


def test_every_runbook_that_is_linked_to_exists_and_each_is_linked_to() -> None:
    linked = {panel.runbook for board in BOARDS for panel in board.panels}
    linked |= set(re.findall(r"/docs/runbooks/([\w-]+)\.html", (RULES / "alerts.yml").read_text()))

    assert linked == {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    index = (RUNBOOKS / "README.md").read_text()
    assert all(f"({page}.md)" in index for page in linked)
