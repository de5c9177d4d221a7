"""Health of the TensorRT-LLM adapter: an idle engine proves itself, a busy one by its progress."""

from __future__ import annotations

from typing import Any

from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.requests import RefusalKind
from poolgrid.plugins.trtllm.calls import HEALTH_SALT
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from tests.trtllm.engines import make_request, running_engine
from tests.trtllm.test_engine_legs import decode_leg, prefilled

QUICK = TrtllmLimits(health_interval_ms=20.0, health_timeout_ms=20.0, progress_timeout_ms=40.0)
PROGRESS = TrtllmLimits(progress_timeout_ms=40.0)


async def test_an_idle_engine_generates_a_token_with_a_salt_of_its_own_on_every_rank() -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running_engine(limits=QUICK, **settings) as told:
        calls: list[Any] = []
        original = told.llm.generate_async

        def noting(inputs: Any, **given: Any) -> Any:
            calls.append((given["scheduling_params"].attention_dp_rank, given["cache_salt"], len(inputs)))
            return original(inputs, **given)

        told.llm.generate_async = noting
        await told.turned(lambda: (told.sample("health_checks_total", outcome="passed") or 0) > 1)
        assert {call[0] for call in calls} == {0, 1}
        assert {call[1:] for call in calls} == {(HEALTH_SALT, 1)}
        assert told.engine.unhealthy_reason == ""
        assert told.engine.restate(0) == [], "it leaves no block with a name"
        assert not told.deltas


async def test_an_idle_engine_that_generates_nothing_is_not_well_until_it_does_again() -> None:
    async with running_engine(limits=QUICK) as told:
        told.executor.pause()
        await told.turned(lambda: told.engine.unhealthy_reason)
        assert "one-token generation has not ended within 20 ms" in told.engine.unhealthy_reason
        assert told.sample("engine_healthy") == 0
        told.executor.resume()
        await told.turned(lambda: not told.engine.unhealthy_reason)
        assert told.sample("engine_healthy") == 1


async def test_a_wedged_transfer_makes_the_worker_unhealthy_and_its_end_heals_it() -> None:
    async with (
        running_engine(Role.PREFILL) as prefill,
        running_engine(Role.DECODE, PROGRESS, max_batch_size=64) as decode,
    ):
        request = make_request("r")
        params = await prefilled(prefill, request)
        decode.executor.transfers_open.clear()
        decode.engine.submit(decode_leg(request, params))
        await decode.until(lambda: decode.finished("r"))
        last = decode.deltas["r"][-1]
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN), "it goes on elsewhere"
        assert "1 requests are in the engine, 1 of them for KV from another worker" in (last.error or "")
        assert decode.llm._check_health(), "alive all the while"
        assert (decode.sample("engine_silence_seconds") or 0) > 0.04
        decode.executor.open_transfers()
        await decode.turned(lambda: not decode.engine.unhealthy_reason)
        await decode.finish(decode_leg(make_request("r"), params))


async def test_an_engine_that_steps_no_more_is_unhealthy_while_it_lives() -> None:
    async with running_engine(limits=PROGRESS) as told:
        told.executor.pause()
        told.engine.submit(make_request("r"))
        await told.until(lambda: told.finished("r"))
        assert told.deltas["r"][-1].refusal is RefusalKind.BROKEN
        assert told.engine.is_silent
        told.executor.resume()
        await told.turned(lambda: not told.engine.unhealthy_reason)
        await told.finish(make_request("r"))


async def test_health_says_how_reading_goes_and_which_ranks_lack_something() -> None:
    async with running_engine(tensor_parallel_size=2, enable_attention_dp=True) as told:
        await told.finish(make_request("r", range(10), 2))
        feed: Any = told.engine.describe()["feed"]
        assert feed["readers"] == {"events": "ok", "statistics": "ok"}
        assert [(rank["dp_rank"], rank["state"]) for rank in feed["ranks"]] == [(0, "exact"), (1, "exact")]
    async with running_engine(publish_events_and_metrics=False) as told:
        assert told.engine.describe() == {}
