"""``poolgrid drain``: when a worker counts as drained, and what is said when nobody can be told."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from poolgrid.kernel.wire.answers import WorkerRow
from poolgrid.server.cli.commands.drain import Told, drain_through, left_on, without_anybody
from poolgrid.server.cli.main import app
from tests.cli.json_server import serving
from tests.cli.test_top import WORKERS

TOLD = Told(None, 60)


def row(worker_id: str, state: str, requests: int = 0, role: str = "decode", active: int = 0) -> WorkerRow:
    shape = msgspec.convert(WORKERS["data"][0], WorkerRow)  # type: ignore[index]
    return msgspec.structs.replace(
        shape,
        worker_id=worker_id,
        role=role,
        state=state,
        running_requests=requests,
        waiting_requests=0,
        active_requests=active,
    )


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([row("a", "ready")], {"a": "has not reported yet that it drains"}),
        ([row("a", "draining", 2)], {"a": "2 requests"}),
        ([row("a", "draining", 0, active=1)], {"a": "1 request"}),
        ([row("a", "draining"), row("a", "draining", 1)], {"a": "1 request"}),
        ([row("a", "draining"), row("b", "ready", 9)], {}),
        ([], {}),
    ],
    ids=["not heard", "busy", "only the router knows", "one rank is busy", "drained", "has left"],
)
def test_a_worker_is_drained_when_it_says_so_and_nothing_is_on_any_rank(
    rows: list[WorkerRow], left: dict[str, str]
) -> None:
    assert left_on(rows, ["a"]) == left


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        ([row("a", "ready"), row("b", "ready")], []),
        ([row("a", "ready"), row("b", "draining")], ["tiny (decode)"]),
        ([row("a", "ready"), row("p", "ready", role="prefill")], ["tiny (decode)"]),
        ([row("a", "ready"), row("w", "ready", role="aggregated")], []),
        ([row("a", "ready", role="encode"), row("w", "ready", role="aggregated")], ["tiny (encode)"]),
    ],
)
def test_it_is_said_when_nobody_is_left_for_a_role(rows: list[WorkerRow], lost: list[str]) -> None:
    assert without_anybody(rows, ["a"]) == lost


def test_a_name_that_the_pool_does_not_know_drains_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _: (200, json.dumps(WORKERS).encode())) as url:
        assert drain_through(url, ["w1", "w7"], TOLD, False) == 1

    said = capsys.readouterr().err
    assert "the pool has no worker w7, it has w0, w1; no worker is drained" in said


def test_a_global_router_and_a_router_that_is_away_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _: (404, b'{"error":{"message":"no such path"}}')) as url:
        assert drain_through(url, [], TOLD, False) == 1
    assert drain_through(url, [], TOLD, False) == 1

    answered, away = capsys.readouterr().err.splitlines()
    assert "status 404: no such path" in answered
    assert "/v1/workers: " in away


@pytest.mark.parametrize("arguments", [[], ["w0", "--all"], ["--all", "--worker-url", "http://127.0.0.1:1"]])
def test_exactly_one_way_of_saying_who_is_taken(arguments: list[str]) -> None:
    found = CliRunner().invoke(app, ["drain", *arguments])

    assert found.exit_code == 2
