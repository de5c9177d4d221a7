"""The pool under attack: fresh processes on ephemeral loopback ports, and what can be seen of them from outside.

Rules
    1. All parts are the ordinary commands, in one of four topologies. Caches and journals have small bounds, so that
       what an attack may fill by right is small beside what must come back.
    2. API keys are in force: an attacker and a bystander are different tenants, and the harness is the operator.
    3. A part that ended by itself is a death. What an attack starts beside the pool (a worker with a wrong address)
       belongs to the attack.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from lab.attacks.engine_server import EngineServer
from lab.benchmarks.fleet import free_port
from lab.benchmarks.services import ROUTER_BOOKS, WORKER_BOOKS, PoolFailed, Service, get, plain_client, summed
from lab.benchmarks.soak_pool import JOURNAL_BOUNDS
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.nats.servers import NatsServer

Topology = Literal["own", "embedded", "disaggregated", "fleet", "up", "front"]
"""Consolidator of its own and two whole workers; consolidator inside the router; two prefill and two decode workers;
two pools with their consolidators inside behind a global router; `poolgrid up` with a consolidator, a router and two
workers, without API keys; `poolgrid up --engine-url` in front of two engine servers of the attacker."""

HOST = "127.0.0.1"
ATTACKER_HOST = "127.0.0.3"
"""Source address of attackers, so that limits per address are the attacker's and not the bystanders'."""

JOIN_TIMEOUT_S = 90.0
NAMESPACE = "attacked"
LEASE_EXPIRIES = "poolgrid_consolidator_lease_expiries_total"
MEDIA_CACHED_BYTES = "poolgrid_frontend_media_cached_bytes"
TENANTS = ("attacker", "bystander", "neighbour")
STOP_ORDER = {"up": 0, "global-router": 0, "router": 1, "worker": 2, "consolidator": 3}
LOG_LEVEL = "warning"
BLOCKS_PER_WORKER = 2048
ONE_SHOT = "hello " * 200
"""Long enough to count as a session: the pool learns that none is continued, and large prompts need not wait."""

WARM_WORDS = 30_000
"""About half of a worker's blocks of 32 tokens."""

WARM_PROMPTS = 8


_PICTURE = {
    "role": "user",
    "content": [
        {
            "type": "image_url",
            "image_url": {
                "url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4"
                "//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
            },
        },
        {"type": "text", "text": "What is it?"},
    ],
}
"""A picture of one white pixel."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which processes a pool has, and what they are told beyond the usual."""

    topology: Topology = "own"
    router: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    speedup: float = 8.0
    takes_media: bool = False
    """Whether its workers take pictures: what decodes them is loaded before anything is measured."""
    finds: Literal["addresses", "names", "nats"] = "addresses"
    """How processes of the topology ``own`` find each other: by addresses, by a directory of names, or over NATS, where
    the journal and the names are then, with two consolidators."""
    slow_disk: bool = False
    """Run what writes journals under the shim that delays writes (``lab.attacks.slow_disk``)."""


@dataclass(slots=True)
class Look:
    """Everything that is judged of the processes at a moment."""

    rss_mb: dict[str, float] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    books: dict[str, float] = field(default_factory=dict)
    lease_expiries: float = 0.0
    silent: list[str] = field(default_factory=list)
    """In words: who did not answer."""


class AttackedPool:
    """All processes of a pool under attack."""

    def __init__(
        self, shape: Shape, directory: Path, environment: dict[str, str] | None = None, lease_ms: int | None = None
    ) -> None:
        """``lease_ms`` is how long a worker may be silent, to the consolidator and to routers; ``None`` = defaults."""
        self.shape = shape
        self._lease = [] if lease_ms is None else ["--lease-ms", str(lease_ms)]
        self._worker_timeout = [] if lease_ms is None else ["--worker-timeout-ms", str(lease_ms)]
        self.directory = directory
        self.services: list[Service] = []
        self.model = PromptModel.load(TINY_MODEL_PATH)
        self.keys: dict[str, str] = {}
        self._environment = environment or {}
        self._found_by: list[str] = []
        self.nats: NatsServer | None = None
        self._http: httpx.AsyncClient | None = None
        self._kinds: dict[str, str] = {}
        self._logs: dict[str, int] = {}
        self.engines: list[EngineServer] = []
        """The attacker's engine servers; they serve on the harness's own loop."""
        self.request_endpoints: list[str] = []
        """Where the workers take requests."""

    # Where things are

    @property
    def url(self) -> str:
        """Return where clients come in."""
        doors = self._of("up") or self._of("global-router") or self._of("router")
        return doors[0].url

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of that."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def endpoint(self, plane: str) -> str:
        """Return the ZMQ endpoint of ``ingest``, ``feed``, ``query`` or ``select`` of the (first) pool."""
        for service in self.services:
            for word in service.words:
                if word.startswith(f"{plane}="):
                    return word.partition("=")[2]
        raise PoolFailed(f"looking for the {plane} plane: no process of a {self.shape.topology} pool names it")

    def service(self, name: str) -> Service:
        """Return the process of this name; raises ``PoolFailed`` when there is none."""
        for service in self.services:
            if service.name == name:
                return service
        raise PoolFailed(f"the pool has no process {name!r}: {', '.join(each.name for each in self.services)}")

    def _of(self, kind: str) -> list[Service]:
        return [service for service in self.services if self._kinds[service.name] == kind]

    @property
    def operator(self) -> dict[str, str]:
        """Return the headers of an operator."""
        return {"authorization": f"Bearer {self.keys['operator']}"}

    def tenant(self, name: str) -> dict[str, str]:
        """Return the headers of a tenant."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    # Life

    async def start(self) -> None:
        """Start everything and wait until every worker can be reached; raises ``PoolFailed``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_keys()
        self._http = plain_client(headers=self.operator)
        shape = self.shape
        if shape.topology == "fleet":
            await self._start_fleet()
            return
        if shape.topology == "up":
            options = ["--port", "0", "--workers", "2", "--speedup", str(shape.speedup)]
            options += ["--part-option", f"worker.total-kv-blocks={BLOCKS_PER_WORKER}"]
            up = await self._start("up", "up", [*options, "--data-dir", str(self.directory / "data")])
            await self.until_ready(up.url, 2)
            return
        if shape.topology == "front":
            await self._start_front()
            return
        if shape.finds != "addresses":
            await self._start_finding()
            return
        data = ["--data-dir", str(self.directory / "data")]
        planes: list[str] = []
        if shape.topology != "embedded":
            consolidator = await self._start(
                "consolidator", "consolidator", [*data, *self._lease, *_flags(JOURNAL_BOUNDS)]
            )
            planes = ["--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query")]
        router = await self._start("router", "router", [*self._router(), *data, *planes])
        roles = ["aggregated", "aggregated"]
        if shape.topology == "disaggregated":
            roles = ["prefill", "prefill", "decode", "decode"]
        ingest = self.endpoint("ingest")
        await asyncio.gather(
            *(
                self.start_worker(f"{role}-{roles[:number].count(role)}", ingest, role=role)
                for number, role in enumerate(roles)
            )
        )
        await self.until_ready(router.url, len(roles))

    async def _start_finding(self) -> None:
        self._found_by = ["--names", "directory", "--names-dir", str(self.names)]
        planes = [f"--{plane}-endpoint=dyn://{NAMESPACE}.consolidator.{plane}" for plane in ("feed", "query")]
        journal = ["--data-dir", str(self.directory / "data"), *_flags(JOURNAL_BOUNDS)]
        consolidators = ["consolidator"]
        if self.shape.finds == "nats":
            directory = self.directory / "nats"
            directory.mkdir()
            self.nats = NatsServer(directory, "attacked")
            await asyncio.to_thread(self.nats.start)
            self._found_by = ["--event-plane", "nats", "--names", "nats", "--nats-url", self.nats.url]
            planes, journal = [], ["--leader-lease-ms", "2000"]
            consolidators.append("consolidator-2")
        self._found_by += ["--namespace", NAMESPACE]
        for name in consolidators:
            await self._start(name, "consolidator", [*journal, *self._found_by])
        arguments = [*self._router(), "--router-id", "router", *planes, *self._found_by]
        router = await self._start("router", "router", arguments)
        await asyncio.gather(*(self.start_worker(f"worker-{number}", "") for number in range(2)))
        await self.until_ready(router.url, 2)

    @property
    def names(self) -> Path:
        """Return the directory of names."""
        return self.directory / "names"

    async def _start_fleet(self) -> None:
        names = ("one", "two")
        routers = await asyncio.gather(
            *(
                self._start(f"router-{name}", "router", [*self._router(), "--data-dir", str(self.directory / name)])
                for name in names
            )
        )
        await asyncio.gather(
            *(
                self.start_worker(f"{name}-{number}", router.word("ingest"))
                for name, router in zip(names, routers, strict=True)
                for number in range(2)
            )
        )
        await asyncio.gather(*(self.until_ready(router.url, 2) for router in routers))
        document = self.directory / "fleet.json"
        document.write_text(json.dumps(two_pools({n: r.url for n, r in zip(names, routers, strict=True)})))
        operator = self.directory / "operator"
        operator.write_text(self.keys["operator"])
        operator.chmod(0o600)
        outer = ["--config", str(document), "--pool-api-key", str(operator), "--port", "0"]
        outer += ["--api-keys", str(self._key_path)]
        await self._start("global-router", "global-router", outer)
        await until("the fleet serves", self._serves, JOIN_TIMEOUT_S)

    async def _serves(self) -> bool:
        assert self._http is not None
        body = {"model": self.model.name, "prompt": "ready", "max_tokens": 1}
        return (await self._http.post(f"{self.url}/v1/completions", json=body)).status_code == 200

    def _router(self) -> list[str]:
        keys = ["--api-keys", str(self._key_path)]
        local = ["--legs", "two"] if self.shape.topology == "disaggregated" else []
        bounds = [*_flags(JOURNAL_BOUNDS)]
        lease = self._lease if self.shape.topology in ("embedded", "fleet") else []
        return ["--port", "0", *keys, *bounds, *local, *self._worker_timeout, *lease, *self.shape.router]

    def worker_arguments(self, name: str, ingest: str, *options: str, role: str = "aggregated") -> list[str]:
        """Return the options of a worker of this pool."""
        return [
            *("--worker-id", name, "--role", role, "--served-model-name", self.model.name),
            *(("--consolidator", ingest) if ingest else self._found_by),
            *(
                "--speedup",
                str(self.shape.speedup),
                "--total-kv-blocks",
                str(BLOCKS_PER_WORKER),
                "--shutdown-timeout-ms",
                "2000",
            ),
            *("--vocabulary-size", str(self.model.vocab_size)),
            *("--model-path", str(TINY_MODEL_PATH), *self.shape.worker, *options),
        ]

    async def start_worker(self, name: str, ingest: str, *options: str, role: str = "aggregated") -> Service:
        """Start a worker of the pool."""
        port = free_port()
        self.request_endpoints.append(f"tcp://{HOST}:{port}")
        options = (*options, "--request-port", str(port))
        return await self._start(name, "worker", self.worker_arguments(name, ingest, *options, role=role))

    async def _start_front(self) -> None:
        self.engines = [EngineServer(self.model.name) for _ in range(2)]
        options = ["--port", "0", "--data-dir", str(self.directory / "data")]
        for engine in self.engines:
            options += ["--engine-url", await engine.start(HOST)]
        parts = [
            f"router.api-keys={self._key_path}",
            *(f"router.{name}={each}" for name, each in JOURNAL_BOUNDS.items()),
        ]
        if self._lease:
            parts += [f"consolidator.lease-ms={self._lease[1]}", f"router.worker-timeout-ms={self._lease[1]}"]
        for part in parts:
            options += ["--part-option", part]
        up = await self._start("up", "up", options)
        await self.until_ready(up.url, len(self.engines))

    async def _start(self, name: str, kind: str, arguments: list[str]) -> Service:
        environment = self._environment if kind in ("router", "consolidator") else None
        command = [kind, *arguments, "--log-level", LOG_LEVEL]
        service = await Service.start(name, command, self.directory, environment)
        self.services.append(service)
        self._kinds[name] = kind
        await service.wait_ready()
        return service

    async def until_ready(self, url: str, workers: int) -> None:
        """Wait until a router reaches as many workers; raises ``TimeoutError``."""

        async def complete() -> bool:
            return await self.ready_workers(url) >= workers

        await until(f"{url} reaches {workers} workers", complete, JOIN_TIMEOUT_S)

    async def ready_workers(self, url: str) -> int:
        """Return how many workers a router reaches; raises ``PoolFailed`` when it does not answer."""
        return sum(row["state"] == "ready" for row in await self.workers(url))

    async def workers(self, url: str) -> list[dict[str, Any]]:
        """Return the workers that a router knows; from any event loop."""
        async with plain_client(headers=self.operator) as http:
            rows: list[dict[str, Any]] = (await get(http, f"{url}/v1/workers")).json()["data"]
        return rows

    async def stop(self) -> None:
        """End everything; what an attack has stopped goes on first, and what does not end is killed."""
        for service in self.services:
            self.resume(service)
        ordered = sorted(self.services, key=lambda service: STOP_ORDER[self._kinds[service.name]])
        for kind in STOP_ORDER:
            await asyncio.gather(*(service.stop() for service in ordered if self._kinds[service.name] == kind))
        for engine in self.engines:
            engine.stop()
        if self._http is not None:
            await self._http.aclose()
        if self.nats is not None:
            self.nats.kill()

    @staticmethod
    def resume(service: Service) -> None:
        """Let a process go on that was stopped."""
        if service.process.returncode is None:
            psutil.Process(service.process.pid).resume()

    # What can be seen

    def deaths(self) -> list[str]:
        """Return in words which processes ended by themselves."""
        return [
            f"{service.name} ended with status {service.process.returncode}"
            for service in self.services
            if service.process.returncode is not None
        ]

    async def look(self) -> Look:
        """Return what is judged; a process that does not answer is named in ``silent``."""
        assert self._http is not None
        look = Look()
        for service in self.services:
            if service.process.returncode is not None:
                continue  # a death, which is named elsewhere
            kind = self._kinds[service.name]
            books = ROUTER_BOOKS if kind in ("router", "up") else WORKER_BOOKS if kind == "worker" else ()
            try:
                reading = await service.reading(self._http, books)
                cached_bytes = 0.0
                if kind in ("router", "consolidator", "global-router", "up"):
                    found = summed(await service.metrics(self._http), (LEASE_EXPIRIES, MEDIA_CACHED_BYTES))
                    look.lease_expiries += found.get(LEASE_EXPIRIES, 0.0)
                    cached_bytes = found.get(MEDIA_CACHED_BYTES, 0.0)
            except PoolFailed as error:
                look.silent.append(str(error).split("; see")[0])
                continue
            # A cache with a bound of its own may keep what it was given; how full it is, it says itself.
            look.rss_mb[service.name] = reading.rss_mb - cached_bytes / 1e6
            look.descriptors[service.name] = reading.descriptors
            look.books.update({f"{service.name}: {name}": value for name, value in reading.books.items()})
        return look

    def resident_mb(self) -> float:
        """Return the memory of all processes now, without asking them."""
        total = 0
        for service in self.services:
            try:
                main = psutil.Process(service.process.pid)
                total += sum(process.memory_info().rss for process in (main, *main.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue  # a death, which is found elsewhere
        return total / 1e6

    def new_log_text(self) -> dict[str, bytes]:
        """Return what each process has written to its log since the last call."""
        found = {}
        for service in self.services:
            data = service.log.read_bytes()
            found[service.name] = data[self._logs.get(service.name, 0) :]
            self._logs[service.name] = len(data)
        return found

    # Requests of the harness

    async def warm(self) -> None:
        """Use once what takes memory or descriptors for good when it is first used."""
        small: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": ONE_SHOT, "max_tokens": 8, "guided_json": {"type": "integer"}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": ONE_SHOT}], "max_tokens": 8}),
            ("/v1/responses", {"input": ONE_SHOT, "max_output_tokens": 16, "store": False}),
        ]
        if self.shape.takes_media:
            small.append(("/v1/chat/completions", {"messages": [_PICTURE], "max_tokens": 8}))
        # Every cache is full before it counts: each of these fills half of a worker's blocks.
        large: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": f"{number} " + "word " * WARM_WORDS, "max_tokens": 2})
            for number in range(WARM_PROMPTS)
        ]
        async with plain_client(headers=self.tenant("neighbour") if self.keys else {}) as http:
            for requests in (small * 6, large):
                answers = await asyncio.gather(
                    *(
                        http.post(f"{self.url}{path}", json={"model": self.model.name, **body})
                        for path, body in requests
                    )
                )
                for answer in answers:
                    answer.raise_for_status()

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model.name, **fields}

    @property
    def _key_path(self) -> Path:
        return self.directory / "keys.json"

    def _write_keys(self) -> None:
        document = key_file.new_document()
        tenants = {}
        for name in (*TENANTS, "operator"):
            key = self.keys[name] = key_file.make_key()
            tenants[name] = key_file.Tenant(keys=(key_file.Key(key_file.hash_key(key)),), operator=name == "operator")
        key_file.write(self._key_path, msgspec.structs.replace(document, tenants=tenants))


def two_pools(urls: dict[str, str]) -> dict[str, Any]:
    """Return a pool-grid document in which short prompts go to the first pool and longer ones to the second."""
    first, second = urls
    return {
        "version": 1,
        "mode": "aggregated",
        "aggregated": {
            "pools": [{"name": name, "url": url} for name, url in urls.items()],
            "isl_min": 0,
            "isl_max": 256,
            "isl_resolution": 2,
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 20,
            "itl_resolution": 1,
            "mapping": [[[first]], [[second]]],
            "fallback": {"rule": "faster-then-slower", "order": {first: [second], second: [first]}},
        },
    }


def _flags(settings: dict[str, int]) -> Sequence[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


async def until(what: str, check: Callable[[], Awaitable[bool]], timeout_s: float, every_s: float = 0.05) -> None:
    """Wait until a check of other processes holds; raises ``TimeoutError`` that says what never came true."""
    deadline = time.monotonic() + timeout_s
    while not await check():  # other processes announce nothing
        if time.monotonic() > deadline:
            raise TimeoutError(f"never came true within {timeout_s:.0f} s: {what}")
        await asyncio.sleep(every_s)
