"""Completion: what bash, zsh and fish get when somebody presses Tab."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolgrid.cli import main
from poolgrid.cli.completion import COMPLETE_VARIABLE, SHELLS
from poolgrid.cli.main import app

LINES = {
    "poolgrid rou": {"router"},
    "poolgrid journal ver": {"verify"},
    "poolgrid up --api-k": {"--api-keys"},
    "poolgrid bench --endpoint ch": {"chat"},
}
"""Command lines up to the cursor, and what completes them."""

BASH_LINES = ("poolgrid rou", "poolgrid bench --endpoint ch")
"""Each is a process; what the words are does not depend on the shell."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    program = tmp_path / "poolgrid"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m poolgrid "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    asked = [
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _poolgrid_completion poolgrid; "
        'echo "${COMPREPLY[@]}"'
        for line in BASH_LINES
    ]
    told = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([script, *asked])],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )

    assert told.stderr == ""
    assert [set(line.split()) for line in told.stdout.splitlines()] == [LINES[line] for line in BASH_LINES]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("line", LINES)
def test_other_shells_are_told_the_same(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(COMPLETE_VARIABLE, f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setattr(sys, "argv", ["poolgrid"])

    with pytest.raises(SystemExit) as ended:
        main.run()

    assert ended.value.code == 0
    told = capsys.readouterr().out
    for completion in LINES[line]:
        assert completion in told


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_for_the_shell_that_is_named_or_logged_in_with(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    named, own = (CliRunner().invoke(app, ["completion", *given]) for given in ([shell], []))

    assert named.exit_code == 0
    assert named.stdout == own.stdout
    assert f"complete_{shell}" in named.stdout
    assert f"poolgrid completion {shell} >" in named.stderr


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for given in ([], ["elvish"]):
        answer = CliRunner().invoke(app, ["completion", *given])
        assert answer.exit_code == 2
        assert "allowed are bash, zsh, fish" in answer.output


def test_no_other_command_offers_to_install_completion() -> None:
    for group in ([], ["journal"], ["keys"], ["config"], ["engine-config"]):
        assert "install-completion" not in CliRunner().invoke(app, [*group, "--help"]).output
