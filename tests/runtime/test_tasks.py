"""Background tasks: what raises is seen, and either starts again or ends the process."""

from __future__ import annotations

import asyncio

import pytest

from runtime import lifecycle
from runtime.tasks import Restart, owned, supervised

QUICK = Restart(limit=3, pause_s=0.0, pause_max_s=0.0)


def test_a_task_that_raises_is_logged_with_its_place_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def work() -> None:
        starts.append(1)
        if len(starts) < 3:
            raise ValueError("what the policy said")

    async def scenario() -> None:
        await supervised(work, "housekeeping", QUICK)

    asyncio.run(scenario())

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


def test_one_without_a_bound_is_tried_for_ever() -> None:
    async def scenario() -> None:
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

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_an_owned_task_gives_what_it_raises_to_its_owner() -> None:
    async def scenario() -> None:
        async def work() -> int:
            raise KeyError("x")

        with pytest.raises(KeyError):
            await owned(work(), "asking")

    asyncio.run(scenario())
