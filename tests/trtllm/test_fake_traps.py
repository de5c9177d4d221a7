"""Each trap of TensorRT-LLM 1.2.1 is there in the fake, so that code which forgets one fails a test here."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest

from poolgrid.kv_events.cache_events import Stored
from poolgrid.kv_events.trtllm import parse_event
from poolgrid.wire.hashing import pack_tokens, unpack_hashes
from poolgrid.wire.identifiers import Tier
from poolgrid.wire.requests import Sampling
from poolgrid.workers.core.event_translation import EventTranslator
from poolgrid.workers.engines.simulated.core.next_token import Vocabulary, expected_output
from tests.fakes.tensorrt_llm import LLM, DisaggregatedParams, MultimodalEncoder, SamplingParams, SchedulingParams
from tests.fakes.tensorrt_llm._fake import behaviour as behaviours
from tests.fakes.tensorrt_llm._fake.block_key import block_key_hash, salt_id
from tests.fakes.tensorrt_llm._fake.executor import Executor, Request
from tests.fakes.tensorrt_llm.executor import LoRARequest, RequestError
from tests.fakes.tensorrt_llm.executor.result import Response
from tests.fakes.tensorrt_llm.llmapi import KvCacheConfig, KvCacheRetentionConfig
from tests.fakes.tensorrt_llm.llmapi.utils import AsyncQueue
from tests.trtllm.facts import facts

BLOCK = 4
SHORT_S = 0.01
TIERS = (Tier.DEVICE, Tier.HOST)
TOO_LATE = Request(0, (1,), Sampling(1), None, {}, False, 1, False, lambda response: None)


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with room for a few blocks, so that things are evicted."""
    monkeypatch.setattr(behaviours, "behaviour", replace(behaviours.behaviour, device_blocks=12, block_bytes=1))


def make(**arguments: Any) -> LLM:
    cache = {"event_buffer_max_size": 10_000, "tokens_per_block": BLOCK, **arguments.pop("kv_cache_config", {})}
    return LLM("m", skip_tokenizer_init=True, kv_cache_config=KvCacheConfig(**cache), **arguments)


def sampling(max_tokens: int = 4, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, end_id=-1, **more)


def executor_of(llm: LLM) -> Executor:
    assert llm._executor is not None
    return llm._executor


def settle(llm: LLM) -> None:
    """Wait until everything that was asked for is done and published."""
    executor = executor_of(llm)
    executor.flush()
    executor.pause()
    executor.resume()


async def drain(llm: LLM) -> list[dict[str, Any]]:
    settle(llm)
    return await read_until_empty(llm.get_kv_cache_events_async(timeout=0))


async def read_until_empty(readings: Any) -> list[Any]:
    """Read with timeout 0: what came before ``asyncio.QueueEmpty``, which must come."""
    found: list[Any] = []

    async def collect() -> None:
        async for each in readings:
            found.append(each)  # noqa: PERF401 - a comprehension would lose all with the exception

    with pytest.raises(asyncio.QueueEmpty):
        await collect()
    return found


async def finish(llm: LLM, prompt: list[int], max_tokens: int = 4, **more: Any) -> Any:
    return await llm.generate_async(prompt, sampling(max_tokens), **more)


# readers


@pytest.mark.parametrize("timeout", [2, 0])
def test_reading_events_before_the_first_request_is_an_assertion_error(timeout: int) -> None:
    with make() as llm:
        for read in (llm.get_kv_cache_events, llm.get_kv_cache_events_async):
            with pytest.raises(AssertionError, match="KV Event IterationResult is not properly instantiated"):
                read(timeout)


def test_reading_events_without_a_buffer_or_reuse_is_an_assertion_error() -> None:
    for cache in ({"event_buffer_max_size": 0}, {"enable_block_reuse": False}):
        with make(kv_cache_config=cache) as llm:
            llm.generate([1, 2], sampling())
            with pytest.raises(AssertionError, match="not properly instantiated"):
                llm.get_kv_cache_events(0)


async def read_all(readings: Any) -> list[Any]:
    return [each async for each in readings]


def test_statistics_before_the_first_request_are_empty() -> None:
    with make(enable_iter_perf_stats=True) as llm:
        assert llm.get_stats() == []
        assert asyncio.run(read_all(llm.get_stats_async())) == []


def test_a_reader_with_a_timeout_is_done_on_expiry_until_the_next_request() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5])
            settle(llm)
            assert await read_all(llm.get_kv_cache_events_async(SHORT_S))
            # More events come, and are not seen: the reader is done.
            executor = executor_of(llm)
            executor.pause()
            executor.recorders[0].moved([(next(iter(executor.recorders[0].names)), None)], *TIERS)
            executor._publish()
            executor.resume()
            assert await read_all(llm.get_kv_cache_events_async(2)) == []
            assert await read_all(llm.get_kv_cache_events_async(None)) == []
            llm.generate_async([9], sampling(1))
            settle(llm)
            types = [event["data"]["type"] for event in await read_all(llm.get_kv_cache_events_async(SHORT_S))]
            assert types[0] == "updated"

    asyncio.run(scenario())


def test_a_reader_without_a_timeout_raises_queue_empty_and_is_not_done() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5])
            settle(llm)
            assert await read_until_empty(llm.get_kv_cache_events_async(0))
            with pytest.raises(asyncio.QueueEmpty):
                await read_all(llm.get_kv_cache_events_async(0))
            await finish(llm, [7, 7, 7, 7, 7])
            assert await drain(llm)

    asyncio.run(scenario())


def test_statistics_readers_behave_as_event_readers_do() -> None:
    async def scenario() -> None:
        with make(enable_iter_perf_stats=True) as llm:
            await finish(llm, [1, 2])
            settle(llm)
            with pytest.raises(asyncio.QueueEmpty):
                await read_all(llm.get_stats_async(0))
            await finish(llm, [1, 2])
            settle(llm)
            assert await read_all(llm.get_stats_async(SHORT_S))
            assert await read_all(llm.get_stats_async(None)) == []

    asyncio.run(scenario())


def test_an_asynchronous_read_after_a_synchronous_one_is_refused() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1])
            assert llm.get_kv_cache_events(SHORT_S)
            llm.generate_async([1], sampling())
            with pytest.raises(AsyncQueue.MixedSyncAsyncAPIError):
                await read_all(llm.get_kv_cache_events_async(0))

    asyncio.run(scenario())


def test_an_asynchronous_read_needs_the_loop_that_ran_at_the_first_request() -> None:
    with make() as llm:
        llm.generate([1], sampling())
        with pytest.raises(AssertionError, match="event loop was not present"):
            asyncio.run(read_all(llm.get_kv_cache_events_async(0)))


def test_statistics_are_off_by_default_and_have_the_documented_keys_when_on() -> None:
    with make() as llm:
        llm.generate([1, 2], sampling())
        assert llm.get_stats(SHORT_S) == []
    with make(enable_iter_perf_stats=True, enable_iter_req_stats=True) as llm:
        llm.generate([1, 2], sampling(6))
        settle(llm)
        found = llm.get_stats(SHORT_S)
        example = {key: each for key, each in facts()["iteration_stats_example"].items() if not key.startswith("_")}
        assert found[-1].keys() == example.keys()
        for key in ("kvCacheStats", "inflightBatchingStats"):
            assert list(found[0][key]) == list(example[key])
        assert list(found[0]["requestStats"][0]) == facts()["iteration_stats_example"]["_request_stats_item_keys"]
        assert [each["iter"] for each in found] == list(range(1, len(found) + 1))


def test_the_oldest_statistics_are_dropped() -> None:
    with make(enable_iter_perf_stats=True, max_stats_len=3) as llm:
        llm.generate([1, 2], sampling(10))
        settle(llm)
        assert [each["iter"] for each in llm.get_stats(SHORT_S)] == [8, 9, 10]


# results


def test_iteration_yields_the_same_object_and_diffs_that_do_not_last() -> None:
    async def scenario() -> None:
        with make() as llm:
            result = llm.generate_async([1, 2, 3], sampling(5), streaming=True)
            outputs, diffs = [], []
            async for each in result:
                outputs.append(each)
                diffs.append(list(each.outputs[0].token_ids_diff))
            assert all(each is result for each in outputs)
            assert [len(each) for each in diffs] == [1, 1, 1, 1, 1]
            # Read too late, every step's diff is the last one.
            assert [each.outputs[0].token_ids_diff for each in outputs] == [diffs[-1]] * 5
            assert [token for diff in diffs for token in diff] == result.outputs[0].token_ids

    asyncio.run(scenario())


def test_tokens_are_those_of_the_simulated_engine() -> None:
    with make() as llm:
        done = llm.generate([1, 2, 3], sampling(6, seed=7))
        expected = expected_output(pack_tokens([1, 2, 3]), Sampling(max_tokens=6, seed=7), Vocabulary())
        assert tuple(done.outputs[0].token_ids) == expected
        assert done.outputs[0].finish_reason == "length"


def test_result_ignores_its_timeout() -> None:
    with make() as llm:
        executor = executor_of(llm)
        executor.pause()
        result = llm.generate_async([1], sampling())
        waiting = threading.Event()
        ended: list[Any] = []

        def wait() -> None:
            waiting.set()
            ended.append(result.result(timeout=-1))

        # A timeout that counted would be over before the engine goes on.
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait()
        executor.resume()
        waiter.join()
        assert ended == [result]
        assert result.finished


def test_a_result_made_without_a_loop_cannot_be_awaited() -> None:
    with make() as llm:
        result = llm.generate_async([1], sampling())

        async def wait() -> None:
            await result

        with pytest.raises(AssertionError, match="event loop was not present"):
            asyncio.run(wait())
        assert result.result().finished


def test_steps_take_time_when_the_behaviour_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviours, "behaviour", replace(behaviours.behaviour, speedup=1e4))
    with make(enable_iter_perf_stats=True) as llm:
        llm.generate([1] * 100, sampling(3))
        settle(llm)
        assert all(each["iterLatencyMS"] > 0 for each in llm.get_stats(SHORT_S))


def test_abort_returns_at_once_and_the_stream_ends_as_cancelled() -> None:
    async def scenario() -> None:
        with make() as llm:
            executor = executor_of(llm)
            executor.pause()
            result = llm.generate_async([1], sampling(1000), streaming=True)
            result.abort()
            assert result.aborted()
            assert not result.finished
            executor.resume()
            await result
            assert result.outputs[0].finish_reason == "cancelled"

    asyncio.run(scenario())


def test_a_stop_token_is_the_stop_reason_and_is_cut_off() -> None:
    with make() as llm:
        tokens = llm.generate([1, 2], sampling(8)).outputs[0].token_ids
        cut = llm.generate([1, 2], sampling(8, stop_token_ids=[tokens[3]])).outputs[0]
        kept = llm.generate([1, 2], sampling(8, stop_token_ids=[tokens[3]], include_stop_str_in_output=True)).outputs[0]
        end = llm.generate([1, 2], SamplingParams(max_tokens=8, end_id=tokens[3])).outputs[0]
        assert (cut.finish_reason, cut.stop_reason, cut.token_ids) == ("stop", tokens[3], tokens[:3])
        assert kept.token_ids == tokens[:4]
        assert (end.finish_reason, end.stop_reason) == ("stop", None)


def test_stream_interval_lumps_tokens_together() -> None:
    async def scenario() -> None:
        with make(stream_interval=3) as llm:
            lengths = [
                len(each.outputs[0].token_ids_diff)
                async for each in llm.generate_async([1], sampling(7), streaming=True)
            ]
            assert lengths == [3, 3, 1]

    asyncio.run(scenario())


def test_several_sequences_of_one_request_differ() -> None:
    with make() as llm:
        done = llm.generate([1, 2], sampling(6, n=3, temperature=1.0, logprobs=1))
        assert len({tuple(each.token_ids) for each in done.outputs}) == 3
        assert all(len(each.logprobs) == 6 for each in done.outputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": -0.1}, "temperature"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2}, "Greedy decoding"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_sampling_params_refuse_what_the_contract_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_calls_that_are_wrong_have_the_errors_of_the_contract() -> None:
    with make() as llm:
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate_async([1], {"max_tokens": 1})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tokenizer is required to reset end_id"):
            llm.generate_async([1], SamplingParams())
        with pytest.raises(ValueError, match="does not exist"):
            LoRARequest("a", 1)
        with pytest.raises(RequestError, match="max_num_tokens"):
            llm.generate_async([1] * 8193, sampling())
        with pytest.raises(RequestError, match="max_sequence_length"):
            llm.generate([1], sampling(2_000_000))
        assert llm.generate([1], sampling()).finished, "a request's error is only its own"
        with pytest.raises(RuntimeError, match="pickled"):
            pickle.dumps(llm)
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async([1], sampling())
    llm.shutdown()


def test_a_broken_engine_fails_every_request_and_its_health() -> None:
    with make() as llm:
        executor = executor_of(llm)
        assert llm._check_health()
        executor.pause()
        result = llm.generate_async([1], sampling(100))
        executor.fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
        executor.resume()
        with pytest.raises(RequestError, match="illegal memory access"):
            result.result()
        executor._thread.join()
        late: list[Response] = []
        executor.submit(replace(TOO_LATE, put=late.append))
        assert [each.error for each in late] == ["LLM is shutting down"]
        assert not llm._check_health()
        with pytest.raises(RuntimeError, match="shutting down"):
            llm.generate_async([1], sampling())


def test_metrics_are_there_at_the_end_when_asked_for() -> None:
    with make() as llm:
        assert llm.generate([1], sampling()).metrics_dict == {}
        done = llm.generate([1], sampling(return_perf_metrics=True))
        assert list(done.metrics_dict) == facts()["enums"]["MetricNames"]


# events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["data"]["type"] for event in events]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for event in events if event["data"]["type"] == "stored" for block in event["data"]["blocks"]]


def test_events_have_the_shapes_of_the_contract() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5, 6], 6)
            events = await drain(llm)
            example = facts()["events"]
            assert [event["event_id"] for event in events] == list(range(len(events)))
            assert list(events[0]) == list(example["created"])
            assert events[0]["data"].keys() == example["created"]["data"].keys()
            stored = next(event for event in events if event["data"]["type"] == "stored")
            assert list(stored) == list(example["stored"]), "attention_dp_rank is absent, not null"
            assert stored["data"].keys() == example["stored"]["data"].keys()
            assert stored["data"]["parent_hash"] is None
            block, shape = stored["data"]["blocks"][0], example["stored"]["data"]["blocks"][0]
            assert list(block) == list(shape)
            assert block["tokens"][0].keys() == shape["tokens"][0].keys()
            for event in events:
                parse_event(event)

    asyncio.run(scenario())


def test_block_hashes_chain_and_exceed_the_signed_range() -> None:
    async def scenario() -> None:
        with make() as llm:
            tokens = [1, 2, 3, 4, 5, 6, 7, 8]
            done = await finish(llm, tokens, 8)
            blocks = blocks_of(await drain(llm))
            parent = 0
            everything = [*tokens, *done.outputs[0].token_ids]
            for at, block in enumerate(blocks):
                part = everything[at * BLOCK : min((at + 1) * BLOCK, len(everything) - 1)]
                assert [token["token_id"] for token in block["tokens"]] == part
                parent = block_key_hash(part, parent)
                assert block["block_hash"] == parent
            assert any(block["block_hash"] > 2**63 for block in blocks)

    asyncio.run(scenario())


def test_the_salt_enters_the_first_blocks_hash_and_is_not_told() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5], 1, cache_salt="tenant")
            await finish(llm, [1, 2, 3, 4, 5], 1)
            events = await drain(llm)
            names = [block["block_hash"] for block in blocks_of(events) if len(block["tokens"]) == BLOCK]
            assert names == [block_key_hash([1, 2, 3, 4], 0, salt_id("tenant")), block_key_hash([1, 2, 3, 4])]
            assert "tenant" not in str(events)

    asyncio.run(scenario())


def test_the_last_block_may_be_partial_and_is_removed_later(small_cache: None) -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5, 6], 2)  # 7 tokens of KV: one whole block and 3 tokens
            events = await drain(llm)
            last = blocks_of(events)[-1]
            assert len(last["tokens"]) == 3
            told = next(event for event in events if event["data"].get("blocks", [None])[-1] is last)
            assert told["data"]["parent_hash"] == blocks_of(events)[0]["block_hash"]
            for at in range(6):
                await finish(llm, [100 + at] * 12, 4)
            removed = [
                name
                for event in await drain(llm)
                if event["data"]["type"] == "removed"
                for name in event["data"]["block_hashes"]
            ]
            assert last["block_hash"] in removed

    asyncio.run(scenario())


def test_consecutive_removals_of_a_window_are_one_event() -> None:
    async def scenario() -> None:
        with make() as llm:
            await finish(llm, list(range(12)), 1)
            await drain(llm)
            executor = executor_of(llm)
            executor.pause()
            recorder = executor.recorders[0]
            names = dict(recorder.names)
            for sequence_hash in reversed(names):
                recorder.removed([sequence_hash], Tier.DEVICE)
            executor._publish()
            executor.resume()
            (event,) = await drain(llm)
            assert event["data"] == {"type": "removed", "block_hashes": list(reversed(names.values()))}
            assert len(names) == 3

    asyncio.run(scenario())


def test_overflow_drops_the_oldest_events_and_leaves_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with make(kv_cache_config={"event_buffer_max_size": 3}) as llm:
            with caplog.at_level(logging.WARNING, "tensorrt_llm"):
                for at in range(5):
                    await finish(llm, [100 * at + each for each in range(9)], 1)
                events = await drain(llm)
            ids = [event["event_id"] for event in events]
            assert len(ids) == 3
            assert ids[0] > 0
            assert ids == list(range(ids[0], ids[0] + 3))
            assert "The event queue has reached the max size of 3" in caplog.text
            assert EventTranslator(BLOCK).translate([parse_event(each) for each in events]).lost == ids[0]

    asyncio.run(scenario())


def test_moves_between_gpu_and_host_are_updates_without_a_priority(small_cache: None) -> None:
    async def scenario() -> None:
        with make(kv_cache_config={"host_cache_size": 100}) as llm:
            await finish(llm, list(range(40)), 4)
            await finish(llm, list(range(100, 140)), 4)
            await finish(llm, list(range(40)), 4)
            updates = [event["data"] for event in await drain(llm) if event["data"]["type"] == "updated"]
            assert all(update["priority"] is None for update in updates)
            moves = {(update["cache_level"]["old_value"], update["cache_level"]["new_value"]) for update in updates}
            assert moves == {(0, 1), (1, 0)}
            assert updates[0].keys() == facts()["events"]["updated"]["data"].keys()

    asyncio.run(scenario())


def test_a_new_priority_is_an_update_without_a_level() -> None:
    async def scenario() -> None:
        with make() as llm:
            keep = KvCacheRetentionConfig([], decode_retention_priority=80)
            await finish(llm, [1, 2, 3, 4, 5], 1, kv_cache_retention_config=keep)
            update = (await drain(llm))[-1]["data"]
            assert update["cache_level"] is None
            assert update["priority"] == {"type": "event_diff", "new_value": 80, "old_value": 35}
            parse_event({"event_id": 0, "data": update, "window_size": 1})

    asyncio.run(scenario())


def test_sliding_windows_have_pools_of_their_own_that_use_the_same_names() -> None:
    async def scenario() -> None:
        with make(max_seq_len=1024, kv_cache_config={"max_attention_window": [8, 8, 1024]}) as llm:
            for at in range(20):
                await finish(llm, [at * 100 + each for each in range(12)], 1)
            events = await drain(llm)
            assert [event["window_size"] for event in events if event["data"]["type"] == "created"] == [1024, 8]
            names: dict[int, set[int]] = {}
            gone: dict[int, set[int]] = {1024: set(), 8: set()}
            for event in events:
                for block in event["data"].get("blocks", []):
                    names.setdefault(event["window_size"], set()).add(block["block_hash"])
                gone[event["window_size"]].update(event["data"].get("block_hashes", []))
            assert names[8] & names[1024]
            assert gone[8], "the small window gives up blocks that the large one keeps"
            assert not gone[1024]
            assert [event["event_id"] for event in events] == list(range(len(events))), "one sequence over all windows"
            translator = EventTranslator(BLOCK)
            translator.translate([parse_event(each) for each in events])
            assert translator.resident_blocks == len(executor_of(llm).recorders[0].names)

    asyncio.run(scenario())


def test_attention_dp_ranks_count_their_events_apart() -> None:
    async def scenario() -> None:
        with make(tensor_parallel_size=4, enable_attention_dp=True) as llm:
            for rank in (2, 0, 2, 3):
                where = SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
                await finish(llm, [rank * 10 + each for each in range(9)], 1, scheduling_params=where)
            events = await drain(llm)
            by_rank: dict[int, list[int]] = {}
            for event in events:
                by_rank.setdefault(event["attention_dp_rank"], []).append(event["event_id"])
            assert sorted(by_rank) == [0, 1, 2, 3]
            for ids in by_rank.values():
                assert ids == list(range(len(ids)))
            assert len(by_rank[1]) == 1, "nothing ran there: only created"
            with pytest.raises(RequestError, match="attention_dp_rank"):
                await finish(llm, [1], 1, scheduling_params=SchedulingParams(attention_dp_rank=4))

    asyncio.run(scenario())


def test_what_the_translator_makes_of_the_events_is_what_the_engine_holds(small_cache: None) -> None:
    async def scenario() -> None:
        with make(kv_cache_config={"host_cache_size": 8}) as llm:
            for at in range(30):
                await finish(llm, [(at * 7 + each) % 50 for each in range(4 + at % 9)], 1 + at % 7)
            events = [parse_event(event) for event in await drain(llm)]
            translator = EventTranslator(BLOCK)
            assert translator.translate(events).lost == 0
            held: set[int] = set()
            for told in translator.restate():
                held.update(unpack_hashes(told.sequence_hashes))
            assert held == set(executor_of(llm).recorders[0].names)
            assert any(isinstance(event, Stored) for event in events)

    asyncio.run(scenario())


def behave(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    monkeypatch.setattr(behaviours, "behaviour", replace(behaviours.behaviour, **values))


def test_the_serializer_crashes_on_a_null_diff_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, null_diff_crash=True)

    async def scenario() -> None:
        with make() as llm:
            keep = KvCacheRetentionConfig([], decode_retention_priority=80)
            await finish(llm, [1, 2, 3, 4, 5], 1, kv_cache_retention_config=keep)
            settle(llm)
            with pytest.raises(RequestError, match="NoneType"):
                llm.generate_async([1, 2, 3], sampling())
            await finish(llm, [6, 7, 8, 9, 10], 1)
            ids = [event["event_id"] for event in await drain(llm)]
            assert ids != list(range(len(ids))), "the events that were with it are lost, and leave a gap"

    asyncio.run(scenario())


def test_a_late_notification_is_an_index_error(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, late_notifications=1)

    async def scenario() -> None:
        with make() as llm:
            await finish(llm, [1, 2, 3, 4, 5])
            settle(llm)
            with pytest.raises(IndexError):
                await read_all(llm.get_kv_cache_events_async(0))
            assert await drain(llm) == []

    asyncio.run(scenario())


def test_the_engine_behind_can_tell_what_it_holds() -> None:
    with make() as llm:
        llm.generate([1, 2, 3, 4, 5, 6, 7, 8, 9], sampling(1))
        (chain,) = llm.resident_blocks(0)
        assert len(unpack_hashes(chain.sequence_hashes)) == 2


# disaggregation


def pair() -> tuple[LLM, LLM]:
    transceiver = {"backend": "UCX"}
    prefill = make(cache_transceiver_config=transceiver, disable_overlap_scheduler=True)
    decode = make(cache_transceiver_config=transceiver)
    return prefill, decode


async def prefilled(llm: LLM, prompt: list[int]) -> DisaggregatedParams:
    done = await llm.generate_async(
        prompt, sampling(8), disaggregated_params=DisaggregatedParams(request_type="context_only")
    )
    made: DisaggregatedParams = done.disaggregated_params  # type: ignore[assignment]
    return made


def test_context_only_forces_one_token_on_the_callers_object() -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode:
            mine = sampling(8)
            result = prefill.generate_async(
                [1, 2, 3], mine, disaggregated_params=DisaggregatedParams(request_type="context_only")
            )
            assert mine.max_tokens == 1
            await result
            assert result.outputs[0].finish_reason == "not_finished"
            assert result.outputs[0].length == 1

    asyncio.run(scenario())


def test_disaggregated_output_is_the_aggregated_output() -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode, make() as aggregated:
            prompt = list(range(30))
            made = await prefilled(prefill, prompt)
            assert isinstance(made.opaque_state, bytes)
            made.request_type = "generation_only"
            done = await decode.generate_async(prompt, sampling(8), disaggregated_params=made)
            assert done.outputs[0].token_ids == aggregated.generate(prompt, sampling(8)).outputs[0].token_ids
            assert made.first_gen_tokens == (done.outputs[0].token_ids or [])[:1]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opaque_state": None}, "missing"),
        ({"opaque_state": b"x" * 40}, "damaged"),
        ({"ctx_request_id": 10**9}, "ctx_request_id"),
        ({"first_gen_tokens": [4]}, "first_gen_tokens"),
    ],
)
def test_generation_only_checks_what_context_only_left(change: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode:
            made = replace(await prefilled(prefill, [1, 2, 3]), request_type="generation_only", **change)
            with pytest.raises(RequestError, match=message):
                await decode.generate_async([1, 2, 3], sampling(8), disaggregated_params=made)

    asyncio.run(scenario())


def test_generation_only_checks_the_prompt_and_the_kv_dtype() -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        other = make(cache_transceiver_config={"backend": "UCX"}, kv_cache_config={"dtype": "fp8"})
        with prefill, decode, other:
            made = replace(await prefilled(prefill, [1, 2, 3]), request_type="generation_only")
            with pytest.raises(RequestError, match="prompt"):
                await decode.generate_async([1, 2, 4], sampling(8), disaggregated_params=made)
            with pytest.raises(RequestError, match="dtype"):
                await other.generate_async([1, 2, 3], sampling(8), disaggregated_params=made)
            with pytest.raises(ValueError, match="not allowed in generation_only"):
                decode.generate_async(
                    [1, 2, 3],
                    sampling(8),
                    disaggregated_params=replace(made, multimodal_embedding_handles=[{"a": 1}]),
                )

    asyncio.run(scenario())


def test_disaggregation_needs_a_transceiver_and_no_overlap() -> None:
    context = DisaggregatedParams(request_type="context_only")
    with make() as llm, pytest.raises(RequestError, match="Disaggregated serving is not enabled"):
        llm.generate_async([1], sampling(), disaggregated_params=context)
    with (
        make(cache_transceiver_config={"backend": "UCX"}) as llm,
        pytest.raises(RequestError, match="disable_overlap_scheduler"),
    ):
        llm.generate_async([1], sampling(), disaggregated_params=context)


def test_a_cancellation_during_the_transfer_waits_for_the_transfer() -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode:
            made = replace(await prefilled(prefill, [1, 2, 3]), request_type="generation_only")
            executor = executor_of(decode)
            executor.transfers_open.clear()
            result = decode.generate_async([1, 2, 3], sampling(1000), disaggregated_params=made, streaming=True)
            result.abort()
            settle(decode)
            assert not result.queue._items, "nothing came: the transfer is not in"
            executor.open_transfers()
            await result
            assert result.outputs[0].finish_reason == "cancelled"

    asyncio.run(scenario())


def test_failed_transfers_may_keep_their_blocks_until_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, leak_failed_transfers=True, device_blocks=4)

    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode:
            executor = executor_of(decode)
            executor.transfers_open.clear()
            for at in range(2):
                prompt = [10 * at + each for each in range(8)]
                made = replace(await prefilled(prefill, prompt), request_type="generation_only")
                result = decode.generate_async(prompt, sampling(), disaggregated_params=made)
                result.abort()
                await result
                assert result.outputs[0].finish_reason == "cancelled"
            executor.open_transfers()
            wedged = decode.generate_async([1, 2, 3], sampling())
            settle(decode)
            assert not wedged.queue._items, "no block is left"
            assert decode._check_health(), "and the engine says that it is well"

    asyncio.run(scenario())


def test_encoding_leaves_handles_and_hashes_and_the_context_gives_the_handles_up() -> None:
    async def scenario() -> None:
        prefill, decode = pair()
        with prefill, decode, MultimodalEncoder("m") as encoder:
            assert encoder.args.max_num_tokens == 16384  # type: ignore[attr-defined]
            made = await encoder.generate_async({"prompt": "look", "multi_modal_data": {"image": [b"1", b"2"]}})
            params = made.disaggregated_params
            assert made.mm_embedding_handle is not None
            assert params is not None
            assert params.multimodal_hashes is not None
            assert params.multimodal_embedding_handles is not None
            assert len(params.multimodal_embedding_handles) == 2
            assert [len(each) for each in params.multimodal_hashes] == [8, 8]
            context = replace(params, request_type="context_only")
            done = await prefill.generate_async([1, 2, 3, 4, 5], sampling(), disaggregated_params=context)
            assert done.disaggregated_params is not None
            assert done.disaggregated_params.multimodal_embedding_handles is None
            assert done.disaggregated_params.multimodal_hashes == params.multimodal_hashes
            keys = blocks_of(await drain(prefill))[0]["mm_keys"]
            assert [key["type"] for key in keys] == ["mm_key", "mm_key"]
            assert all(len(key["hash"]) == 64 for key in keys)

    asyncio.run(scenario())


def test_an_encode_request_that_carries_params_gets_a_tuple_around_its_handles() -> None:
    with LLM("m", mm_encoder_only=True) as llm:
        request = {"prompt": "look", "multi_modal_data": {"image": ["1"]}}
        given = DisaggregatedParams(request_type="context_and_generation")
        params = llm.generate_async(request, disaggregated_params=given).result().disaggregated_params
        assert params is not None
        assert isinstance(params.multimodal_embedding_handles, tuple)
