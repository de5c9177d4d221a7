"""Completion: what a shell is told when somebody presses Tab. The scripts are click's own; bash runs its."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from poolgrid.server.cli.commands.completion import COMPLETE_VARIABLE, HOW_TO_KEEP
from poolgrid.server.cli.main import PROGRAM, app

LINES = {
    "rou": {"router"},
    "journal ver": {"verify"},
    "up --api-k": {"--api-keys"},
    "bench --endpoint ch": {"chat"},
    "router --policy r": {"round-robin", "random"},
    "simulate --policy kv,le": {"kv,least-loaded"},
    "completion b": {"bash"},
}
"""Command lines up to the cursor, and what completes them."""


@pytest.mark.parametrize("line", LINES)
def test_commands_options_and_values_are_completed(line: str) -> None:
    completer = get_completion_class("bash")
    assert completer is not None
    *words, incomplete = line.split()

    found = completer(app, {}, PROGRAM, COMPLETE_VARIABLE).get_completions(words, incomplete)

    assert {each.value for each in found} == LINES[line]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_runs_the_script(tmp_path: Path) -> None:
    program = tmp_path / "poolgrid"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m poolgrid "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    asked = f'COMP_WORDS=(poolgrid rou); COMP_CWORD=1; _poolgrid_completion {program}; echo "${{COMPREPLY[@]}}"'

    done = subprocess.run(["bash", "--norc", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)

    assert done.stdout == "router\n"


@pytest.mark.parametrize("shell", HOW_TO_KEEP)
def test_the_script_is_for_the_shell_that_is_named_or_logged_in_with(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    named, own = (CliRunner().invoke(app, ["completion", *given]) for given in ([shell], []))

    assert named.exit_code == 0
    assert named.stdout == own.stdout
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in named.stdout
    assert f"poolgrid completion {shell} >" in named.stderr


@pytest.mark.parametrize("given", [[], ["elvish"]])
def test_a_shell_that_is_not_known_is_refused_with_those_that_are(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    answer = CliRunner().invoke(app, ["completion", *given])
    assert answer.exit_code == 2
    assert "allowed are bash, zsh, fish" in answer.output
