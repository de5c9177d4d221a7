"""A pool whose processes find each other by name: no address is given to any of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.discovery.api_server import ApiServer, proxy_in_a_thread
from tests.discovery.slices import endpoint, endpoint_slice
from tests.e2e.disturbed_load import assert_unharmed, load_while
from tests.e2e.fleet import all_available, assert_serves, pools
from tests.e2e.processes import Process, eventually, is_settled, ready_workers
from tests.e2e.screen import screen_of

pytestmark = pytest.mark.e2e

POOL = "blue"


def one_pool(name: str = POOL, **more: str) -> dict[str, Any]:
    grid = {
        "pools": [{"name": name, **more}],
        "isl_min": 0,
        "isl_max": 100,
        "isl_resolution": 1,
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "mapping": [[[name]]],
    }
    return {"version": 1, "mode": "aggregated", "aggregated": grid}


class NamedPool:
    """A consolidator, two routers, a worker and a global router, which share a directory and nothing else."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self.names = directory / "names"
        self._opened = opened
        document = directory / "pool.json"
        document.write_text(json.dumps(one_pool()))
        # All at once: whoever is first waits for the others.
        consolidator = self.begin("consolidator", "--http-port", "0")
        routers = [self.begin_router(f"router-{number}") for number in range(2)]
        worker = self.begin("worker", "--worker-id", "w", "--served-model-name", "tiny", "--speedup", "50")
        for process in (consolidator, *routers, worker):
            process.wait_ready()
        self.consolidator, self.routers, self.worker = consolidator, routers, worker
        self.front = self.begin("global-router", "--config", str(document), "--port", "0").wait_ready()

    def begin(self, *arguments: str) -> Process:
        names = (
            "--names",
            "directory",
            "--names-dir",
            str(self.names),
            "--namespace",
            POOL,
        )
        return self._opened.enter_context(Process(*arguments, *names))

    def begin_router(self, name: str) -> Process:
        feed = ("--feed-endpoint", f"dyn://{POOL}.consolidator.feed")
        query = ("--query-endpoint", f"dyn://{POOL}.consolidator.query")
        return self.begin("router", "--port", "0", "--router-id", name, *feed, *query)

    def loading(self) -> list[str]:
        return [each["worker_id"] for each in httpx.get(f"{self.routers[0].url}/v1/workers").json()["loading"]]

    def router_at(self, url: str) -> Process:
        return next(router for router in self.routers if router.url == url)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamedPool]:
    with ExitStack() as opened:
        yield NamedPool(tmp_path_factory.mktemp("named"), opened)


def test_a_pool_is_found_by_its_name_and_serves(pool: NamedPool) -> None:
    eventually("the pool is available", lambda: all_available(pool.front.url))

    assert_serves(pool.front.url)

    assert pools(pool.front.url)[POOL]["url"] in {router.url for router in pool.routers}
    [row] = httpx.get(f"{pool.routers[0].url}/health").json()["served"]
    assert row["endpoint"] == f"{POOL}.worker.generate"


def test_operators_see_everybody_at_any_router(pool: NamedPool) -> None:
    for url in (pool.front.url, pool.routers[0].url):
        listed = httpx.get(f"{url}/v1/fleet").json()

        assert listed["names"] == "directory"
        assert listed["refused"] == {}
        assert sorted((row["namespace"], row["component"]) for row in listed["data"]) == [
            (POOL, "consolidator"),
            (POOL, "global-router"),
            (POOL, "router"),
            (POOL, "router"),
            (POOL, "worker"),
        ]
        [worker] = [row for row in listed["data"] if row["component"] == "worker"]
        assert worker["instance"] == "w"
        assert worker["endpoints"]["generate"].startswith("tcp://127.0.0.1:")


def test_a_worker_that_loads_says_so_to_the_consolidator_that_it_finds_by_name(pool: NamedPool) -> None:
    with pool.begin("worker", "--worker-id", "late", "--served-model-name", "tiny", "--load-ms", "600000"):
        eventually("it is seen to load", lambda: pool.loading() == ["late"])


def test_a_global_router_finds_a_pools_routers_by_what_kubernetes_says(pool: NamedPool, tmp_path: Path) -> None:
    rows = httpx.get(f"{pool.front.url}/v1/fleet").json()["data"]
    server = ApiServer(tmp_path)
    for number, row in enumerate(each for each in rows if each["component"] == "router"):
        places = {name: urlsplit(address) for name, address in row["endpoints"].items()}
        pod = endpoint(number, address=places["http"].hostname or "")
        ports = [{"name": name, "port": at.port, "protocol": "TCP"} for name, at in places.items()]
        server.slices.append(endpoint_slice(f"blue-router-names-{number:05}", [pod], ports=ports))
    document = tmp_path / "east.json"
    document.write_text(json.dumps(one_pool("east", url=f"dyn://{POOL}.router.select")))
    with proxy_in_a_thread(server):
        api = ("--names", "kubernetes", "--kubernetes-api", server.url, "--kubernetes-namespace", server.namespace)
        with Process("global-router", "--config", str(document), "--port", "0", *api) as front:
            front.wait_ready()
            eventually("the pool is available", lambda: all_available(front.url))

            assert_serves(front.url)

            assert len(pools(front.url)["east"]["routers"]) == 2
            listed = httpx.get(f"{front.url}/v1/fleet").json()
            assert listed["names"] == "kubernetes"
            assert sorted(row["instance"] for row in listed["data"]) == ["router-0", "router-1"]


def test_one_of_two_routers_killed_under_load_costs_nothing_and_its_successor_is_found(pool: NamedPool) -> None:
    eventually("the pool is available", lambda: all_available(pool.front.url))
    active = pools(pool.front.url)[POOL]["url"]
    victim = pool.router_at(active)

    report = load_while(pool.front.url, victim.kill, requests=80)

    assert_unharmed(report)
    now = pools(pool.front.url)[POOL]
    assert now["state"] == "available"
    assert now["url"] != active
    pool.routers.remove(victim)
    pool.routers.append(pool.begin_router("router-2").wait_ready())
    survivor = pool.router_at(now["url"])
    eventually(
        "the new router stands by",
        lambda: {row["state"] for row in pools(pool.front.url)[POOL]["routers"]} == {"active", "standby"},
    )

    report = load_while(pool.front.url, survivor.kill, requests=80)

    assert_unharmed(report)
    eventually("what is cached is known", lambda: is_settled(pool.routers[-1].url))


def test_top_follows_a_name_from_a_router_that_is_killed_to_one_that_lives(pool: NamedPool) -> None:
    watched = pool.begin_router("router-3").wait_ready()
    with screen_of(
        "top", "--url", f"dyn://{POOL}.router.http", "--interval", "0.2",
        POOLGRID_NAMES="directory", POOLGRID_NAMES_DIR=str(pool.names),
    ) as screen:  # fmt: skip
        screen.read_until(f"{watched.url}   workers: 1 ready")

        watched.kill()

        screen.read_until(f"{pool.routers[-1].url}   workers: 1 ready")


def test_who_ends_in_order_gives_its_name_back(pool: NamedPool) -> None:
    before = {path.name for path in pool.names.glob(f"{POOL}.worker.*.json")}
    assert len(before) == 1

    status, errors = pool.worker.stop()

    assert status == 0, errors
    assert not list(pool.names.glob(f"{POOL}.worker.*.json"))


def test_an_entry_moves_nobody_who_is_connected_and_the_next_consolidator_is_found_in_spite_of_it(
    pool: NamedPool,
) -> None:
    """It names an address at which nothing listens, and its life is the latest there can be."""
    router = pool.routers[-1]
    worker = pool.begin("worker", "--worker-id", "stays", "--served-model-name", "tiny", "--speedup", "50").wait_ready()
    life, dead = "f" * 24, "tcp://127.0.0.1:9"
    entry = {
        "namespace": POOL, "component": "consolidator", "instance": "forged", "life": life, "lease_ms": 600_000,
        "endpoints": {"ingest": dead, "feed": dead, "query": dead},
    }  # fmt: skip
    file = pool.names / f"{POOL}.consolidator.{life}.json"
    both = f"{POOL}.consolidator.{life} is registered as well at {dead}"
    said = dict.fromkeys((worker, router), "")

    def has_said(process: Process, text: str) -> bool:
        said[process] += process.errors_so_far()
        return text in said[process]

    for process in said:
        process.errors_so_far()
    file.write_text(json.dumps(entry))
    try:
        # Also one that comes now finds the consolidator that answers.
        with pool.begin("worker", "--worker-id", "joins", "--served-model-name", "tiny", "--speedup", "50") as late:
            late.wait_ready()
            for process in said:
                eventually("the log names both entries", partial(has_said, process, both))
                assert f"is at {dead}" not in said[process]
        pool.consolidator.kill()
        pool.consolidator = pool.begin("consolidator", "--http-port", "0").wait_ready()
        for process, plane in ((worker, "ingest"), (router, "feed")):
            eventually("it is found", partial(has_said, process, f"is at {pool.consolidator.word(plane)}"))
        eventually("the worker has joined it", lambda: ready_workers(router.url) == ["stays"])
        eventually("it is settled", lambda: is_settled(router.url))
        eventually("the pool is available", lambda: all_available(pool.front.url))
        assert_serves(pool.front.url)
    finally:
        file.unlink()
