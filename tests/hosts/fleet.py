"""Two pools on three hosts: a NATS server on each, two consolidators and two routers a pool, workers on all of them.

Whatever one host takes with it, each pool has a router, a consolidator and two workers on the others, and clients a
global router.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import pools
from tests.e2e.processes import Process, pool_is_quiet, worker_rows
from tests.hosts.network import Host
from tests.nats.servers import NatsServer

POOLS = ("blue", "green")
LEASE_S = 10
"""Of the active consolidator. When the host of a stream's leader is cut off, NATS servers elect another one, which was
seen to take up to ten seconds and which no setting of theirs shortens. A shorter lease is over before anybody can take
it."""

SPEEDUP = 4.0
HTTP = 8000
CONSOLIDATORS = {"blue": (1, 2), "green": (3, 2)}
ROUTERS = {"blue": (2, 1), "green": (3, 2)}
FRONTS = (1, 3)
NATS_PORT, ROUTES_PORT = 4222, 6222
ROUTES = 'ping_interval: "1s"\n  ping_max: 2'
"""How soon a server finds out that another one's host is gone, as ``docs/operations.md`` says to set it."""


def document() -> dict[str, Any]:
    """Return the grid: shorter prompts go to one pool, longer ones to the other."""
    grid = {
        "pools": [{"name": name} for name in POOLS],
        "isl_min": 0,
        "isl_max": 1000,
        "isl_resolution": 2,
        "ttft_min_ms": 0,
        "ttft_max_ms": 1000,
        "ttft_resolution": 1,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "mapping": [[[name]] for name in POOLS],
    }
    return {"version": 1, "mode": "aggregated", "aggregated": grid}


@dataclass
class Part:
    """One process of the fleet, started again where it was."""

    name: str
    kind: str
    host: Host
    pool: str
    arguments: Sequence[str]
    directory: Path
    port: int
    lives: itertools.count[int] = field(default_factory=itertools.count)
    process: Process | None = None

    @property
    def url(self) -> str:
        """Return where its HTTP is."""
        return f"http://{self.host.address}:{self.port}"

    def start(self) -> None:
        """Start it, without waiting."""
        log = self.directory / f"{self.name}.{next(self.lives)}.log"
        self.process = Process(*self.arguments, log=log, prefix=self.host.prefix)

    def wait_ready(self) -> None:
        """Wait until it says so."""
        assert self.process is not None
        self.process.wait_ready()

    def kill(self) -> None:
        """Kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.__exit__(None, None, None)


class Fleet:
    """All processes of the three hosts."""

    def __init__(self, hosts: Sequence[Host], directory: Path) -> None:
        self.hosts = list(hosts)
        self._directory = directory
        routes = ", ".join(f'"nats://{host.address}:{ROUTES_PORT}"' for host in hosts)
        self.servers: list[NatsServer] = []
        for host in hosts:
            listen = f'listen: "{host.address}:{ROUTES_PORT}"'
            more = f"cluster {{\n  name: c\n  {listen}\n  {ROUTES}\n  routes: [{routes}]\n}}\n"
            server = NatsServer(directory, f"nats-{host.number}", more, host=host.address, prefix=host.prefix)
            server.port = NATS_PORT
            self.servers.append(server)
        self.nats_url = f"nats://{hosts[0].address}:{NATS_PORT}"
        grid = directory / "grid.json"
        grid.write_text(json.dumps(document()))
        self.parts: list[Part] = []
        for pool, port in zip(POOLS, (HTTP + 100, HTTP + 200), strict=True):
            for number in CONSOLIDATORS[pool]:
                self._add(
                    "consolidator",
                    pool,
                    number,
                    port,
                    "--http-port",
                    str(port),
                    *self._journal(pool, consolidates=True),
                )
            for number in ROUTERS[pool]:
                name = f"{pool}-router-{number}"
                self._add(
                    "router", pool, number, port + 1, "--port", str(port + 1), "--router-id", name, *self._journal(pool)
                )
            for host in hosts:
                name = f"{pool}-{host.number}"
                engine = ("--worker-id", name, "--served-model-name", "tiny", "--speedup", str(SPEEDUP))
                self._add(
                    "worker", pool, host.number, port + 2, "--http-port", str(port + 2), *engine, *self._journal(pool)
                )
        for number in FRONTS:
            self._add("global-router", "", number, HTTP, "--port", str(HTTP), "--config", str(grid))

    def _journal(self, pool: str, consolidates: bool = False) -> list[str]:
        words = ["--event-plane", "nats", "--nats-pool", pool, "--namespace", pool]
        return [*words, "--leader-lease-ms", str(1000 * LEASE_S)] if consolidates else words

    def _add(self, command: str, pool: str, number: int, port: int, *arguments: str) -> None:
        host = self.hosts[number - 1]
        names = ["--names", "nats", "--nats-replicas", "3"]
        urls = [word for server in self.servers for word in ("--nats-url", f"nats://{server.url.rpartition('/')[2]}")]
        where = ["--host", "0.0.0.0", "--advertise-host", host.address]
        words = [command, *where, *names, *urls, *arguments]
        name = "-".join(word for word in (pool, command, str(number)) if word)
        self.parts.append(Part(name, command, host, pool, words, self._directory, port))

    def start(self) -> None:
        """Start everything at once and wait until all say that they are ready."""
        for server in self.servers:
            server.start(wait=False)
        for server in self.servers:
            server.wait()
        for part in self.parts:
            part.start()
        for part in self.parts:
            part.wait_ready()

    def stop(self) -> None:
        """Kill everything."""
        for part in self.parts:
            if part.process is not None:
                part.kill()
        for server in self.servers:
            server.kill()

    def of(self, kind: str, pool: str | None = None) -> list[Part]:
        """Return the parts of a kind, of one pool or of all."""
        return [part for part in self.parts if part.kind == kind and pool in (None, part.pool)]

    def logs_with(self, *words: str) -> list[str]:
        """Return the lines of all logs that have one of some words."""
        return [
            f"{log.name}: {line}"
            for log in sorted(self._directory.glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if any(word in line for word in words)
        ]

    def untruths(self) -> list[str]:
        """Return in words what is not as it must be while nobody asks: who is missing, which index is wrong."""
        found = []
        for front in self.of("global-router"):
            for name, row in pools(front.url).items():
                states = sorted(each["state"] for each in row["routers"])
                if row["state"] != "available" or states != ["active", "standby"]:
                    known = {each["url"]: each["state"] for each in row["routers"]}
                    found.append(f"{front.name}: pool {name} is {row['state']}, its routers are {known}")
        for router in self.of("router"):
            found += _untruths_of(router, [f"{router.pool}-{host.number}" for host in self.hosts])
        return found


def _untruths_of(router: Part, workers: Sequence[str]) -> list[str]:
    trouble = httpx.get(f"{router.url}/v1/pool").json()["journal"]["trouble"]
    if trouble:
        return [f"{router.name}: {trouble}"]
    rows = worker_rows(router.url)
    states = {name: row["state"] for name, row in rows.items()}
    if states != dict.fromkeys(workers, "ready"):
        return [f"{router.name}: its workers are {states}"]
    if not pool_is_quiet(router.url):
        return [f"{router.name}: it has requests on its books"]
    found = []
    for name, row in rows.items():
        believed = set(httpx.get(f"{router.url}/v1/workers/{name}/blocks").text.split())
        held = set(httpx.get(f"{row['http_endpoint']}/blocks").text.split())
        if believed != held:
            found.append(
                f"{router.name}: of {name} it lacks {len(held - believed)} blocks of {len(held)} "
                f"and has {len(believed - held)} that are not there"
            )
    return found
