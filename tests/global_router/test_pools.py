"""Connections to pools' routers over real sockets: found, asked, lost, found again elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from poolgrid.kernel.pool_grids.circuit_breaker import BreakerState
from poolgrid.kernel.pool_grids.grid import PoolStanding, choose_available, fallback_order
from poolgrid.kernel.pool_grids.grid_document import CircuitBreakerSettings, GridStage
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.selection import (
    AskStatus,
    PoolStatus,
    Probe,
    Probed,
    Release,
    Reservation,
    Select,
    Selected,
    SelectRefused,
    ToPool,
    WorkerRank,
)
from poolgrid.server.global_router.pools import PoolConnection, Pools, select_endpoint, state_for
from poolgrid.server.global_router.router_link import PoolLost, PoolNetwork, RouterLink
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.transport.zmq_socket import CallbackSocket
from tests.global_router.documents import aggregated, changed, document
from tests.global_router.fake_fleet import status, workers_of

SELECT = Select(0, "r", "m", Stage.WHOLE, 40)


class PoolRouter:
    """A pool's side of the select plane; ``silent`` kinds of messages are kept and not answered."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:*")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.heard: list[ToPool] = []
        self.kept: list[tuple[bytes, ToPool]] = []
        self.silent: set[type] = set()
        self.status = status(workers_of(Role.AGGREGATED))
        self._news = asyncio.Event()
        self._socket = CallbackSocket(socket, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        message = codec.to_pool.decode(frames[-1])
        self.heard.append(message)
        if type(message) in self.silent:
            self.kept.append((frames[0], message))
        else:
            self.answer(frames[0], message)
        self._news.set()

    def answer(self, peer: bytes, message: ToPool) -> None:
        if isinstance(message, AskStatus):
            self._say(peer, PoolStatus(message.ask, True, self.status.models))
        elif isinstance(message, Probe):
            self._say(peer, Probed(message.ask, None, 3, 3, 16))
        elif isinstance(message, Select):
            self._say(peer, Selected(message.ask, WorkerRank("w"), "tcp://127.0.0.1:1", 1, 0, 16, "kv", 1000))

    def _say(self, peer: bytes, message: PoolStatus | Probed | Selected | SelectRefused) -> None:
        self._socket.send([peer, codec.from_pool.encode(message)])

    async def until_heard(self, kind: type) -> ToPool:
        while True:
            for message in self.heard:
                if isinstance(message, kind):
                    return message
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        self._socket.close()


class Scene:
    """One connection and the pool router behind its URL, which may move."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.router = PoolRouter(context)
        self.is_lost = False
        self.looks = 0
        self.failures: list[Exception] = []
        """What the next looks end with."""
        self._news = asyncio.Event()
        self.pool = PoolConnection(
            "p",
            "http://pool",
            CircuitBreakerSettings(),
            PoolNetwork(context, self._discover, SystemClock(), 20, 400),
            self._news.set,
        )

    @property
    def link(self) -> RouterLink:
        [link] = self.pool._links.values()
        return link

    async def _discover(self, url: str) -> str:
        self.looks += 1
        if self.failures:
            raise self.failures.pop()
        if self.is_lost:
            raise OSError("connection refused")
        return self.router.endpoint

    def lose(self) -> None:
        self.router.close()
        self.is_lost = True

    def come_back(self) -> None:
        self.router, self.is_lost = PoolRouter(self.context), False

    async def until(self, state: PoolStanding) -> None:
        while self.pool.overall_state(0) is not state:
            self._news.clear()
            await self._news.wait()


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Scene(context)
    made.pool.start()
    try:
        async with asyncio.timeout(120):
            yield made
    finally:
        made.pool.close()
        if not made.is_lost:
            made.router.close()
        context.destroy(linger=0)


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with scene() as made:
            await scenario(made)

    asyncio.run(whole())


def test_a_pool_is_found_asked_for_its_status_and_for_workers() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)

        selected = await made.pool.select(SELECT, 5)
        probed = await made.pool.probe(Probe(made.pool.next_ask(), "m", Stage.WHOLE, 40), 5)

        assert isinstance(selected, Selected)
        assert selected.worker == WorkerRank("w")
        assert probed.overlap_blocks == 3

    run(scenario)


def test_a_question_that_is_open_when_the_pool_dies_fails_at_once_and_the_pool_is_down() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        made.router.silent = {Select}
        asking = asyncio.create_task(made.pool.select(SELECT, 60))
        await made.router.until_heard(Select)

        made.lose()
        with pytest.raises(PoolLost, match="connection lost"):
            await asking

        assert made.pool.overall_state(0) is PoolStanding.DOWN
        with pytest.raises(PoolLost):
            await made.pool.select(SELECT, 60)

    run(scenario)


def test_a_pool_that_comes_back_elsewhere_is_found_behind_its_url() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        made.lose()
        await made.until(PoolStanding.DOWN)
        made.come_back()

        await made.until(PoolStanding.AVAILABLE)

        assert made.pool.endpoint == made.router.endpoint

    run(scenario)


def test_a_pool_that_is_silent_is_dropped_and_looked_for_again() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        made.router.silent = {AskStatus}

        await made.until(PoolStanding.DOWN)
        assert "silent for" in made.pool.last_error
        made.router.silent = set()
        await made.until(PoolStanding.AVAILABLE)
        assert made.looks >= 2

    run(scenario)


def test_a_worker_that_is_reserved_too_late_is_released() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        made.router.silent = {Select}
        with pytest.raises(PoolLost, match="did not answer within 10 ms"):
            await made.pool.select(SELECT, 0.01)
        await made.router.until_heard(Select)

        for peer, message in made.router.kept:
            made.router.answer(peer, message)

        assert await made.router.until_heard(Release) == Release(Reservation("r", WorkerRank("w")))

    run(scenario)


def test_a_worker_that_is_reserved_as_its_asker_is_cancelled_is_released() -> None:
    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        asking = asyncio.ensure_future(made.pool.select(SELECT, 10))
        await asyncio.sleep(0)  # it has asked
        [(future, _)] = made.link._asks.values()

        def receive(frames: list[bytes], genuine: Callable[[list[bytes]], None] = made.link._on_frames) -> None:
            genuine(frames)
            if future.done():
                asking.cancel()  # the answer and the client's leaving come in one turn of the loop

        assert made.link._socket is not None
        made.link._socket._handle = receive
        with pytest.raises(asyncio.CancelledError):
            await asking

        assert await made.router.until_heard(Release) == Release(Reservation("r", WorkerRank("w")))

    run(scenario)


def test_a_question_that_was_given_up_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.server.global_router.router_link.LATE_ANSWER_MS", 30.0)

    async def scenario(made: Scene) -> None:
        await made.until(PoolStanding.AVAILABLE)
        made.router.silent = {Select}
        with pytest.raises(PoolLost, match="did not answer within 10 ms"):
            await made.pool.select(SELECT, 0.01)
        assert made.link._asks

        while made.link._asks:
            made._news.clear()
            await made._news.wait()  # statuses go on coming, and with each the pool looks

        for peer, message in made.router.kept:
            made.router.answer(peer, message)
        made.router.silent = set()
        assert isinstance(await made.pool.select(Select(made.pool.next_ask(), "s", "m", Stage.WHOLE, 40), 10), Selected)

    run(scenario)


async def test_a_changed_document_adds_drops_and_moves_pools_and_keeps_the_others() -> None:
    looked: list[str] = []

    async def discover(url: str) -> str:
        looked.append(url)
        raise OSError("nobody there")

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pools = Pools({"c": "http://given"}, PoolNetwork(context, discover, SystemClock(), 20, 400))
    raw = changed(aggregated(), ("aggregated", "pools", 0, "url"), "http://a:1/")
    try:
        pools.use(document(raw))
        await pools.first_look()
        before = {pool.name: pool for pool in pools.all()}
        raw = changed(raw, ("aggregated", "pools", 0, "url"), "http://a:2")
        pools.use(document(raw))
        after = {pool.name: pool for pool in pools.all()}
    finally:
        pools.close()
        context.destroy(linger=0)

    assert {name: pool.url for name, pool in before.items()} == {"a": "http://a:1", "b": "", "c": "http://given"}
    assert after["b"] is before["b"]
    assert after["c"] is before["c"]
    assert after["a"] is not before["a"]
    assert after["a"].url == "http://a:2"
    assert before["c"].last_error == "nobody there"


async def test_other_settings_of_the_breaker_forget_nothing() -> None:
    async def discover(url: str) -> str:
        raise OSError("nobody there")

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pools = Pools({}, PoolNetwork(context, discover, SystemClock(), 20, 400))
    raw = changed(aggregated(), ("circuit_breaker",), {"failures_to_open": 1})
    try:
        pools.use(document(raw))
        pool = pools.get("a")
        assert pool is not None
        ticket, _ = pool.breaker.admit(0)
        late, _ = pool.breaker.admit(0)
        assert ticket is not None
        assert late is not None
        pool.breaker.failed(ticket, 0)
        pools.use(document(changed(raw, ("circuit_breaker", "open_ms"), 3000)))

        assert pool.breaker.state is BreakerState.OPEN
        assert pool.breaker.succeeded(late, 1) == []
        assert pool.breaker.state is BreakerState.OPEN
    finally:
        pools.close()
        context.destroy(linger=0)


async def test_a_pool_that_a_new_document_moved_is_waited_for_until_it_answers_or_does_not() -> None:
    answers: asyncio.Queue[OSError] = asyncio.Queue()

    async def discover(url: str) -> str:
        raise await answers.get()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pools = Pools({}, PoolNetwork(context, discover, SystemClock(), 20, 400))
    news = asyncio.Event()
    pools.listen(news.set)
    try:
        pools.use(document(aggregated()))
        pool = pools.get("a")
        assert pool is not None
        assert pool.state("m", Stage.WHOLE, 0) is pool.overall_state(0) is PoolStanding.CONNECTING

        answers.put_nowait(OSError("nobody there"))
        await asyncio.wait_for(news.wait(), 120)

        states = [each.state("m", Stage.WHOLE, 0) for each in pools.all()]
        assert sorted(states) == [PoolStanding.CONNECTING, PoolStanding.CONNECTING, PoolStanding.DOWN]
    finally:
        pools.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("url", "answer", "endpoint"),
    [
        ("http://10.0.0.1:8000", {"select_endpoint": "tcp://0.0.0.0:4001"}, "tcp://10.0.0.1:4001"),
        ("http://pool.example:8000", {"select_endpoint": "tcp://127.0.0.1:4001"}, "tcp://pool.example:4001"),
        ("http://[::1]:8000", {"select_endpoint": "tcp://[::]:4001"}, "tcp://[::1]:4001"),
    ],
)
def test_the_select_plane_is_at_the_host_of_the_url(url: str, answer: object, endpoint: str) -> None:
    assert select_endpoint(url, answer) == endpoint


@pytest.mark.parametrize("answer", [None, [], {}, {"select_endpoint": 5}, {"select_endpoint": "http://x"}])
def test_another_server_behind_the_url_is_a_clear_error(answer: object) -> None:
    with pytest.raises(ValueError, match="is it a pool's router"):
        select_endpoint("http://x", answer)


@pytest.mark.parametrize(
    ("roles", "stage", "state"),
    [
        ([], Stage.WHOLE, PoolStanding.DOWN),
        ([workers_of(Role.AGGREGATED)], Stage.PREFILL, PoolStanding.AVAILABLE),
        ([workers_of(Role.PREFILL)], Stage.DECODE, PoolStanding.DOWN),
        ([workers_of(Role.PREFILL)], Stage.WHOLE, PoolStanding.DOWN),
        ([workers_of(Role.DECODE)], Stage.WHOLE, PoolStanding.AVAILABLE),
        ([workers_of(Role.DECODE, 2, 16)], Stage.DECODE, PoolStanding.SATURATED),
        ([workers_of(Role.DECODE, 2, 16), workers_of(Role.AGGREGATED)], Stage.DECODE, PoolStanding.AVAILABLE),
        ([workers_of(Role.DECODE, 0, 0, 2)], Stage.DECODE, PoolStanding.DRAINING),
    ],
)
def test_what_a_pool_says_of_its_workers_decides_what_it_takes(roles: list, stage: Stage, state: PoolStanding) -> None:  # type: ignore[type-arg]
    assert state_for(status(*roles), "m", stage) is state


@pytest.mark.parametrize("port", ["0", "70000", "*", ""])
def test_a_pool_that_names_a_port_that_is_none_is_a_clear_error(port: str) -> None:
    with pytest.raises(ValueError, match="the answer's select_endpoint is"):
        select_endpoint("http://pool:1", {"select_endpoint": f"tcp://10.0.0.1:{port}"})


def test_a_pool_whose_looking_for_fails_as_nobody_expected_is_looked_for_again_and_holds_up_nobody() -> None:
    """Like the library behind it, which raises an error of its own kind for a URL that is none."""

    class InvalidUrl(Exception):
        pass

    async def scenario(scene: Scene) -> None:
        scene.failures = [InvalidUrl("Invalid port: '70000'") for _ in range(2)]
        await scene.pool.reached.wait()
        assert scene.pool.last_error == "InvalidUrl: Invalid port: '70000'"
        await scene.until(PoolStanding.AVAILABLE)

    run(scenario)


def test_a_pool_that_is_not_ready_is_down() -> None:
    assert state_for(PoolStatus(1, False), "m", Stage.WHOLE) is PoolStanding.DOWN
    assert state_for(None, "m", Stage.WHOLE) is PoolStanding.DOWN


UP = PoolStanding.AVAILABLE


def stage(ranks: dict[str, int], fallback: dict[str, Any] | None = None) -> GridStage:
    raw = {
        "mode": "aggregated",
        "accept": ["unreachable-pool"],
        "aggregated": {
            "pools": [{"name": name, "priority": rank} for name, rank in ranks.items()],
            "ttft_min_ms": 0,
            "ttft_max_ms": 1,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 1,
            "itl_resolution": 1,
            "mapping": [[0]],
            "fallback": fallback or {},
        },
    }
    made = document(raw).aggregated
    assert made is not None
    return made


RANKS = {"slow": 3, "fast": 0, "mid": 1, "also-mid": 1, "slowest": 9}


@pytest.mark.parametrize(
    ("chosen", "rule", "expected"),
    [
        ("mid", "faster-then-slower", ["mid", "also-mid", "fast", "slow", "slowest"]),
        ("slowest", "faster-then-slower", ["slowest", "slow", "mid", "also-mid", "fast"]),
        ("fast", "faster-then-slower", ["fast", "mid", "also-mid", "slow", "slowest"]),
        ("mid", "faster-only", ["mid", "also-mid", "fast"]),
        ("mid", "none", ["mid"]),
    ],
)
def test_pools_follow_the_rule(chosen: str, rule: str, expected: list[str]) -> None:
    order = fallback_order(stage(RANKS, {"rule": rule}), chosen)

    assert [candidate.pool for candidate in order] == expected


def test_the_first_available_pool_is_taken_and_the_others_are_explained() -> None:
    order = fallback_order(stage(RANKS), "mid")
    states = {
        "mid": PoolStanding.BREAKER_OPEN,
        "also-mid": PoolStanding.DRAINING,
        "fast": PoolStanding.SATURATED,
        "slow": UP,
    }

    choice = choose_available(order, states)

    assert (choice.chosen, choice.pool, choice.reason) == ("mid", "slow", "slower")
    assert choice.explanation()["passed_over"] == [
        {"pool": "mid", "state": "breaker-open"},
        {"pool": "also-mid", "state": "draining"},
        {"pool": "fast", "state": "saturated"},
    ]


@pytest.mark.parametrize(
    ("state", "later"), [(PoolStanding.SATURATED, True), (PoolStanding.CONNECTING, True), (PoolStanding.DOWN, False)]
)
def test_without_any_pool_it_is_said_whether_waiting_helps(state: PoolStanding, later: bool) -> None:
    choice = choose_available(fallback_order(stage(RANKS), "mid"), {"fast": state})

    assert choice.pool is None
    assert choice.may_have_room_later is later
    assert len(choice.passed_over) == 5
