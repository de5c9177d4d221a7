"""The threat model names tests that exist, knows every attacker, and says what really listens where."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.settings import Settings
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.transport.security import is_loopback

ROOT = Path(__file__).parents[1]
PAGE = "\n".join((ROOT / name).read_text() for name in ("docs/security.md", "SECURITY.md"))

ATTACKERS = ("Client without a key", "Tenant", "Operator", "Local process", "Worker", "Engine", "Document author")
SHOWN_BY = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROCESSES: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "global-router": GlobalRouterSettings,
    "consolidator": ConsolidatorProcessSettings,
    "worker": SimulatedWorkerSettings,
}


@cache
def _tests_of(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _section(heading: str) -> str:
    """What follows a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/security.md and SECURITY.md have no section {heading!r}"
    return found[1]


def _rows(heading: str) -> list[list[str]]:
    """The cells of the first table of a section, its head and rule left out."""
    table = re.search(r"^\|.*?(?=\n\n|\Z)", _section(heading), re.DOTALL | re.MULTILINE)
    assert table is not None, f"{heading!r} has no table"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def test_every_test_that_the_page_names_exists() -> None:
    named = SHOWN_BY.findall(PAGE)
    assert named
    assert PAGE.count("::test_") == len(named), "a test is named in another form than `tests/file.py::test_name`"

    missing = [f"{file}::{name}" for file, name in named if name not in _tests_of(ROOT / file)]

    assert not missing


def test_every_attacker_is_in_the_list_and_no_other() -> None:
    listed = [re.sub(r"\[(.*)\]\(.*\)", r"\1", row[0]) for row in _rows("Threat model")]

    assert listed == [attacker.lower() for attacker in ATTACKERS]


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_an_attacker_has_a_table_in_which_what_holds_is_shown(attacker: str) -> None:
    rows = _rows(attacker)

    assert rows
    for row in rows:
        attempt, holds, shown_by, does_not_hold = row
        if shown_by == "none":
            assert holds.startswith("nothing"), f"{attempt}: something holds, and no test shows it"
            assert does_not_hold, f"{attempt}: neither a test nor what does not hold"
        else:
            assert SHOWN_BY.search(shown_by), f"{attempt}: {shown_by!r} names no test"


def test_what_listens_where_is_what_the_settings_say() -> None:
    told: dict[str, set[str]] = {process: set() for process in PROCESSES}
    for process, _, option, default, _ in _rows("Listening sockets"):
        name = process.split(" (")[0]
        field = option.strip("`-").replace("-", "_")
        fields = PROCESSES[name].model_fields
        assert default == f"`{fields['host'].default}`, {fields[field].default}"
        assert is_loopback(fields["host"].default)
        told[name].add(field)

    for name, settings in PROCESSES.items():
        ports = {field for field in settings.model_fields if re.fullmatch(r"(\w+_)?port", field)}
        inherited = told["consolidator"] if name == "router" else set()
        assert ports - inherited <= told[name]
