"""Policies on a pool that runs, with real processes: each router is asked the same, and starts from nothing."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.benchmarks import live_policies
from poolgrid.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import Process
from tests.fakes.engine_server.vllm import Options
from tests.workers.server.running import engine_server

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


def test_ways_without_a_router_need_servers(capsys: pytest.CaptureFixture[str]) -> None:
    planes = ["--feed-endpoint", "a", "--query-endpoint", "b", "--model-path", "c"]
    with pytest.raises(SystemExit):
        live_policies.main([*planes, "--routers", "kv,sticky", "--servers", "http://h:1"])

    assert "direct and sticky take two servers or more" in capsys.readouterr().err


@pytest.mark.parametrize("sticky", [True, False])
def test_requests_without_a_router_go_to_the_server_of_their_conversation_or_round_robin(sticky: bool) -> None:
    shape = live_policies.Shape(2, 3, 8, 16, 8, 4, 1000)

    async def play() -> tuple[list[live_policies.Said], list[list[list[int]]]]:
        async with engine_server(Options(blocks=20_000)) as one, engine_server(Options(blocks=20_000)) as other:
            run = live_policies.Run((one.url, other.url), "tiny", shape, 0.01, 1, 1, sticky=sticky)
            said = await run.play()
            counted = [[body["prompt"] for body in server.bodies if body["max_tokens"] == 4] for server in (one, other)]
            return said, counted

    said, counted = asyncio.run(play())

    assert len(said) == 6
    assert [len(prompts) for prompts in counted] == [3, 3]
    found = live_policies.figures(said)
    assert found["by_worker"] == {"server-0": 3, "server-1": 3}
    assert found["error"] is None
    if sticky:
        assert all(len({tuple(prompt[:24]) for prompt in prompts}) == 1 for prompts in counted)
