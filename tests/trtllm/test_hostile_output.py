"""What TensorRT-LLM makes of one request, and a fault of ours over it, costs no other request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from poolgrid.wire.requests import FinishReason, RefusalKind
from poolgrid.workers.engines.lifecycle.health import EngineBrokenError
from poolgrid.workers.engines.trtllm.core.outputs import OutputCursor
from poolgrid.workers.engines.trtllm.requests import EngineRequests
from tests.trtllm.engines import RunningEngine, expected, make_request, running_engine


async def three(told: RunningEngine) -> None:
    """Run three requests, of which the second is the odd one."""
    for number in (1, 2, 3):
        told.engine.submit(make_request(f"r{number}", range(number, number + 10), 6))
    await told.until(lambda: all(told.finished(f"r{number}") for number in (1, 2, 3)))
    for number in (1, 3):
        assert told.output(f"r{number}") == expected(make_request(f"r{number}", range(number, number + 10), 6))


async def test_an_output_is_cut_at_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    take = OutputCursor.take
    longer: list[OutputCursor] = []

    def over(self: OutputCursor, output: Any) -> Any:
        if not longer:
            longer.append(self)
        if longer[0] is self and output.token_ids:
            output = SimpleNamespace(token_ids=[*output.token_ids, *range(50)], logprobs=None)
        return take(self, output)

    monkeypatch.setattr(OutputCursor, "take", over)

    async with running_engine() as told:
        longer.clear()
        last = await told.finish(make_request("r", range(10), 6))
        assert last.finish_reason is FinishReason.LENGTH
        assert len(told.output("r")) == 4 * 6
        assert told.sample("overlong_answers_total") == 1.0
        await three(told)


@pytest.mark.parametrize("place", ["_collect", "_book"])
async def test_a_fault_over_one_output_is_its_own(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = getattr(EngineRequests, place)

    def faulty(self: EngineRequests, active: Any, *rest: Any) -> Any:
        if active.request_id == "r2":
            raise RuntimeError("injected")
        return method(self, active, *rest)

    monkeypatch.setattr(EngineRequests, place, faulty)

    async with running_engine() as told:
        await three(told)
        last = told.last("r2")
        assert last is not None
        assert (last.finish_reason, last.refusal) == (FinishReason.ERROR, RefusalKind.BROKEN)
        assert told.sample("request_faults_total") == 1.0


async def test_a_report_that_is_lost_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine() as told:

        def broken(*_: Any) -> Any:
            raise RuntimeError("injected")

        monkeypatch.setattr(told.engine._report, "_load", broken)
        told.engine.submit(make_request("r", range(10), 6))
        assert told.running is not None
        with pytest.raises(EngineBrokenError, match="injected"):
            async with asyncio.timeout(120):
                await told.running
