"""The TensorRT-LLM adapter on the contract fake: each test fails when the rule that it names is removed."""

from __future__ import annotations

import asyncio

from tests.trtllm.engines import expected, make_request, running_engine
from wire.events import PrefillCompleted, RequestFinished, RequestProgressed, RequestStarted


def test_a_request_gets_the_engines_tokens_once_and_in_order_and_its_events_tell_its_life() -> None:
    async def scenario() -> None:
        async with running_engine() as told:
            request = make_request("r", range(10), 12)
            last = await told.finish(request)
            assert last.finish_reason == "length"
            assert told.output("r") == expected(request)
            assert told.deltas["r"][0].cached_tokens == 0
            events = told.events_of("r")
            assert isinstance(events[0], RequestStarted)
            assert events[1] == PrefillCompleted("r")
            assert events[-1] == RequestFinished("r", "length")
            blocks = [event.active_blocks for event in events if isinstance(event, RequestProgressed)]
            assert [events[0].active_blocks, *blocks][-1] == 6

    asyncio.run(scenario())
