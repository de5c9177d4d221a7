"""A pool on a cluster of three NATS servers on loopback: its parts are killed under verified load; what appends cost.

    python -m tests.nats              all parts
    python -m tests.nats failures     servers, consolidators and workers killed, one after the other
    python -m tests.nats fleet        two pools behind a global router, each with its journal under its own name
    python -m tests.nats costs        one server, one that syncs always, three servers

The exit status is 0 when all holds, 1 when something does not, 2 when there is no nats-server to try it with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
from click.testing import CliRunner

from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.plugins.nats.jetstream import JetStreamJournal, StreamShape
from poolgrid.plugins.nats.message import Outgoing, StreamUnavailable, empty_body
from poolgrid.server.cli.main import app
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from tests.e2e.disturbed_load import assert_unharmed
from tests.e2e.expectation import Verifier
from tests.e2e.fleet import pools, running_fleet
from tests.e2e.processes import eventually, index_equals_workers, pool_is_quiet, running_pool
from tests.nats.pool import active_consolidator, leader, offset, trouble
from tests.nats.servers import BINARY, MISSING, NatsServer, cluster, one_server

LEASE_S = 2
REQUESTS = 100
"""Of one round of load; rounds follow each other until everything was killed."""

APART_S = 6.0
"""Between two deaths: longer than a fail-over, so that each is one of its own."""

COST_S = 3.0
"""How long each shape of append is measured."""


def say(text: str) -> None:
    """Tell whoever waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def failures() -> None:
    """Kill what can be killed, one after the other, under load whose every answer is checked."""
    with cluster() as servers:
        plane = [word for server in servers for word in ("--nats-url", server.url)]
        further = (
            "--part-option",
            f"consolidator.leader-lease-ms={1000 * LEASE_S}",
            "--part-option",
            "consolidator.nats-replicas=3",
        )
        arguments = ("--event-plane", "nats", *plane, "--consolidators", "2", *further)
        with running_pool(*arguments, speedup=20.0, workers=3) as up:
            url = up.url

            def kill_consolidator() -> None:
                first = leader(servers[0].url)
                died_s = time.monotonic()
                active_consolidator(up, servers[0].url).kill()
                eventually("another consolidator is active", lambda: _announced(servers[0].url, first))
                took_s = time.monotonic() - died_s
                say(f"fail-over of the consolidator: {took_s:.1f} s, with a lease of {LEASE_S} s")
                assert took_s <= LEASE_S + 2, "fail-over takes at most the lease and two seconds"

            disturbances: list[tuple[str, Callable[[], object]]] = [
                ("the active consolidator", kill_consolidator),
                *((f"NATS server {number}", _restarter(server)) for number, server in enumerate(servers)),
                ("a worker", lambda: up.child("--worker-id", "worker-1").kill()),
                ("the active consolidator again", kill_consolidator),
            ]
            failed: list[BaseException] = []
            done = threading.Event()

            def disturb_all() -> None:
                try:
                    for what, disturb in disturbances:
                        done.wait(APART_S)  # the load goes on meanwhile
                        say(f"killing {what}")
                        disturb()
                    done.wait(APART_S)
                except BaseException as error:
                    failed.append(error)
                finally:
                    done.set()

            disturber = threading.Thread(target=disturb_all)
            disturber.start()
            requests, verified = _load_until(done, url)
            disturber.join()
            if failed:
                raise AssertionError(f"disturbing failed: {failed[0]!r}") from failed[0]
            say(f"{requests} requests, {verified} texts checked, none wrong, none failed")
            before = offset(url)
            eventually(
                "the index is true", lambda: pool_is_quiet(url) and index_equals_workers(url) and trouble(url) == ""
            )
            say(f"index = truth at offset {before}")


def _load_until(done: threading.Event, url: str) -> tuple[int, int]:
    """Send requests whose answers are checked until something is done; return how many, and how many were checked."""
    requests = verified = 0
    while not done.is_set():
        settings = BenchSettings(url=url, requests=REQUESTS, concurrency=(8,), isl=600, osl=48)
        verifier = Verifier()
        report = measure_one(settings, verify=verifier)
        assert_unharmed(report)
        requests += report.requests
        verified += verifier.checked
    return requests, verified


def _announced(url: str, first: object) -> bool:
    found = leader(url)
    return found is not None and found != first and bool(found.ingest)


def _restarter(server: NatsServer) -> Callable[[], None]:
    def restart() -> None:
        server.kill()
        time.sleep(2.0)  # noqa: TID251 - the others elect a leader meanwhile
        server.start()

    return restart


def fleet() -> None:
    """Run a fleet on one server; kill the active consolidator of a pool."""
    shape = {"simulate": {"workers": 1}}
    grid = {
        "pools": [{"name": "fast.a", **shape}, {"name": "slow_b", **shape}],
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 2,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "mapping": [["fast.a"], ["slow_b"]],
    }
    with tempfile.TemporaryDirectory(prefix="poolgrid-nats-") as directory, one_server() as server:
        path = Path(directory) / "fleet.json"
        path.write_text(json.dumps({"version": 1, "mode": "aggregated", "aggregated": grid}))
        plane = ("--event-plane", "nats", "--nats-url", server.url, "--consolidators", "2")
        with running_fleet(path, *plane, "--part-option", f"consolidator.leader-lease-ms={1000 * LEASE_S}") as up:
            for target in ("100", "900"):
                body = {"model": "tiny", "prompt": "What is said here is cached there. " * 8, "max_tokens": 4}
                answer = httpx.post(f"{up.url}/v1/completions", json=body, headers={"x-ttft-target-ms": target})
                assert answer.status_code == 200, answer.text
            places = {row["name"]: row["url"] for row in pools(up.url).values()}
            for pool, name in (("fast.a", "fast-a"), ("slow_b", "slow_b")):
                url = places[pool]
                eventually(f"the index of {pool} is true", partial(_is_true, url))
                verified = CliRunner().invoke(app, ["journal", "verify", f"{server.url}/{name}", "--json"])
                assert verified.exit_code == 0, verified.output
                records = json.loads(verified.stdout)["records"]
                assert records == offset(url), f"{name} has {records} records, its router is at {offset(url)}"
                say(f"pool {pool}: {records} records under its own name, index = truth")


def _is_true(url: str) -> bool:
    return pool_is_quiet(url) and index_equals_workers(url)


def costs() -> None:
    """Print what appends cost, as the table in ``docs/operations.md``."""
    say("servers                    1 KiB ms  250 KiB ms  messages/s  MB/s")
    with one_server() as server:
        say("one, default               " + asyncio.run(_costs([server], 1)))
    with one_server(sync_always=True) as server:
        say("one, sync_interval: always " + asyncio.run(_costs([server], 1)))
    with cluster() as servers:
        say("three, default             " + asyncio.run(_costs(servers, 3)))
    with cluster(sync_always=True) as servers:
        say("three, always              " + asyncio.run(_costs(servers, 3)))


async def _costs(servers: list[NatsServer], replicas: int) -> str:
    settings = EventPlaneSettings(event_plane="nats", nats_url=tuple(server.url for server in servers))
    connection = NatsConnection(settings, "costs", SystemClock())
    await connection.open()
    try:
        journal = JetStreamJournal(connection, StreamShape(replicas))
        while True:
            try:
                await journal.open()
                break
            except StreamUnavailable:
                await asyncio.sleep(0.5)  # servers of a cluster find each other
        small, last = await _appends(journal, 1024, 0)
        large, _ = await _appends(journal, 250 * 1024, last)
        return f"{1000 / small:8.2f}  {1000 / large:10.2f}  {small:10,.0f}  {large * 0.256:4.0f}"
    finally:
        await connection.close()


async def _appends(journal: JetStreamJournal, size: int, last: int) -> tuple[float, int]:
    """Append messages for a while, one after the other; return how many a second, and the last sequence."""
    count, begun_s = 0, time.monotonic()
    while (took_s := time.monotonic() - begun_s) < COST_S:
        message = Outgoing(f"costs.{last}", 0, False, empty_body(0, 0) + bytes(size))
        await journal.append([message], last, begins=last == 0)
        last += 1
        count += 1
    return count / took_s, last


def main() -> int:
    """Run the parts that are named; return the exit status."""
    parts = {"failures": failures, "fleet": fleet, "costs": costs}
    parser = argparse.ArgumentParser(prog="python -m tests.nats")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="failures, fleet, costs; all when none is named")
    named = parser.parse_args().parts or list(parts)
    if not BINARY:
        say(MISSING)
        return 2
    for name in named:
        say(f"-- {name}")
        try:
            parts[name]()
        except AssertionError as error:
            say(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
