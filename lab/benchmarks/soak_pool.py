"""The pool under a soak: its processes, what each of them holds at a moment, and what is left when nobody asks.

Rules
    1. Consolidator, router and workers are the ordinary commands, each with its output in a file of its own. Bounds of
       caches and journals are small, so that they are full before the warm-up is over: what grows then is a leak.
    2. Memory, descriptors, sockets and threads are the kernel's figures; tasks, requests and blocks are each process's
       own metrics. A router with several HTTP processes counts as one, with all its children.
    3. ``leftovers`` says in words what is not as it was before the load; the empty list is the only good answer.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lab.benchmarks.services import (
    ROUTER_BOOKS,
    START_TIMEOUT_S,
    WORKER_BOOKS,
    Reading,
    Service,
    get,
    plain_client,
    summed,
)
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_model import PromptModel

MIB = 1024 * 1024
BASELINE_INTERVAL_S = 0.3
"""Two looks this far apart that agree are the baseline."""

WARM_ROUNDS = 6

JOURNAL_BOUNDS = {"journal-retention-bytes": 4 * MIB}
STOP_ORDER = {"router": 0, "consolidator": 2}
"""Workers end between the two."""

BLOCKS_PER_WORKER = 8192
BLOCK_SIZE = 32

EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""What asyncio's own thread pool grows to in each process when it is used; it never shrinks."""

SERVER_FAULTS = re.compile(r'^poolgrid_frontend_requests_total\{.*status="5\d\d".*\} (\S+)$', re.MULTILINE)
UNWANTED_OUTPUT = re.compile(r'^poolgrid_router_stream_faults_total\{kind="unknown_request"\} (\S+)$', re.MULTILINE)
CONTRADICTIONS = "poolgrid_router_index_contradictions_total"
BAD_LINES = re.compile(r"traceback|this is a bug|error|was never (retrieved|awaited)|in callback", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many processes of what."""

    workers: int = 4
    prefill_workers: int = 0
    decode_workers: int = 0
    http_workers: int = 1
    speedup: float = 0.5


class SoakPool:
    """All processes of a run."""

    def __init__(self, shape: PoolShape, directory: Path) -> None:
        self._shape = shape
        self._directory = directory
        self._services: list[Service] = []
        self._http = plain_client()
        model = PromptModel.load(TINY_MODEL_PATH)
        self.model: str = model.name
        self._vocabulary = ["--vocabulary-size", str(model.vocab_size), "--model-path", str(TINY_MODEL_PATH)]

    @property
    def url(self) -> str:
        """Return where the OpenAI API is."""
        return self._router.url

    @property
    def _router(self) -> Service:
        return next(service for service in self._services if service.name == "router")

    async def start(self) -> None:
        """Start everything and wait until the router reaches every worker."""
        shape, data = self._shape, str(self._directory / "data")
        consolidator = await self._start("consolidator", ["--data-dir", data, *_flags(JOURNAL_BOUNDS)])
        planes = ["--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query")]
        local = ["--legs", "two"] if shape.prefill_workers else []
        bounds = [*_flags(JOURNAL_BOUNDS), "--data-dir", data, *local]
        router = self._start("router", ["--port", "0", "--http-workers", str(shape.http_workers), *planes, *bounds])
        roles = ["aggregated"] * shape.workers
        if shape.prefill_workers:
            roles = ["prefill"] * shape.prefill_workers + ["decode"] * shape.decode_workers
        ingest = consolidator.word("ingest")
        workers = [self._start("worker", self._worker(number, role, ingest)) for number, role in enumerate(roles)]
        await asyncio.gather(router, *workers)
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self._reaches(len(roles)):  # noqa: ASYNC110 - other processes, which announce nothing
                await asyncio.sleep(0.05)

    def _worker(self, number: int, role: str, ingest: str) -> list[str]:
        return [
            *(
                "--worker-id",
                f"{role}-{number}",
                "--role",
                role,
                "--served-model-name",
                self.model,
                "--consolidator",
                ingest,
            ),
            *("--speedup", str(self._shape.speedup), "--kv-block-size", str(BLOCK_SIZE)),
            *("--total-kv-blocks", str(BLOCKS_PER_WORKER), "--shutdown-timeout-ms", "2000", *self._vocabulary),
        ]

    async def _reaches(self, workers: int) -> bool:
        # Each HTTP process of a router has links of its own; each new connection goes to any of them.
        for _ in range(1 if self._shape.http_workers == 1 else 8 * self._shape.http_workers):
            async with plain_client() as client:
                rows = (await client.get(f"{self.url}/v1/workers")).json()["data"]
            if sum(row["state"] == "ready" for row in rows) < workers:
                return False
        return True

    async def _start(self, command: str, arguments: list[str]) -> Service:
        name = arguments[1] if command == "worker" else command
        service = await Service.start(name, [command, *arguments, "--log-level", "warning"], self._directory)
        self._services.append(service)
        await service.wait_ready()
        return service

    async def readings(self) -> dict[str, Reading]:
        """Return what each service holds now; raises ``PoolFailed`` when one is gone."""
        found = await asyncio.gather(
            *(
                service.reading(self._http, ROUTER_BOOKS if service.name == "router" else WORKER_BOOKS)
                for service in self._services
            )
        )
        return {service.name: reading for service, reading in zip(self._services, found, strict=True)}

    async def baseline(self) -> dict[str, Reading]:
        """Return what each service holds while nobody asks, once that has stopped to change."""
        before: object = None
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                found = await self.readings()
                now = [(reading.descriptors, reading.tasks, reading.books) for reading in found.values()]
                if now == before and not any(any(reading.books.values()) for reading in found.values()):
                    return found
                before = now
                await asyncio.sleep(BASELINE_INTERVAL_S)

    async def warm(self) -> None:
        """Do once what starts threads and opens connections for good, so that the baseline has them.

        Every prompt is another one, so that requests spread over all workers, and over all pairs of a prefill and a
        decode worker, which connect when they first meet.
        """
        shape = self._shape
        pairs = shape.prefill_workers * shape.decode_workers or shape.workers
        for number in range(WARM_ROUNDS * shape.http_workers):
            async with plain_client() as client:
                await asyncio.gather(*(self._ask(client, f"{number} {at} ", at) for at in range(2 * pairs)))

    async def _ask(self, client: httpx.AsyncClient, start: str, at: int) -> None:
        prompt = start + "word " * (4000 if at == 0 else 100)
        body = {"model": self.model, "prompt": prompt, "max_tokens": 2}
        (await client.post(f"{self.url}/v1/completions", json=body)).raise_for_status()

    async def leftovers(self, baseline: Mapping[str, Reading]) -> list[str]:
        """Return in words what is not as before the load: requests, blocks, tasks, descriptors, threads, the index."""
        found = leftovers(baseline, await self.readings())
        rows = (await get(self._http, f"{self.url}/v1/workers")).json()["data"]
        for row in rows:
            name = row["worker_id"]
            for key in ("running_requests", "waiting_requests", "active_requests", "prefill_tokens", "active_blocks"):
                if row[key]:
                    found.append(f"router: its ledger has {row[key]} {key} on {name}")
            held = (await get(self._http, f"{row['http_endpoint']}/blocks")).text.split("\n")
            for _ in range(1 if self._shape.http_workers == 1 else 4 * self._shape.http_workers):
                async with plain_client() as client:
                    believed = (await get(client, f"{self.url}/v1/workers/{name}/blocks")).text.split("\n")
                if believed != held:
                    apart = len(set(believed) ^ set(held))
                    found.append(f"router: its index and {name} differ in {apart} of {len(held)} blocks")
                    break
        return found

    async def faults(self) -> list[str]:
        """Return in words what no process may have to say at the end: answers 5xx, contradictions, bad log lines."""
        found = []
        text = await self._router.metrics(self._http)
        broken = sum(float(value) for value in SERVER_FAULTS.findall(text))
        if broken:
            found.append(f"router: {broken:.0f} answers 5xx")
        unwanted = UNWANTED_OUTPUT.search(text)
        if unwanted is not None and float(unwanted[1]):
            found.append(f"router: {float(unwanted[1]):.0f} outputs of requests that it had not cancelled")
        contradictions = summed(text, (CONTRADICTIONS,)).get(CONTRADICTIONS, 0)
        if contradictions:
            found.append(f"router: {contradictions:.0f} events contradict its index")
        for service in self._services:
            lines = [line for line in service.log.read_text(errors="replace").splitlines() if BAD_LINES.search(line)]
            if lines:
                found.append(f"{service.name}: {len(lines)} bad lines in its log, the first: {lines[0][:300]}")
        return found

    async def holdings(self) -> dict[str, Any]:
        """Return figures of the whole pool for the report."""
        names = (
            "poolgrid_frontend_output_tokens_total",
            "poolgrid_frontend_prompt_tokens_total",
            "poolgrid_frontend_cached_tokens_total",
            "poolgrid_frontend_client_disconnects_total",
            "poolgrid_router_migrations_total",
            "poolgrid_router_index_blocks",
            "poolgrid_router_expired_reservations_total",
        )
        return summed(await self._router.metrics(self._http), names)

    async def stop(self) -> list[str]:
        """End everything in order; return in words what did not end well."""
        await self._http.aclose()
        found = []
        for service in sorted(self._services, key=lambda service: STOP_ORDER.get(service.name, 1)):
            fault = await service.stop()
            if fault is not None:
                found.append(fault)
        return found


def leftovers(baseline: Mapping[str, Reading], now: Mapping[str, Reading]) -> list[str]:
    """Return in words which of the figures that must come back have not."""
    found = []
    for name, reading in now.items():
        before = baseline[name]
        found += [f"{name}: {book} is {value:g}, not 0" for book, value in reading.books.items() if value]
        for what in ("tasks", "descriptors", "sockets", "threads"):
            was, is_now = getattr(before, what), getattr(reading, what)
            if is_now > was + (EXECUTOR_THREADS * reading.processes if what == "threads" else 0):
                found.append(f"{name}: {is_now:g} {what}, {was:g} before the load")
    return found


def _flags(settings: Mapping[str, int]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
