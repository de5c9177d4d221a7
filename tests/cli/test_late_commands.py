"""A process imports what its command needs: what all import, a pool of ten processes pays ten times."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.server.cli.command_line import PLUGIN, LateGroup
from poolgrid.server.cli.main import SECTIONS, app, run
from poolgrid.server.process import garbage

ROOT = Path(__file__).parents[2]

PACKAGE = ROOT / "src" / "poolgrid"

LINKED = [path.resolve() for path in (PACKAGE / "server").iterdir() if path.is_symlink()]

MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}

PROBE = """
import importlib, sys
from poolgrid.server.cli.main import app
app.commands[sys.argv[1]]
for module in sys.argv[2].split(","):
    importlib.import_module(module)
from poolgrid.server.process.settings import Settings
waiting = [Settings]
for each in waiting:
    waiting += each.__subclasses__()
    if "__pydantic_validator__" in vars(each) and each.__pydantic_complete__:
        print("built", each.__name__)
print("\\n".join(sys.modules))
"""

NOT_NEEDED = {
    ("worker", "poolgrid.plugins.simulated.opening,poolgrid.server.workers.bootstrap"): {
        "fastapi",
        "jinja2",
        "tokenizers",
        "httpx",
        "rich",
        "numpy",
        "poolgrid.server.frontend",
        "poolgrid.server.router",
        "poolgrid.server.global_router",
        "poolgrid.plugins.simulation",
    },
    ("up", "poolgrid.server.cli.local_pool"): {
        "fastapi",
        "httpx",
        "rich",
        "numpy",
        "poolgrid.server.router",
        "poolgrid.server.global_router",
        "poolgrid.plugins.simulation",
        "poolgrid.server.workers.service",
    },
    ("consolidator", "poolgrid.server.consolidator.bootstrap"): {
        "fastapi",
        "jinja2",
        "tokenizers",
        "httpx",
        "rich",
        "numpy",
        "yaml",
        "poolgrid.server.frontend",
        "poolgrid.server.workers.bootstrap",
        "poolgrid.server.workers.service",  # their settings are options of this command
        "poolgrid.server.global_router",
        "poolgrid.plugins.simulation",
        "poolgrid.kernel.routing",
    },
    ("router", "poolgrid.server.router.bootstrap"): {
        "poolgrid.server.workers",
        "poolgrid.server.global_router",
        "poolgrid.plugins.simulation",
        "poolgrid.plugins.bench",
        "yaml",
        "httpx",
        "rich",
        "matplotlib",
        "grpc",
        "google.protobuf",
    },
    ("global-router", "poolgrid.server.global_router.bootstrap"): {
        # httpx brings rich
        "poolgrid.server.workers",
        "poolgrid.server.router",
        "poolgrid.plugins.simulation",
        "poolgrid.plugins.bench",
        "yaml",
        "matplotlib",
        "poolgrid.server.cli.config",
        "poolgrid.server.global_router.heat_map",
        "poolgrid.plugins.grid_builder",
    },
    ("explain", "poolgrid.server.cli.commands.explain"): {
        "numpy",
        "poolgrid.server.router",
        "poolgrid.plugins.simulation",
        "poolgrid.server.cli.journal_directory",
    },
}
"""What a command's process must not import, by the command and the modules that start it."""


@pytest.mark.parametrize(("command", "module"), NOT_NEEDED)
def test_a_process_imports_only_what_its_command_needs(command: str, module: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROBE, command, module], cwd=ROOT, capture_output=True, timeout=120, check=True
    )

    imported = set(answer.stdout.decode().split())
    assert imported.issuperset(module.split(","))
    assert not NOT_NEEDED[command, module] & imported
    assert "built" not in imported, f"what checks settings is built before there are any: {answer.stdout.decode()}"


@pytest.mark.parametrize(("words", "is_on"), [(["--version"], False), (["completion", "bash"], True)])
def test_the_collector_runs_rarely_and_not_before_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, words: list[str], is_on: bool
) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["poolgrid", *words])
    try:
        with pytest.raises(SystemExit) as ended:
            run()
        assert gc.get_threshold()[0] == garbage.YOUNG_OBJECTS
        assert gc.isenabled() is is_on
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert ended.value.code == 0


def test_every_command_is_called_as_the_table_says() -> None:
    assert list(app.commands) == list(MODULES)
    assert {name: command.name for name, command in app.commands.items()} == {name: name for name in MODULES}


def test_commands_of_the_core_are_where_their_names_say_and_nothing_imports_them() -> None:
    core = "poolgrid.server.cli.commands."
    modules = {name: module for name, module in MODULES.items() if module != PLUGIN}
    assert modules == {name: f"{core}{name.replace('-', '_')}" for name in modules}
    made = {path.stem for path in (PACKAGE / "server" / "cli" / "commands").glob("*.py")} - {"__init__"}
    assert made == {module.rpartition(".")[2] for module in modules.values()}
    importing = re.compile(
        r"^\s*(?:from|import) (?:poolgrid\.server\.cli\.commands|poolgrid\.server\.cli import commands)", re.MULTILINE
    )
    reads = re.compile(r"^\s*(?:from|import) click\b", re.MULTILINE)
    for folder in (*(PACKAGE / ring for ring in ("kernel", "server", "plugins")), *LINKED):
        for path in folder.rglob("*.py"):
            text = path.read_text()
            assert not importing.search(text), f"{path} imports a command"
            may_read = path.stem == "command" or not {"cli", "bench", "simulation"}.isdisjoint(path.parts)
            assert may_read or not reads.search(text), f"{path} reads a command line"


def test_a_command_whose_folder_is_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = EntryPoint("bench", "poolgrid.absent.bench.command:bench", "poolgrid.commands")
    monkeypatch.setattr("poolgrid.server.cli.command_line._added", lambda: EntryPoints([absent]))
    group = LateGroup({"Try": {"bench": PLUGIN, "simulate": PLUGIN}})
    answer = CliRunner().invoke(group, ["bench"])
    unknown = CliRunner().invoke(group, ["simulate"])
    helped = CliRunner().invoke(group, ["--help"])

    assert answer.exit_code == unknown.exit_code == 2
    assert "bench: not installed (there is no poolgrid.absent)" in answer.output
    assert "simulate: not installed (no entry point of poolgrid.commands has this name)" in unknown.output
    assert helped.exit_code == 0
    assert "not installed" in helped.output


def test_other_distributions_add_commands_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    added = EntryPoint("greet", "poolgrid.server.cli.commands.completion:completion", "poolgrid.commands")
    monkeypatch.setattr("poolgrid.server.cli.command_line._added", lambda: EntryPoints([added]))

    assert CliRunner().invoke(app, ["greet", "bash"]).exit_code == 0
    assert "greet" in CliRunner().invoke(app, ["--help"]).output


def test_help_shows_every_command_with_its_first_sentence() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output

    for name, command in app.commands.items():
        assert name in shown
        assert (command.help or "").split()[0] in shown


def test_a_command_that_does_not_exist_is_refused_and_a_near_one_named() -> None:
    answer = CliRunner().invoke(app, ["wroker"])

    assert answer.exit_code == 2
    assert "worker" in answer.output
