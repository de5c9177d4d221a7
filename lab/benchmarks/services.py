"""Commands of poolgrid under a benchmark: started, awaited by their ready line, looked at, ended in order.

Memory, descriptors, sockets and threads are the kernel's figures, of a process and all its children; tasks, requests
and blocks are the process's own metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from poolgrid.server.cli.part import part_environment

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

SCRAPE_TIMEOUT_S = 20.0
"""A router that is busy with a thousand streams answers late, and that is no fault."""

LATE_ANSWERS_MAX = 3
"""Answers in a row that may be later than that, on a machine that is busy with something else; then it hangs."""

ROUTER_BOOKS = (
    "poolgrid_frontend_in_flight_requests",
    "poolgrid_frontend_tokenizations_pending",
    "poolgrid_router_active_requests",
    "poolgrid_router_ledger_requests",
    "poolgrid_router_queued_requests",
    "poolgrid_router_queued_prompt_tokens",
)
WORKER_BOOKS = (
    "poolgrid_worker_running_requests",
    "poolgrid_worker_waiting_requests",
    "poolgrid_worker_queued_prefill_tokens",
    "poolgrid_worker_active_blocks",
    "poolgrid_worker_kept_transfers",
    "poolgrid_worker_tensors_kept",
    "poolgrid_worker_outbox_batches",
)
"""Gauges that are 0 when nobody asks."""

TASKS = "poolgrid_event_loop_tasks"


@dataclass(slots=True)
class Reading:
    """One service at a moment."""

    rss_mb: float = 0.0
    descriptors: int = 0
    sockets: int = 0
    threads: int = 0
    processes: int = 0
    tasks: float = 0.0
    books: dict[str, float] = field(default_factory=dict)


class PoolFailed(RuntimeError):
    """A process did not start, or is gone."""


class LateAnswer(PoolFailed):
    """A process did not answer in time."""


Answer = TypeVar("Answer")


class Patience:
    """Asks again who answers late, counts it, and gives up after ``LATE_ANSWERS_MAX`` in a row."""

    def __init__(self) -> None:
        self.late = 0

    async def asked(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return what is answered; raises ``PoolFailed``."""
        for _ in range(LATE_ANSWERS_MAX - 1):
            try:
                return await ask()
            except LateAnswer:
                self.late += 1
        return await ask()


class Service:
    """One command, and what its ready line said."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.words: list[str] = []

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: list[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Service:
        """Start a command, its errors in ``directory/NAME.log``; ``wait_ready`` is next."""
        log = directory / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "poolgrid", *arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                env={**part_environment(), **(environment or {})},
                start_new_session=True,
            )
        return cls(name, process, log)

    async def wait_ready(self) -> None:
        """Wait for the ready line; raises ``PoolFailed`` when another one comes, or the end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await self.process.stdout.readline()).decode().split()
        if not line or line[0] != "ready":
            raise PoolFailed(
                f"starting {self.name}: it said {' '.join(line)!r}; see {self.log}:\n{self.log.read_text()[-2000:]}"
            )
        self.words = line[1:]

    def word(self, key: str) -> str:
        """Return what the ready line says about ``key`` (``key=value``)."""
        return next(word.partition("=")[2] for word in self.words if word.startswith(f"{key}="))

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return next((word for word in self.words if word.startswith("http")), "") or self.word("http")

    async def metrics(self, http: httpx.AsyncClient) -> str:
        """Return its metrics in Prometheus' form; raises ``PoolFailed``."""
        return (await get(http, f"{self.url}/metrics")).text

    async def reading(self, http: httpx.AsyncClient, books: tuple[str, ...]) -> Reading:
        """Return what it holds now; raises ``PoolFailed`` when a process of it is gone."""
        if self.process.returncode is not None:
            raise PoolFailed(f"{self.name} ended with status {self.process.returncode}; see {self.log}")
        values = summed(await self.metrics(http), (*books, TASKS))
        reading = Reading(tasks=values.pop(TASKS, 0.0), books=values)
        main = psutil.Process(self.process.pid)
        for process in (main, *main.children(recursive=True)):
            try:
                reading.rss_mb += process.memory_info().rss / 1e6
                reading.threads += process.num_threads()
                reading.processes += 1
                for link in _descriptors(process.pid):
                    reading.descriptors += 1
                    reading.sockets += link.startswith("socket:")
            except (psutil.NoSuchProcess, FileNotFoundError) as error:
                raise PoolFailed(f"a process of {self.name} is gone: {error}; see {self.log}") from error
        return reading

    async def stop(self) -> str | None:
        """End it with SIGTERM, or with SIGKILL when it does not; return in words what did not end well."""
        process = self.process
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                status = await process.wait()
        except TimeoutError:
            await self.kill()
            return f"{self.name} did not end within {STOP_TIMEOUT_S:.0f} s"
        return f"{self.name} ended with status {status}" if status else None

    async def kill(self) -> None:
        """End it at once, with all its children."""
        if self.process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                self.process.kill()
        await self.process.wait()


def plain_client(**options: object) -> httpx.AsyncClient:
    """Return a client for plain HTTP on loopback: authorities, which take long to load, are never asked."""
    return httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False, verify=False, **options)  # type: ignore[arg-type]


async def get(http: httpx.AsyncClient, url: str) -> httpx.Response:
    """Return the answer to a GET; raises ``PoolFailed`` when there is none, ``LateAnswer`` when there is none yet."""
    try:
        try:
            return await http.get(url)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The server ends a connection that was idle for its time-out, also just when it is used again.
            return await http.get(url)
    except httpx.TimeoutException as error:
        raise LateAnswer(f"reading {url}: {error!r}") from error
    except httpx.HTTPError as error:
        raise PoolFailed(f"reading {url}: {error!r}") from error


def summed(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Return the sum of all samples of each metric that ``text`` (Prometheus' form) has."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line[: min(at for at in (line.find("{"), line.find(" "), len(line)) if at >= 0)]
        if name in names:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def _descriptors(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(directory):
        try:
            found.append(os.readlink(f"{directory}/{name}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found
