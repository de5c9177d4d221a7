"""Events that the engine publishes by itself: asked for by its arguments, followed by its worker, never read twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poolgrid.kernel.kv_events.pub import EngineStored
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import BASE_SEED, block_hashes, hash_seed, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.requests import Routing
from poolgrid.plugins.trtllm.arguments.contract import ContractError
from poolgrid.plugins.trtllm.arguments.engine_arguments import EngineArguments, resolve_files
from poolgrid.plugins.trtllm.arguments.engine_rules import EventStreamEndpoints
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError
from tests.fakes import tensorrt_llm_of
from tests.trtllm.engines import BLOCK, RunningEngine, make_request, running_engine


def arguments(kv_cache: dict[str, Any] | None = None, stream: dict[str, Any] | None = None, **other: Any) -> str:
    config = {"enable_kv_cache_events": True, **(stream or {})}
    return json.dumps({"kv_cache_config": {"kv_events_config": config, **(kv_cache or {})}, **other})


def resolved(override: str, **settings: Any) -> EngineArguments:
    return resolve_files(TrtllmSettings(model_path="m", override_engine_args=override, **settings))


def endpoints(directory: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"}


def path_of(prompt: range, salt: str = "") -> list[int]:
    return sequence_hashes(block_hashes(pack_tokens(prompt), BLOCK, hash_seed("", salt)))


def told(engine: RunningEngine, rank: int = 0) -> set[int]:
    return {
        each
        for event in engine.engine.restate(rank)
        if isinstance(event, BlocksStored)
        for each in unpack_hashes(event.sequence_hashes)
    }


def held(engine: RunningEngine, rank: int = 0) -> set[int]:
    return {each for event in engine.llm.resident_blocks(rank) for each in unpack_hashes(event.sequence_hashes)}


@pytest.mark.parametrize("replay", [True, False])
async def test_the_worker_follows_the_engines_own_stream_and_reads_no_events(tmp_path: Path, replay: bool) -> None:
    given = endpoints(tmp_path)
    if not replay:
        del given["replay_endpoint"]

    with tensorrt_llm_of("1.3"):
        async with running_engine(
            override_engine_args=arguments({"max_tokens": 12 * BLOCK}, given), max_batch_size=2, max_seq_len=40
        ) as engine:
            reads: list[Any] = []
            engine.llm.get_kv_cache_events_async = reads.append
            for at in range(6):
                await engine.finish(make_request(f"r{at}", range(10 * at, 10 * at + 20)))
            await engine.turned(lambda: told(engine) == held(engine))
            assert told(engine).issuperset(path_of(range(50, 70))[:-1])
            assert told(engine).isdisjoint(path_of(range(20))), "its blocks were needed"
            stored = [event for event in engine.events[0] if isinstance(event, BlocksStored)]
            assert stored, "the pool is told"
            assert not reads
            described: Any = engine.engine.describe()
            assert described["feed"]["readers"] == {"events": "stream", "statistics": "ok"}
            assert described["feed"]["ranks"][0]["state"] == "live"


async def test_each_rank_has_a_stream_of_its_own(tmp_path: Path) -> None:
    with tensorrt_llm_of("1.3"):
        async with running_engine(
            override_engine_args=arguments(stream=endpoints(tmp_path)),
            enable_attention_dp=True,
            tensor_parallel_size=2,
            max_batch_size=8,
        ) as engine:
            await engine.finish(make_request("r", range(20), routing=Routing(dp_rank=1)))
            # Not once the prompt's blocks are told: the engine holds one more, which is told a moment later.
            await engine.turned(lambda: told(engine, 1) == held(engine, 1))
            assert told(engine, 1).issuperset(path_of(range(20))[:-1])
            assert not told(engine, 0)


async def test_blocks_are_a_tenants_by_their_names_where_the_stream_names_no_salt(tmp_path: Path) -> None:
    with tensorrt_llm_of("1.3"):
        async with running_engine(
            override_engine_args=arguments(stream=endpoints(tmp_path)), max_batch_size=8
        ) as engine:
            await engine.finish(make_request("salted", range(20), routing=Routing(cache_salt="a tenant")))
            await engine.finish(make_request("plain", range(20)))
            await engine.turned(lambda: told(engine) == held(engine))
            assert told(engine).issuperset([*path_of(range(20))[:-1], *path_of(range(20), "a tenant")[:-1]])


async def test_a_version_without_the_stream_refuses_its_arguments(tmp_path: Path) -> None:
    with tensorrt_llm_of("1.2.1"), pytest.raises(EngineBrokenError, match="use_kv_cache_manager_v2") as refused:
        async with running_engine(override_engine_args=arguments(stream=endpoints(tmp_path)), max_batch_size=8):
            pass
    assert "starting TensorRT-LLM 1.2.1 failed" in str(refused.value)


def test_the_stream_takes_the_place_of_the_buffer_and_needs_the_second_manager() -> None:
    made = resolved(arguments())
    assert made.stream == EventStreamEndpoints("tcp://*:5557")
    assert made.values["kv_cache_config"]["event_buffer_max_size"] == 0
    assert made.values["kv_cache_config"]["use_kv_cache_manager_v2"] is True
    assert not made.warnings
    off = resolved(arguments(stream={"enable_kv_cache_events": False}))
    assert off.stream is None
    assert off.values["kv_cache_config"]["event_buffer_max_size"] > 0
    unheard = resolved(arguments(), publish_events_and_metrics=False)
    assert unheard.stream is None
    assert "no process follows it" in unheard.warnings[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (arguments(stream={"publisher": "null"}), "kv_events_config.publisher: is 'null'"),
        (
            arguments(stream={"publisher": "nats"}),
            "kv_events_config.publisher: is \"nats\", allowed is 'null' or 'zmq'",
        ),
        (arguments({"use_kv_cache_manager_v2": False}), "use_kv_cache_manager_v2: is false with"),
        (arguments({"enable_block_reuse": False}), "enable_block_reuse is false: there are no events"),
        (arguments({"max_attention_window": [512, 4096]}), "which publishes the blocks of one window"),
        (arguments(pipeline_parallel_size=2), "pipeline_parallel_size: is 2 with"),
        (
            arguments(stream={"endpoint": "inproc://events"}),
            'endpoint: is "inproc://events", allowed are tcp://HOST:PORT',
        ),
        (
            arguments(stream={"endpoint": "tcp://*:65535"}, enable_attention_dp=True, tensor_parallel_size=2),
            "1 to 65534",
        ),
        (
            arguments(stream={"replay_endpoint": "tcp://*:5558"}, enable_attention_dp=True, tensor_parallel_size=2),
            "2 ports from there and from endpoint",
        ),
        (arguments(stream={"buffer_steps": 0}), "buffer_steps: is 0, allowed is a value greater than 0"),
        (arguments(stream={"endpiont": "x"}), "did you mean 'endpoint'?"),
    ],
)
def test_a_stream_that_nobody_could_follow_is_refused(given: str, words: str) -> None:
    with pytest.raises(ContractError) as refused:
        resolved(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("stream", "rank", "addresses"),
    [
        (
            EventStreamEndpoints("tcp://*:5557", "tcp://0.0.0.0:5657"),
            3,
            ("tcp://127.0.0.1:5560", "tcp://127.0.0.1:5660"),
        ),
        (EventStreamEndpoints("tcp://[::]:5557"), 1, ("tcp://[::1]:5558", "")),
        (EventStreamEndpoints("tcp://10.0.0.7:5557"), 0, ("tcp://10.0.0.7:5557", "")),
        (EventStreamEndpoints("ipc:///run/events", "ipc:///run/replay"), 0, ("ipc:///run/events", "ipc:///run/replay")),
        (
            EventStreamEndpoints("ipc:///run/events", "ipc:///run/replay"),
            2,
            ("ipc:///run/events_dp2", "ipc:///run/replay_dp2"),
        ),
    ],
)
def test_a_rank_is_found_where_it_binds(stream: EventStreamEndpoints, rank: int, addresses: tuple[str, str]) -> None:
    assert stream.of_rank(rank) == addresses


def test_a_chain_whose_seed_nobody_knows_has_no_names() -> None:
    salted, plain = pack_tokens(range(4)), pack_tokens(range(4, 8))
    asked: list[tuple[bytes, int]] = []

    def seed_of(tokens: bytes, name: int) -> int | None:
        asked.append((tokens, name))
        return None if tokens == salted else BASE_SEED

    translator = EngineTranslator(4, 100, seed_of)

    def stored(name: int, parent: int | None, tokens: bytes) -> EngineStored:
        return EngineStored([name], parent, tokens, 4, None, Tier.DEVICE)

    events = translator.translate([stored(1, None, salted), stored(2, 1, plain), stored(3, None, plain + salted[:8])])

    assert [unpack_hashes(event.sequence_hashes) for event in events if isinstance(event, BlocksStored)] == [
        tuple(sequence_hashes(block_hashes(plain, 4)))
    ]
    assert asked == [(salted, 1), (plain, 3)]
    assert translator.ignored_blocks == 2
