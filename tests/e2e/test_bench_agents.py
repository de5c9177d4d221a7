"""Agents against a pool that cannot hold all of them: who waits, what is reused, and the same without admission."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.cli.main import app
from tests.e2e.processes import assert_decisions_replay, metric, running_pool

pytestmark = pytest.mark.e2e

AGENTS = 16
BLOCKS = 330
"""Of 32 tokens on each of two workers: the open sessions hold about twice that."""


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.stdout


def test_agents_that_do_not_fit_wait_and_their_calls_replay(tmp_path: Path) -> None:
    pool = ("--data-dir", str(tmp_path / "data"), "--part-option", f"worker.total-kv-blocks={BLOCKS}")
    with running_pool(*pool, workers=2, speedup=4.0) as up:
        load = ("--agents", AGENTS, "--length-scale", 0.1, "--duration-s", 25, "--json", "--out", tmp_path / "lines")
        report = json.loads(run("bench", "--url", up.url, *load))
        waited = metric(up.url, "poolgrid_router_queue_seconds_count", cause="working_set")
        shown = json.loads(run("top", "--url", up.url, "--sessions", "--once", "--json"))["sessions"]["data"]

    assert report["errors"] == 0
    assert waited > 0
    assert report["cached_token_ratio"] >= 0.8 * report["ideal_cached_token_ratio"]
    lines = [json.loads(line) for path in (tmp_path / "lines").glob("*.jsonl") for line in path.open()]
    opened = sum(line["turn"] == 0 for line in lines)
    assert opened >= AGENTS
    turns = sorted(row["turns"] for row in shown)
    assert sum(turns) >= len(lines)
    assert len([each for each in turns if each > 1]) <= opened, "a session's turns are told from those of all others"

    assert assert_decisions_replay(tmp_path / "data") >= len(lines)
    tried = json.loads(run("what-if", tmp_path / "data", "--policy", "kv", "--json"))["policies"]
    assert tried["recorded"]["waited_turns"] > 0, "as the router did"
    assert tried["kv"]["waited_turns"] == 0
