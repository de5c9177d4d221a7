"""A password in an address is shown nowhere: not in a refusal of the command line, nor in a failure to connect."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app

SECRET = "hunter2"
FORMS = (
    f"http://u:{SECRET}@127.0.0.1:9",
    f"http://u:pass/{SECRET}@127.0.0.1:9",
    f"http://u:pass/@{SECRET}@127.0.0.1:x",
    f"u:{SECRET}@127.0.0.1:9",
    f"https://127.0.0.1:9?key={SECRET}",
    f"https://127.0.0.1:9/v1?key={SECRET}",
    f"http://127.0.0.1:9/v1#{SECRET}",
    f"tcp://u:{SECRET}@127.0.0.1:9",
    f"nats://u:{SECRET}@127.0.0.1:x",
    f"dyn://u:{SECRET}@127.0.0.1:9",
    f"dyn://blue.u:{SECRET}@router.http",
)
UNUSABLE = ("--max-connections", "-1")
"""Ends every service before its start, with a line for each option that cannot be used."""

OPTIONS = (
    *(("up", option) for option in ("--engine-url", "--nats-url")),
    *(("router", each) for each in ("--feed-endpoint", "--query-endpoint", "--nats-url", "--kubernetes-api")),
    ("router", "--trace-endpoint"),
    ("global-router", "--nats-url"),
    *(("worker", each) for each in ("--engine-url", "--nats-url", "--kv-events-endpoint", "--encode-endpoint")),
    *(("consolidator", each) for each in ("--engine-url", "--nats-url", "--kv-events-endpoint", "--serving-endpoint")),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_refused_address_shows_no_password(command: str, option: str, form: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, [command, option, form, *UNUSABLE])

    assert answer.exit_code == 2, answer.output
    assert SECRET not in answer.output


@pytest.mark.parametrize("form", FORMS)
def test_a_refused_url_of_a_pool_shows_its_name_and_no_password(form: str, tmp_path: Path) -> None:
    grid = tmp_path / "grid.json"
    grid.write_text("{}")

    answer = CliRunner().invoke(app, ["global-router", "--config", str(grid), "--pool-url", f"fast={form}"])

    assert answer.exit_code == 2
    assert "--pool-url" in answer.output
    assert "127.0.0.1" in answer.output or "router.http" in answer.output
    assert SECRET not in answer.output


@pytest.mark.parametrize(
    "words",
    [
        ("top", "--once"),
        ("explain", "r"),
        ("doctor",),
        ("drain", "--all"),
        ("config", "rollback"),
        ("bench", "--start-timeout-ms", "200"),
        ("engine-check",),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_command_that_reaches_nothing_shows_no_password(words: tuple[str, ...], form: str) -> None:
    answer = CliRunner().invoke(app, [*words, "--url", form])

    assert answer.exit_code != 0
    assert SECRET not in answer.output
    assert SECRET not in str(answer.exception)
