"""A pool of ours in front of two servers: one consolidator, a worker each, and routers with different policies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.e2e.processes import Process, eventually, metric
from tests.real_vllm.servers import LossyWire, VllmServer

LOST_SHARE = 0.2
"""Of the event frames on the way to us."""

PATIENCE_S = 120.0


@dataclass
class Asked:
    """A request that was answered."""

    request_id: str
    prompt: list[int]
    salt: str
    worker: str
    text: str
    cached_tokens: int
    seconds: float = 0.0


@dataclass
class Pool:
    """The pool; ``router`` has the first policy, ``turns`` the second."""

    servers: Sequence[VllmServer]
    model: Path
    vllm: Path
    policies: tuple[str, str] = ("kv", "round-robin")
    router_options: tuple[str, ...] = ()
    """Of both."""
    first_options: tuple[str, ...] = ()
    """Of ``router``."""
    lost_share: float = LOST_SHARE
    wires: list[LossyWire] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    router: str = ""
    turns: str = ""
    nudges: int = 0
    ingest: str = ""

    def __enter__(self) -> Self:
        consolidator = self._part("consolidator", "--ingest-port=0", "--feed-port=0", "--query-port=0").wait_ready()
        self.ingest = consolidator.word("ingest")
        workers = []
        for server in self.servers:
            wire = LossyWire(server.endpoint, self.lost_share, server.number)
            self.stack.callback(wire.close)
            self.wires.append(wire)
            workers.append(
                self._part(
                    *("worker", "--engine", "vllm", "--engine-url", server.url, "--worker-id", f"w{server.number}"),
                    *("--kv-events-endpoint", wire.endpoint, "--kv-events-replay-endpoint", server.replay_endpoint),
                    *("--consolidator", self.ingest),
                )
            )
        planes = ("--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query"))
        common = (
            "--port=0",
            "--select-port=0",
            "--model-path",
            str(self.model),
            "--served-model-name",
            "tiny",
            *planes,
            *self.router_options,
        )
        first, second = self.policies
        routers = [
            self._part("router", *common, "--policy", first, *self.first_options),
            self._part("router", *common, "--policy", second),
        ]
        self.router, self.turns = (each.wait_ready().url for each in routers)
        for each in workers:
            each.wait_ready()
        for url in (self.router, self.turns):
            self.until_ready(url, len(workers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    def _part(self, *arguments: str) -> Process:
        part = self.stack.enter_context(Process(*arguments, "--log-level", "error"))
        return part

    def until_ready(self, url: str, workers: int) -> None:
        """Wait until requests can be sent to so many workers."""
        eventually(f"{workers} workers are ready", lambda: self.ready(url) == workers, 600)

    def ready(self, url: str) -> int:
        """How many workers take requests."""
        return sum(row["state"] == "ready" for row in httpx.get(f"{url}/v1/workers").json()["data"])

    def index(self, number: int) -> set[int]:
        """What the router believes of a server."""
        return self.believed(f"w{number}")

    def believed(self, worker: str) -> set[int]:
        """What the router believes of a worker."""
        lines = httpx.get(f"{self.router}/v1/workers/{worker}/blocks", timeout=30).text.split("\n")
        return {int(line.split()[0], 16) for line in lines if line}

    def settles(self) -> dict[int, tuple[int, int, int]]:
        """Wait until the index is what the servers hold; return blocks held, missing and too many by server."""
        found: dict[int, tuple[int, int, int]] = {}
        for wire in self.wires:
            wire.share = 0.0
        for server in self.servers:
            self.nudges += 1
            server.nudge(self.nudges)

        def equal() -> bool:
            for server in self.servers:
                truth, index = server.holds(), self.index(server.number)
                found[server.number] = (len(truth), len(truth - index), len(index - truth))
            return all(missing == extra == 0 for _, missing, extra in found.values())

        try:
            eventually("the index is what the servers hold", equal, PATIENCE_S)
        except AssertionError:
            pass  # the numbers say by how much
        for wire in self.wires:
            wire.share = self.lost_share
        return found

    def attempts(self, request_id: str) -> list[dict[str, Any]]:
        """The decisions about a request, one for each worker that had it."""
        found: list[dict[str, Any]] = httpx.get(f"{self.router}/v1/decisions/{request_id}", timeout=60).json()[
            "attempts"
        ]
        return found

    def untrusted(self) -> float:
        """How many workers are not believed."""
        return metric(self.router, "poolgrid_router_untrusted_workers")

    async def ask(self, client: httpx.AsyncClient, request_id: str, prompt: list[int], count: int, salt: str) -> Asked:
        """Send one request to the router, and wait for its answer."""
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0}
        body["ignore_eos"] = True
        if salt:
            body["cache_salt"] = salt
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return Asked(
            request_id,
            prompt,
            salt,
            answer.headers["x-poolgrid-worker"],
            said["choices"][0]["text"],
            said["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    def ask_all(self, wanted: Sequence[tuple[str, list[int], int, str]], together: int) -> list[Asked]:
        """Ask for all, so many at a time, in their order."""

        async def main() -> list[Asked]:
            gate = asyncio.Semaphore(together)
            async with httpx.AsyncClient(base_url=self.router, timeout=300) as client:

                async def one(each: tuple[str, list[int], int, str]) -> Asked:
                    async with gate:
                        return await self.ask(client, *each)

                return list(await asyncio.gather(*(one(each) for each in wanted)))

        return asyncio.run(main())
