"""The TensorRT-LLM adapter on the contract fake: each test fails when the rule that it names is removed."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.wire.events import (
    BlocksStored,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.requests import KvRetention, LogitsProcessorCall, RefusalKind, RetainedTokens, Routing
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.kernel.wire.trace_context import TraceContext
from poolgrid.kernel.worker_protocol.cache_facts import RETURN_PRIORITY
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.trtllm import generations
from poolgrid.plugins.trtllm.core.outputs import OutputCursor
from poolgrid.plugins.trtllm.library import LibraryMissingError, load_library
from poolgrid.plugins.trtllm.logits import RequestProcessors
from poolgrid.plugins.trtllm.requests import TrtllmLimits
from poolgrid.plugins.trtllm.settings import TrtllmWorkerSettings
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread, end_engine, start_engine
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError
from tests.fakes import install_tensorrt_llm
from tests.fakes.tensorrt_llm._fake import behaviour as behaviours
from tests.trtllm.engines import BLOCK, PATIENCE_S, RunningEngine, expected, make_request, running_engine


class Unreadable(OutputCursor):
    """Fails as no output of the engine should make it."""

    def take(self, output: Any) -> Any:
        raise ZeroDivisionError


def hold(told: RunningEngine) -> list[Any]:
    """Note what ``generate_async`` is called with."""
    calls: list[Any] = []
    original = told.llm.generate_async

    def noting(inputs: Any, **given: Any) -> Any:
        calls.append({"inputs": inputs, **given})
        return original(inputs, **given)

    told.llm.generate_async = noting
    return calls


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_a_request_gets_the_engines_tokens_once_and_in_order_and_its_events_tell_its_life() -> None:
    async with running_engine() as told:
        request = make_request("r", range(10), 12)
        last = await told.finish(request)
        assert last.finish_reason == "length"
        assert told.output("r") == expected(request)
        assert told.deltas["r"][0].cached_tokens == 0
        events = told.events_of("r")
        assert isinstance(events[0], RequestStarted)
        assert (events[0].isl, events[0].cached_tokens) == (10, 0)
        assert events[1] == PrefillCompleted("r")
        assert events[-1] == RequestFinished("r", "length")
        blocks = [event.active_blocks for event in events if isinstance(event, RequestProgressed)]
        assert [events[0].active_blocks, *blocks][-1] == 6


# -- what the engine is called with ------------------------------------------------------------------------------------


async def test_each_rank_of_attention_dp_is_addressed_and_has_its_own_events_and_load() -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 4, "enable_attention_dp": True}
    async with running_engine(**settings) as told:
        assert told.engine.dp_size == 4
        calls = hold(told)
        told.executor.pause()
        for rank in (2, 0, 3):
            prompt = [100 * rank + at for at in range(9)]
            told.engine.submit(make_request(f"r{rank}", prompt, 4, routing=Routing(dp_rank=rank)))
        assert [told.engine.load(rank).waiting_requests for rank in range(4)] == [1, 0, 1, 1]
        assert [told.engine.load(rank).prefill_tokens for rank in range(4)] == [9, 0, 9, 9]
        told.executor.resume()
        await told.until(lambda: all(told.finished(f"r{rank}") for rank in (0, 2, 3)))
        for call, rank in zip(calls, (2, 0, 3), strict=True):
            assert call["scheduling_params"].attention_dp_rank == rank
            assert call["scheduling_params"].attention_dp_relax is False
        for rank in (0, 2, 3):
            await told.until(partial(lambda rank: told.engine.load(rank).cached_blocks == 3, rank))
            stored = [event for event in told.events[rank] if isinstance(event, BlocksStored)]
            held = [each for event in stored for each in unpack_hashes(event.sequence_hashes)]
            request = told.events_of(f"r{rank}", rank)
            packed = pack_tokens([100 * rank + at for at in range(9)])
            assert held[:2] == sequence_hashes(block_hashes(packed, BLOCK))
            assert request[-1] == RequestFinished(f"r{rank}", "length")
        assert not told.events_of("r2", 0)
        assert told.engine.load(1).cached_blocks == 0


async def test_blocks_of_a_tenant_or_an_adapter_have_its_own_names(tmp_path: Path) -> None:
    adapter = tmp_path / "legal"
    adapter.mkdir()
    lora = f'{{"enable_lora": true, "lora_config": {{"lora_dir": ["{adapter}"]}}}}'
    async with running_engine(override_engine_args=lora) as told:
        assert told.engine.loras == ("legal",)
        prompt = list(range(9))
        tenants = (("", "s"), ("", ""), ("legal", ""), ("legal", "t"))
        for lora, salt in tenants:
            await told.finish(
                make_request(lora + salt, prompt, 1, routing=Routing(lora_name=lora, cache_salt=salt), temperature=0.0)
            )
        wanted = {
            each
            for names in tenants
            for each in sequence_hashes(block_hashes(pack_tokens(prompt), BLOCK, hash_seed(*names)))
        }
        await told.until(
            lambda: (
                {
                    each
                    for chain in told.engine.restate(0)
                    if isinstance(chain, BlocksStored)
                    for each in unpack_hashes(chain.sequence_hashes)
                }
                == wanted
            )
        )


async def test_an_adapter_whose_directory_is_missing_ends_the_start(tmp_path: Path) -> None:
    lora = f'{{"lora_config": {{"lora_dir": ["{tmp_path}/none"]}}}}'
    with pytest.raises(ValueError, match="none does not exist; no engine was started"):
        async with running_engine(override_engine_args=lora):
            pass


async def test_the_tokenizer_is_not_needed_and_text_is_not_made() -> None:
    async with running_engine(guided_decoding_backend=None) as told:
        calls = hold(told)
        await told.finish(make_request("r", stop_token_ids=(9,)))
        sampling = calls[0]["sampling_params"]
        assert told.llm.tokenizer is None
        assert (sampling.end_id, sampling.stop_token_ids, sampling.detokenize) == (-1, [9], False)
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, 7)


async def test_a_salt_is_refused_where_the_version_takes_none() -> None:
    async with running_engine() as told:
        calls = hold(told)
        await told.finish(make_request("r", routing=Routing(priority=5)))
        assert "priority" not in calls[0], "1.2 has none"
        told.engine._calls._accepted -= {"cache_salt"}
        with pytest.raises(RefusedError, match="no cache salts"):
            told.engine.submit(make_request("t", routing=Routing(cache_salt="tenant")))


async def test_engines_own_metrics_are_made_of_finished_requests() -> None:
    async with running_engine() as told:
        await told.finish(make_request("r"))
        finished = told.metrics.registry.get_sample_value(
            "trtllm_request_success_total",
            {"model_name": "served", "engine_type": "trtllm", "finished_reason": "length"},
        )
        assert finished == 1


async def test_logits_processors_are_made_for_the_request_and_refused_where_the_engine_has_none() -> None:
    banned = LogitsProcessorCall("banned_tokens", b'{"token_ids": [7]}')
    async with running_engine() as told:
        calls = hold(told)
        last = await told.finish(make_request("r", logits_processors=(banned,)))
        assert "the fake has no logits_processor" in (last.error or "")
        assert isinstance(calls[0]["sampling_params"].logits_processor, RequestProcessors)
        last = await told.finish(make_request("u", logits_processors=(LogitsProcessorCall("unknown"),)))
        assert "this worker has allowed_tokens, banned_tokens" in (last.error or "")
        told.engine._calls._processors._reporter.report("banned_tokens")
        await told.turned(lambda: told.sample("logits_processor_failures_total", name="banned_tokens") == 1)
    async with running_engine(Role.DECODE, max_batch_size=64) as told:
        with pytest.raises(RefusedError, match="disaggregated serving"):
            told.engine.submit(make_request("r", logits_processors=(banned,)))


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_what_a_request_does_wrong_is_its_own_error() -> None:
    async with running_engine(max_seq_len=64, max_batch_size=8, max_num_tokens=16) as told:
        for name, wrong, words in (
            ("long", make_request("long", range(17)), "max_num_tokens"),
            ("top_p", make_request("top_p", top_p=1.5), "top_p"),
        ):
            last = await told.finish(wrong)
            assert (last.finish_reason, last.refusal) == ("error", RefusalKind.INVALID), name
            assert words in (last.error or "")
        last = await told.finish(make_request("r", max_tokens=100))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO), "nobody can tell whose it is"
        assert "max_sequence_length" in (last.error or "")
        assert told.events_of("r") == [RequestFinished("r", "error")]
        assert (await told.finish(make_request("s"))).finish_reason == "length"
        assert told.running is not None
        assert not told.running.done()


async def test_an_error_of_the_engines_threads_does_not_hit_the_next_request() -> None:
    async with running_engine() as told:
        told.executor.background_errors.append("'NoneType' object has no attribute 'new_value'")
        request = make_request("r")
        await told.finish(request)
        assert told.output("r") == expected(request)


async def test_an_unexpected_exception_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine() as told:
        original = told.llm.generate_async

        def broken(inputs: Any, **given: Any) -> Any:
            raise KeyError("surprise")

        told.llm.generate_async = broken
        last = await told.finish(make_request("r"))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        assert "surprise" in (last.error or "")
        told.llm.generate_async = original
        monkeypatch.setattr(generations, "OutputCursor", Unreadable)
        await told.finish(make_request("s", max_tokens=3))
        monkeypatch.undo()
        assert (told.deltas["s"][-1].finish_reason, told.deltas["s"][-1].refusal) == ("error", RefusalKind.BROKEN)
        assert (await told.finish(make_request("t"))).finish_reason == "length"


async def test_a_dead_engine_ends_the_run_with_its_reason() -> None:
    async with running_engine() as told:
        told.executor.pause()
        told.engine.submit(make_request("r", max_tokens=100))
        await told.turned(lambda: told.executor._inbox)
        told.executor.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
        told.executor.resume()
        assert told.running is not None
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineBrokenError, match="illegal memory access"):
                await told.running
        with pytest.raises(RefusedError, match="has shut down"):
            told.engine.submit(make_request("s"))


# -- start and end -----------------------------------------------------------------------------------------------------


async def test_the_engine_is_shut_down_whatever_ends_the_block() -> None:
    async with running_engine() as told:
        executor = told.executor
        told.engine.submit(make_request("r", max_tokens=100_000))
    assert not executor.alive
    try:
        async with running_engine() as told:
            executor = told.executor
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not executor.alive


async def test_a_start_that_nobody_waits_for_any_more_is_ended_when_it_is_there() -> None:
    may_exist, ended = threading.Event(), threading.Event()

    def make() -> str:
        may_exist.wait(PATIENCE_S)
        return "engine"

    thread = EngineThread()
    starting = asyncio.create_task(start_engine(thread, make, lambda made: ended.set()))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    assert not ended.is_set()
    may_exist.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    thread.end()


async def test_a_start_that_fails_says_why_and_an_end_that_fails_is_survived() -> None:
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        await start_engine(thread, lambda: 1 // 0, lambda made: None)
    await end_engine(thread, "engine", lambda made: exec("raise OSError"))
    thread.end()


async def test_cache_events_are_reported_in_the_turn_in_which_they_are_read() -> None:
    """A restatement between the two would tell routers what the reports tell them once more."""

    async with running_engine() as told:
        await told.turned(lambda: told.engine._report._deliver)
        event = BlocksStored(None, b"12345678")
        told.engine._on_cache(0, [event])
        assert told.reports[-1].ranks[0].events == [event]


async def test_a_worker_that_is_stopped_while_its_engine_loads_ends_and_leaves_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_tensorrt_llm()
    library = load_library()
    loading, may_exist = threading.Event(), threading.Event()
    made: list[Any] = []

    def slow(**arguments: Any) -> Any:
        loading.set()
        may_exist.wait(PATIENCE_S)
        made.append(library.llm(**arguments))
        return made[0]

    monkeypatch.setattr("poolgrid.plugins.trtllm.opening.load_library", lambda: replace(library, llm=slow))

    stop = asyncio.Event()
    settings = TrtllmWorkerSettings(model_path="m")
    serving = asyncio.create_task(bootstrap.serve(settings, stop, lambda url: None))
    assert await asyncio.to_thread(loading.wait, PATIENCE_S)
    stop.set()
    async with asyncio.timeout(PATIENCE_S):
        await serving
    may_exist.set()
    while not made or made[0]._executor is not None:  # noqa: ASYNC110 - its own thread ends it
        await asyncio.sleep(0.001)


def test_without_the_package_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(LibraryMissingError, match=r"tensorrt_llm is not installed in this Python.*simulated"):
        load_library()


async def test_load_is_the_engines_while_it_works_and_the_workers_own_when_it_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(behaviours.behaviour, "device_blocks", 100)

    async with running_engine() as told:
        assert told.engine.total_blocks == 100
        await told.finish(make_request("r", range(20), 10))
        load = told.engine.load(0)
        assert (load.running_requests, load.waiting_requests, load.active_blocks) == (0, 0, 0)
        assert (load.prefill_tokens, load.total_blocks) == (0, 100)


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE, Stage.ENCODE])
async def test_an_engine_without_a_transceiver_takes_whole_requests_only(stage: Stage) -> None:
    async with running_engine(Role.AGGREGATED) as told:
        with pytest.raises(RefusedError) as refused:
            told.engine.submit(make_request(stage=stage, disaggregated_params=b"\x80"))
        assert refused.value.kind is RefusalKind.BROKEN


async def test_more_requests_than_allowed_are_refused_as_retryable() -> None:
    async with running_engine(limits=TrtllmLimits(max_requests=1)) as told:
        told.executor.pause()
        told.engine.submit(make_request("a"))
        with pytest.raises(RefusedError, match="max_requests") as refused:
            told.engine.submit(make_request("b"))
        assert refused.value.kind is RefusalKind.BUSY
        told.executor.resume()


# -- how long blocks stay, and traces ----------------------------------------------------------------------------------


async def test_the_session_is_given_as_a_conversation_where_the_engine_has_them() -> None:
    def conversation(conversation_id: str) -> str:
        return conversation_id

    turn = SessionTurn("agent-1")
    async with running_engine() as told:
        calls = hold(told)
        await told.finish(msgspec.structs.replace(make_request("r"), turn=turn))
        told.engine._calls._conversations = conversation
        await told.finish(msgspec.structs.replace(make_request("s"), turn=turn))
        await told.finish(msgspec.structs.replace(make_request("t"), turn=msgspec.structs.replace(turn, tenant=255)))
        await told.finish(make_request("u"))

    assert [call.get("conversation_params") for call in calls] == [
        None,
        "0000000000000000-agent-1",
        "00000000000000ff-agent-1",
        None,
    ]


async def test_how_long_blocks_stay_is_given_as_the_bindings_take_it() -> None:
    retention = KvRetention((RetainedTokens(0, 4, 80, 1500), RetainedTokens(6, None, 5)), 10, 250)

    async with running_engine() as told:
        calls = hold(told)
        await told.finish(msgspec.structs.replace(make_request("r"), retention=retention))
        moved = make_request("m", routing=Routing(emitted_tokens=3))
        await told.finish(msgspec.structs.replace(moved, retention=retention))
        await told.finish(make_request("s"))
        first, second, third = (call.get("kv_cache_retention_config") for call in calls)
        assert third is None
        assert [_range(each) for each in first.token_range_retention_configs] == [
            (0, 4, 80, timedelta(milliseconds=1500)),
            (6, 10, 5, None),
        ]
        assert (first.decode_retention_priority, first.decode_duration_ms) == (10, timedelta(milliseconds=250))
        assert [_range(each) for each in second.token_range_retention_configs] == [
            (0, 4, 80, timedelta(milliseconds=1500)),
            (6, 7, 5, None),
            (7, 10, 10, timedelta(milliseconds=250)),
        ], "of an output that moved here the engine only knows that it is prompt"
        assert told.engine.takes_retention, "as the card says"
        told.engine._calls._accepted -= {"kv_cache_retention_config"}
        assert not told.engine.takes_retention
        with pytest.raises(RefusedError, match="kv_cache_retention_config is given"):
            told.engine.submit(msgspec.structs.replace(make_request("t"), retention=retention))


def test_what_is_to_stay_stays_when_others_need_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviours, "behaviour", replace(behaviours.behaviour, device_blocks=8))

    async def reused(retention: KvRetention | None) -> int | None:
        async with running_engine() as told:
            await told.finish(msgspec.structs.replace(make_request("kept", range(16), 1), retention=retention))
            for number in range(3):
                await told.finish(make_request(f"other {number}", range(100 * number + 100, 100 * number + 120), 1))
            await told.finish(make_request("again", range(16), 1))
            return told.deltas["again"][0].cached_tokens

    assert asyncio.run(reused(None)) == 0
    assert asyncio.run(reused(KvRetention((RetainedTokens(0, 8, 90, 60_000),)))) == 8


async def test_blocks_of_a_turn_are_kept_until_its_session_is_back() -> None:
    turn = SessionTurn("agent-1", return_ms=900)

    async with running_engine() as told:
        calls = hold(told)
        await told.finish(msgspec.structs.replace(make_request("r"), turn=turn))
        kept = calls[0]["kv_cache_retention_config"]
        assert [_range(each) for each in kept.token_range_retention_configs] == [
            (0, 10, RETURN_PRIORITY, timedelta(milliseconds=900))
        ]
        assert kept.decode_duration_ms == timedelta(milliseconds=900)
        by_client = msgspec.structs.replace(turn, keep_ms=300_000, keep_tokens=8)
        await told.finish(msgspec.structs.replace(make_request("kept by its client"), turn=by_client))
        ranges = calls.pop()["kv_cache_retention_config"].token_range_retention_configs
        assert [_range(each) for each in ranges] == [
            (0, 8, RETURN_PRIORITY, timedelta(minutes=5)),
            (8, 10, RETURN_PRIORITY, timedelta(milliseconds=900)),
        ]
        told.engine._calls._accepted -= {"kv_cache_retention_config"}
        await told.finish(msgspec.structs.replace(make_request("s"), turn=turn))
        assert "kv_cache_retention_config" not in calls[1], "nothing is refused for it"


async def test_the_span_of_a_leg_goes_to_the_engine() -> None:
    span = TraceContext("00-" + 31 * "0" + "1-" + 15 * "0" + "2-01", "vendor=x")

    async with running_engine() as told:
        calls = hold(told)
        await told.finish(msgspec.structs.replace(make_request("r"), trace=span))
        await told.finish(make_request("s"))
        assert calls[0]["trace_headers"] == {"traceparent": span.traceparent, "tracestate": "vendor=x"}
        assert "trace_headers" not in calls[1]


def _range(made: Any) -> tuple[Any, ...]:
    return made.token_start, made.token_end, made.priority, made.duration_ms
