"""Prefill and decode legs of the TensorRT-LLM adapter on the contract fake: nothing is lost, twice, or left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished, RequestStarted
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.requests import Generate, RefusalKind
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.trtllm.core import disaggregated_params as codec
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from tests.trtllm.engines import RunningEngine, expected, make_request, running_engine


@asynccontextmanager
async def pair(
    limits: TrtllmLimits | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningEngine, RunningEngine]]:
    async with (
        running_engine(Role.PREFILL, limits, **settings) as prefill,
        running_engine(Role.DECODE, limits, **settings, max_batch_size=64) as decode,
    ):
        yield prefill, decode


def decode_leg(request: Generate, params: bytes | None) -> Generate:
    """What a router makes of a prefill leg's answer."""
    return msgspec.structs.replace(request, stage=Stage.DECODE, disaggregated_params=params)


async def the_leg(told: RunningEngine) -> Any:
    """The only leg that the engine's thread has, once the engine has it."""
    legs = told.engine._generations._legs
    await told.turned(lambda: any(leg.result is not None for leg in legs.values()))
    (leg,) = legs.values()
    return leg


async def prefilled(prefill: RunningEngine, request: Generate) -> bytes:
    last = await prefill.finish(msgspec.structs.replace(request, stage=Stage.PREFILL))
    assert last.finish_reason == "prefilled", last
    assert last.disaggregated_params is not None
    return last.disaggregated_params


async def test_a_context_request_does_not_change_what_the_request_asked_for() -> None:
    """TensorRT-LLM sets ``max_tokens`` to 1 on the object that it is given."""

    async with pair() as (prefill, decode):
        request = make_request("r", max_tokens=9)
        given: list[Any] = []
        original = prefill.llm.generate_async

        def noting(inputs: Any, **more: Any) -> Any:
            given.append(more["sampling_params"])
            return original(inputs, **more)

        prefill.llm.generate_async = noting
        params = await prefilled(prefill, request)
        await prefilled(prefill, msgspec.structs.replace(request, request_id="again"))
        assert [each.max_tokens for each in given] == [1, 1]
        assert given[0] is not given[1]
        await decode.finish(decode_leg(request, params))
        assert len(decode.output("r")) == 4 * 9


async def test_the_prompt_goes_to_the_decode_engine_as_token_ids_with_its_own_request_type() -> None:
    async with pair() as (prefill, decode):
        request = make_request("r", range(6))
        params = await prefilled(prefill, request)
        original, calls = decode.llm.generate_async, []

        def noting(inputs: Any, **given: Any) -> Any:
            calls.append((inputs, given["disaggregated_params"].request_type, given["streaming"]))
            return original(inputs, **given)

        decode.llm.generate_async = noting
        await decode.finish(decode_leg(request, params))
        assert calls == [([0, 1, 2, 3, 4, 5], "generation_only", True)]


async def test_a_first_token_that_stops_ends_the_request_without_a_decode_leg() -> None:
    async with running_engine(Role.PREFILL) as prefill:
        request = make_request("r", stage=Stage.PREFILL)
        first = int.from_bytes(expected(request)[:4], "little")
        last = await prefill.finish(msgspec.structs.replace(request, stop_token_ids=(first,)))
        assert (last.finish_reason, last.disaggregated_params) == ("stop", None)
        assert not prefill.engine._requests._kept_legs


async def test_a_prefilled_leg_is_kept_until_its_router_says_that_it_is_over() -> None:
    async with running_engine(Role.PREFILL) as prefill:
        request = make_request("r", range(10))
        late = prefill.executor.late_aborts
        await prefilled(prefill, request)
        events = prefill.events_of("r")
        assert isinstance(events[0], RequestStarted)
        assert events[1:] == [PrefillCompleted("r")]
        assert prefill.reports[-1].kept_transfers == 1
        assert prefill.engine.load(0).running_requests == 0
        prefill.engine.cancel("r")
        await prefill.until(lambda: prefill.released == ["r"])
        assert prefill.events_of("r")[-1] == RequestFinished("r", "prefilled")
        assert prefill.executor.late_aborts == late, "it is finished: the engine has forgotten it"
        assert len(prefill.deltas["r"]) == 1


async def test_a_leg_that_nobody_speaks_of_is_given_up_and_counted() -> None:
    limits = TrtllmLimits(kv_transfer_timeout_ms=20.0, progress_timeout_ms=40.0)
    async with running_engine(Role.PREFILL, limits) as prefill:
        await prefilled(prefill, make_request("r"))
        await prefill.until(lambda: prefill.released == ["r"])
        assert sum(report.expired for report in prefill.reports) == 1
        assert prefill.events_of("r")[-1] == RequestFinished("r", "expired")
        await prefilled(prefill, make_request("r"))


async def test_legs_that_run_or_are_kept_are_bounded() -> None:
    async with running_engine(Role.PREFILL, TrtllmLimits(kept_transfers_max=2)) as prefill:
        await prefilled(prefill, make_request("kept"))
        prefill.executor.pause()
        prefill.engine.submit(make_request("runs", stage=Stage.PREFILL))
        with pytest.raises(RefusedError, match="kept_transfers_max") as refused:
            prefill.engine.submit(make_request("third", stage=Stage.PREFILL))
        assert refused.value.kind is RefusalKind.BUSY
        prefill.engine.submit(make_request("one", max_tokens=1, stage=Stage.PREFILL))
        prefill.executor.resume()
        prefill.engine.cancel("kept")
        await prefill.until(lambda: prefill.finished("runs"))
        prefill.engine.submit(make_request("third", stage=Stage.PREFILL))


async def test_a_cancel_during_the_transfer_waits_for_the_kv_and_leaks_nothing() -> None:
    async with pair() as (prefill, decode):
        request = make_request("r", max_tokens=4000)
        params = await prefilled(prefill, request)
        decode.executor.transfers_open.clear()
        decode.engine.submit(decode_leg(request, params))
        decode.engine.cancel("r")
        leg = await the_leg(decode)
        decode.executor.flush()
        assert not leg.result.aborted(), "an abort now would leak the blocks"
        decode.executor.open_transfers()
        await decode.until(lambda: decode.finished("r"))
        assert leg.result.aborted(), "and not left to run to its end"
        assert decode.deltas["r"][-1].finish_reason == "cancelled"
        assert decode.events_of("r")[-1] == RequestFinished("r", "cancelled")
        assert decode.executor.look(lambda: decode.executor.engines[0].load().active_blocks) == 0


async def test_a_cancel_reaches_the_engine_at_once_where_no_kv_is_on_its_way() -> None:
    async with running_engine() as told:
        told.executor.pause()
        told.engine.submit(make_request("r", max_tokens=4000))
        told.engine.cancel("r")
        told.engine.cancel("r")
        told.engine.cancel("unknown")
        told.executor.resume()
        await told.until(lambda: told.finished("r"))
        assert told.deltas["r"][-1].finish_reason == "cancelled"
        assert told.events_of("r")[-1] == RequestFinished("r", "cancelled")


@pytest.mark.parametrize("broken", [b"", b"\xc1", msgspec.msgpack.encode({"request_type": "no such"})])
async def test_params_that_are_damaged_are_the_requests_error(broken: bytes) -> None:
    async with running_engine(Role.DECODE, max_batch_size=64) as decode:
        last = await decode.finish(decode_leg(make_request("r"), broken))
        assert (last.finish_reason, last.refusal) == ("error", None)
        assert "disaggregated" in (last.error or "")
        with pytest.raises(RefusedError, match="the place of its KV is unknown"):
            decode.engine.submit(decode_leg(make_request("r"), None))


async def test_a_transfer_that_fails_is_retryable() -> None:
    async with pair() as (prefill, decode):
        request = make_request("r")
        params = await prefilled(prefill, request)
        found = codec.decode(params, prefill.engine._calls.library.disaggregated_params).params
        damaged = codec.encode(replace(found, opaque_state=b"x" * 40))
        last = await decode.finish(decode_leg(request, damaged))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        assert "damaged" in (last.error or "")


async def test_a_short_prompt_is_computed_where_it_decodes() -> None:
    async with running_engine(Role.DECODE, max_batch_size=64) as decode:
        request = make_request("r")
        await decode.finish(request)
        assert decode.output("r") == expected(request)


async def test_context_results_without_params_are_no_prefilled_legs() -> None:
    async with running_engine(Role.PREFILL) as prefill:
        original = prefill.llm.generate_async

        def forgetting(inputs: Any, **given: Any) -> Any:
            result = original(inputs, **given)
            handle = result._handle

            def without(response: Any) -> None:
                handle(response)
                result.disaggregated_params = result.outputs[0].disaggregated_params = None

            result._handle = without
            return result

        prefill.llm.generate_async = forgetting
        last = await prefill.finish(make_request("r", stage=Stage.PREFILL))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        assert not prefill.engine._requests._kept_legs
