"""What the README's first bench promises: conversations find their cache where the router knows it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from poolgrid.cli.main import app

pytestmark = pytest.mark.e2e

README = (Path(__file__).parents[2] / "README.md").read_text()


def printed() -> list[str]:
    """The words of the printed command, without its own name."""
    found = re.search(r"<!-- bench -->\n```sh\n(.*?)\n```\n<!-- /bench -->", README, re.DOTALL)
    assert found is not None, "README.md has no code block between the bench marks"
    program, *words = shlex.split(found[1])
    assert program == ".venv/bin/poolgrid"
    return words


def test_the_printed_comparison_shows_a_hit_rate_that_matters_and_the_gain_over_round_robin(tmp_path: Path) -> None:
    # Smaller than printed, in all that costs time.
    small = ("--requests", "72", "--rounds", "1", "--think-time-s", "0.05", "--out", str(tmp_path))
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

    lines = [json.loads(line) for line in (tmp_path / "kv-c16-r1.jsonl").read_text().splitlines()]
    first = [line["prompt_tokens"] for line in lines if line["turn"] == 0]
    assert sum(first) / len(first) == pytest.approx(2500, rel=0.03), "words are as many as make the wanted tokens"
