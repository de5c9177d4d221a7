"""A pool whose worker still loads: everybody sees how far it is, nobody counts it, and then it serves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.e2e.fleet import POOL_CONFIGS, complete, pools
from tests.e2e.processes import Process, eventually

pytestmark = pytest.mark.e2e

LOAD_MS = 10_000
WEIGHTS = 16_000_000_000


def worker(pool: Process, name: str, *more: str) -> Process:
    there = (
        "--worker-id",
        name,
        "--served-model-name",
        "tiny",
        "--speedup",
        "50",
        "--consolidator",
        pool.word("ingest"),
    )
    return Process("worker", *there, *more)


def router() -> Process:
    return Process("router", "--port", "0", "--select-port", "0", "--ingest-port", "0")


def loading(pool: Process) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{pool.url}/v1/workers").json()["loading"]
    return rows


def test_a_pool_that_still_loads_is_not_counted_and_says_what_is_left() -> None:
    document = POOL_CONFIGS / "short_and_long.json"
    with router() as short, router() as long, worker(short.wait_ready(), "s0") as prompt:
        urls = [f"--pool-url=short={short.url}", f"--pool-url=long={long.wait_ready().url}"]
        prompt.wait_ready()
        with Process("global-router", "--config", str(document), "--port", "0", *urls) as fleet:
            fleet.wait_ready()
            eventually("the one pool is there", lambda: pools(fleet.url)["short"]["state"] == "available")
            with worker(long, "l0", "--load-ms", str(LOAD_MS)) as late:
                eventually("its pool hears that it loads", lambda: bool(loading(long)))
                eventually("a global router sees it", lambda: pools(fleet.url)["long"]["state"] == "loading")
                answer = complete(fleet.url, list(range(1200)), 2)
                drawn = CliRunner().invoke(app, ["top", "--once", "--url", long.url], env={"COLUMNS": "160"})
                (row,) = loading(long)  # still: what was asked before was asked of a pool that loads

                assert (answer.status_code, answer.headers["x-poolgrid-pool"]) == (200, "short")
                assert "1 loading" in drawn.stdout, drawn.output
                assert "GiB" in drawn.stdout
                assert (row["worker_id"], row["model"], row["role"], row["phase"]) == (
                    "l0",
                    "tiny",
                    "aggregated",
                    "load",
                )
                assert row["total_bytes"] == WEIGHTS
                assert 0 < row["left_bytes"] == WEIGHTS - row["done_bytes"]

                late.wait_ready()
                eventually("the pool is counted", lambda: pools(fleet.url)["long"]["state"] == "available")
                assert loading(long) == [], "a member is not among those that load"
                assert complete(fleet.url, list(range(1200)), 2).headers["x-poolgrid-pool"] == "long"
