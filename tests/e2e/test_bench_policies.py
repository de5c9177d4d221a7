"""What the README's first bench promises: conversations find their cache where the router knows it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.e2e.processes import assert_decisions_replay, metric, running_pool

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def printed() -> list[str]:
    """The words of the printed command, without its own name."""
    found = re.search(r"<!-- bench -->\n```sh\n(.*?)\n```\n<!-- /bench -->", README, re.DOTALL)
    assert found is not None, "README.md has no code block between the bench marks"
    program, *words = shlex.split(found[1])
    assert program == ".venv/bin/poolgrid"
    return words


def test_the_printed_comparison_shows_a_hit_rate_that_matters_and_the_gain_over_round_robin(tmp_path: Path) -> None:
    # Smaller than printed, in all that costs time.
    small = ("--requests", "72", "--rounds", "1", "--think-time-s", "0.05", "--out", str(tmp_path / "report.json"))
    result = CliRunner().invoke(app, [*printed(), *small, "--pool-options", "--workers 2 --speedup 10"])

    assert result.exit_code == 0, result.output
    assert "ratios to kv" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    kv, rest = ({**point, **point["report"]} for point in report["points"])
    assert (kv["name"], rest["name"]) == ("kv", "round-robin")
    assert kv["errors"] == rest["errors"] == 0
    assert kv["cached_token_ratio"] > 0.7
    assert kv["cached_token_ratio"] > 0.9 * kv["ideal_cached_token_ratio"]
    assert rest["cached_token_ratio"] < kv["cached_token_ratio"] - 0.05
    assert rest["ratios"]["cached_token_ratio"]["median"] < 1

    first = kv["prompt_tokens"] / kv["requests"]
    assert first > 2500, "words are as many as make the wanted tokens, and later turns are longer"


def test_the_recipe_of_prefill_and_decode_apart_runs_with_fewer_requests(tmp_path: Path) -> None:
    found = re.search(r"^poolgrid (bench .*--prefill 2 .*)$", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert found is not None
    result = CliRunner().invoke(app, [*shlex.split(found[1]), "--requests", "16", "--out", str(tmp_path / "out.json")])

    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["requests"], report["errors"]) == (16, 0)
    assert {worker.partition("-")[0] for worker in report["per_worker"]} >= {"decode"}


OPEN = 16
TURNS = 12
BLOCKS = 330
"""Of 32 tokens on each of two workers: the open sessions hold about twice that."""


def run(*arguments: object) -> str:
    found = CliRunner().invoke(app, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.stdout


def test_sessions_that_do_not_fit_wait_and_their_turns_replay(tmp_path: Path) -> None:
    pool = (
        *("--data-dir", str(tmp_path / "data"), "--part-option", f"worker.total-kv-blocks={BLOCKS}"),
        *("--part-option", "router.session-admission"),
    )
    with running_pool(*pool, workers=2, speedup=4.0) as up:
        shape = ("--turns", TURNS, "--isl", 150, "--osl", 34, "--think-time-s", 0.5, "--shared-prefix", 800)
        load = ("--concurrency", OPEN, "--requests", 2 * OPEN * TURNS, *shape)
        report = json.loads(run("bench", "--url", up.url, "--json", *load))
        waited = metric(up.url, "poolgrid_router_queue_seconds_count", cause="working_set")
        shown = json.loads(run("top", "--url", up.url, "--sessions", "--once", "--json"))["sessions"]["data"]

    assert report["errors"] == 0
    assert waited > 0
    assert report["cached_token_ratio"] >= 0.8 * report["ideal_cached_token_ratio"]
    assert report["requests"] == 2 * OPEN * TURNS
    turns = sorted(row["turns"] for row in shown)
    assert [each for each in turns if each > 1] == [TURNS] * 2 * OPEN, "a session's turns are told from those of others"

    assert assert_decisions_replay(tmp_path / "data") >= report["requests"]
    tried = json.loads(run("what-if", tmp_path / "data", "--policy", "kv", "--json"))["policies"]
    assert tried["recorded"]["waited_turns"] > 0, "as the router did"
    assert tried["kv"]["waited_turns"] == 0
