"""Requests that wait in the global router until a pool has room: who goes next, who gives way, who may leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import Refused
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.wire.selection import SelectRefusal, SelectRefused
from poolgrid.server.global_router.http_api import register_views
from poolgrid.server.global_router.queue import ATTEMPTS_PER_LANE_MAX
from tests.global_router.documents import aggregated, changed, disagg
from tests.global_router.fake_fleet import (
    FakeFleet,
    FakeLink,
    FakePool,
    output_of,
    read,
    request,
    right_answer,
    speak,
    status,
    targets,
    until,
    workers_of,
)

TO_A = targets(0, 0)
FULL = status(workers_of(Role.AGGREGATED, requests=16))
FREE = status(workers_of(Role.AGGREGATED))


class Scene:
    """A fleet of which pool ``a`` has room for one request, and the others for none; workers answer when told to."""

    def __init__(self, raw: dict[str, Any] | None = None, room: int = 1, **settings: Any) -> None:
        self.fleet = FakeFleet(raw or aggregated(), **settings)
        register_views(self.fleet.registry, self.fleet.service)
        self.running: list[tuple[FakeLink, Generate]] = []
        self.order: list[str] = []
        self.fleet.default_script = self._take
        for pool in "abc" if raw is None or raw["mode"] == "aggregated" else ():
            self.fleet.pool(pool).room = 0
        if raw is None:
            self.fleet.pool("a").room = room
        self.tasks: dict[str, asyncio.Task[TokenDelivery]] = {}

    def _take(self, _: FakeFleet, link: FakeLink, message: Generate) -> None:
        self.running.append((link, message))
        self.order.append(message.request_id)

    def waiting(self) -> int:
        return self.fleet.service.counts()[1]

    async def submit(self, name: str, **fields: Any) -> asyncio.Task[TokenDelivery]:
        """Submit a request, and return when it is on a worker, waits, or is refused."""
        task = asyncio.ensure_future(self.fleet.service.submit(request(name, **{"hints": TO_A, **fields})))
        self.tasks[name] = task
        before = self.waiting()
        await until(lambda: task.done() or self.waiting() != before)
        return task

    async def finish(self, count: int = 1) -> None:
        """Let workers answer so many requests, one after the other, in the order in which they got them."""
        for _ in range(count):
            await until(lambda: bool(self.running))
            speak(self.fleet, *self.running.pop(0))

    def count(self, name: str, **labels: str) -> float:
        return self.fleet.count(f"poolgrid_global_router_{name}", **labels)


async def test_requests_wait_and_go_by_priority_then_by_arrival() -> None:
    scene = Scene()
    await scene.submit("first")
    for name, priority in (("x", 0), ("low", -1), ("y", 0), ("high", 5), ("z", 0)):
        await scene.submit(name, priority=priority)
    assert scene.fleet.service.counts() == (1, 5)
    assert scene.count("queued_requests") == 5
    assert scene.count("queued_prompt_tokens") == 5 * 32
    selects = len(scene.fleet.pool("a").selects)

    await scene.finish(6)
    for name, task in scene.tasks.items():
        tokens, last = await read(await task)
        assert (tokens, last.finish_reason) == (right_answer(), "length"), name

    assert scene.order == ["first", "high", "x", "y", "z", "low"]
    assert scene.count("queue_seconds_count", cause="pools_full") == 1
    assert scene.count("queue_seconds_count", cause="behind_others") == 4
    assert 1 <= scene.count("passed_over_total", pool="b", state="saturated") <= 6, "not with each attempt"
    assert len(scene.fleet.pool("a").selects) <= selects + 2 * 5, "a freed place is asked for, and once too often"
    record = scene.fleet.service.decisions.get("low")
    assert record is not None
    assert record.summary().queued_ms >= 0
    scene.fleet.assert_nothing_is_left()
    assert scene.fleet.service.counts() == (0, 0)


async def test_a_pool_that_says_it_has_room_is_asked_at_once() -> None:
    scene = Scene()
    for name in "abc":
        scene.fleet.pool(name).status = FULL
    await scene.submit("r")
    assert scene.waiting() == 1
    assert all(not scene.fleet.pool(name).selects for name in "abc"), "their statuses say that it is of no use"

    scene.fleet.pool("a").say(FREE)
    await scene.finish()

    assert (await read(await scene.tasks["r"]))[0] == right_answer()


async def test_room_that_our_own_requests_leave_is_used_before_the_pool_says_so() -> None:
    scene = Scene(room=2)
    await scene.submit("one")
    await scene.submit("two")
    for name in "abc":
        scene.fleet.pool(name).say(FULL)
    for number in range(10):
        await scene.submit(f"r{number}")

    await scene.finish(12)

    assert len(scene.order) == 12
    assert len(scene.fleet.pool("a").selects) == 12, "one question for each"


async def test_room_that_came_free_while_a_pool_said_that_it_is_full_is_not_forgotten() -> None:
    scene = Scene(room=2)
    pool = scene.fleet.pool("a")
    await scene.submit("one")
    await scene.submit("two")
    for name in "abc":
        scene.fleet.pool(name).say(FULL)
    await scene.submit("three")
    select, asked, answer = pool.select, asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any) -> SelectRefused:
        pool.select = select  # type: ignore[method-assign]
        asked.set()
        await answer.wait()
        return SelectRefused(0, SelectRefusal.BUSY, "every worker is busy")

    pool.select = late  # type: ignore[assignment,method-assign]
    await scene.finish()
    await asked.wait()
    await scene.finish()
    answer.set()
    await scene.finish()

    assert scene.order == ["one", "two", "three"]


async def test_many_are_placed_at_a_time_in_their_turns_when_there_is_room() -> None:
    scene = Scene(room=0)
    pool = scene.fleet.pool("a")
    for name in "abc":
        scene.fleet.pool(name).status = FULL
    for number in range(40):
        await scene.submit(f"r{number}", tenant="xy"[number % 2])
    pool.room, pool.answering = 30, asyncio.Event()
    pool.say(FREE)
    await until(lambda: len(pool.selects) == ATTEMPTS_PER_LANE_MAX)
    assert scene.waiting() == 40, "until they have a worker they wait"

    pool.answering.set()
    await until(lambda: len(scene.order) == 30)

    assert scene.order == [f"r{number}" for number in range(30)]
    assert scene.waiting() == 10
    assert len(pool.selects) <= 30 + ATTEMPTS_PER_LANE_MAX


async def test_full_pools_are_asked_how_they_are_while_somebody_waits_and_no_longer() -> None:
    scene = Scene(status_interval_ms=10)
    for name in "abc":
        scene.fleet.pool(name).status = FULL
    await scene.submit("r")
    async with asyncio.timeout(120):
        await scene.fleet.pool("b").asked_thrice.wait()

    scene.fleet.pool("a").say(FREE)
    await scene.finish()
    await scene.tasks["r"]
    asked = scene.fleet.pool("b").statuses_asked
    await asyncio.sleep(0.02)

    assert scene.fleet.pool("b").statuses_asked == asked <= 4


async def test_beyond_the_limit_the_last_of_the_lowest_priority_gives_way() -> None:
    scene = Scene(max_queue_requests=2)
    await scene.submit("first")
    low = await scene.submit("low", priority=-1)
    await scene.submit("x")
    newcomer = scene.fleet.service.submit(request("y", hints=TO_A))
    task = asyncio.ensure_future(newcomer)
    with pytest.raises(Refused, match="2 requests with 64 prompt tokens, allowed are 2 with") as gone:
        await low
    assert (gone.value.status, gone.value.code, gone.value.retry_after_s) == (429, SelectRefusal.BUSY, 3.0)
    last = await scene.submit("z")
    with pytest.raises(Refused, match="waiting already: 2 requests with 64 prompt token"):
        await last
    assert scene.count("queue_evictions_total") == 1
    assert scene.count("refused_requests_total", code="busy") == 2

    await scene.finish(3)

    assert (await read(await task))[0] == right_answer()
    assert scene.order == ["first", "x", "y"]
    records = {record.request_id: record for record in scene.fleet.service.decisions.newest(9)}
    assert records["low"].outcome == "refused: busy"
    scene.fleet.assert_nothing_is_left()


async def test_who_waited_too_long_is_told_when_to_come_back_by_the_measured_rate() -> None:
    scene = Scene(queue_timeout_ms=30)
    for number in range(5):
        await scene.submit(f"r{number}")
        await scene.finish()
        await read(await scene.tasks[f"r{number}"])
        scene.fleet.clock.now_ms += 4000
    await scene.submit("first")
    task = await scene.submit("late")
    scene.fleet.clock.now_ms += 30

    with pytest.raises(Refused, match="no pool had room within 30 ms; choosing a pool for model 'm'") as refused:
        await task

    # Five requests in 20 s, and nobody before it: it left the queue before it was told.
    assert refused.value.retry_after_s in (4.0, 8.0)
    assert scene.fleet.service.counts() == (1, 0)
    await scene.finish()
    await read(await scene.tasks["first"])
    scene.fleet.assert_nothing_is_left()


async def test_when_no_pool_can_serve_any_more_nobody_waits_on() -> None:
    scene = Scene()
    await scene.submit("first")
    waits = [await scene.submit(f"r{number}") for number in range(3)]
    for name in "cb":
        scene.fleet.pool(name).status = None
    scene.fleet.pool("a").say(None)

    for task in waits:
        with pytest.raises(Refused, match="a is down") as refused:
            await task
        assert (refused.value.status, refused.value.code) == (503, "no_worker")
    late = await scene.submit("late")
    with pytest.raises(Refused, match="a is down"):
        await late


async def test_who_waits_when_the_document_changes_goes_where_the_new_one_says() -> None:
    scene = Scene(changed(aggregated(), ("aggregated", "fallback"), {"rule": "none"}))
    scene.fleet.pool("a").room = 1
    await scene.submit("first")
    waiting = await scene.submit("r")
    assert scene.waiting() == 1
    renamed = changed(aggregated(), ("aggregated", "pools", 0, "name"), "renamed")
    text = json.dumps(renamed).replace('"a"', '"renamed"')
    scene.fleet.pools.add(FakePool("renamed", scene.fleet.clock, scene.fleet.pools, (Role.AGGREGATED,), 2))

    await scene.fleet.service.configuration.propose(text.encode(), "a test")
    scene.fleet.pools.forget("a")
    scene.fleet.pools.say_news()
    await scene.finish(2)

    assert (await read(await waiting))[0] == right_answer()
    record = scene.fleet.service.decisions.get("r")
    assert record is not None
    assert (record.revision, [placement.pool for placement in record.placements]) == (2, ["renamed"])
    await read(await scene.tasks["first"])
    scene.fleet.assert_nothing_is_left()


@pytest.mark.parametrize("during", ["the wait", "an attempt"])
async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(during: str) -> None:
    scene = Scene()
    await scene.submit("first")
    gone = await scene.submit("gone")
    await scene.submit("next")
    pool = scene.fleet.pool("a")
    if during == "an attempt":
        pool.answering = asyncio.Event()
        asked = len(pool.selects)
        await scene.finish()
        await until(lambda: len(pool.selects) > asked)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert scene.waiting() == 1
    if pool.answering is not None:
        pool.answering.set()
        await scene.finish(1)
    else:
        await scene.finish(2)

    await read(await scene.tasks["next"])
    assert scene.order == ["first", "next"]
    scene.fleet.assert_nothing_is_left()


async def test_an_attempt_that_is_under_way_for_one_who_gave_way_is_taken_back() -> None:
    scene = Scene(max_queue_requests=1)
    await scene.submit("first")
    low = await scene.submit("low", priority=-1)
    pool = scene.fleet.pool("a")
    pool.answering = asyncio.Event()
    asked = len(pool.selects)
    await scene.finish()
    await until(lambda: len(pool.selects) > asked)
    high = asyncio.ensure_future(scene.fleet.service.submit(request("high", hints=TO_A, priority=1)))
    with pytest.raises(Refused):
        await low
    pool.answering.set()
    await scene.finish()

    await read(await high)
    assert scene.order == ["first", "high"]
    scene.fleet.assert_nothing_is_left()


async def test_who_lost_its_worker_goes_before_those_that_have_none_yet() -> None:
    scene = Scene(room=2)

    def die(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
        scene.order.append(message.request_id)
        fleet.scripts.clear()
        fleet.pool("a").room = 0
        fleet.say(link, message, output_of(message)[:2], 0)
        fleet.break_link(link.endpoint.removeprefix("tcp://"))

    scene.fleet.scripts["a"] = die
    moved = await scene.submit("moved")
    await until(lambda: scene.waiting() == 1)
    await scene.submit("high", priority=100)
    assert scene.waiting() == 2

    scene.fleet.pool("a").room = 1
    scene.fleet.pool("a").say(FREE)
    await scene.finish(2)

    assert (await read(await moved))[0] == right_answer()
    assert scene.order == ["moved", "moved~1", "high"]
    await read(await scene.tasks["high"])
    scene.fleet.assert_nothing_is_left()


async def test_in_a_disaggregated_fleet_requests_wait_for_a_decode_pool() -> None:
    scene = Scene(disagg())
    full, free = status(workers_of(Role.DECODE, requests=16)), status(workers_of(Role.DECODE))
    for name in ("d-fast", "d-cheap"):
        scene.fleet.pool(name).status = full
    await scene.submit("r", hints={})
    assert scene.waiting() == 1
    assert not scene.fleet.pool("p-fast").selects, "a prefill for which nobody can decode is work for nothing"

    scene.fleet.pool("d-cheap").say(free)
    await until(lambda: bool(scene.running))

    assert scene.order == ["r"]


async def test_at_the_end_those_that_wait_are_sent_away() -> None:
    scene = Scene()
    await scene.submit("first")
    waits = await scene.submit("waits")

    scene.fleet.service.stop()

    with pytest.raises(Refused, match="shutting down") as refused:
        await waits
    assert refused.value.code == "not_ready"
    scene.fleet.assert_nothing_is_left()


async def test_an_attempt_that_breaks_is_the_error_of_its_own_request_only() -> None:
    scene = Scene()
    await scene.submit("first")
    broken = await scene.submit("broken")
    await scene.submit("next")
    pool = scene.fleet.pool("a")
    select = pool.select

    async def breaks(*arguments: Any) -> Any:
        pool.select = select  # type: ignore[method-assign]
        raise RuntimeError("a bug")

    pool.select = breaks  # type: ignore[assignment,method-assign]
    await scene.finish(2)

    with pytest.raises(RuntimeError, match="a bug"):
        await broken
    assert scene.order == ["first", "next"]


async def test_whoever_waits_is_served_though_the_serving_failed_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.submit("first")
    await scene.submit("second")
    room = scene.fleet.service.queue
    find = room._next
    failures = [KeyError("a bug of ours")]

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return find(*arguments)

    room._next = failing  # type: ignore[assignment]
    await scene.finish()
    second = await scene.tasks["second"]  # after a pause in real time
    await scene.finish()
    assert (await read(second))[0] == right_answer()
    scene.fleet.assert_nothing_is_left()

    assert "task 'waiting for" in caplog.text
    assert "a bug of ours" in caplog.text
