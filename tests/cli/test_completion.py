"""Completion: what bash, zsh and fish get when somebody presses Tab; each shell itself is asked where it is there."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poolgrid.cli import main
from poolgrid.cli.completion import COMPLETE_VARIABLE, SHELLS
from poolgrid.cli.main import app
from poolgrid.process.plugins import policy_names
from poolgrid.router.settings import RouterSettings
from poolgrid.tools.bench.settings import BenchSettings
from poolgrid.tools.simulation.settings import SIMULATED_POLICIES, SimulationSettings, WhatIfSettings

LINES = {
    "poolgrid rou": {"router"},
    "poolgrid journal ver": {"verify"},
    "poolgrid up --api-k": {"--api-keys"},
    "poolgrid bench --endpoint ch": {"chat"},
    "poolgrid router --policy r": {"round-robin", "random"},
    "poolgrid simulate --policy kv,le": {"kv,least-loaded"},
}
"""Command lines up to the cursor, and what completes them."""

SHELL_LINES = {"poolgrid rou": "router", "poolgrid bench --endpoint ch": "chat", "poolgrid bench --endpoint=ch": "chat"}
"""Each is a process in each shell: what else the words are does not depend on the shell."""

FILE_LINE, FILE = "poolgrid router --settings-file tun", "tuned.toml"
"""What we know no words for is completed with what lies there, by the shell."""

DESCRIBED = "poolgrid journal "
DESCRIPTIONS = {"compact": "Write a snapshot at the end, check it, and drop what it covers beyond retention"}

DEADLINE_S = 240


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home that has the program in ``bin``, which is on no path, and under ``path``, which is."""
    home = tmp_path_factory.mktemp("home")
    for folder in ("bin", "path"):
        program = home / folder / "poolgrid"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m poolgrid "$@"\n')
        program.chmod(0o755)
    (home / FILE).touch()
    return home


def environment(home: Path) -> dict[str, str]:
    return {"PATH": f"{home / 'path'}:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb"}


def script(shell: str) -> str:
    return CliRunner().invoke(app, ["completion", shell]).stdout


def told(command: Sequence[str], home: Path) -> list[str]:
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd=home
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_values(home: Path) -> None:
    # Bash makes words of a line before it asks, and an equals sign is one of them.
    asked = [
        f"COMP_WORDS=({line.replace('=', ' = ')}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_poolgrid_completion bin/poolgrid; echo "${COMPREPLY[@]}"'
        for line in SHELL_LINES
    ]
    assert told(["bash", "--norc", "-c", "\n".join([script("bash"), *asked])], home) == list(SHELL_LINES.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_options_and_values_and_says_what_they_are(home: Path) -> None:
    kept = home / ".config/fish/completions/poolgrid.fish"
    kept.parent.mkdir(parents=True)
    kept.write_text(script("fish"))
    lines = told(["fish", "-c", "\n".join(f"complete -C'{line}'" for line in (*SHELL_LINES, FILE_LINE))], home)
    assert [line.rpartition("=")[2].strip() for line in lines] == [*SHELL_LINES.values(), FILE]

    # By its path, after a variable of its own.
    described = told(["fish", "-c", f"complete -C'POOLGRID_URL=x ~/bin/{DESCRIBED}'"], home)
    completions = dict(line.split("\t") for line in described)
    assert DESCRIPTIONS.items() <= completions.items()
    assert "verify" in completions


@contextmanager
def zsh(home: Path) -> Iterator[int]:
    """Run zsh in a terminal; yield our end of it."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(shutil.which("zsh") or "", ["zsh", "-f", "-i"], environment(home))
    try:
        yield terminal
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def shown(terminal: int, pattern: str) -> str:
    """Return what a group of a pattern matches in what a terminal shows, once it does."""
    text = ""
    until = time.monotonic() + DEADLINE_S
    while (found := re.search(pattern, text)) is None:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{pattern} is not in {text!r}"
        text += os.read(terminal, 65_536).decode(errors="replace")
    return found[1]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_at_the_first_tab_and_at_each_further_one_and_says_what_it_offers(home: Path) -> None:
    functions = home / ".zfunc"
    functions.mkdir()
    (functions / "_poolgrid").write_text(script("zsh"))
    with zsh(home) as terminal:
        # What stands in the line when it is sent is what the function prints.
        start = [
            "cd; stty rows 60 cols 200; PS1=''",
            "fpath+=~/.zfunc; autoload -Uz compinit; compinit -u -D",
            "poolgrid() { print -r -- 'li''ne:' ${*##*=} }",
            "print rea''dy",
        ]
        os.write(terminal, ("; ".join(start) + "\n").encode())
        shown(terminal, "(ready)")
        for line, completed in {**SHELL_LINES, FILE_LINE: FILE}.items():
            os.write(terminal, f"{line}\t\n".encode())
            assert shown(terminal, r"line: (.*?)\r?\n").split()[-1] == completed, line

        # By its path, which is no function.
        os.write(terminal, f"POOLGRID_URL=x ~/bin/{DESCRIBED}\t".encode())
        for name, description in DESCRIPTIONS.items():
            shown(terminal, rf"({name} +-- {description})")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_the_script_for_zsh_can_be_evaluated(home: Path) -> None:
    lines = ["autoload -Uz compinit; compinit -u -D", script("zsh"), "print $_comps[poolgrid]"]

    assert told(["zsh", "-f", "-c", "\n".join(lines)], home) == ["_poolgrid"]


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
    completions = [re.split(r"[:\t]", told)[0] for told in capsys.readouterr().out.splitlines()]
    assert set(completions) == LINES[line]


def test_a_completion_is_one_line_with_the_first_sentence_of_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(COMPLETE_VARIABLE, "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "poolgrid router --queue-")
    monkeypatch.setattr(sys, "argv", ["poolgrid"])
    with pytest.raises(SystemExit):
        main.run()

    lines = capsys.readouterr().out.splitlines()
    assert "--queue-limit:Requests that may wait for room" in lines
    assert any(line.startswith("--queue-order:Order within a priority and tenant") for line in lines)
    assert all(line.startswith("--queue-") for line in lines)


def test_the_policies_that_are_completed_are_those_that_there_are() -> None:
    for settings, field in ((RouterSettings, "policy"), (BenchSettings, "policies")):
        assert tuple(settings.model_fields[field].examples or ()) == policy_names()
    for model in (SimulationSettings, WhatIfSettings):
        assert tuple(model.model_fields["policy"].examples or ()) == SIMULATED_POLICIES


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
