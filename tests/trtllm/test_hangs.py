"""An engine that hangs, breaks or errs as TensorRT-LLM does: its requests move, and the worker's loop goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from poolgrid.kernel.wire.events import RequestFinished
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import RefusalKind
from poolgrid.plugins.trtllm import requests as trtllm_requests
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError
from tests.trtllm.engines import RunningEngine, expected, make_request, running_engine
from tests.trtllm.test_feed import behave
from tests.workers.builders import fold

QUICK = TrtllmLimits(answer_timeout_ms=100.0, health_interval_ms=50.0, health_timeout_ms=5_000.0)


async def knows_its_blocks(told: RunningEngine) -> None:
    """Wait until what the worker restates is what the engine holds."""
    await told.turned(lambda: fold(told.engine.restate(0)) == fold(told.llm.resident_blocks(0)))


async def test_a_stopped_engine_process_loses_its_requests_to_others_and_comes_back_with_its_blocks() -> None:
    async with running_engine(limits=QUICK) as told:
        changes: list[tuple[bool, bool]] = []
        told.engine.observe_health(lambda: changes.append((bool(told.engine.unhealthy_reason), told.engine.is_silent)))
        await told.finish(make_request("before", range(20), 9))
        await asyncio.to_thread(told.executor.stop_process)
        told.engine.submit(make_request("r", range(30)))
        await told.until(lambda: told.finished("r"))
        last = told.last("r")
        assert last is not None
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        assert "has not come back from a call for more than 100 ms (answer_timeout_ms)" in (last.error or "")
        assert told.events_of("r")[-1] == RequestFinished("r", "error")
        assert told.engine.is_silent
        assert told.engine.load(0).running_requests == 0
        told.executor.continue_process()
        await told.turned(lambda: not told.engine.unhealthy_reason)
        assert changes == [(True, True), (False, False)]
        await told.finish(make_request("after", range(20), 9))
        assert told.output("after") == expected(make_request("after", range(20), 9))
        await knows_its_blocks(told)


async def test_the_worker_cancels_while_its_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_requests, "CANCEL_TIMEOUT_MS", 20.0)

    limits = TrtllmLimits(answer_timeout_ms=60_000.0, health_interval_ms=20.0)
    async with running_engine(limits=limits) as told:
        await asyncio.to_thread(told.executor.stop_process)
        told.engine.submit(make_request("r"))
        told.engine.cancel("r")
        await told.until(lambda: told.finished("r"))
        assert told.deltas["r"][-1].finish_reason == "cancelled"
        told.executor.continue_process()
        await told.finish(make_request("r"))


async def test_a_dead_rank_freezes_a_thread_and_not_the_worker() -> None:
    """The engine shuts itself down inside the call that meets the error, and waits for ranks that never return."""

    async with running_engine(limits=QUICK) as told:
        executor = told.executor
        executor.lose_rank(RuntimeError("MPI worker 1 has died"), stuck=True)
        told.engine.submit(make_request("r"))
        told.engine.submit(make_request("s"))
        await told.until(lambda: told.finished("r") and told.finished("s"))
        assert {told.deltas[each][-1].refusal for each in "rs"} == {RefusalKind.BROKEN}
        assert told.engine.is_silent
        assert told.running is not None
        assert not told.running.done()
        executor.release_ranks()
        with pytest.raises(EngineBrokenError):
            await told.running


async def test_everything_of_the_engine_happens_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake refuses to be shut down by another one than made it, as MPI does."""
    behave(monkeypatch, one_thread=True)

    threads: set[threading.Thread] = set()
    async with running_engine() as told:
        original, check = told.llm.generate_async, told.llm._check_health

        def generate_async(*args: Any, **given: Any) -> Any:
            threads.add(threading.current_thread())
            return original(*args, **given)

        def check_health() -> bool:
            threads.add(threading.current_thread())
            return bool(check())

        told.llm.generate_async, told.llm._check_health = generate_async, check_health
        await told.finish(make_request("r"))
        executor = told.executor
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert not executor.alive


async def test_a_build_that_cannot_say_whether_it_lives_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, health_method=False)

    async with running_engine(limits=QUICK) as told:
        await told.finish(make_request("r"))
        assert told.output("r") == expected(make_request("r"))
        # It was asked for signs of life meanwhile.
        await told.turned(lambda: (told.sample("health_checks_total", outcome="passed") or 0) > 1)
        assert told.running is not None
        assert not told.running.done()


@pytest.mark.parametrize("count", [1, 5])
async def test_a_step_without_memory_moves_every_request(count: int) -> None:
    async with running_engine() as told:
        told.executor.pause()
        for at in range(count):
            told.engine.submit(make_request(f"r{at}", [at] * 9, 50))
        await told.turned(lambda: len(told.executor._inbox) >= count)
        told.executor.run_out_of_memory()
        told.executor.resume()
        await told.until(lambda: all(told.finished(f"r{at}") for at in range(count)))
        lasts = [told.deltas[f"r{at}"][-1] for at in range(count)]
        assert {(last.finish_reason, last.refusal) for last in lasts} == {("error", RefusalKind.BROKEN)}
        assert told.running is not None
        assert not told.running.done(), "and the engine goes on"
        await told.finish(make_request("after"))


async def test_a_stall_is_seen_though_every_client_gives_up_and_a_cancellation_heals_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trtllm_requests, "CANCEL_TIMEOUT_MS", 20.0)

    # Far longer than a client waits, also on a busy machine: only together they have waited so long.
    limits = TrtllmLimits(progress_timeout_ms=2_000.0, health_timeout_ms=100.0, health_interval_ms=60_000.0)
    async with running_engine(Role.AGGREGATED, limits) as told:
        told.executor.leak(10_000)
        told.executor.flush()
        at = 0
        async with asyncio.timeout(120):
            while not told.engine.unhealthy_reason:
                at += 1
                told.engine.submit(make_request(f"r{at}", [at] * 9))
                await asyncio.sleep(0.05)
                told.engine.cancel(f"r{at}")
                await told.until(lambda: told.finished(f"r{at}"))  # noqa: B023 - awaited here
        assert at > 1
        assert all(told.deltas[f"r{each}"][-1].finish_reason == "cancelled" for each in range(1, at))
        told.engine.submit(make_request("one more", [7] * 9))
        told.engine.cancel("one more")
        await told.until(lambda: told.finished("one more"))
        assert told.engine.unhealthy_reason, "that it can cancel says nothing of its work"
