"""Requests that wait in a router for a worker with room: who goes next, who gives way, who may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.journal.ports import PoolListener
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import InferenceRequest, Refused
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.feed import WorkerState
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import (
    Cancel,
    FinishReason,
    Generate,
    Ping,
    Pong,
    RefusalKind,
    Sampling,
    TokenBatch,
    TokenDelta,
)
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.links import link_opener
from poolgrid.server.transport.zmq_socket import CallbackSocket
from tests.router.fleet_builder import make_card
from tests.router.test_service import ToldFeed

TIMEOUT_S = 120.0


class Worker:
    """A worker's request plane that does only what the test tells it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:*")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.taken: list[str] = []
        self.cancelled: list[str] = []
        self._news = asyncio.Event()
        self._peer = b""
        self._socket = CallbackSocket(socket, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        message = codec.to_worker.decode(frames[-1])
        self._peer = frames[0]
        if isinstance(message, Ping):
            self._socket.send([frames[0], codec.from_worker.encode(Pong(message.nonce, 1))])
        elif isinstance(message, Generate):
            self.taken.append(message.request_id)
        elif isinstance(message, Cancel):
            self.cancelled.append(message.request_id)
        self._news.set()

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not check():
                self._news.clear()
                await self._news.wait()

    async def finish_one(self) -> str:
        """Finish the request that was taken first and not finished yet."""
        await self.until(lambda: bool(self.taken))
        request_id = self.taken.pop(0)
        self.say(TokenDelta(request_id, 0, pack_tokens([7]), FinishReason.LENGTH))
        return request_id

    def say(self, delta: TokenDelta) -> None:
        """Send one delta to the router."""
        self._socket.send([self._peer, codec.from_worker.encode(TokenBatch(0, [delta]))])

    def close(self) -> None:
        self._socket.close()


class Feed(ToldFeed):
    """A pool whose workers are there from the start."""

    def __init__(self, workers: dict[str, tuple[str, str]]) -> None:
        super().__init__()
        cards = {name: make_card(model, max_batch_size=1, request_endpoint=at) for name, (model, at) in workers.items()}
        self._states = [WorkerState(name, 0, 1, 0, card, False, []) for name, card in cards.items()]

    async def start(self, listener: PoolListener) -> None:
        listener.on_snapshot(0, self._states, [])


class Scene:
    def __init__(self, service: RouterService, workers: dict[str, Worker]) -> None:
        self.service = service
        self.workers = workers
        self.order: list[str] = []
        self.submitted: dict[str, asyncio.Task[TokenDelivery]] = {}

    async def submit(self, name: str, model: str = "m", tokens: int = 4, **fields: Any) -> asyncio.Task[TokenDelivery]:
        request = InferenceRequest(name, model, pack_tokens([5] * tokens), Sampling(4), **fields)
        task = asyncio.ensure_future(self.service.submit(request))
        self.submitted[name] = task
        await asyncio.sleep(0)  # it is on a worker, refused, or in the queue now
        await asyncio.sleep(0)
        return task

    def waiting(self) -> int:
        return self.service.counts()[1]

    async def finish(self, count: int) -> list[str]:
        """Let the only worker finish so many requests, one after the other; return the order."""
        (worker,) = self.workers.values()
        return [await worker.finish_one() for _ in range(count)]


@asynccontextmanager
async def scene(*models: str, **settings: Any) -> AsyncIterator[Scene]:
    """Run a router with a worker per model (several may have the same), each with room for one request."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    models = models or ("m",)
    workers = {f"worker-{number}": Worker(context) for number in range(len(models))}
    projection = Projection(PrefixIndex(), LoadLedger())
    given = RouterSettings.model_validate({"worker_queue_factor": 1.0, **settings})
    feed = Feed({name: (model, workers[name].endpoint) for name, model in zip(workers, models, strict=True)})
    metrics = RouterMetrics(CollectorRegistry())
    service = RouterService(
        given,
        RouterState(
            Selector(projection, make_policy(given.policy), given.worker_queue_factor),
        ),
        feed,
        metrics,
        SystemClock(),
        link_opener(context, given.worker_timeout_ms, SystemClock(), lambda: None),
    )
    await service.start()
    made = Scene(service, workers)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while service.links.unreachable:  # noqa: ASYNC110 - links come up without telling anybody
                await asyncio.sleep(0.002)
        yield made
    finally:
        for task in made.submitted.values():
            task.cancel()
        await asyncio.gather(*made.submitted.values(), return_exceptions=True)
        await service.stop()
        for worker in workers.values():
            worker.close()
        context.destroy(linger=0)


async def test_a_decision_says_how_long_its_request_was_queued() -> None:
    async with scene(policy="least-loaded") as pool:  # which plans nothing: nobody waits for the end of a turn
        await pool.submit("first")
        await pool.submit("second")
        assert await pool.finish(2) == ["first", "second"]

        second, first = pool.service.tracker.decisions.newest(2)
        assert (first.request.request_id, first.queued_ms) == ("first", 0.0)
        assert second.queued_ms > 0


async def test_the_shortest_work_goes_first_when_that_is_wanted() -> None:
    async with scene(queue_order="shortest-uncached-work-first") as pool:
        await pool.submit("first")
        await pool.submit("long", tokens=3000)
        await pool.submit("short", tokens=10)

        assert await pool.finish(3) == ["first", "short", "long"]


async def test_whoever_leaves_the_queue_gives_up_the_place() -> None:
    async with scene(max_queue_requests=1) as pool:
        await pool.submit("first")
        leaving = await pool.submit("leaving")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert pool.waiting() == 0
        await pool.submit("next")

        assert await pool.finish(2) == ["first", "next"]
        assert pool.waiting() == 0


async def test_waiting_too_long_is_429_and_leaves_nothing_behind() -> None:
    async with scene(queue_timeout_ms=20) as pool:
        await pool.submit("first")
        late = await pool.submit("late")
        with pytest.raises(Refused, match="no worker had room within 20 ms") as caught:
            await late
        assert caught.value.status == 429
        assert pool.waiting() == 0


async def test_a_request_that_must_move_is_never_refused_and_holds_up_nobody() -> None:
    async with scene("m", "m", max_queue_requests=1, worker_timeout_ms=600_000) as pool:
        await pool.submit("a")
        await pool.submit("b")
        holder = {}
        for worker in pool.workers.values():
            await worker.until(lambda worker=worker: bool(worker.taken))  # type: ignore[misc]
            holder[worker.taken[0]] = worker
        await pool.submit("waiting")
        assert pool.waiting() == 1

        # Its worker hands "a" back: only the other one could take it, and that is full.
        delta = TokenDelta("a", 0, b"", FinishReason.ERROR, error="no room", refusal=RefusalKind.BROKEN)
        holder["a"].taken.clear()
        holder["a"].say(delta)
        await holder["a"].until(lambda: holder["a"].taken == ["waiting"])
        moving = await pool.submitted["a"]
        assert not moving.finished
        assert pool.waiting() == 1

        await holder["b"].finish_one()
        await holder["b"].until(lambda: len(holder["b"].taken) == 1)
        assert holder["b"].taken[0].startswith("a")
        assert pool.waiting() == 0


async def test_the_most_urgent_go_first_and_tenants_take_turns() -> None:
    async with scene() as pool:
        await pool.submit("first")
        for number in range(3):
            await pool.submit(f"a{number}", tenant="a")
        await pool.submit("b0", tenant="b")
        await pool.submit("urgent", tenant="a", priority=1)
        assert pool.waiting() == 5

        assert await pool.finish(6) == ["first", "urgent", "a0", "b0", "a1", "a2"]
