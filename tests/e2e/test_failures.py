"""Processes die at the worst moment, and clients do not notice."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.server.cli.commands.drain import Told, drain_through
from poolgrid.server.cli.main import app
from tests.e2e.disturbed_load import assert_unharmed, held_at_work, kill_at_work, load_while
from tests.e2e.expectation import PLAIN, Verifier
from tests.e2e.processes import (
    PATIENT_ROUTER,
    Process,
    eventually,
    index_equals_workers,
    is_settled,
    metric,
    pool_is_quiet,
    ready_workers,
    running_pool,
    worker_rows,
)
from tests.wire.test_guide_limits import chain, rules

pytestmark = pytest.mark.e2e

MAKER = ("--served-model-name", "tiny", "--vocabulary-size", "4096")

TRACE = Path(__file__).parent.parent / "data" / "conversation_1000.jsonl"
TRACE_REQUESTS = int(os.environ.get("POOLGRID_TRACE_REQUESTS", "250"))
"""Of the trace; 1000 are all."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Process]:
    with running_pool(workers=3) as up:
        yield up


def test_the_trace_runs_with_every_text_right_and_most_of_the_reuse_that_is_possible(pool: Process) -> None:
    """`test_bench_policies.py` has the comparison with round robin."""
    settings = BenchSettings(url=pool.url, trace=TRACE, requests=TRACE_REQUESTS, speed=40, length_scale=0.25, osl=48)
    report = measure_one(settings, verify=Verifier())

    assert_unharmed(report)
    assert report.requests == TRACE_REQUESTS
    assert report.cached_token_ratio is not None
    assert report.ideal_cached_token_ratio is not None
    assert report.cached_token_ratio > 0.75 * report.ideal_cached_token_ratio


def test_a_worker_killed_under_load_costs_no_request_and_no_wrong_text(pool: Process) -> None:
    eventually("all workers are there", lambda: len(ready_workers(pool.url)) == 3)
    before = metric(pool.url, "poolgrid_router_migrations_total")

    report = load_while(pool.url, lambda: kill_at_work(pool.url, "worker-1", pool.child("--worker-id", "worker-1")))

    assert_unharmed(report)
    assert metric(pool.url, "poolgrid_router_migrations_total") > before
    eventually("the worker is back", lambda: len(ready_workers(pool.url)) == 3)
    eventually("the books are balanced", lambda: pool_is_quiet(pool.url))
    eventually("the index is true", lambda: index_equals_workers(pool.url))


def test_a_guide_that_a_compiler_dies_of_is_refused_and_every_worker_lives_on(pool: Process) -> None:
    eventually("all workers are there", lambda: len(ready_workers(pool.url)) == 3)
    lives = {name: row["epoch"] for name, row in worker_rows(pool.url).items()}
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 64}

    for poison in ({"guided_json": chain(1000)}, {"guided_json": chain(160)}, {"guided_grammar": rules(4000)}):
        refused = httpx.post(f"{pool.url}/v1/completions", json={**asked, **poison})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "guide_too_complex")
    answer = httpx.post(f"{pool.url}/v1/completions", json={**asked, "guided_json": chain(50)})

    assert answer.status_code == 200
    assert {name: row["epoch"] for name, row in worker_rows(pool.url).items()} == lives


def test_most_of_a_pool_that_drains_at_once_under_load_costs_nothing(pool: Process) -> None:
    """One worker by order, which hands over at once amid output, and another by a signal."""
    eventually("all workers are there", lambda: len(ready_workers(pool.url)) == 3)
    before = worker_rows(pool.url)
    moved = metric(pool.url, "poolgrid_router_migrations_total")

    def drain_two() -> None:
        # The order is there before it goes on: what it has cannot end first.
        with held_at_work(pool.url, "worker-1", pool.child("--worker-id", "worker-1")):
            pool.child("--worker-id", "worker-2").send_signal(signal.SIGTERM)
            ordered = httpx.post(f"{pool.url}/v1/workers/worker-1/drain", params={"timeout_ms": 0})
            assert ordered.status_code == 202, ordered.text
        assert drain_through(pool.url, ["worker-1"], Told(timeout_ms=0, wait_s=60), as_json=False) == 0

    report = load_while(pool.url, drain_two)

    assert_unharmed(report)
    assert metric(pool.url, "poolgrid_router_migrations_total") > moved
    drained = worker_rows(pool.url)["worker-1"]
    assert (drained["state"], drained["epoch"]) == ("draining", before["worker-1"]["epoch"]), "it waits to be ended"
    assert httpx.get(f"{drained['http_endpoint']}/health").json()["status"] == "drained"
    pool.child("--worker-id", "worker-1").send_signal(signal.SIGTERM)
    eventually(
        "their next lives have joined",
        lambda: (
            len(ready_workers(pool.url)) == 3
            and all(worker_rows(pool.url)[each]["epoch"] != before[each]["epoch"] for each in ("worker-1", "worker-2"))
        ),
    )


def test_a_consolidator_killed_under_load_loses_nothing(pool: Process) -> None:
    eventually("all workers are there", lambda: len(ready_workers(pool.url)) == 3)
    offset = httpx.get(f"{pool.url}/v1/workers").json()["offset"]

    report = load_while(pool.url, lambda: pool.child("consolidator").kill())

    assert_unharmed(report)
    eventually("the books are balanced", lambda: pool_is_quiet(pool.url))
    eventually("the index is true", lambda: index_equals_workers(pool.url))
    assert httpx.get(f"{pool.url}/v1/workers").json()["offset"] > offset


def test_a_router_killed_and_restarted_knows_what_the_workers_hold_before_it_is_ready(tmp_path: Path) -> None:
    arguments = ("router", "--port", "0", "--data-dir", str(tmp_path), *PATIENT_ROUTER)
    with Process(*arguments) as first:
        first.wait_ready()
        ingest = first.word("ingest")
        with Process(
            *(
                "worker",
                "--worker-id",
                "w",
                "--served-model-name",
                "tiny",
                "--consolidator",
                ingest,
                "--speedup",
                "100",
            ),
            *("--vocabulary-size", "4096"),
        ) as worker:
            worker.wait_ready()
            eventually("the worker is reachable", lambda: ready_workers(first.url) == ["w"])
            settings = BenchSettings(url=first.url, concurrency=(8,), isl=900, osl=40, requests=60)
            assert_unharmed(measure_one(settings, verify=Verifier(PLAIN)))
            eventually("the index is true", lambda: index_equals_workers(first.url))
            held = httpx.get(f"{first.url}/v1/workers/w/blocks").text
            assert held.count("\n") > 60 * 28
            first.kill()

            with Process(*arguments, "--ingest-port", ingest.rpartition(":")[2]) as second:
                second.wait_ready()
                assert httpx.get(f"{second.url}/v1/workers/w/blocks").text == held
                eventually("the worker is reachable", lambda: ready_workers(second.url) == ["w"])
                assert httpx.get(f"{second.url}/ready").status_code == 200
                again = BenchSettings(url=second.url, concurrency=(8,), isl=900, osl=40, requests=60)
                report = measure_one(again, verify=Verifier(PLAIN))

                assert_unharmed(report)
                assert report.cached_token_ratio is not None
                assert report.cached_token_ratio > 0.9, "the same prompts again: all but their last block is cached"
                eventually("the index is true", lambda: index_equals_workers(second.url))
                second.stop()
            worker.stop()


def test_requests_on_a_router_that_died_are_given_up_by_their_worker(tmp_path: Path) -> None:
    with Process("router", "--port", "0", "--data-dir", str(tmp_path), *PATIENT_ROUTER) as router:
        router.wait_ready()
        with Process(
            *("worker", *MAKER, "--consolidator", router.word("ingest")),
        ) as worker:
            worker.wait_ready()
            eventually("the worker is reachable", lambda: len(ready_workers(router.url)) == 1)
            body = {"model": "tiny", "prompt": "long", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{router.url}/v1/completions", json=body) as answer:
                next(answer.iter_raw())
                router.kill()

            eventually("the worker is idle", lambda: metric(worker.url, "poolgrid_worker_running_requests") == 0)
            worker.signal(signal.SIGKILL)


def test_no_worker_is_503_and_too_many_requests_are_429_with_a_time_to_come_back(tmp_path: Path) -> None:
    bounds = ("--max-queue-requests", "2", "--worker-queue-factor", "1")
    with Process("router", "--port", "0", *bounds, *PATIENT_ROUTER) as router:
        router.wait_ready()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 10_000, "ignore_eos": True}
        nobody = httpx.post(f"{router.url}/v1/completions", json=body)
        assert nobody.status_code == 503
        assert nobody.json()["error"]["code"] == "no_worker"

        with Process(
            *("worker", *MAKER, "--consolidator", router.word("ingest")),
            *("--max-batch-size", "1", "--max-num-tokens", "64"),
        ) as worker:
            worker.wait_ready()
            eventually("the worker is reachable", lambda: len(ready_workers(router.url)) == 1)
            streamed = {**body, "stream": True}
            with httpx.stream("POST", f"{router.url}/v1/completions", json=streamed, timeout=60):
                waiting = [_asking(router.url, body) for _ in range(2)]
                eventually("two wait", lambda: metric(router.url, "poolgrid_router_queued_requests") == 2)

                refused = httpx.post(f"{router.url}/v1/completions", json=body)

                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "busy"
            assert not select.select(waiting, [], [], 0)[0], "they wait, or are served"
            for client_that_leaves in waiting:
                client_that_leaves.close()
            eventually("all is quiet", lambda: pool_is_quiet(router.url))
            worker.stop()
        router.stop()


def _asking(url: str, body: dict[str, object]) -> socket.socket:
    """Ask for a completion; whoever closes the connection leaves without it."""
    host, _, port = url.rpartition("/")[2].partition(":")
    data = json.dumps(body).encode()
    asking = socket.create_connection((host, int(port)))
    asking.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
    )
    return asking


def let_files_grow(process: psutil.Process, to_bytes: int) -> None:
    """Set the size beyond which this process can write no file; writes fail as they do on a full disk."""
    process.rlimit(resource.RLIMIT_FSIZE, (to_bytes, resource.RLIM_INFINITY))


def verified_load(url: str) -> None:
    settings = BenchSettings(url=url, concurrency=(8,), isl=400, osl=20, requests=40)
    assert_unharmed(measure_one(settings, verify=Verifier()))


def test_a_full_disk_stops_no_request_is_said_and_is_caught_up(tmp_path: Path) -> None:
    with running_pool("--data-dir", str(tmp_path), workers=2) as up:
        verified_load(up.url)
        eventually("it is recorded", lambda: metric(up.url, "poolgrid_router_recorded_decisions_total") == 40)
        writers = [up.child("consolidator"), up.child("router")]
        for writer in writers:
            let_files_grow(writer, 100)
        verified_load(up.url)
        eventually(
            "the router reports both", lambda: len(httpx.get(f"{up.url}/health").json().get("troubles", [])) == 2
        )
        assert metric(up.url, "poolgrid_router_journal_trouble") == 1
        pool = httpx.get(f"{up.url}/v1/pool").json()
        health = httpx.get(f"{up.url}/health")
        stalled_at = pool["journal"]["offset"]
        verified_load(up.url)

        assert "cannot write its journal" in pool["journal"]["trouble"]
        assert "File too large" in pool["decisions"]["trouble"]
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert httpx.get(f"{up.url}/v1/pool").json()["journal"]["offset"] == stalled_at

        for writer in writers:
            let_files_grow(writer, resource.RLIM_INFINITY)
        eventually("the state is current", lambda: httpx.get(f"{up.url}/health").json()["status"] == "healthy")
        eventually("the index is true", lambda: is_settled(up.url))
        verified_load(up.url)
        assert httpx.get(f"{up.url}/v1/pool").json()["journal"]["offset"] > stalled_at

    verify = CliRunner().invoke(app, ["journal", "verify", str(tmp_path), "--json"])
    replay = CliRunner().invoke(app, ["replay", str(tmp_path), "--json"])
    told = json.loads(replay.stdout)["routers"]["router"]
    assert verify.exit_code == 0, verify.output
    assert replay.exit_code == 0, replay.output
    assert told["lost_decisions"] > 0
    assert told["identical"] >= 80
    assert told["identical"] + told["not_derivable"] + told["lost_decisions"] == 160
