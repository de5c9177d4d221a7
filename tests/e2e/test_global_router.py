"""A fleet of real processes behind a global router: the grid decides, tokens go straight, and pools may fail."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from lab.benchmarks.fleet import free_port
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.cli.main import app
from tests.e2e.disturbed_load import assert_unharmed, kill_at_work, load_while
from tests.e2e.expectation import MODEL, expected_text
from tests.e2e.fleet import POOL_CONFIGS, all_available, complete, pools, running_fleet
from tests.e2e.processes import Process, assert_decisions_replay, eventually, is_settled, metric, pool_is_quiet

pytestmark = pytest.mark.e2e

FOUR_CLASSES = POOL_CONFIGS / "aggregated_four_classes.json"
STARTED_ELSEWHERE = {
    "agents_with_priorities.json": "tests/e2e/test_body_fuzz.py",
    "disagg_two_by_two.json": "tests/e2e/test_top.py",
    "long_context.json": "docs/global_router.md",
    "short_and_long.json": "docs/tutorial.md",
}
"""Examples of which another test, or the test of a page, starts the fleet, which takes ten seconds of CPU."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A fleet of which routers and workers are killed; what its routers decided can be derived again all the same."""
    directory = tmp_path_factory.mktemp("fleet")
    with running_fleet(FOUR_CLASSES, "--data-dir", str(directory)) as up:
        yield up
    placed = [assert_decisions_replay(pool) for pool in sorted(directory.iterdir())]
    assert sum(placed) > 10


def listener(up: Process, url: str) -> psutil.Process:
    """Return the child that listens where a URL points."""
    port = int(url.rpartition(":")[2])
    for child in up.descendants():
        if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in child.net_connections("tcp")):
            return child
    raise AssertionError(f"no child of {up.arguments} listens at {url}")


@pytest.mark.parametrize(
    ("ttft", "itl", "pool"),
    [("100", "10", "premium"), ("100", "90", "first-token"), ("3900", "10", "steady"), ("3900", "90", "batch")],
)
def test_a_request_lands_in_the_pool_that_the_grid_says(fleet: Process, ttft: str, itl: str, pool: str) -> None:
    tokens = list(range(100, 400))
    before = metric(fleet.url, "poolgrid_global_router_dispatches_total", pool=pool)

    answer = complete(fleet.url, tokens, 24, x_ttft_target_ms=ttft, x_itl_target_ms=itl)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-poolgrid-pool"] == pool
    assert answer.headers["x-poolgrid-worker"].startswith(pool)
    assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(tokens), 24)
    assert metric(fleet.url, "poolgrid_global_router_dispatches_total", pool=pool) == before + 1
    record = httpx.get(f"{fleet.url}/v1/decisions/{answer.headers['x-request-id']}").json()
    assert record["outcome"] == "length"
    assert record["output_tokens"] == 24
    assert [(each["pool"], each["how"]) for each in record["placements"]] == [(pool, "grid")]
    assert record["placements"][0]["selection"]["cell"] == [int(ttft == "3900"), int(itl == "90")]


def test_tokens_and_prompts_do_not_pass_through_the_pools_router(fleet: Process) -> None:
    answer = complete(fleet.url, list(range(500, 700)), 16)
    pool = pools(fleet.url)[answer.headers["x-poolgrid-pool"]]["url"]

    explained = httpx.get(f"{pool}/v1/decisions/{answer.headers['x-request-id']}").json()

    assert explained["attempts"][0]["worker"] == answer.headers["x-poolgrid-worker"]
    assert metric(pool, "poolgrid_frontend_output_tokens_total") == 0
    eventually(
        "every reservation has ended", lambda: all(pool_is_quiet(row["url"]) for row in pools(fleet.url).values())
    )


def test_a_repeated_prompt_finds_its_blocks_through_the_select_plane(fleet: Process) -> None:
    tokens = list(range(1000, 1640))
    first = complete(fleet.url, tokens, 2)
    pool = pools(fleet.url)[first.headers["x-poolgrid-pool"]]["url"]
    holder = first.headers["x-poolgrid-worker"]
    eventually("the router knows what is cached", lambda: is_settled(pool))

    second = complete(fleet.url, tokens, 2)

    assert second.headers["x-poolgrid-worker"] == holder
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 608


@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        ({"router": {"ttft_target": -1}}, "nvext.router.ttft_target"),
        ({"router": {"itl_target": True}}, "nvext.router.itl_target"),
        ({"router": 5}, "nvext.router"),
        ({"agent_hints": {"priority": 2**40}}, "nvext.agent_hints.priority"),
    ],
)
def test_a_bad_hint_is_the_clients_error_and_names_the_field(fleet: Process, nvext: dict[str, Any], field: str) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "nvext": nvext}

    answer = httpx.post(f"{fleet.url}/v1/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_worker_killed_under_load_costs_no_request_and_no_wrong_text(fleet: Process) -> None:
    before = metric(fleet.url, "poolgrid_global_router_moves_total")

    pool = pools(fleet.url)["batch"]["url"]

    report = load_while(
        fleet.url, lambda: kill_at_work(pool, "batch-0", fleet.child("--worker-id", "batch-0")), requests=120
    )

    assert_unharmed(report)
    assert metric(fleet.url, "poolgrid_global_router_moves_total") > before
    eventually("the worker is back", lambda: all_available(fleet.url))


def test_a_pools_router_killed_under_load_costs_nothing_and_the_fallback_shows(fleet: Process) -> None:
    router = listener(fleet, pools(fleet.url)["batch"]["url"])

    report = load_while(fleet.url, router.kill, requests=120)

    assert_unharmed(report)
    records = httpx.get(f"{fleet.url}/v1/decisions?limit=200").json()["data"]
    fallen = [record for record in records if record["how"] == "fallback"]
    assert fallen, "nothing fell back while the pool was down"
    assert fallen[0]["pools"] != ["batch"]
    assert metric(fleet.url, "poolgrid_global_router_passed_over_total", pool="batch", state="down") >= len(fallen)
    eventually("the pool is back", lambda: all_available(fleet.url))
    assert complete(fleet.url, [5, 6, 7], 1).headers["x-poolgrid-pool"] == "batch"


def test_a_whole_pool_killed_under_load_costs_nothing(fleet: Process) -> None:
    eventually("the fleet is whole", lambda: all_available(fleet.url))
    row = pools(fleet.url)["batch"]

    def kill_pool() -> None:
        for process in (listener(fleet, row["url"]), *(fleet.child("--worker-id", f"batch-{n}") for n in (0, 1))):
            process.kill()

    report = load_while(fleet.url, kill_pool, requests=120)

    assert_unharmed(report)
    eventually("the fleet is whole again", lambda: all_available(fleet.url))
    eventually("the books are balanced", lambda: all(pool_is_quiet(row["url"]) for row in pools(fleet.url).values()))


def test_every_example_is_started_by_some_test() -> None:
    assert {path.name for path in POOL_CONFIGS.glob("*.json")} == {FOUR_CLASSES.name, *STARTED_ELSEWHERE}
    for example, starter in STARTED_ELSEWHERE.items():
        form = f'POOL_CONFIGS / "{example}"' if starter.endswith(".py") else f"pool_configs/{example}"
        assert form in (POOL_CONFIGS.parent / starter).read_text()


def replace_whole(document: Path, text: str) -> None:
    """Replace a document that is watched: one that is emptied first may be read, and refused, in between."""
    new = document.with_suffix(".new")
    new.write_text(text)
    new.replace(document)


def two_pools(urls: dict[str, str], cells: list[str]) -> str:
    return json.dumps(
        {
            "mode": "aggregated",
            "aggregated": {
                "pools": [{"name": name, "url": url} for name, url in urls.items()],
                "ttft_min_ms": 0,
                "ttft_max_ms": 1000,
                "ttft_resolution": 2,
                "itl_min_ms": 0,
                "itl_max_ms": 100,
                "itl_resolution": 1,
                "mapping": [[cells[0]], [cells[1]]],
            },
            "accept": ["unreachable-pool", "slower-pool-for-faster-target"],
        }
    )


def test_a_pool_may_be_missing_at_the_start_and_documents_may_change_while_it_runs(tmp_path: Path) -> None:
    document = tmp_path / "grid.json"
    late_port = free_port()
    vocabulary = ("--vocabulary-size", str(MODEL.vocab_size), "--speedup", "50", "--served-model-name", "tiny")
    with Process("router", "--port", "0") as here:
        here.wait_ready()
        urls = {"late": f"http://127.0.0.1:{late_port}", "here": here.url}
        document.write_text(two_pools(urls, ["late", "late"]))
        with (
            Process("worker", "--consolidator", here.word("ingest"), *vocabulary) as worker,
            Process("global-router", "--config", str(document), "--port", "0") as router,
        ):
            worker.wait_ready()
            router.wait_ready()
            eventually("one pool is up", lambda: pools(router.url)["here"]["state"] == "available")
            fallen = complete(router.url, [5, 6, 7], 3)

            assert fallen.status_code == 200, fallen.text
            assert fallen.headers["x-poolgrid-pool"] == "here"
            assert fallen.headers["x-poolgrid-decision"].startswith("fallback")
            late = pools(router.url)["late"]
            assert late["state"] == "down"
            assert "refused" in late["reason"] or "failed" in late["reason"]

            replace_whole(document, two_pools(urls, ["here", "here"]))
            eventually(
                "the new document is in force", lambda: metric(router.url, "poolgrid_global_router_revision") == 2
            )
            assert complete(router.url, [5, 6, 7], 3).headers["x-poolgrid-decision"].startswith("grid")

            replace_whole(document, two_pools(urls, ["here", "nowhere"]))
            eventually(
                "the broken one is refused",
                lambda: metric(router.url, "poolgrid_global_router_reloads_total", outcome="refused") == 1,
            )
            assert complete(router.url, [5, 6, 7], 3).status_code == 200

            router.signal(signal.SIGHUP)
            eventually(
                "a signal reads the file again",
                lambda: metric(router.url, "poolgrid_global_router_reloads_total", outcome="refused") == 2,
            )

            rolled_back = CliRunner().invoke(app, ["config", "rollback", "--url", router.url])
            assert rolled_back.exit_code == 0, rolled_back.output
            assert "revision 3 is in force" in rolled_back.output
            assert CliRunner().invoke(app, ["config", "rollback", "--url", router.url]).exit_code == 1
            assert complete(router.url, [5, 6, 7], 3).headers["x-poolgrid-decision"].startswith("fallback")

            with Process("router", "--port", str(late_port)) as found:
                found.wait_ready()
                with Process("worker", "--consolidator", found.word("ingest"), *vocabulary) as late_worker:
                    late_worker.wait_ready()
                    eventually("the late pool is up", lambda: pools(router.url)["late"]["state"] == "available")
                    assert complete(router.url, [5, 6, 7], 3).headers["x-poolgrid-pool"] == "late"

            eventually("the late pool is down", lambda: pools(router.url)["late"]["state"] == "down")
            worker.kill()
            eventually("nobody is left", lambda: httpx.get(f"{router.url}/ready").status_code == 503)
            assert complete(router.url, [5, 6, 7], 3).status_code in (404, 503)

            router.signal(signal.SIGTERM)
            assert router.wait() == 0
