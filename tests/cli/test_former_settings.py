"""Settings of an earlier version are refused by name, wherever they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.cli import former_settings
from poolgrid.cli.former_settings import FORMER_SETTINGS
from poolgrid.cli.main import app
from tests.cases import for_each

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _former(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**FORMER_SETTINGS, "--old-limit": "use --new-limit.", "bench --old-pause": "it is 5 s."}
    monkeypatch.setattr(former_settings, "FORMER_SETTINGS", table)


@pytest.mark.parametrize("words", [["--old-limit", "3"], ["--old-limit=3"], ["--port", "8000", "--old-limit=3"]])
def test_a_former_option_is_refused_by_its_name(words: list[str]) -> None:
    done = RUNNER.invoke(app, ["router", *words])

    assert (done.exit_code, done.stderr) == (2, "--old-limit: removed. Use --new-limit.\n")


def test_a_former_variable_is_refused_by_its_name() -> None:
    done = RUNNER.invoke(app, ["router"], env={"POOLGRID_OLD_LIMIT": "3"})

    assert (done.exit_code, done.stderr) == (
        2,
        "--old-limit (POOLGRID_OLD_LIMIT): removed. Use --new-limit.\n",
    )


def test_a_former_name_in_a_settings_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("old_limit = 3\n")

    done = RUNNER.invoke(app, ["router", "--settings-file", str(file)])

    assert done.exit_code == 2
    assert "--old-limit: removed. Use --new-limit." in done.stderr


def test_an_option_that_one_command_lost_is_refused_there_only() -> None:
    of_bench = RUNNER.invoke(app, ["bench", "--old-pause=3"])
    of_router = RUNNER.invoke(app, ["router", "--old-pause=3"])

    assert of_bench.stderr == "--old-pause: removed. It is 5 s.\n"
    assert "removed" not in of_router.stderr


@for_each("entry", sorted(FORMER_SETTINGS))
def test_a_former_option_is_gone_from_every_command(entry: str) -> None:
    command, _, option = entry.rpartition(" ")
    commands = [command] if command else list(app.commands)
    have = [
        name
        for name in commands
        for parameter in app.commands[name].params
        if option in (*parameter.opts, *parameter.secondary_opts)
    ]

    assert option.startswith("--")
    assert not have, f"{option} is still an option of {have}"
    assert FORMER_SETTINGS[entry].endswith("."), "one sentence"
