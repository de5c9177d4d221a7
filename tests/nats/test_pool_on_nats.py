"""A whole pool whose journal is a stream on one server: it serves, fails over, and its journal is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.e2e.processes import Process, eventually, index_equals_workers, metric, pool_is_quiet, running_pool
from tests.nats.pool import ask, kill_active_consolidator, leader, offset, publish, trouble
from tests.nats.servers import BINARY, MISSING, NatsServer, one_server

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

PROMPT = "What is said at length is cached in blocks, and what is cached in blocks is said again sooner. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with one_server() as server:
        yield server


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the router records its decisions."""
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def pool(server: NatsServer, data_dir: Path) -> Iterator[Process]:
    plane = ("--event-plane", "nats", "--nats-url", server.url, "--consolidators", "2")
    options = ("--part-option", "consolidator.leader-lease-ms=5000", "--part-option", f"router.data-dir={data_dir}")
    with running_pool(*plane, *options, workers=1) as up:
        yield up


def knows_what_is_cached(url: str, after: int) -> bool:
    return offset(url) > after and pool_is_quiet(url) and index_equals_workers(url)


def test_the_router_knows_what_workers_cache(pool: Process) -> None:
    before = offset(pool.url)

    assert ask(pool.url, PROMPT) == 200

    eventually("the index is true", lambda: knows_what_is_cached(pool.url, before))
    eventually("nothing is wrong", lambda: trouble(pool.url) == "")


def test_a_worker_that_loads_says_so_to_the_active_consolidator_and_routers_hear_it(
    pool: Process, server: NatsServer
) -> None:
    def loading() -> list[str]:
        return [each["worker_id"] for each in httpx.get(f"{pool.url}/v1/workers").json()["loading"]]

    plane = ("--event-plane", "nats", "--nats-url", server.url)
    with Process("worker", "--worker-id", "late", "--served-model-name", "tiny", "--load-ms", "600000", *plane):
        eventually("it is seen to load", lambda: loading() == ["late"])


def test_when_the_active_consolidator_is_killed_another_one_goes_on_without_a_hole(
    pool: Process, server: NatsServer
) -> None:
    before = offset(pool.url)
    first = kill_active_consolidator(pool, server.url)

    assert ask(pool.url, "first " + PROMPT) == 200
    eventually("another consolidator is active", lambda: leader(server.url) not in (None, first))

    assert ask(pool.url, "then " + PROMPT) == 200
    eventually("the index is true", lambda: knows_what_is_cached(pool.url, before))


def test_foreign_messages_stop_neither_the_pool_nor_the_consolidator_that_takes_over(
    pool: Process, server: NatsServer
) -> None:
    before = offset(pool.url)
    publish(server.url, "$O.poolgrid-default-snapshots.M.x", b"null")
    publish(server.url, "poolgrid.default.journal.x", b"hello")

    assert ask(pool.url, "foreign " + PROMPT) == 200
    eventually("the index is true", lambda: knows_what_is_cached(pool.url, before))

    first = kill_active_consolidator(pool, server.url)
    eventually("another consolidator is active", lambda: leader(server.url) not in (None, first))
    assert ask(pool.url, "after " + PROMPT) == 200
    eventually("the index is true again", lambda: knows_what_is_cached(pool.url, before))
    eventually("nothing is wrong", lambda: trouble(pool.url) == "")


def test_when_the_server_is_killed_the_pool_serves_and_knows_everything_afterwards(
    pool: Process, server: NatsServer
) -> None:
    before = offset(pool.url)
    server.kill()

    assert ask(pool.url, "meanwhile " + PROMPT) == 200
    eventually("the router reports it", lambda: "the consolidator has been silent" in trouble(pool.url))
    server.start()

    eventually("the index is true", lambda: knows_what_is_cached(pool.url, before))
    eventually("nothing is wrong any more", lambda: trouble(pool.url) == "")


def test_the_journal_of_the_stream_is_read_as_one_of_a_directory_is(pool: Process, server: NatsServer) -> None:
    where = f"{server.url}/default"
    runner = CliRunner()

    verified = runner.invoke(app, ["journal", "verify", where, "--json"])
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["records"] > 5
    listed = json.loads(runner.invoke(app, ["journal", "ls", where, "--json"]).stdout)
    assert listed["in_use"]
    assert [row["worker"] for row in listed["streams"]] == ["worker-0"]
    rows = runner.invoke(app, ["journal", "cat", where, "--from", "1", "--to", "4"]).stdout.splitlines()
    assert [json.loads(row)["offset"] for row in rows] == [1, 2, 3]
    refused = runner.invoke(app, ["journal", "compact", where])
    assert refused.exit_code == 2
    absent = runner.invoke(app, ["journal", "ls", f"{server.url}/another"])
    assert absent.exit_code == 2


def test_recorded_decisions_are_derived_again_from_the_stream(
    pool: Process, server: NatsServer, data_dir: Path
) -> None:
    where, decisions = f"{server.url}/default", str(data_dir)
    runner = CliRunner()
    for number in range(50):
        assert ask(pool.url, f"{number % 5} of many " + PROMPT) == 200
    decision = httpx.get(f"{pool.url}/v1/decisions?limit=1").json()["data"][0]

    def is_all_recorded() -> bool:
        name = "poolgrid_router_{}_total".format
        made = metric(pool.url, name("decisions"))
        return metric(pool.url, name("recorded_decisions")) + metric(pool.url, name("unrecorded_decisions")) == made

    eventually("all are recorded", is_all_recorded)
    shown = runner.invoke(app, ["explain", decision["request_id"], "--journal", decisions, "--json"])
    [attempt] = json.loads(shown.stdout)["attempts"]
    assert (attempt["worker"], attempt["recorded"]["router"]) == (decision["worker"], "router")
    replayed = json.loads(runner.invoke(app, ["replay", where, "--decisions", decisions, "--json"]).stdout)
    assert replayed["identical"]
    assert replayed["routers"]["router"]["identical"] > 50
    refused = runner.invoke(app, ["replay", where])
    assert refused.exit_code == 2
    assert "--decisions" in refused.output

    shown = runner.invoke(app, ["what-if", where, "--decisions", decisions, "--policy", "kv,round-robin", "--json"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["requests"] >= 50
    assert list(report["policies"]) == ["recorded", "kv", "round-robin"]
