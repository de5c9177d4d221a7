"""Help that reads: every option and command name whole, at 80 columns and piped; the walk is one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import PROGRAM, app
from poolgrid.server.cli.options import BYTES
from tests.forms import needs_checkout


def commands(made: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, made
    if isinstance(made, click.Group):
        for name, below in made.commands.items():
            yield from commands(below, (*path, name))


COMMANDS = dict(commands(app))


def has_basics(path: tuple[str, ...]) -> bool:
    return getattr(COMMANDS[path], "has_basics", False)


def helped(path: tuple[str, ...], columns: str | None, *asked: str) -> str:
    words = asked or (("--help-all",) if has_basics(path) else ("--help",))
    answer = CliRunner().invoke(app, [*path, *words], env={"COLUMNS": columns}, prog_name=PROGRAM)
    assert answer.exit_code == 0, answer.output
    return answer.output


@needs_checkout
@pytest.mark.parametrize("columns", ["80", None])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_name_is_cut(path: tuple[str, ...], columns: str | None) -> None:
    text = helped(path, columns)
    words = text.replace(",", " ").replace(";", " ").split()

    assert text.startswith(f"Usage: {' '.join((PROGRAM, *path))}")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for parameter in COMMANDS[path].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                assert option in words, f"{option} of {path} is cut"
    if isinstance(COMMANDS[path], click.Group):
        for name, command in COMMANDS[path].commands.items():
            (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
            assert (command.help or "").split()[0] in line


OTHERWISE = {
    **dict.fromkeys(["router", "global-router", "worker", "consolidator"], "it serves until it is stopped"),
    "completion": "a script",
    "journal cat": "JSON lines",
    "config schema": "JSON",
    "config convert": "a document, which is JSON or YAML",
    "keys hash": "one word",
    "keys revoke": "nothing",
}
"""What commands print that have nothing to say in two ways."""


@pytest.mark.parametrize(
    "path", [path for path, made in COMMANDS.items() if not isinstance(made, click.Group)], ids=" ".join
)
def test_every_report_is_printed_as_json_on_demand_and_files_are_written_where_out_says(path: tuple[str, ...]) -> None:
    parameters = {name: each for each in COMMANDS[path].params for name in each.opts}

    if " ".join(path) in OTHERWISE:
        assert "--json" not in parameters
    else:
        assert parameters["--json"].is_flag
    assert "out" not in parameters, "a file to write is named with --out, everywhere"
    if "--out" in parameters:
        assert not parameters["--out"].is_flag


def test_help_says_defaults_environment_and_where_the_key_goes() -> None:
    router = " ".join(helped(("router",), "80").split())

    assert "Serve HTTP at this port; 0 = any free port. [default: 8000]" in router
    assert "Options are environment variables too (" in router
    assert "--settings-file is POOLGRID_SETTINGS_FILE" in router or "and so on" in router
    for path in (("top",), ("explain",), ("config", "rollback"), ("bench",)):
        assert "POOLGRID_API_KEY" in helped(path, "80"), path


def options_shown(text: str) -> list[str]:
    return [
        line.split()[0] for line in text.splitlines() if line.startswith("  --") and not line.startswith("  --help")
    ]


@pytest.mark.parametrize(
    "path", [path for path, made in COMMANDS.items() if not isinstance(made, click.Group)], ids=" ".join
)
def test_the_first_page_has_at_most_twelve_options_and_names_the_panel_of_every_other(path: tuple[str, ...]) -> None:
    first = helped(path, "80", "--help")

    assert len(options_shown(first)) <= 12
    if not has_basics(path):
        return
    shown = set(options_shown(first))
    for line in first.partition("More options, by panel:")[2].splitlines():
        if line.startswith("  --help ") and "-all" not in line:
            shown |= set(options_shown(helped(path, "80", "--help", line.split()[1])))
    assert shown == set(options_shown(helped(path, "80", "--help-all")))


def test_the_first_page_of_a_router_fits_sixty_lines_of_eighty_columns() -> None:
    assert len(helped(("router",), "80", "--help").splitlines()) <= 60


@pytest.mark.parametrize("asked", ["--help=tensorrt-llm", "--help=TensorRT-LLM", "--help=llm"])
def test_options_of_one_engine_have_a_panel(asked: str) -> None:
    text = helped(("worker",), "80", asked)

    assert "  --tensor-parallel-size " in text
    assert "  --speedup " not in text


def test_an_unknown_panel_is_refused_with_the_names_of_the_panels() -> None:
    answer = CliRunner().invoke(app, ["router", "--help", "typo"])

    assert answer.exit_code == 2
    assert "--help typo: no such panel; the panels are http-server," in answer.output


@pytest.mark.parametrize(("typed", "count"), [("256MiB", 256 << 20), ("4096", 4096), ("1 GiB", 1 << 30), ("-1", -1)])
def test_sizes_are_bytes_or_binary_units(typed: str, count: int) -> None:
    assert BYTES.convert(typed, None, None) == count


@pytest.mark.parametrize("typed", ["", "MiB", "256MB", "1.5GiB", "12 apples"])
def test_other_sizes_are_refused(typed: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size; allowed: bytes, or whole KiB"):
        BYTES.convert(typed, None, None)


def test_the_version_is_told_by_an_option() -> None:
    answer = CliRunner().invoke(app, ["--version"])

    assert answer.exit_code == 0
    assert answer.output.split()[0] == "poolgrid"
    assert answer.output.split()[1][0].isdigit()
