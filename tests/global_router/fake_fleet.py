"""Pools and workers without sockets: they answer from scripts, fail where they are told to, and remember everything.

A fake pool is a real ``PoolConnection`` whose questions are answered here; its status and breaker are the real ones.
Nothing waits for time: the clock moves when a test moves it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.requests.legs import LegEvent
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.hashing import HASH_SPEC, pack_tokens, unpack_tokens
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenDelta
from poolgrid.kernel.wire.selection import (
    ModelStatus,
    PoolStatus,
    Probe,
    Probed,
    Reservation,
    RoleStatus,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
    WorkerRank,
)
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.document.reader import load_document
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import PoolConnection, Pools
from poolgrid.server.global_router.router_link import PoolLost, PoolNetwork
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.global_router.settings import GlobalRouterSettings, Timings
from poolgrid.server.serving.links import LinksOnDemand, WorkerLink
from tests.clock import HandClock

MODEL = "m"
BLOCK_SIZE = 16


def status(*roles: RoleStatus, model: str = MODEL) -> PoolStatus:
    return PoolStatus(0, True, (ModelStatus(model, BLOCK_SIZE, HASH_SPEC, 4096, roles),), retry_after_s=3.0)


def status_of_servers(requests: int = 0, capacity: int = 16, kind: str = "vllm") -> PoolStatus:
    """Return the status of a pool in front of engine servers."""
    role = RoleStatus(Role.AGGREGATED, 2, 0, 0, requests, capacity)
    served = ModelStatus(MODEL, BLOCK_SIZE, HASH_SPEC, 4096, (role,), server_kind=kind)
    return PoolStatus(0, True, (served,), retry_after_s=3.0)


def workers_of(
    role: Role, ready: int = 2, requests: int = 0, draining: int = 0, decodes_only: bool = False
) -> RoleStatus:
    return RoleStatus(role, ready, draining, 0, requests, 8 * ready, decodes_only)


class FakePool(PoolConnection):
    """Chooses its workers in turn; ``refuse`` and ``lose`` say what happens instead."""

    def __init__(self, name: str, clock: HandClock, pools: FakePools, roles: tuple[Role, ...], workers: int) -> None:
        async def nowhere(url: str) -> str:
            raise OSError(url)

        super().__init__(
            name, "", pools.breaker, PoolNetwork(zmq.Context.instance(), nowhere, clock, 250, 2000), pools.say_news
        )
        self.status = status(*(workers_of(role, workers) for role in roles))
        self.reached.set()
        self.workers = [WorkerRank(f"{name}-{number}") for number in range(workers)]
        self.selects: list[Select] = []
        self.probes: list[Probe] = []
        self.reserved: dict[str, WorkerRank] = {}
        self.renewed: list[Reservation] = []
        self.refuse: SelectRefused | None = None
        self.lost = False
        self.room: int | None = None
        """Requests that it has at a time; ``None`` = any number."""
        self.statuses_asked = 0
        self.asked_thrice = asyncio.Event()
        self.overlap_blocks = 0
        self.answering: asyncio.Event | None = None

    async def select(self, message: Select, timeout_s: float) -> Selected | SelectRefused:
        self.selects.append(message)
        if self.answering is not None:
            await self.answering.wait()
        if self.lost:
            raise PoolLost(f"pool {self.name}: connection lost")
        if self.refuse is not None:
            return self.refuse
        if self.room is not None and len(self.reserved) >= self.room:
            return SelectRefused(message.ask, SelectRefusal.BUSY, "every worker is busy", 3.0)
        free = [worker for worker in self.workers if worker not in message.excluded]
        if not free:
            return SelectRefused(message.ask, SelectRefusal.NO_WORKER, "every worker is excluded")
        worker = free[len(self.selects) % len(free)]
        self.reserved[message.request_id] = worker
        return Selected(
            message.ask, worker, f"tcp://{worker.worker_id}", 1, self.overlap_blocks, BLOCK_SIZE, "kv", 30_000
        )

    async def probe(self, message: Probe, timeout_s: float) -> Probed:
        self.probes.append(message)
        if self.lost:
            raise PoolLost(f"pool {self.name}: connection lost")
        return Probed(message.ask, None, self.overlap_blocks, self.overlap_blocks, BLOCK_SIZE)

    def release(self, reservation: Reservation) -> None:
        self.reserved.pop(reservation.request_id, None)

    def ask_status(self) -> None:
        self.statuses_asked += 1
        if self.statuses_asked == 3:
            self.asked_thrice.set()

    def say(self, said: PoolStatus | None) -> None:
        """Have a status come in."""
        self._take(said)
        self._on_news()

    def renew(self, reservations: list[Reservation]) -> None:
        self.renewed += reservations


class FakePools(Pools):
    def __init__(self, clock: HandClock, document: Any) -> None:
        async def nowhere(url: str) -> str:
            raise OSError(url)

        super().__init__({}, PoolNetwork(zmq.Context.instance(), nowhere, clock, 250, 2000))
        self.breaker = document.circuit_breaker

    def add(self, pool: FakePool) -> None:
        self._pools[pool.name] = pool

    def forget(self, name: str) -> None:
        del self._pools[name]

    def say_news(self) -> None:
        self._news()


@dataclass
class FakeLink:
    endpoint: str
    is_up: bool = True
    sent: list[Generate] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    on_generate: Callable[[FakeLink, Generate], None] = lambda link, message: None

    def generate(self, message: Generate, at_once: bool = False) -> bool:
        if not self.is_up:
            return False
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self.on_generate, self, message)
        return True

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class FakeLinks(LinksOnDemand):
    """One link per endpoint; a worker in ``out_of_reach`` never comes up."""

    def __init__(self, on_generate: Callable[[FakeLink, Generate], None], clock: HandClock) -> None:
        super().__init__(cast(Any, None), 60_000, clock)
        self.links: dict[str, FakeLink] = {}
        self.out_of_reach: set[str] = set()
        self._on_generate = on_generate

    async def up(self, endpoint: str, timeout_s: float) -> WorkerLink | None:
        await asyncio.sleep(0)
        if endpoint.removeprefix("tcp://") in self.out_of_reach:
            return None
        link = self.links.setdefault(endpoint, FakeLink(endpoint, on_generate=self._on_generate))
        return cast(WorkerLink, link) if link.is_up else None

    def get(self, endpoint: str) -> WorkerLink | None:
        return cast("WorkerLink | None", self.links.get(endpoint))

    def check(self) -> None:
        pass


Script = Callable[["FakeFleet", FakeLink, Generate], None]


def output_of(message: Generate) -> list[int]:
    """Return what a worker must generate: each token is the length of what comes before it."""
    length = len(message.token_ids) // 4
    return [length + position for position in range(message.sampling.max_tokens)]


def speak(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
    """Answer in full, two tokens in the first delta, the rest in the second."""
    tokens = output_of(message)
    fleet.say(link, message, tokens[:2], 0, finish=FinishReason.LENGTH if len(tokens) <= 2 else None)
    if len(tokens) > 2:
        fleet.say(link, message, tokens[2:], 2, finish=FinishReason.LENGTH)


class FakeFleet:
    """A service over fake pools; ``scripts`` say by worker name what it does with a request."""

    def __init__(self, raw: dict[str, Any], *, workers: int = 2, **settings: Any) -> None:
        loaded = load_document(json.dumps(raw))
        self.clock = HandClock()
        self.scripts: dict[str, Script] = {}
        self.default_script: Script = speak
        self.pools = FakePools(self.clock, loaded.document)
        self.links = FakeLinks(self._on_generate, self.clock)
        self.registry = CollectorRegistry()
        self.metrics = GlobalRouterMetrics(self.registry)
        timings = Timings(**{name: settings.pop(name) for name in list(settings) if name in Timings.__slots__})
        options = GlobalRouterSettings(config=Path("grid.json"), **settings)
        configuration = Configuration(loaded, options.config, self.clock)
        self.service = GlobalRouterService(
            options, configuration, self.pools, self.links, self.metrics, self.clock, timings=timings
        )
        roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "aggregated": Role.AGGREGATED}
        for stage_name, stage in loaded.document.stages.items():
            for pool in stage.pools:
                self.pools.add(FakePool(pool.name, self.clock, self.pools, (roles[stage_name],), workers))

    def pool(self, name: str) -> FakePool:
        pool = self.pools.get(name)
        assert isinstance(pool, FakePool)
        return pool

    def _on_generate(self, link: FakeLink, message: Generate) -> None:
        worker = link.endpoint.removeprefix("tcp://")
        script = self.scripts.get(worker) or self.scripts.get(worker.rpartition("-")[0]) or self.default_script
        script(self, link, message)

    def say(
        self,
        link: FakeLink,
        message: Generate,
        tokens: list[int],
        position: int,
        finish: FinishReason | None = None,
        error: str | None = None,
        refusal: RefusalKind | None = None,
        params: bytes | None = None,
    ) -> None:
        delta = TokenDelta(
            message.request_id,
            position,
            pack_tokens(tokens),
            finish,
            0 if position == 0 else None,
            error,
            refusal,
            None,
            params,
        )
        self.service.tracker.on_tokens(cast(WorkerLink, link), iter([delta]))

    def break_link(self, worker: str) -> None:
        link = self.links.links[f"tcp://{worker}"]
        link.is_up = False
        self.service.tracker.on_lost(link.endpoint, LegEvent.LOST, "connection lost")

    def sent_to(self, pool: str) -> list[Generate]:
        return [
            message
            for endpoint, link in self.links.links.items()
            if endpoint.removeprefix("tcp://").rpartition("-")[0] == pool
            for message in link.sent
        ]

    def assert_nothing_is_left(self) -> None:
        assert len(self.service) == 0
        assert all(not pool.reserved for pool in self.pools.all() if isinstance(pool, FakePool))
        assert all(count == 0 for count in self.service.in_flight().values())
        assert not any(self.service.tracker.has_legs(endpoint) for endpoint in self.links.links)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def request(
    request_id: str = "r",
    isl: int = 32,
    max_tokens: int = 6,
    hints: dict[str, Any] | None = None,
    model: str = MODEL,
    **fields: Any,
) -> InferenceRequest:
    return InferenceRequest(
        request_id, model, pack_tokens(range(isl)), Sampling(max_tokens=max_tokens), hints=hints or {}, **fields
    )


def targets(ttft: float | None = None, itl: float | None = None, **agent: int) -> dict[str, Any]:
    return {"nvext": {"router": {"ttft_target": ttft, "itl_target": itl}, "agent_hints": agent}}


async def read(stream: TokenDelivery) -> tuple[list[int], StreamDelta]:
    """Return all tokens and the last delta."""
    tokens: list[int] = []
    while True:
        for delta in await asyncio.wait_for(stream.next(), 120):
            tokens += unpack_tokens(delta.token_ids)
            if delta.finish_reason is not None:
                return tokens, delta


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def right_answer(isl: int = 32, max_tokens: int = 6) -> list[int]:
    return [isl + position for position in range(max_tokens)]
