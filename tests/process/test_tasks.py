"""Background tasks: what raises is seen, and either starts again or ends the process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from poolgrid.server.process import lifecycle
from poolgrid.server.process.tasks import (
    Restart,
    cancel_all,
    detached,
    keep_cancellation,
    owned,
    supervised,
    unless,
    wait_from_thread,
)

QUICK = Restart(limit=3, pause_s=0.0, pause_max_s=0.0)


async def test_a_task_that_raises_is_logged_with_its_place_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def work() -> None:
        starts.append(1)
        if len(starts) < 3:
            raise ValueError("what the policy said")

    await supervised(work, "housekeeping", QUICK)

    assert len(starts) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "task 'housekeeping' failed" in caplog.text
    assert "in work" in caplog.text


@pytest.mark.parametrize(("restart", "starts"), [(None, 1), (QUICK, 4)])
def test_one_that_goes_on_failing_ends_its_process_with_an_error(restart: Restart | None, starts: int) -> None:
    begun = []
    ended_in_order = []

    async def work() -> None:
        begun.append(1)
        raise ValueError("no")

    async def main(stop: asyncio.Event) -> None:
        task = supervised(work, "followers", restart)
        await stop.wait()
        ended_in_order.append(task.done())

    with pytest.raises(lifecycle.TaskFailed, match="background task 'followers' failed: ValueError: no"):
        lifecycle.run(main)

    assert (len(begun), ended_in_order) == (starts, [True])


async def test_one_without_a_bound_is_tried_for_ever() -> None:
    begun = asyncio.Event()
    count = 0

    async def work() -> None:
        nonlocal count
        count += 1
        if count == 50:
            begun.set()
        raise OSError("not there")

    task = supervised(work, "pool", Restart(limit=None, pause_s=0.0, pause_max_s=0.0))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_owned_task_gives_what_it_raises_to_its_owner() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await owned(work(), "asking")


async def test_what_an_owner_does_not_take_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.wait({owned(_fails(), "asking")})
    gc.collect()

    assert "in _fails" in caplog.text


async def test_what_nobody_awaits_is_logged_with_its_place_at_once_and_only_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = detached(_fails(), "comment")
    await asyncio.wait({task})
    await asyncio.sleep(0)

    assert [record.getMessage() for record in caplog.records] == ["task 'comment' failed: this is a bug"]
    assert "in _fails" in caplog.text
    del task
    gc.collect()

    assert len(caplog.records) == 1


async def test_one_that_nobody_cancelled_has_failed_when_it_ends_so(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def work() -> None:
        starts.append(1)
        if len(starts) == 1:
            answer = asyncio.get_running_loop().create_future()
            answer.cancel()  # as an executor does that is shut down
            await answer

    await supervised(work, "follower", QUICK)

    assert len(starts) == 2
    assert "task 'follower' failed: it starts again" in caplog.text


async def test_one_that_is_cancelled_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    forever = asyncio.Event()
    tasks = [
        supervised(_forever(forever), "housekeeping", QUICK),
        detached(_forever(forever)(), "comment"),
        owned(_forever(forever)(), "asking"),
    ]
    await asyncio.sleep(0)
    await cancel_all(tasks)

    assert all(task.cancelled() for task in tasks)

    assert not caplog.records


async def test_what_fails_while_it_is_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("closing it failed")

    task = owned(work(), "fetch")
    await asyncio.sleep(0)
    await cancel_all([task])

    assert "task 'fetch' failed" in caplog.text
    assert "closing it failed" in caplog.text


async def test_work_is_done_unless_it_is_stopped_first() -> None:
    cleaned = []

    async def slow() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)
        return 1

    async def quick() -> int:
        return 2

    stop = asyncio.Event()
    before = asyncio.all_tasks()
    assert await unless(stop, quick(), "start") == 2
    with pytest.raises(ValueError, match="no"):
        await unless(stop, _fails(), "start")
    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless(stop, slow(), "start") is None
    assert cleaned == [1]
    assert asyncio.all_tasks() == before


async def test_a_thread_gets_what_it_waits_for_and_what_comes_too_late_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    late = asyncio.Event()

    async def answer() -> int:
        return threading.get_ident()

    async def fails_late() -> None:
        await late.wait()
        raise ValueError("too late")

    assert await asyncio.to_thread(wait_from_thread, loop, answer(), "question", 10.0) == threading.get_ident()
    with pytest.raises(ValueError, match="no"):
        await asyncio.to_thread(wait_from_thread, loop, _fails(), "question", 10.0)
    assert not caplog.records
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(wait_from_thread, loop, fails_late(), "question", 0.01)
    late.set()
    await asyncio.sleep(0)  # it ends
    await asyncio.sleep(0)  # who waited in vain would hear of it

    assert "task 'question' failed, after its last waiter had left" in caplog.text
    assert "in fails_late" in caplog.text


async def _fails() -> None:
    raise ValueError("no")


def _forever(event: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    async def wait() -> None:
        await event.wait()

    return wait


@pytest.mark.parametrize("lost", ["answered", "refused"])
async def test_a_cancellation_that_a_library_loses_ends_the_task(lost: str) -> None:
    begun = asyncio.Event()

    async def library() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if lost == "refused":
                raise OSError("too many requests") from None

    async def work() -> None:
        while True:
            with keep_cancellation():
                await library()

    task = owned(work(), "asking")
    await begun.wait()
    await cancel_all([task])

    assert task.cancelled()


async def test_what_is_asked_on_the_way_out_is_answered_though_the_task_was_cancelled() -> None:
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with keep_cancellation():
                await asyncio.sleep(0)
            told.append("left")

    task = owned(work(), "leaving")
    await asyncio.sleep(0)
    await cancel_all([task])

    assert told == ["left"]


async def test_an_error_without_a_cancellation_is_raised_as_it_is() -> None:
    with pytest.raises(OSError, match="no route"), keep_cancellation():
        raise OSError("no route")
