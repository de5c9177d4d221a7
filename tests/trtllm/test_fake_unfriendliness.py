"""What TensorRT-LLM does to its callers beside the traps: each is there in the fake, by version or by switch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import Sampling
from poolgrid.workers.engines.simulated.core.next_token import TokenStream, Vocabulary
from tests.fakes import tensorrt_llm_of
from tests.fakes.tensorrt_llm import LLM
from tests.fakes.tensorrt_llm._fake import behaviour as behaviours
from tests.fakes.tensorrt_llm._fake.profile import PROFILES
from tests.fakes.tensorrt_llm.disaggregated_params import DisaggregatedParams
from tests.fakes.tensorrt_llm.executor import RequestError
from tests.fakes.tensorrt_llm.llmapi import llm_args
from tests.trtllm.test_fake_traps import behave, blocks_of, executor_of, finish, make, read_all, sampling, settle

PROMPT = list(range(1, 13))
PATIENCE_S = 20.0


def in_a_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call beside the test; what it returned comes into the list."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


# events and statistics over calls to the engine's process


@pytest.fixture
def rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, rpc_proxy=True)


def test_events_come_by_a_call_without_any_request_before_it(rpc: None) -> None:
    with make(enable_iter_perf_stats=True) as llm:
        assert [event["data"]["type"] for event in llm.get_kv_cache_events(0)] == ["created"]
        assert llm.get_stats(0) == []
        llm.generate(PROMPT, sampling())
        settle(llm)
        assert llm.get_kv_cache_events(0)[0]["event_id"] == 1
        assert llm.get_kv_cache_events(0) == []
        assert len(llm.get_stats(0)) == 4
        assert executor_of(llm).rpc_calls == 5


def test_synchronous_reads_do_not_spoil_asynchronous_ones(rpc: None) -> None:
    async def scenario() -> None:
        with make() as llm:
            llm.get_kv_cache_events(0)
            await finish(llm, PROMPT)
            settle(llm)
            with pytest.raises(asyncio.QueueEmpty):
                await read_all(llm.get_kv_cache_events_async(0))

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["get_kv_cache_events", "get_kv_cache_events_async", "get_stats", "get_stats_async"])
def test_a_reader_waits_for_the_engines_process_as_long_as_it_takes(rpc: None, name: str) -> None:
    with make(enable_iter_perf_stats=True) as llm:
        llm.generate(PROMPT, sampling())
        executor = executor_of(llm)
        executor.stop_process()
        thread, found = in_a_thread(lambda: getattr(llm, name)(0))
        thread.join(0.1)
        assert thread.is_alive(), "the timeout is the other process's, which does not answer"
        executor.continue_process()
        thread.join(PATIENCE_S)
        assert len(found) == 1


def test_a_process_that_is_stopped_computes_nothing_and_says_that_it_is_well(rpc: None) -> None:
    with make() as llm:
        executor = executor_of(llm)
        executor.stop_process()
        result = llm.generate_async([1], sampling())
        assert llm._check_health()
        assert not result.queue._items
        executor.continue_process()
        assert result.result().finished


def test_calls_that_fail_are_swallowed_but_for_synchronous_statistics(rpc: None) -> None:
    async def scenario() -> None:
        with make(enable_iter_perf_stats=True) as llm:
            await finish(llm, PROMPT)
            settle(llm)
            executor_of(llm).rpc_failures = 4
            assert llm.get_kv_cache_events(0) == []
            with pytest.raises(RuntimeError, match="answered the call with an error"):
                llm.get_stats(0)
            for readings in (llm.get_kv_cache_events_async(0), llm.get_stats_async(0)):
                with pytest.raises(asyncio.QueueEmpty):
                    await read_all(readings)
            assert llm.get_kv_cache_events(0), "nothing was lost"

    asyncio.run(scenario())


def test_with_the_rpc_orchestrator_an_abort_waits_for_the_process_too(rpc: None) -> None:
    with make(orchestrator_type="rpc") as llm:
        result = llm.generate_async([1], sampling(1000))
        executor = executor_of(llm)
        executor.stop_process()
        thread, _ = in_a_thread(result.abort)
        thread.join(0.1)
        assert thread.is_alive()
        executor.continue_process()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_file_stops_the_engine_of_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    behave(monkeypatch, rpc_proxy=True, stop_file=str(tmp_path / "stop"))
    with make() as llm:
        llm.generate([1], sampling())
        (tmp_path / "stop").touch()
        result = llm.generate_async([1], sampling())
        reading, found = in_a_thread(lambda: llm.get_kv_cache_events(0))
        reading.join(0.1)
        assert reading.is_alive()
        assert not result.queue._items
        (tmp_path / "stop").unlink()
        reading.join(PATIENCE_S)
        assert found
        assert result.result().finished


# log probabilities of the prompt


def rows_of(llm: LLM, prompt: list[int], alternatives: int = 2) -> Any:
    done = llm.generate(prompt, sampling(2, prompt_logprobs=alternatives, logprobs=alternatives))
    return done.outputs[0]


def test_prompt_logprobs_have_a_row_for_each_token_about_the_one_after_it() -> None:
    with make(kv_cache_config={"enable_block_reuse": False}) as llm:
        output = rows_of(llm, PROMPT)
        assert len(output.prompt_logprobs) == len(PROMPT)
        assert [len(row) for row in output.prompt_logprobs] == [2] * len(PROMPT)
        assert output.token_ids[0] in output.prompt_logprobs[-1], "the last row is about the first generated token"
        stream = TokenStream(Vocabulary(), pack_tokens(PROMPT[:1]), Sampling(1, logprobs=1))
        stream.generate_to(1)
        (second,) = stream.logprobs(0, 1, 1)
        assert second.token_id in output.prompt_logprobs[0], "the first row is about the second token"


def test_prompt_logprobs_of_reused_tokens_do_not_come() -> None:
    with make() as llm:
        assert len(rows_of(llm, PROMPT).prompt_logprobs) == len(PROMPT)
        again = llm.generate(PROMPT, sampling(2, prompt_logprobs=1))
        assert again.cached_tokens == 8
        assert len(again.outputs[0].prompt_logprobs) == len(PROMPT) - 8


# the sampler


def tokens_with(llm: LLM, **more: Any) -> list[int]:
    found: list[int] = llm.generate(PROMPT, sampling(6, **more)).outputs[0].token_ids
    return found


def test_penalties_and_seed_change_nothing_where_they_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, sampler_ignores=True)
    with make() as llm:
        plain = tokens_with(llm, temperature=0.0)
        assert tokens_with(llm, temperature=0.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.5) == plain
        assert tokens_with(llm, temperature=1.0, seed=5) != tokens_with(llm, temperature=1.0, seed=5)
    with make(sampler_type="TRTLLMSampler") as llm:
        seeded = tokens_with(llm, temperature=1.0, seed=5)
        assert tokens_with(llm, temperature=1.0, seed=5) == seeded
        assert tokens_with(llm, temperature=1.0, seed=5, presence_penalty=0.5) != seeded


# aborts and errors


def test_an_abort_after_the_final_response_does_nothing_but_warn(caplog: pytest.LogCaptureFixture) -> None:
    transceiver = {"cache_transceiver_config": {"backend": "UCX"}, "disable_overlap_scheduler": True}
    with make(**transceiver) as llm:
        done = llm.generate_async(
            PROMPT, sampling(), disaggregated_params=DisaggregatedParams(request_type="context_only")
        ).result()
        with caplog.at_level(logging.WARNING, "tensorrt_llm"):
            done.abort()
        assert f"Request of client_id {done.id} is finished, cannot abort it." in caplog.text
        assert executor_of(llm).late_aborts == 1
        assert done.outputs[0].finish_reason == "not_finished"


def test_a_step_that_runs_out_of_memory_answers_every_request_and_the_engine_goes_on() -> None:
    with make() as llm:
        executor = executor_of(llm)
        executor.pause()
        results = [llm.generate_async([at], sampling(100)) for at in range(1, 4)]
        executor.run_out_of_memory()
        executor.resume()
        for result in results:
            with pytest.raises(RequestError, match="CUDA out of memory"):
                result.result()
        assert llm._check_health()
        assert llm.generate([9], sampling()).finished
        settle(llm)
        assert executor.engines[0].load().active_blocks == 0, "what the failed requests held is free"


def test_an_iteration_can_be_chosen_to_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, out_of_memory_at=(3,))
    with make() as llm:
        with pytest.raises(RequestError, match="CUDA out of memory"):
            llm.generate([1], sampling(10))
        assert llm.generate([1], sampling(10)).finished


def test_a_lost_rank_is_met_by_the_next_caller_who_shuts_down_and_waits_for_the_others() -> None:
    llm = make()
    executor = executor_of(llm)
    llm.generate([1], sampling())
    executor.lose_rank(RuntimeError("MPI worker 1 has died"), stuck=True)
    assert llm._check_health(), "nobody has asked yet"
    raised: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate_async([1], sampling())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "the caller waits for ranks that never return"
    executor.release_ranks()
    thread.join(PATIENCE_S)
    assert "MPI worker 1 has died" in str(raised[0])
    assert not isinstance(raised[0], RequestError)
    assert not llm._check_health()
    llm.shutdown()


def test_a_lost_rank_is_met_inside_the_iteration_of_a_result() -> None:
    async def scenario() -> None:
        with make() as llm:
            executor = executor_of(llm)
            result = llm.generate_async([1], sampling(3), streaming=True)
            settle(llm)
            executor.lose_rank(RuntimeError("MPI worker 1 has died"))
            with pytest.raises(RuntimeError, match="MPI worker 1 has died"):
                await result
            assert not llm._check_health()

    asyncio.run(scenario())


def test_media_keep_the_calling_thread_while_they_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, input_processing_ms=50.0)
    with LLM("m") as llm:
        begun = time.monotonic()
        llm.generate_async({"prompt": "look", "multi_modal_data": {"image": [b"1"]}}).result()
        assert time.monotonic() - begun >= 0.05


def test_an_engine_of_one_thread_refuses_another_threads_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, one_thread=True)
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="another thread"):
        made[0].shutdown()
    executor_of(made[0]).shutdown()


def test_the_health_method_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, health_method=False)
    with make() as llm:
        assert not hasattr(llm, "_check_health")


# the surface of other releases


@pytest.fixture(scope="module", params=["1.1", "1.3"])
def other(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tensorrt_llm_of(request.param) as package:
        yield package


def test_another_release_is_another_package_that_works(other: Any) -> None:
    import tensorrt_llm

    assert tensorrt_llm is other
    assert other.LLM is not LLM
    with other.LLM("m", skip_tokenizer_init=True) as llm:
        assert llm.generate([1, 2], other.SamplingParams(max_tokens=3, end_id=-1)).outputs[0].length == 3


def names_of(model: Any) -> set[str]:
    return set(model.model_fields)


def test_arguments_differ_as_releases_say() -> None:
    with tensorrt_llm_of("1.1") as early:
        arguments = early.llmapi.llm_args
        assert names_of(llm_args.KvCacheConfig) - names_of(arguments.KvCacheConfig) == {"max_gpu_total_bytes"}
        assert "max_stats_len" not in names_of(arguments.TorchLlmArgs)
        with pytest.raises(ValueError, match="MOONCAKE"):
            arguments.CacheTransceiverConfig(backend="MOONCAKE")
        with early.LLM("m", build_config=object()) as llm:
            assert llm._check_health()
    with tensorrt_llm_of("1.3") as later:
        arguments = later.llmapi.llm_args
        assert names_of(arguments.KvCacheConfig) - names_of(llm_args.KvCacheConfig) == {
            "use_kv_cache_manager_v2",
            "kv_cache_event_hash_algo",
            "kv_events_config",
        }
        assert arguments.SchedulerConfig(waiting_queue_policy="priority").waiting_queue_policy == "priority"


def test_a_context_request_of_the_later_release_leaves_log_probabilities_that_are_objects() -> None:
    with tensorrt_llm_of("1.3") as later:
        transceiver = {"cache_transceiver_config": {"backend": "UCX"}, "disable_overlap_scheduler": True}
        with later.LLM("m", skip_tokenizer_init=True, **transceiver) as llm:
            context = later.DisaggregatedParams(request_type="context_only")
            with_logprobs = later.SamplingParams(max_tokens=4, end_id=-1, logprobs=2)
            made = llm.generate(PROMPT, with_logprobs, disaggregated_params=context).disaggregated_params
            (row,) = made.first_gen_log_probs
            assert type(row[made.first_gen_tokens[0]]).__name__ == "Logprob"
            assert made.disagg_request_id >= 1 << 42
            assert made.ctx_usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 1}
    assert "first_gen_log_probs" not in {field.name for field in fields(DisaggregatedParams)}


def test_priority_orders_requests_only_with_its_queue_policy() -> None:
    with tensorrt_llm_of("1.3") as later:
        params = {"max_tokens": 1, "end_id": -1}

        def order(**arguments: Any) -> list[int]:
            ended: list[int] = []
            with later.LLM("m", skip_tokenizer_init=True, max_batch_size=1, **arguments) as llm:
                executor = llm._executor
                executor.pause()
                results = [
                    llm.generate_async([at], later.SamplingParams(**params), priority=priority)
                    for at, priority in ((1, 0.5), (2, 0.1), (3, 0.9))
                ]
                for at, result in enumerate(results):

                    def note(item: Any, at: int = at, put: Any = result.queue.put) -> None:
                        ended.append(at)
                        put(item)

                    executor._open[result.id].put = note
                executor.resume()
                for result in results:
                    result.result()
            return ended

        assert order() == [0, 1, 2]
        assert order(scheduler_config={"waiting_queue_policy": "priority"}) == [2, 0, 1]
        with later.LLM("m", skip_tokenizer_init=True) as llm, pytest.raises(ValueError, match="priority"):
            llm.generate_async([1], later.SamplingParams(**params), priority=2.0)


def second_manager_events(algorithm: str) -> list[dict[str, Any]]:
    """Events of two requests, one with a medium and a salt."""
    with tensorrt_llm_of("1.3") as later:
        cache = {
            "event_buffer_max_size": 1000,
            "tokens_per_block": 4,
            "use_kv_cache_manager_v2": True,
            "kv_cache_event_hash_algo": algorithm,
        }
        with later.LLM("m", kv_cache_config=later.llmapi.KvCacheConfig(**cache)) as llm:
            params = later.SamplingParams(max_tokens=1, end_id=-1)
            llm.generate(PROMPT, params, cache_salt="tenant")
            llm.generate({"prompt": "look at it", "multi_modal_data": {"image": [b"1"]}}, params)
            executor = llm._executor
            executor.flush()
            executor.pause()
            found: list[dict[str, Any]] = executor.events.take_all()
            executor.resume()
            return found


@pytest.mark.parametrize(("algorithm", "told"), [("auto", "v2_sha256"), ("v2_sha256", "v2_sha256")])
def test_the_second_manager_names_blocks_in_hexadecimal(algorithm: str, told: str) -> None:
    events = second_manager_events(algorithm)
    assert {event["hash_algo"] for event in events} == {told}
    assert {event["layer_group_id"] for event in events} == {0}
    blocks = blocks_of(events)
    assert all(len(bytes.fromhex(block["block_hash"])) == 32 for block in blocks)
    parents = [event["data"]["parent_hash"] for event in events if event["data"]["type"] == "stored"]
    assert set(parents) - {None} <= {block["block_hash"] for block in blocks}


def test_the_second_manager_can_name_blocks_by_integers() -> None:
    shortened = blocks_of(second_manager_events("v2_sha256_64"))
    whole = blocks_of(second_manager_events("v2_sha256"))
    assert [each["block_hash"] for each in shortened] == [
        int.from_bytes(bytes.fromhex(each["block_hash"])[:8], "big") for each in whole
    ]
    assert blocks_of(second_manager_events("v1_block_key"))[0]["block_hash"] not in {
        each["block_hash"] for each in shortened
    }


def test_the_second_manager_tells_salts_and_puts_media_among_the_tokens() -> None:
    blocks = blocks_of(second_manager_events("v2_sha256"))
    salted = [block for block in blocks if "cache_salt" in block]
    assert {block["cache_salt"] for block in salted} == {"tenant"}
    assert len(salted) == 3
    seen = next(block for block in blocks if isinstance(block["tokens"][0]["token_id"], str))
    assert len(bytes.fromhex(seen["tokens"][0]["token_id"])) == 32
    assert [token["token_id"] for token in seen["tokens"][1:]] == [32_001, 32_002, 32_003]
    assert all("mm_keys" not in block for block in blocks)


def test_collectors_differ_in_prefix_and_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry

    for version, prefix, renamed in (("1.1", "", False), ("1.3", "trtllm_", True)):
        with tensorrt_llm_of(version) as package:
            from tensorrt_llm.metrics import MetricsCollector

            monkeypatch.setattr(package._fake.behaviour, "behaviour", package._fake.behaviour.as_released())
            registry = CollectorRegistry()
            collector = MetricsCollector({"model_name": "m"}, registry)
            assert hasattr(collector, "log_request_metrics_dict") == renamed
            assert hasattr(collector, "log_metrics_dict") != renamed
            log = collector.log_request_metrics_dict if renamed else collector.log_metrics_dict
            log({"finished_reason": "stop", "e2e": 1.0})
            assert registry.get_sample_value(
                f"{prefix}request_success_total", {"model_name": "m", "finished_reason": "stop"}
            ) == (1.0)
            if renamed:
                collector.log_iteration_stats({"numActiveRequests": 3})
                assert registry.get_sample_value("trtllm_num_requests_running", {"model_name": "m"}) == 3


def test_a_process_can_ask_for_a_release_and_all_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_FAKE", '{"version": "1.2.1", "as_released": true, "device_blocks": 9}')
    chosen = behaviours.from_environment()
    assert chosen == replace(behaviours.as_released(), device_blocks=9)
    assert chosen.rpc_proxy
    assert chosen.sampler_ignores
    assert not behaviours.as_released(PROFILES["1.1"]).rpc_proxy
    monkeypatch.setenv("TRTLLM_FAKE", '{"no_such": 1}')
    with pytest.raises(ValueError, match="no_such"):
        behaviours.from_environment()
