"""A process imports what its command needs: what all import, a pool of ten processes pays ten times."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from poolgrid.cli.late_group import LateCommands
from poolgrid.cli.main import Commands, app, run
from poolgrid.process import garbage

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "cli", "consolidator", "discovery", "fleet_page", "frontend", "global_router", "http", "inference", "kv_events",
    "nats", "process", "router", "serving", "structured_output", "tools", "transport", "wire", "workers",
)  # fmt: skip

PROBE = """
import importlib, sys
import typer.main
from poolgrid.cli.main import app
typer.main.get_command(app).commands[sys.argv[1]]
for module in sys.argv[2].split(","):
    importlib.import_module(module)
from poolgrid.process.settings import Settings
waiting = [Settings]
for each in waiting:
    waiting += each.__subclasses__()
    if "__pydantic_validator__" in vars(each) and each.__pydantic_complete__:
        print("built", each.__name__)
print("\\n".join(sys.modules))
"""

NOT_NEEDED = {
    ("worker", "poolgrid.workers.engines.simulated.opening,poolgrid.workers.bootstrap"): {
        "fastapi", "jinja2", "tokenizers", "httpx", "rich", "numpy", "poolgrid.frontend", "poolgrid.router",
        "poolgrid.global_router", "poolgrid.tools.simulation",
    },
    ("up", "poolgrid.cli.local_pool"): {
        "fastapi", "httpx", "rich", "numpy", "poolgrid.router", "poolgrid.global_router",
        "poolgrid.tools.simulation", "poolgrid.workers.service",
    },
    ("consolidator", "poolgrid.consolidator.bootstrap"): {
        "fastapi", "jinja2", "tokenizers", "httpx", "rich", "numpy", "yaml", "poolgrid.frontend", "poolgrid.workers",
        "poolgrid.global_router", "poolgrid.tools.simulation", "poolgrid.router.core",
    },
    ("router", "poolgrid.router.bootstrap"): {
        "poolgrid.workers", "poolgrid.global_router", "poolgrid.tools.simulation", "poolgrid.tools.bench", "yaml",
        "httpx",
        "rich", "matplotlib", "grpc", "google.protobuf",
    },
    ("global-router", "poolgrid.global_router.bootstrap"): {
        # httpx brings rich
        "poolgrid.workers", "poolgrid.router", "poolgrid.tools.simulation", "poolgrid.tools.bench", "yaml",
        "matplotlib",
        "poolgrid.cli.config", "poolgrid.global_router.heat_map", "poolgrid.global_router.core.builder",
    },
    ("explain", "poolgrid.cli.explain"): {
        "numpy", "poolgrid.router", "poolgrid.tools.simulation", "poolgrid.cli.journal_directory",
    },
}  # fmt: skip
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


def test_the_collector_runs_rarely_before_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["poolgrid", "--version"])
    try:
        with pytest.raises(SystemExit) as ended:
            run()
        assert gc.get_threshold()[0] == garbage.YOUNG_OBJECTS
    finally:
        gc.set_threshold(*before)
    assert ended.value.code == 0


def test_every_command_is_made_when_asked_for_and_only_then() -> None:
    commands = LateCommands(Commands.modules)

    assert list(commands) == list(Commands.modules)
    assert commands["top"] is commands["top"]
    assert {name: command.name for name, command in commands.items()} == {name: name for name in Commands.modules}


def test_a_command_is_where_its_name_says_and_nobody_imports_it() -> None:
    assert Commands.modules == {name: f"poolgrid.cli.commands.{name.replace('-', '_')}" for name in Commands.modules}
    made = {path.stem for path in (ROOT / "src" / "poolgrid" / "cli" / "commands").glob("*.py")} - {"__init__"}
    assert made == {module.rpartition(".")[2] for module in Commands.modules.values()}
    importing = re.compile(
        r"^\s*(?:from|import) (?:poolgrid\.cli\.commands|poolgrid\.cli import commands)", re.MULTILINE
    )
    typed = re.compile(r"^\s*(?:from|import) typer\b", re.MULTILINE)
    for package in PACKAGES:
        for path in (ROOT / "src" / "poolgrid" / package).resolve().rglob("*.py"):
            text = path.read_text()
            assert not importing.search(text), f"{path} imports a command"
            assert package == "cli" or not typed.search(text), f"{path} is outside of cli and reads a command line"
            makes = "typer.Typer(" in text or " = CommandLine(" in text
            assert not makes or path.parent.name == "commands" or path.name == "main.py", path


def test_help_shows_every_command_with_its_first_sentence() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output

    for name, command in group.commands.items():
        assert name in shown
        assert (command.help or "").split()[0] in shown


def test_a_command_that_does_not_exist_is_refused_and_a_near_one_named() -> None:
    answer = CliRunner().invoke(app, ["wroker"])

    assert answer.exit_code == 2
    assert "worker" in answer.output
