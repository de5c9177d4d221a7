"""What is done in bulk has the turns of an event loop one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from poolgrid.server.process.tasks import SLICE_MS, BulkWork, owned
from tests.clock import HandClock


class Scene:
    """Slices that note in which turn of the loop they were done."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.bulk = BulkWork(self.clock)
        self.done: list[tuple[str, int]] = []
        self.turns = 0

    def slice_of(self, name: str, takes_ms: float, again: int = 0) -> Callable[[], None]:
        def work() -> None:
            self.done.append((name, self.turns))
            self.clock.now_ms += takes_ms
            if again:
                self.bulk.soon(self.slice_of(name, takes_ms, again - 1))

        return work

    async def task(self, name: str, slices: int) -> None:
        for _ in range(slices):
            await self.bulk.turn()
            self.done.append((name, self.turns))

    def count_turns(self) -> None:
        self.turns += 1
        asyncio.get_running_loop().call_soon(self.count_turns)

    async def until_idle(self) -> None:
        while self.bulk.busy:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)


def play(scenario: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def played() -> Scene:
        scene = Scene()
        scene.count_turns()
        await scenario(scene)
        await asyncio.wait_for(scene.until_idle(), 120)
        return scene

    return asyncio.run(played())


def test_long_slices_have_a_turn_each_and_who_asks_again_comes_last() -> None:
    async def scenario(scene: Scene) -> None:
        scene.bulk.soon(scene.slice_of("intake", SLICE_MS, again=2))
        scene.bulk.soon(scene.slice_of("memory", 2 * SLICE_MS))

    done = play(scenario).done
    assert [name for name, _ in done] == ["intake", "memory", "intake", "intake"]
    assert len({turn for _, turn in done}) == 4


def test_short_slices_share_a_turn_but_none_has_two_of_it() -> None:
    async def scenario(scene: Scene) -> None:
        for name in ("a", "b", "c"):
            scene.bulk.soon(scene.slice_of(name, SLICE_MS / 10, again=1))

    done = play(scenario).done
    assert [name for name, _ in done] == ["a", "b", "c", "a", "b", "c"]
    first, second = done[:3], done[3:]
    assert len({turn for _, turn in first}) == len({turn for _, turn in second}) == 1
    assert first[0][1] != second[0][1]


def test_a_task_has_its_turns_to_itself() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def scenario(scene: Scene) -> None:
        tasks.append(owned(scene.task("snapshot", 3), "a snapshot"))
        await asyncio.sleep(0)
        scene.bulk.soon(scene.slice_of("intake", SLICE_MS / 10, again=3))
        scene.bulk.soon(scene.slice_of("memory", SLICE_MS / 10, again=3))

    scene = play(scenario)
    assert tasks[0].done()
    of_the_task = {turn for name, turn in scene.done if name == "snapshot"}
    assert len(of_the_task) == 3
    assert not of_the_task & {turn for name, turn in scene.done if name != "snapshot"}
    assert [name for name, _ in scene.done].count("intake") == 4


def test_a_task_that_was_cancelled_while_it_waited_keeps_nobody() -> None:
    async def scenario(scene: Scene) -> None:
        scene.bulk.soon(scene.slice_of("intake", SLICE_MS))
        task = owned(scene.task("snapshot", 1), "a snapshot")
        await asyncio.sleep(0)
        scene.bulk.soon(scene.slice_of("memory", SLICE_MS))
        task.cancel()

    assert [name for name, _ in play(scenario).done] == ["intake", "memory"]


def test_a_slice_that_fails_is_told_of_and_ends_nothing_else() -> None:
    told: list[object] = []

    async def scenario(scene: Scene) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, fault: told.append(fault["exception"]))
        scene.bulk.soon(lambda: pytest.fail("planted"))
        scene.bulk.soon(scene.slice_of("intake", 0.0))

    assert [name for name, _ in play(scenario).done] == ["intake"]
    assert [str(each) for each in told] == ["planted"]
