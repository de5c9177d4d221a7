"""Exceptions in callbacks of the event loop: none is lost, and what a process cannot do without ends it in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.server.process import lifecycle
from poolgrid.server.process.lifecycle import OF_ONE_CONNECTION, LoopMetrics, TaskFailed


def raising(module: str, error: Exception) -> Callable[..., None]:
    """Return a callback of a module that raises."""
    space: dict[str, Any] = {"__name__": module, "error": error}
    exec("def callback(*_):\n    raise error\n", space)
    made: Callable[..., None] = space["callback"]
    return made


def ways(callback: Callable[..., None]) -> list[Callable[[asyncio.AbstractEventLoop], object]]:
    """Return all ways in which a loop is given a callback."""

    def by_future(loop: asyncio.AbstractEventLoop) -> None:
        future = loop.create_future()
        future.add_done_callback(callback)
        future.set_result(None)

    def by_reader(loop: asyncio.AbstractEventLoop) -> None:
        import socket

        ours, theirs = socket.socketpair()

        def once() -> None:
            loop.remove_reader(ours.fileno())
            ours.close()
            theirs.close()
            callback()

        loop.add_reader(ours.fileno(), once)
        theirs.send(b"x")

    return [
        lambda loop: loop.call_soon(callback),
        lambda loop: loop.call_later(0.001, callback),
        lambda loop: loop.call_at(loop.time(), callback),
        lambda loop: loop.call_soon_threadsafe(callback),
        by_future,
        by_reader,
    ]


@pytest.mark.parametrize("way", range(6))
def test_an_exception_in_any_callback_of_ours_ends_the_process(way: int, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[float] = []

    async def main(stop: asyncio.Event) -> None:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        callback = raising("poolgrid.server.router.feeds", RuntimeError("injected"))
        ways(callback)[way](asyncio.get_running_loop())
        async with asyncio.timeout(120):
            await stop.wait()
        counted.append(registry.get_sample_value("poolgrid_event_loop_faults_total") or 0.0)

    with pytest.raises(TaskFailed, match=r"poolgrid\.server\.router\.feeds.*injected"):
        lifecycle.run(main)

    assert counted == [1.0]
    assert "injected" in caplog.text


@pytest.mark.parametrize(
    ("module", "error"),
    [
        *((module, ValueError("injected")) for module in sorted(OF_ONE_CONNECTION)),
        ("poolgrid.server.http.http_server", ConnectionAbortedError("injected")),
        ("httpx._client", ValueError("injected")),
    ],
)
def test_what_costs_one_connection_is_logged_and_counted_only(
    module: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[float] = []

    async def main(stop: asyncio.Event) -> None:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        asyncio.get_running_loop().call_soon(raising(module, error))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not stop.is_set()
        counted.append(registry.get_sample_value("poolgrid_event_loop_faults_total") or 0.0)

    with caplog.at_level(logging.ERROR):
        lifecycle.run(main)

    assert counted == [1.0]
    assert "injected" in caplog.text


def test_a_task_that_nobody_awaits_does_not_end_the_process() -> None:
    async def main(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "Task exception was never retrieved", "exception": ValueError()})
        await asyncio.sleep(0)
        assert not stop.is_set()

    lifecycle.run(main)


def test_the_modules_of_one_connection_exist() -> None:
    for module in OF_ONE_CONNECTION:
        __import__(module)


def test_tasks_are_counted_until_they_end() -> None:
    async def go() -> list[float | None]:
        registry = CollectorRegistry()
        LoopMetrics(registry)
        counts = []

        async def count() -> None:
            counts.append(await asyncio.to_thread(registry.get_sample_value, "poolgrid_event_loop_tasks"))

        await count()
        hold = asyncio.Event()
        tasks = [asyncio.ensure_future(hold.wait()) for _ in range(3)]
        await count()
        hold.set()
        await asyncio.gather(*tasks)
        await count()
        return counts

    assert asyncio.run(go()) == [1, 4, 1]
