"""Two routers in front of one consolidator and its workers: one truth, and no request harmed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from tests.e2e.disturbed_load import assert_unharmed
from tests.e2e.expectation import MODEL, PLAIN, Verifier
from tests.e2e.processes import (
    WAIT_TIMEOUT_S,
    Process,
    eventually,
    index_equals_workers,
    metric,
    pool_is_quiet,
    ready_workers,
)
from tests.e2e.test_failures import TRACE

pytestmark = pytest.mark.e2e

WORKERS = 3
MODEL_OPTIONS = ("--served-model-name", MODEL.name, "--vocabulary-size", str(MODEL.vocab_size))
REQUESTS = 150


def all_ready(url: str) -> bool:
    return len(ready_workers(url)) == WORKERS


def two_routers(stack: ExitStack, consolidator: Process, *options: str) -> list[Process]:
    feed = ("--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query"))
    command = ("router", "--port", "0", *feed, *options)
    return [stack.enter_context(Process(*command, "--router-id", name)) for name in ("r0", "r1")]


@pytest.fixture(scope="module")
def consolidator() -> Iterator[Process]:
    with Process("consolidator") as running:
        yield running.wait_ready()
        assert running.stop()[0] == 0


@pytest.fixture(scope="module")
def routers(consolidator: Process) -> Iterator[list[Process]]:
    """Two routers and three workers, each a process of its own, on one consolidator."""
    with ExitStack() as stack:
        parts = two_routers(stack, consolidator)
        for number in range(WORKERS):
            name = ("--worker-id", f"worker-{number}", "--consolidator", consolidator.word("ingest"))
            options = (*MODEL_OPTIONS, "--speedup", "50", *name)
            parts.append(stack.enter_context(Process("worker", *options)))
        for part in parts:
            part.wait_ready()
        both = parts[:2]
        for router in both:
            eventually("all workers are there", partial(all_ready, router.url))
        yield both
        for part in parts:
            assert part.stop()[0] == 0


def run_bench(url: str) -> subprocess.Popen[bytes]:
    shape = ("--speed", "40", "--length-scale", "0.25", "--osl", "32")
    arguments = ("--url", url, "--trace", str(TRACE), "--requests", str(REQUESTS), *shape)
    return subprocess.Popen([sys.executable, "-m", "poolgrid", "bench", "--trace", str(TRACE), *arguments])


def test_two_routers_share_the_load_and_end_with_the_same_true_index(routers: list[Process]) -> None:
    other = run_bench(routers[1].url)
    settings = BenchSettings(url=routers[0].url, trace=TRACE, requests=REQUESTS, speed=40, length_scale=0.25, osl=32)
    report = measure_one(settings, verify=Verifier(PLAIN))
    assert other.wait(WAIT_TIMEOUT_S) == 0, "every request through the other router was served"

    assert_unharmed(report)
    assert report.requests == REQUESTS
    # Both send the same prompts: what one router had computed, the other one finds.
    found, realised = (
        [metric(router.url, f"poolgrid_router_{name}_tokens_total") for router in routers]
        for name in ("overlap_found", "overlap_realised")
    )
    sent = sum(metric(router.url, "poolgrid_router_prompt_tokens_total") for router in routers)
    assert report.ideal_cached_token_ratio is not None
    assert sum(realised) > report.ideal_cached_token_ratio * sent
    assert min(found) > 0
    for router in routers:
        url = router.url
        eventually("nothing is on any book", partial(pool_is_quiet, url))
        eventually("the index is what the workers hold", partial(index_equals_workers, url))
        assert metric(router.url, "poolgrid_router_untrusted_workers") == 0
    rows = [httpx.get(f"{router.url}/v1/workers").json()["data"] for router in routers]
    assert [row["indexed_blocks"] for row in rows[0]] == [row["indexed_blocks"] for row in rows[1]]
    assert all(row["requests_total"] > 0 for row in rows[0])


@pytest.fixture
def drawing(consolidator: Process, routers: list[Process]) -> Iterator[list[Process]]:
    """Two more routers, which draw the worker from a request's name: they choose the same one for the same name."""
    with ExitStack() as stack:
        both = two_routers(stack, consolidator, "--policy", "random")
        for router in both:
            eventually("all workers are there", partial(all_ready, router.wait_ready().url))
        yield both


def test_requests_of_the_same_name_from_two_routers_do_not_collide_on_a_worker(drawing: list[Process]) -> None:
    """The worker knows each of them by an id that no other router uses."""
    body = {"model": "tiny", "prompt": "the same name " * 20, "max_tokens": 400, "stream": True, "ignore_eos": True}
    names = ["mine", "mine", "mine~1"]
    with ExitStack() as stack:
        answers = []
        for number, name in enumerate(names):
            url = drawing[number % 2].url
            streaming = httpx.stream("POST", f"{url}/v1/completions", json=body, headers={"x-request-id": name})
            answer = stack.enter_context(streaming)
            lines = answer.iter_lines()
            next(lines)  # its first token is out, and the others come while it runs
            answers.append((answer, lines))
        for answer, lines in answers:
            rest = list(lines)
            assert answer.status_code == 200
            assert not [line for line in rest if '"error":' in line]
            assert "data: [DONE]" in rest
    assert answers[0][0].headers["x-poolgrid-worker"] == answers[1][0].headers["x-poolgrid-worker"]
    attempts = httpx.get(f"{drawing[0].url}/v1/decisions/mine").json()["attempts"]
    assert attempts[0]["request_id"].startswith("mine~")
