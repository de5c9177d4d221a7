"""`poolgrid up --pools FILE`: a whole fleet on this machine, from one pool-grid document.

Rules
    1. Each pool is a router with the consolidator inside, and the workers that the pool's ``simulate`` describes; with
       a real engine they are as many, each with the mode of its stage and the engine file of its role. The global
       router gets the real addresses of the pools' routers; the document's urls are for real deployments.
       In front of engine servers each pool is what ``poolgrid up --engine-url`` starts (``cli.front``).
    2. With an event plane on NATS each pool has its journal there under its own name, and consolidators of its own.
    3. Consolidators start first, then routers, then workers, then the global router; ``ready URL`` follows once every
       pool can be used.
    4. At the end parts stop in the order global router, workers, routers, consolidators. What dies before is started
       again in place.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.grid_document import GridDocument, Pool, PoolSimulation
from poolgrid.server.cli.launch_plan import ANY, PlannedPart, PlannedWorker, described_parts
from poolgrid.server.cli.local_pool import (
    LocalPool,
    UpSettings,
    first_given_up,
    greeting,
    output_arguments,
    pushing,
    until_workers_are_ready,
    worker_part,
)
from poolgrid.server.cli.options import environment_name
from poolgrid.server.cli.part import START_TIMEOUT_S, Part, part_environment, stop_parts
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.process.figures import counted
from poolgrid.server.transport.bound_socket import ReservedPorts, listen

LOOPBACK = "127.0.0.1"

TYPED_PORTS = range(5701, 65_536)
"""Ports in the commands of a plan, in order; ``up`` itself takes any that are free."""

NATS_NAME_CHARS_MAX = 64
"""In the form of ``nats_pool``."""


KEYS_OF_CLIENTS = ("POOLGRID_API_KEYS",)
"""Variables that parts behind the global router do without."""


class LocalFleet:
    """All parts of a fleet on this machine."""

    def __init__(
        self,
        settings: UpSettings,
        path: Path,
        document: GridDocument,
        model: PromptModel | None,
        engines: Sequence[PlannedWorker] = (),
    ) -> None:
        """``engines`` are the workers with a real engine, by their names in ``worker_roles``.

        ``model`` is what simulated workers take their vocabulary from.
        """
        self._settings = settings
        self._engines = {each.name: each for each in engines}
        self._nats_names = nats_names(document) if settings.on_nats else {}
        self._path = path
        self._pools = [(stage, pool) for stage, found in document.stages.items() for pool in found.pools]
        self._model = model
        # Clients come to the global router alone; it needs no key for the pools behind it.
        self._environment = part_environment(without=KEYS_OF_CLIENTS)
        self._host = settings.host if settings.api_keys is None else LOOPBACK
        self._common = ["--host", self._host, *settings.log_choice.arguments]
        self._model_arguments = ["--model-path", str(settings.model_path), "--served-model-name", settings.model_name]
        self._own_ports = ("port", "select-port") if settings.on_nats else ("port", "select-port", "ingest-port")
        self._consolidators: list[Part] = []
        """Of all pools; without an event plane on NATS there are none."""
        self._routers: dict[str, Part] = {}
        self._workers: list[Part] = []
        self._global_router: Part | None = None
        self._ports = ReservedPorts(self._host)
        self._listeners: list[socket.socket] = []
        """Where clients come to, and where the global router asks the pools' routers; those are started with them."""

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API once every pool can be used."""
        settings = self._settings
        front = self._listen(settings.host, settings.port)
        if settings.on_nats:
            for _, pool in self._pools:
                self._consolidators += [Part(*each, self._environment) for each in self._planned_consolidators(pool)]
            await asyncio.gather(*(self._start_part(each) for each in self._consolidators))
        for _, pool in self._pools:
            listener = self._listen(self._host, 0)
            others = [self._ports.hold() for _ in self._own_ports[1:]]
            arguments = self._router_arguments(pool, [listener.getsockname()[1], *others])
            name = f"router of {pool.name}"
            self._routers[pool.name] = Part(name, arguments, self._environment, listener=listener)
        await asyncio.gather(*(self._start_part(router) for router in self._routers.values()))
        for stage, pool in self._pools:
            ingest = "" if settings.on_nats else self._routers[pool.name].word("ingest")
            self._workers += [self._worker(stage, pool, name, ingest) for name in worker_names(pool)]
        await asyncio.gather(*(self._start_part(worker) for worker in self._workers))
        # Complete before the global router looks at them for the first time, so that it begins with all of them.
        await asyncio.gather(*(self._until_complete(pool) for _, pool in self._pools))
        urls = {name: router.ready_words[0] for name, router in self._routers.items()}
        arguments = self._global_router_arguments(front.getsockname()[1], urls)
        self._global_router = Part("global router", arguments, self._environment, listener=front)
        await self._start_part(self._global_router)
        return self._global_router.ready_words[0]

    def _listen(self, host: str, port: int) -> socket.socket:
        listener = listen(host, port, "port")
        self._listeners.append(listener)
        return listener

    def planned_parts(self) -> list[PlannedPart]:
        settings, ports = self._settings, iter(TYPED_PORTS)
        others: dict[str, tuple[str, Sequence[str]]] = {}
        workers: list[PlannedWorker] = []
        urls = {}
        for stage, pool in self._pools:
            if settings.on_nats:
                others |= {name: (ANY, words) for name, words in self._planned_consolidators(pool)}
            own = [next(ports) for _ in self._own_ports]
            others[f"router of {pool.name}"] = (ANY, self._router_arguments(pool, own))
            urls[pool.name] = f"http://{self._host}:{own[0]}"
            ingest = f"tcp://{self._host}:{own[-1]}"
            for name in worker_names(pool):
                planned = self._engines.get(name)
                if planned is None:
                    workers.append(PlannedWorker(name, tuple(self._worker_arguments(stage, pool, name, ingest))))
                else:
                    told = pushing(settings, planned.arguments, ingest, self._nats_names.get(pool.name, ""))
                    workers.append(replace(planned, arguments=tuple(told)))
        port = str(settings.port) if settings.port else ANY
        others["global router"] = (port, self._global_router_arguments(settings.port, urls))
        return described_parts(workers, others, "")

    def _router_arguments(self, pool: Pool, ports: Sequence[int]) -> list[str]:
        settings = self._settings
        held = [f"--{name}={port}" for name, port in zip(self._own_ports, ports, strict=True)]
        arguments = ["router", *held, *self._model_arguments, *self._common, *settings.router_arguments()]
        if settings.on_nats:
            arguments += self._event_plane(pool)
        if settings.data_dir is not None:
            arguments += ["--data-dir", str(settings.data_dir / quote(pool.name, safe=""))]
        return arguments

    def _global_router_arguments(self, port: int, urls: Mapping[str, str]) -> list[str]:
        return global_router_arguments(self._settings, self._path, port, urls, self._model_arguments)

    def _planned_consolidators(self, pool: Pool) -> list[tuple[str, list[str]]]:
        settings = self._settings
        arguments = ["consolidator", *self._event_plane(pool), *self._common, *settings.options_of("consolidator")]
        several = settings.consolidators > 1
        return [
            (f"consolidator of {pool.name}" + (f", {number}" if several else ""), arguments)
            for number in range(settings.consolidators)
        ]

    def _event_plane(self, pool: Pool) -> list[str]:
        return self._settings.event_plane_arguments(self._nats_names[pool.name])

    async def _until_complete(self, pool: Pool) -> None:
        workers = len(worker_names(pool))
        await until_workers_are_ready(self._routers[pool.name].word("select"), workers, START_TIMEOUT_S)

    def ingests(self) -> list[str]:
        return (
            []
            if self._settings.on_nats
            else [f"ingest.{name}={each.word('ingest')}" for name, each in self._routers.items()]
        )

    def greeting(self, url: str) -> str:
        workers = counted(len(self._workers), f"{self._settings.engine} worker")
        what = f"{counted(len(self._routers), 'pool')} with {workers} behind a global router"
        keyed = self._settings.api_keys is not None
        return greeting(
            what, url, self._settings.model_name, keyed, ": which pool, by which cell of the grid, which worker"
        )

    def _worker(self, stage: StageName, pool: Pool, name: str, ingest: str) -> Part:
        planned = self._engines.get(name)
        if planned is None:
            return Part(name, self._worker_arguments(stage, pool, name, ingest), self._environment)
        return worker_part(self._settings, planned, ingest, self._environment, self._nats_names.get(pool.name, ""))

    def _worker_arguments(self, stage: StageName, pool: Pool, name: str, ingest: str) -> list[str]:
        assert self._model is not None, "simulated workers have a model's vocabulary"
        simulate = pool.simulate or PoolSimulation()
        timing = ["--timing", self._settings.timing]
        if simulate.timing_table is not None:
            timing = ["--timing", str(self._path.parent / simulate.timing_table)]
        role = [] if stage == "aggregated" else ["--role", stage]
        pushes = self._event_plane(pool) if self._settings.on_nats else ["--consolidator", ingest]
        return [
            *("worker", "--worker-id", name, "--served-model-name", self._settings.model_name, *timing, *role, *pushes),
            *("--speedup", str(simulate.speedup * self._settings.speedup)),
            *("--kv-block-size", str(simulate.block_size), "--total-kv-blocks", str(simulate.total_kv_blocks)),
            *("--max-batch-size", str(simulate.max_batch_size), "--max-num-tokens", str(simulate.max_num_tokens)),
            *("--max-seq-len", str(simulate.max_sequence_length)),
            *output_arguments(self._settings, self._model),
            *("--shutdown-timeout-ms", "2000"),
            *self._settings.options_of("worker", stage),
            *self._common,
        ]

    async def _start_part(self, part: Part) -> None:
        await part.start()
        part.watch()

    async def given_up(self) -> str:
        """Wait until a worker with a real engine is not started again any more; return why."""
        return await first_given_up(self._workers if self._engines else ())

    async def stop(self) -> None:
        """End everything in order."""
        for listener in self._listeners:
            listener.close()  # the routers' copies are the last: once they are closed, connections are refused
        await stop_parts([self._global_router])
        await stop_parts(self._workers)
        await stop_parts(self._routers.values())
        await stop_parts(self._consolidators)
        self._ports.close()


class FrontFleet:
    """A fleet in front of engine servers that run already: a pool's parts for each pool, and a global router."""

    def __init__(self, settings: UpSettings, path: Path, pools: Mapping[str, LocalPool], what: str) -> None:
        """``settings`` have the model of the global router; ``what`` serves, for people."""
        self._settings = settings
        self._path = path
        self._pools = pools
        self._what = what
        self._global_router: Part | None = None
        self._front: socket.socket | None = None

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API once every pool can be used."""
        settings = self._settings
        self._front = front = listen(settings.host, settings.port, "port")
        started = await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        urls = dict(zip(self._pools, started, strict=True))
        model = ["--model-path", str(settings.model_path)]
        if settings.served_model_name:
            model += ["--served-model-name", settings.served_model_name]
        arguments = global_router_arguments(settings, self._path, front.getsockname()[1], urls, model)
        environment = part_environment(without=(*KEYS_OF_CLIENTS, environment_name("engine_api_key")))
        self._global_router = Part("global router", arguments, environment, listener=front)
        await self._global_router.start()
        self._global_router.watch()
        return self._global_router.ready_words[0]

    def ingests(self) -> list[str]:
        return [
            word.replace("ingest", f"ingest.{name}", 1) for name, pool in self._pools.items() for word in pool.ingests()
        ]

    def greeting(self, url: str) -> str:
        settings = self._settings
        what = f"{counted(len(self._pools), 'pool')} with {self._what} behind a global router"
        keyed = settings.api_keys is not None
        return greeting(what, url, settings.model_name, keyed, ": which pool, by which cell of the grid, which server")

    async def given_up(self) -> str:
        """Wait without end: each part is started again."""
        return await first_given_up(())

    async def stop(self) -> None:
        """End everything in order."""
        if self._front is not None:
            self._front.close()
        await stop_parts([self._global_router])
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))


def pools_in_front(settings: UpSettings, document: GridDocument) -> dict[str, UpSettings]:
    """Return the settings of each pool of a document in front of its servers; raises ``ValueError``."""
    names = [pool.name for found in document.stages.values() for pool in found.pools]
    given = settings.urls_by_pool()
    unknown, missing = sorted(set(given) - set(names)), [name for name in names if name not in given]
    if unknown or missing:
        wrong = f"engine_url names {', '.join(unknown)}" if unknown else f"engine_url has none of {', '.join(missing)}"
        raise ValueError(f"{wrong}; give POOL=URL for each pool of the document: {', '.join(names)}")
    on_nats = nats_names(document) if settings.on_nats else {}
    return {
        name: settings.model_copy(
            update={
                "engine_url": tuple(given[name]),
                "pools": None,
                "port": 0,
                # Clients come to the global router alone; it needs no key for the pools behind it.
                "api_keys": None,
                "host": settings.host if settings.api_keys is None else LOOPBACK,
                "data_dir": None if settings.data_dir is None else settings.data_dir / quote(name, safe=""),
                **({"nats_pool": on_nats[name]} if on_nats else {}),
            }
        )
        for name in names
    }


def global_router_arguments(
    settings: UpSettings, path: Path, port: int, urls: Mapping[str, str], model: Sequence[str]
) -> list[str]:
    """Return the command of the global router in front of routers with these URLs."""
    arguments = ["global-router", "--config", str(path), "--host", settings.host, "--port", str(port)]
    arguments += [f"--pool-url={name}={url}" for name, url in urls.items()]
    further = settings.options_of("global-router")
    return [*arguments, *model, *settings.log_choice.arguments, *settings.key_arguments, *further]


def worker_names(pool: Pool) -> list[str]:
    """Return the names of a pool's workers, as many as its ``simulate`` has."""
    return [f"{pool.name}-{number}" for number in range((pool.simulate or PoolSimulation()).workers)]


def worker_roles(document: GridDocument) -> dict[str, str]:
    """Return the role of every worker of a document, by its name."""
    return {
        name: stage for stage, found in document.stages.items() for pool in found.pools for name in worker_names(pool)
    }


def nats_names(document: GridDocument) -> dict[str, str]:
    """Return the names of a document's pools on NATS, where a character that is not allowed is ``-``.

    Raises ``ValueError`` when two of them are the same, or one is too long.
    """
    pools = [pool.name for found in document.stages.values() for pool in found.pools]
    names = {pool: re.sub("[^A-Za-z0-9_-]", "-", pool) for pool in pools}
    by_name: dict[str, str] = {}
    for pool, name in names.items():
        other = by_name.setdefault(name, pool)
        if other != pool or len(name) > NATS_NAME_CHARS_MAX:
            raise ValueError(
                f"pool {pool!r} would be {name!r} on NATS"
                + (f", as {other!r}" if other != pool else f", allowed are at most {NATS_NAME_CHARS_MAX} characters")
                + "; give it another name"
            )
    return names
