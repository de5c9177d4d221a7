"""Links to workers over real sockets: opened when first wanted, their end told, closed when nobody needs them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.process.clock import SystemClock
from poolgrid.serving.legs import LegEvent
from poolgrid.serving.links import FILES_PER_LINK, LINKS_MAX, LinksOnDemand, WorkerLink, link_opener, links_that_fit
from poolgrid.transport.planes import PlaneContext, PlaneMetrics
from poolgrid.transport.zmq_socket import CallbackSocket
from poolgrid.wire import codec
from poolgrid.wire.limits import ANSWERS_TOGETHER_MAX
from poolgrid.wire.requests import Cancel, FinishReason, Generate, Ping, Pong, Sampling, TokenBatch, TokenDelta
from poolgrid.wire.sessions import TurnAnswer


class Clock:
    """The machine's clock, set forward at will."""

    def __init__(self) -> None:
        self.ahead_ms = 0.0
        self._system = SystemClock()

    def wall_ms(self) -> int:
        return self._system.wall_ms()

    def monotonic_ms(self) -> float:
        return self._system.monotonic_ms() + self.ahead_ms


class Worker:
    """A worker's side of the request plane: it answers pings, and every request with as many ends as it wants tokens,
    all in one frame."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.bind("tcp://127.0.0.1:*")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peers: set[bytes] = set()
        self.told: asyncio.Queue[tuple[TurnAnswer, ...] | None] = asyncio.Queue()
        """Answers of turns, by message."""
        self._socket = CallbackSocket(socket, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        message = codec.to_worker.decode(frames[-1])
        self.peers.add(frames[0])
        if isinstance(message, Ping):
            self._socket.send([frames[0], codec.from_worker.encode(Pong(message.nonce, 1))])
        elif isinstance(message, Cancel):
            self.told.put_nowait(message.answered)
        elif isinstance(message, Generate):
            end = TokenDelta(message.request_id, 0, bytes(4), FinishReason.LENGTH)
            batch = TokenBatch(0, [end] * message.sampling.max_tokens)
            self._socket.send([frames[0], codec.from_worker.encode(batch)])

    def close(self) -> None:
        self._socket.close()


class Owner:
    def __init__(self) -> None:
        self.batches: asyncio.Queue[list[TokenDelta]] = asyncio.Queue()
        self.most = 100
        """Deltas that it takes in a turn."""
        self.then: Callable[[], object] = lambda: None
        """What follows at once."""
        self.downs: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.held: set[str] = set()

    def on_tokens(self, link: WorkerLink, deltas: Iterator[TokenDelta]) -> bool:
        taken = list(islice(deltas, self.most))
        self.batches.put_nowait(taken)
        self.then()
        return len(taken) < self.most

    def on_lost(self, endpoint: str, event: LegEvent, why: str) -> None:
        self.downs.put_nowait((endpoint, why))

    def holds(self, endpoint: str) -> bool:
        return endpoint in self.held


class Scene:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.worker = Worker(context)
        self.owner = Owner()
        self.clock = Clock()
        self.links = LinksOnDemand(link_opener(context, 5_000, self.clock, lambda: None), 60_000, self.clock)
        self.links.attach(self.owner.on_tokens, self.owner.on_lost, self.owner.holds, lambda: None)


def over_the_loop() -> zmq.Context[Any]:
    """Return a context by which links are read by the event loop itself."""
    return PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))


@asynccontextmanager
async def scene(make_context: Callable[[], zmq.Context[Any]]) -> AsyncIterator[Scene]:
    context = make_context()
    made = Scene(context)
    try:
        async with asyncio.timeout(120):
            yield made
    finally:
        made.links.close()
        made.worker.close()
        context.destroy(linger=0)


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    """Play a scenario over the event loop's sockets and over libzmq's."""

    async def whole(make_context: Callable[[], zmq.Context[Any]]) -> None:
        async with scene(make_context) as made:
            await scenario(made)

    for make_context in (over_the_loop, zmq.Context):
        asyncio.run(whole(make_context))


def test_a_worker_that_is_met_for_the_first_time_is_connected_and_serves() -> None:
    async def scenario(made: Scene) -> None:
        link = await made.links.up(made.worker.endpoint, 10)

        assert link is not None
        assert link.generate(Generate("r", bytes(4), Sampling(1)))
        assert (await made.owner.batches.get())[0].request_id == "r"

    run(scenario)


def test_a_worker_is_told_of_many_answers_together() -> None:
    async def scenario(made: Scene) -> None:
        link = await made.links.up(made.worker.endpoint, 10)
        assert link is not None
        answers = [TurnAnswer(f"r{number}", 0, "s", 2, number) for number in range(ANSWERS_TOGETHER_MAX + 3)]
        for answer in answers:
            link.answered(answer)

        assert await made.worker.told.get() == tuple(answers[:ANSWERS_TOGETHER_MAX])
        assert await made.worker.told.get() == tuple(answers[ANSWERS_TOGETHER_MAX:])
        link.answered(answers[0])
        assert await made.worker.told.get() == (answers[0],)

    run(scenario)


def test_a_frame_is_taken_in_turns_and_what_comes_after_it_waits() -> None:
    async def scenario(made: Scene) -> None:
        made.owner.most = 2
        link = await made.links.up(made.worker.endpoint, 10)
        assert link is not None
        turns: list[list[str]] = []

        for name, tokens in (("a", 5), ("b", 1), ("c", 4)):
            assert link.generate(Generate(name, bytes(4), Sampling(tokens)))
        while sum(len(turn) for turn in turns) < 10:
            turns.append([delta.request_id for delta in await made.owner.batches.get()])

        assert [turn for turn in turns if turn] == [["a"] * 2, ["a"] * 2, ["a"], ["b"], ["c"] * 2, ["c"] * 2]

    run(scenario)


def test_what_has_come_is_taken_before_its_link_is_told_to_be_down() -> None:
    async def scenario(made: Scene) -> None:
        link = await made.links.up(made.worker.endpoint, 10)
        assert isinstance(link, WorkerLink)
        cut = partial(link._go_down, "cut")
        made.owner.most = 1
        made.owner.then = lambda: asyncio.get_running_loop().call_soon(cut)

        link.generate(Generate("r", bytes(4), Sampling(5)))
        await made.owner.downs.get()

        assert made.owner.batches.qsize() == 6, "one at a time, and a look that found no more"

    run(scenario)


def test_a_worker_that_is_not_there_is_given_up_in_time() -> None:
    async def scenario(made: Scene) -> None:
        made.worker.close()

        assert await made.links.up(made.worker.endpoint, 0.02) is None
        assert await made.links.up("no endpoint", 0.02) is None

    run(scenario)


def test_the_owner_is_told_when_a_worker_dies() -> None:
    async def scenario(made: Scene) -> None:
        link = await made.links.up(made.worker.endpoint, 10)
        made.worker.close()

        assert await made.owner.downs.get() == (made.worker.endpoint, "connection lost")
        assert link is not None
        assert not link.is_up
        assert not link.generate(Generate("r", bytes(4), Sampling(1)))

    run(scenario)


def test_a_link_that_nobody_needs_is_closed_and_one_with_requests_stays() -> None:
    async def scenario(made: Scene) -> None:
        await made.links.up(made.worker.endpoint, 10)
        made.clock.ahead_ms = 59_000
        made.links.check()
        assert len(made.links) == 1
        made.clock.ahead_ms = 61_000
        made.owner.held = {made.worker.endpoint}
        made.links.check()
        assert len(made.links) == 1
        made.owner.held = set()
        made.links.check()
        assert len(made.links) == 0

        assert await made.links.up(made.worker.endpoint, 10) is not None

    run(scenario)


def test_beyond_the_limit_no_further_worker_is_connected() -> None:
    async def scenario(made: Scene) -> None:
        await made.links.up(made.worker.endpoint, 10)
        made.links._links_max = 1
        assert await made.links.up("tcp://127.0.0.1:1", 10) is None
        assert len(made.links) == 1

    run(scenario)


Limits = tuple[int, int]


@pytest.mark.parametrize(
    ("limits", "after", "fit"),
    [
        ((1024, 4096), 4096, 512),
        ((1024, 2**20), 2 * FILES_PER_LINK * LINKS_MAX, LINKS_MAX),
        ((2**20, 2**20), 2**20, LINKS_MAX),
        ((1024, resource.RLIM_INFINITY), 2 * FILES_PER_LINK * LINKS_MAX, LINKS_MAX),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY, LINKS_MAX),
        ((4, 4), 4, 1),
    ],
)
def test_links_have_half_of_the_open_files_and_the_limit_is_raised_for_them(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, after: int, fit: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: now.__setitem__(0, given))
    assert links_that_fit() == fit
    assert now[0] == (after, limits[1])
