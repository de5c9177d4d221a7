"""Policies on a pool that runs, with real processes: each router is asked the same, and starts from nothing."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.benchmarks import live_policies
from poolgrid.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import Process

SMALL = [
    "--conversations",
    "4",
    "--turns",
    "3",
    "--system-tokens",
    "64",
    "--first-tokens",
    "200",
    "--turn-tokens",
    "40",
]


@pytest.mark.parametrize("argument", ["heavy", "heavy=fast", "heavy=0"])
def test_a_load_that_is_none_is_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        live_policies.main(["--feed-endpoint", "a", "--query-endpoint", "b", "--model-path", "c", "--think", argument])

    assert f"argument --think: {argument!r} is no list like heavy=2,full=0.8" in capsys.readouterr().err


def test_each_policy_is_asked_the_same_and_finds_nothing_of_the_run_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "runs.jsonl"
    with ExitStack() as stack:
        consolidator = stack.enter_context(Process("consolidator")).wait_ready()
        ingest, feed, query = (consolidator.word(plane) for plane in ("ingest", "feed", "query"))
        pool = ["--model", "tiny", "--consolidator", ingest, "--speedup", "50"]
        for number in range(2):
            stack.enter_context(Process("worker", *pool, "--worker-id", f"w{number}")).wait_ready()
        planes = ["--feed-endpoint", feed, "--query-endpoint", query, "--model-path", str(TINY_MODEL_PATH)]
        routers = ["--model-name", "tiny", "--vocabulary", "500", "--routers", "kv,predicted/0"]
        load = ["--think", "fast=0.02", "--seeds", "3", "--answer-tokens", "8", "--json", str(found)]
        live_policies.main([*planes, *routers, *load, *SMALL])

    kv, predicted = map(json.loads, found.read_text().splitlines())
    assert [(run["router"], run["load"], run["seed"]) for run in (kv, predicted)] == [
        ("kv", "fast", 3),
        ("predicted/0", "fast", 3),
    ]
    for run in (kv, predicted):
        assert run["requests"] == 12
        assert sum(run["by_worker"].values()) == 12
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"]
        # A turn has the turns before, but the first has at most the system prompt.
        assert 0.3 < run["reused_share"] < 0.85
    assert kv["error"] is None
    assert predicted["error"] is not None
    assert "predicted/0" in capsys.readouterr().out
