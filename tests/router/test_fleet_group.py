"""The fleet page of two processes behind one port: each over a real core and the group's real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from poolgrid.consolidator.core.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.fleet_page import group_source
from poolgrid.fleet_page.group_source import GroupFleetSource
from poolgrid.fleet_page.playback.player import Player
from poolgrid.fleet_page.ports import Picture
from poolgrid.fleet_page.served_seconds import ServedSeconds
from poolgrid.frontend.metrics import SERVED_COLUMNS
from poolgrid.process.clock import SystemClock
from poolgrid.process.process_group import GroupMember, GroupPlace
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.inputs import Booked, WorkerWanted
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.fleet_source import COLUMNS, RouterFleetSource
from poolgrid.router.fleet_watch import FleetWatch
from poolgrid.serving.admission_queue import QueueView
from tests.ui.large_pool import BLOCK_SIZE, LargePool

INTERVAL_MS = 1.0
WAIT_S = 20.0


class OneOfTwo:
    """A process of the group."""

    def __init__(self, directory: Path, index: int) -> None:
        self.pool = LargePool(2, 1.0)
        self.waiting = 0
        self.pool.queue.view = lambda: QueueView(self.waiting, 10, 0, 1000, float(index), {"busy": 1})  # type: ignore[method-assign]
        place = GroupPlace(directory, index, 2)
        self.member = GroupMember(place)
        self.watch = FleetWatch(self.pool.state, has_siblings=True)
        self.totals = [0] * len(SERVED_COLUMNS)
        self.served = ServedSeconds(lambda: list(self.totals), SystemClock())
        player = Player(None, None, BLOCKS_PER_WORKER_MAX)
        source = RouterFleetSource(self.pool.settings, cast(Any, self.pool), self.watch, player, self.served, place)
        self.source = GroupFleetSource(source, self.member, INTERVAL_MS)

    def send(self, name: str, path: list[int], queued_ms: float = 0.0) -> None:
        """Have a client of this process ask for something."""
        request = RoutingRequest(name, "tiny", len(path) * BLOCK_SIZE, BLOCK_SIZE, len(path))
        found = self.pool.state.apply(WorkerWanted(request, path, 0.0, 1000 + len(path)))
        assert isinstance(found, Decision)
        found.queued_ms = queued_ms
        self.pool.state.apply(Booked(found, path, name, 0.0))
        self.pool.decisions.add(found)

    @property
    def is_watched(self) -> bool:
        return self.pool.state.log is self.watch

    async def look_until(self, holds: Callable[[Picture], bool]) -> Picture:
        async with asyncio.timeout(WAIT_S):
            while not holds(picture := await self.source.look()):  # noqa: ASYNC110 - a source is asked, it does not tell
                await asyncio.sleep(INTERVAL_MS / 1000)
            return picture


@asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[OneOfTwo, OneOfTwo]]:
    """Two processes, at the first of which somebody looks."""
    one, other = OneOfTwo(directory, 0), OneOfTwo(directory, 1)
    for each in (one, other):
        await each.member.start({}, each.source.answers())
    one.source.begin()
    try:
        yield one, other
    finally:
        one.source.end()
        for each in (one, other):
            await each.member.stop()


def rows(picture: Picture) -> dict[str, dict[str, Any]]:
    columns = COLUMNS["requests"]
    return {key: dict(zip(columns, row, strict=True)) for key, row in picture.tables["requests"].items()}


def run(scenario: Callable[[OneOfTwo, OneOfTwo], Awaitable[None]], directory: Path) -> None:
    async def go() -> None:
        async with two(directory) as (one, other):
            await scenario(one, other)

    asyncio.run(go())


def test_the_requests_and_queues_of_all_processes_are_shown_oldest_first(tmp_path: Path) -> None:
    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        other.waiting, one.waiting = 3, 4
        other.send("theirs", [1, 2, 3])
        one.send("ours", [7, 8])

        picture = await one.look_until(lambda seen: "theirs" in seen.tables["requests"])

        assert list(picture.tables["requests"]) == ["ours", "theirs"]
        assert picture.values["totals"]["decisions"] == 2
        queue = picture.values["queue"]
        assert (queue["requests"], queue["requests_max"], queue["refused"]) == (7, 20, {"busy": 2})
        assert queue["retry_after_s"] == 1.0

    run(scenario, tmp_path)


def test_latencies_and_errors_of_all_processes_add_up_and_are_known_since_the_last_one_began(tmp_path: Path) -> None:
    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        other.served.since_ms = one.served.since_ms + 5
        for each, tokens in ((one, 3), (other, 4)):
            each.totals[0] += tokens
            each.totals[1] += 1
            each.served.sample()

        picture = await one.look_until(lambda seen: sum(row[0] for row in seen.tables["served"].values()) == 7)

        assert sum(row[1] for row in picture.tables["served"].values()) == 2
        assert picture.values["totals"]["since_ms"] == other.served.since_ms

    run(scenario, tmp_path)


def test_a_conversation_whose_turns_come_to_different_processes_is_one(tmp_path: Path) -> None:
    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        await one.look_until(lambda _: other.is_watched)
        other.send("first", [1, 2, 3])
        await one.look_until(lambda seen: "first" in seen.tables["requests"])
        one.send("second", [1, 2, 3, 4, 5])
        other.send("third", [1, 2, 3, 4, 5, 6])
        other.send("stranger", [9])

        picture = await one.look_until(lambda seen: "stranger" in seen.tables["requests"])

        talks = {name: row["conversation"] for name, row in rows(picture).items()}
        assert talks == {"first": "c1", "second": "c1", "third": "c1", "stranger": "c2"}

    run(scenario, tmp_path)


def test_a_request_is_opened_whichever_process_keeps_it_and_says_how_long_it_was_queued(tmp_path: Path) -> None:
    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        other.send("theirs\n~1", [1, 2, 3], queued_ms=250.0)
        found = await one.source.request("theirs\n~1")
        assert found is not None
        assert found["explanation"]["attempts"][0]["request_id"] == "theirs\n~1"
        assert found["legs"][0]["queued_ms"] == 250.0
        assert await one.source.request("nobody's") is None

    run(scenario, tmp_path)


def test_a_process_that_does_not_answer_is_missed_aloud_and_shown_again_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        other.send("theirs", [1, 2, 3])
        await other.member.stop()

        picture = await one.look_until(lambda seen: bool(seen.values["totals"]["trouble"]))
        assert picture.values["totals"]["trouble"] == (
            "HTTP process 1 of 2 does not answer: its requests are not shown."
        )
        assert not picture.tables["requests"]

        await other.member.start({}, other.source.answers())
        picture = await one.look_until(lambda seen: "theirs" in seen.tables["requests"])
        assert not picture.values["totals"]["trouble"]

    run(scenario, tmp_path)


def test_who_is_asked_watches_as_long_as_somebody_looks_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_source, "LINGER_S", 0.05)

    async def scenario(one: OneOfTwo, other: OneOfTwo) -> None:
        await one.look_until(lambda _: other.is_watched)
        other.source.begin()  # somebody looks there, too
        one.source.end()
        assert not one.is_watched or other.is_watched
        other.source.end()
        async with asyncio.timeout(WAIT_S):
            while one.is_watched or other.is_watched:  # noqa: ASYNC110 - nobody is told of that
                await asyncio.sleep(INTERVAL_MS / 1000)
        one.source.begin()
        assert one.is_watched

    run(scenario, tmp_path)


def test_turns_that_siblings_did_not_ask_for_in_time_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolgrid.router.fleet_watch.TURNS_BYTES_MAX", 3 * 16)
    pool = LargePool(1, 1.0)
    watch = FleetWatch(pool.state, has_siblings=True)
    watch.begin()
    for number in range(5):
        request = RoutingRequest(f"r{number}", "tiny", 64, BLOCK_SIZE, 2)
        found = pool.state.apply(WorkerWanted(request, [number, number + 1], 0.0, 0))
        assert isinstance(found, Decision)
        pool.state.apply(Booked(found, [number, number + 1], f"r{number}", 0.0))

    def names(first: int) -> list[str]:
        turns, next_turn = watch.turns(first)
        assert next_turn == 5
        return [turn.request_id for turn in turns]

    assert (names(-1), names(0), names(3), names(5)) == ([], ["r2", "r3", "r4"], ["r3", "r4"], [])
    assert names(9) == [], "the number is of another life of the process"
    watch.end()
    assert names(3) == [], "nothing is kept for nobody"
