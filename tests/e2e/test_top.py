"""``poolgrid top`` and ``poolgrid explain`` show what real routers answer, field by field."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec
import pytest

from poolgrid.kernel.wire.answers import PlacedExplanation, RequestExplanation
from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.server.cli.commands.top import Frame, fetch, usage_bar
from poolgrid.server.process.figures import milliseconds, percent
from tests.e2e.fleet import POOL_CONFIGS, is_idle, running_fleet, small_copy
from tests.e2e.processes import eventually, is_settled, running_pool

pytestmark = pytest.mark.e2e

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "why there? " * 40}], "max_tokens": 4}
MOVING = ("last_event_ms_ago", "event_lag_ms", "offset", "saturation", "retry_after_ms")
"""What may differ between two looks at a pool that nobody uses."""


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """The URL of a router that has served two requests of one prompt, the second by name."""
    with running_pool(workers=2) as up:
        for name in ("first", "second"):
            httpx.post(f"{up.url}/v1/chat/completions", json=BODY, headers={"x-request-id": name}).raise_for_status()
            eventually("the router knows what is cached", lambda: is_settled(up.url))
        yield up.url


@pytest.fixture(scope="module")
def global_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    document = small_copy(POOL_CONFIGS / "disagg_two_by_two.json", tmp_path_factory.mktemp("fleet"))
    with running_fleet(document, speedup=50) as up:
        httpx.post(f"{up.url}/v1/chat/completions", json=BODY, headers={"x-request-id": "first"}).raise_for_status()
        eventually("nobody uses it", lambda: is_idle(up.url))
        yield up.url


def asked(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}").raise_for_status().json()


def frame_of(url: str) -> Frame:
    async def look() -> Frame:
        async with httpx.AsyncClient(base_url=url) as client:
            return await fetch(client, Frame(url))

    return asyncio.run(look())


def standing(value: Any) -> Any:
    """Return an answer without what moves by itself; every key stays."""
    if isinstance(value, Mapping):
        return {name: "moves" if name in MOVING else standing(each) for name, each in value.items()}
    return [standing(each) for each in value] if isinstance(value, list) else value


def lines_of(*arguments: str) -> list[str]:
    """Return what a command prints for a wide terminal."""
    environment = {**os.environ, "COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "poolgrid", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def cells(lines: list[str], first: str) -> list[str]:
    """Return the cells of the one row that begins with ``first``."""
    (line,) = [line for line in lines if line.strip().startswith(first + " ")]
    return re.split(r"\s{2,}", line.strip())


def number(value: float) -> str:
    return f"{value:,}"


def test_a_frame_holds_every_field_of_a_routers_answers_and_no_other(router: str) -> None:
    frame = frame_of(router)

    assert frame.fault is None
    assert standing(msgspec.to_builtins(frame.workers)) == standing(asked(router, "/v1/workers"))
    assert msgspec.to_builtins(frame.decisions) == asked(router, "/v1/decisions?limit=20")


def test_top_draws_a_router_as_it_answers(router: str) -> None:
    lines = lines_of("top", "--once", "--url", router)
    workers = asked(router, "/v1/workers")
    decisions = asked(router, "/v1/decisions")["data"]

    assert "2 ready" in lines[0]
    assert f"queue: 0 of {workers['queue']['requests_max']:,} requests" in lines[1]
    assert len(workers["data"]) == 2
    for row in workers["data"]:
        drawn = cells(lines, row["worker_id"])
        lag, last_event = drawn.pop(-3), drawn.pop(-2)
        assert (lag == "–", last_event == "–") == (row["event_lag_ms"] is None, row["last_event_ms_ago"] is None)
        assert drawn == [
            row["worker_id"], "aggregated", "tiny", "ready", "live" if row["requests_total"] else "no events yet",
            row["verdict"], number(row["running_requests"]), number(row["waiting_requests"]),
            *re.split(r"\s{2,}", usage_bar(row["active_blocks"], row["total_blocks"]).plain),
            percent(row["cached_blocks"] / row["total_blocks"]), number(row["indexed_blocks"]),
                number(row["prefill_tokens"]), number(row["requests_total"]),
        ]  # fmt: skip
    assert [name_of(row["request_id"]) for row in decisions] == ["second", "first"]
    assert decisions[0]["overlap_blocks"] > decisions[1]["overlap_blocks"]
    for row in decisions:
        assert cells(lines, row["request_id"]) == [
            row["request_id"], row["worker"], row["policy"], row["reason"],
            f"{row['overlap_blocks']}/{row['isl_blocks']}", number(row["isl"]), number(row["realised_cached_tokens"]),
            f"{row['cost']:,.2f}", number(row["candidates"]),
        ]  # fmt: skip


def test_a_routers_explanation_is_read_whole_and_drawn(router: str) -> None:
    told = asked(router, "/v1/decisions/second")
    (attempt,) = told["attempts"]

    assert msgspec.to_builtins(msgspec.convert(told, RequestExplanation)) == told
    assert json.loads("\n".join(lines_of("explain", "second", "--url", router, "--json"))) == told
    drawn = "\n".join(lines_of("explain", "second", "--url", router))
    assert f"worker {attempt['worker']}, {attempt['reason']} by policy kv at journal offset" in drawn
    assert f"{attempt['realised_cached_tokens']} tokens reported as reused" in " ".join(drawn.replace("│", " ").split())
    assert f"would have cost {attempt['margin']:.2f} more ({attempt['runner_up']})" in drawn
    for row in attempt["rows"]:
        terms = [f"{row['terms'][name]:,.2f}" for name in row["terms"]]
        figures = [
            row[f"{tier}_overlap_blocks"] for tier in ("device", "host", "disk")
        ] + [row["active_prefill_tokens"], row["active_blocks"], row["requests"]]  # fmt: skip
        wanted = [row["worker"], *map(str, figures), *terms, f"{row['cost']:,.2f}"]
        assert re.search(r"\s+".join(map(re.escape, wanted)), drawn), wanted


def test_a_dry_run_answers_in_the_same_words(router: str) -> None:
    answer = httpx.post(f"{router}/v1/route", json=BODY).json()

    assert list(answer) == ["dry_run", "routes"]
    assert list(answer["routes"][0]) == list(asked(router, "/v1/decisions/second")["attempts"][0])


def test_a_frame_holds_every_field_of_a_global_routers_answers_and_no_other(global_router: str) -> None:
    frame = frame_of(global_router)

    assert frame.fault is None
    assert standing(msgspec.to_builtins(frame.pools)) == standing(asked(global_router, "/v1/pools"))
    assert msgspec.to_builtins(frame.placements) == asked(global_router, "/v1/decisions?limit=20")
    told = asked(global_router, "/v1/decisions/first")
    assert msgspec.to_builtins(msgspec.convert(told, PlacedExplanation)) == told


def test_top_draws_a_global_router_as_it_answers(global_router: str) -> None:
    lines = lines_of("top", "--once", "--url", global_router)
    pools = asked(global_router, "/v1/pools")
    (placed,) = asked(global_router, "/v1/decisions")["data"]

    assert f"{len(pools['data'])} available" in lines[0]
    assert f"revision {pools['revision']}" in lines[0]
    for row in pools["data"]:
        roles = [role for model in row["models"] for role in model["roles"].values()]
        room = usage_bar(sum(role["requests"] for role in roles), sum(role["capacity"] for role in roles)).plain
        assert cells(lines, row["name"]) == [
            row["name"], row["stage"], "available", "closed", "0", number(row["waiting_requests"]),
            *re.split(r"\s{2,}", room), number(sum(role["ready"] for role in roles)), "tiny",
        ]  # fmt: skip
    assert name_of(placed["request_id"]) == "first"
    assert cells(lines, placed["request_id"]) == [
        placed["request_id"], ", ".join(placed["pools"]),
        ", ".join(placed["workers"]), placed["how"], placed["outcome"],
        number(placed["isl"]), number(placed["output_tokens"]), milliseconds(placed["queued_ms"]),
        milliseconds(placed["ttft_ms"]), milliseconds(placed["itl_ms"]),
    ]  # fmt: skip
    drawn = "\n".join(lines_of("explain", "first", "--url", global_router))
    for placement in asked(global_router, "/v1/decisions/first")["placements"]:
        assert f"pool {placement['pool']} by {placement['how']}, worker {placement['worker']}" in drawn
    assert drawn.count("would have cost") + drawn.count("attempt 0") >= len(placed["pools"])
