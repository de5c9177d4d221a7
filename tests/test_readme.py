"""The two commands of the README are what installs, runs and tests; what follows them is run by ``e2e``."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def marked(name: str) -> str:
    """The code block between two marks."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)\n```\n<!-- /{name} -->", README, re.DOTALL)
    assert found is not None, f"README.md has no code block between the {name} marks"
    return found[1]


@pytest.mark.parametrize(
    ("name", "installed", "ends_with"),
    [("run-command", ".", "poolgrid up"), ("test-command", ".[dev]", "python -m pytest -n 4 --dist loadfile")],
)
def test_each_of_the_two_commands_is_one_line_that_sets_up_and_runs(name: str, installed: str, ends_with: str) -> None:
    make, install, run = (shlex.split(part) for part in marked(name).split(" && "))

    assert make == ["python3", "-m", "venv", ".venv"]
    assert install[:2] == [".venv/bin/pip", "install"]
    assert install[-1] == installed
    assert " ".join(run) == f".venv/bin/{ends_with}"


def test_the_commands_install_what_they_run() -> None:
    assert PROJECT["scripts"] == {"poolgrid": "poolgrid.server.cli.main:run"}
    assert any(requirement.startswith("pytest") for requirement in PROJECT["optional-dependencies"]["dev"])


def _ci(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci" / "run", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ci_runs_the_readmes_test_command(tmp_path: Path) -> None:
    # Tools that only say how they were called, in a checkout that has nothing but the README and the script.
    (tmp_path / "README.md").write_text(README)
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    script.chmod(0o755)
    tools = {"bin/python3": "mkdir -p .venv/bin && cp said/* .venv/bin/", "said/pip": "true", "said/python": "true"}
    for name, action in tools.items():
        tool = tmp_path / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\necho "{tool.name} $*" >> calls\n{action}\n')
        tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}

    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == ["python3 -m venv .venv", "pip install -q -e .[dev]"]
    assert [call for call in calls[2:] if "pytest" in call] == ["python -m pytest -n 4 --dist loadfile"]
    assert [call for call in calls[2:] if "pytest" not in call] == [
        "python -m ruff check .",
        "python -m ruff format --check .",
        "python -m mypy",
    ], "beside the tests, in this order"
    assert all(f"$ {part}" in done.stdout for part in marked("test-command").rsplit(" && ", 1))
    assert "all passed" in done.stdout

    for failing in ("pytest", "ruff check", "mypy"):
        (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\ncase "$*" in *{failing!r}*) exit 1;; esac\n')
        (tmp_path / "said" / "python").write_text((tmp_path / ".venv" / "bin" / "python").read_text())
        failed = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert failed.returncode == 1, failing
        assert "all passed" not in failed.stdout


def test_ci_stops_at_the_first_failure_and_at_a_step_it_does_not_know() -> None:
    failed = _ci("types", PYTHON="false")
    unknown = _ci("typos")

    assert failed.returncode == 1
    assert "all passed" not in failed.stdout
    assert unknown.returncode == 2
    assert "step typos is unknown, allowed are tests, lint, types" in unknown.stderr


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
