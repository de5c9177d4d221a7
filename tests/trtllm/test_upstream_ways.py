"""What TensorRT-LLM does otherwise than its names suggest, by version: each is met, or refused by its name."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.wire import codec as wire_codec
from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import (
    block_hashes,
    hash_seed,
    pack_tokens,
    sequence_hashes,
    unpack_hashes,
    unpack_tokens,
)
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.kernel.wire.requests import Generate, RefusalKind, Routing
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.kernel.worker_protocol.engine_numbers import UNLIKELY
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.trtllm import library
from poolgrid.plugins.trtllm.core.sampling import sampler_default
from tests.fakes import tensorrt_llm_of
from tests.trtllm.engines import (
    BLOCK,
    RunningEngine,
    expected,
    fake_library,
    make_request,
    running_engine,
)
from tests.trtllm.test_engine import hold
from tests.trtllm.test_engine_legs import decode_leg, prefilled
from tests.trtllm.test_engine_media import TEXT, item, picture, seen, text_request, with_media
from tests.trtllm.test_feed import behave

PICTURES: dict[str, Any] = {"modality": "multimodal", "max_batch_size": 64}


@pytest.fixture
def later() -> Iterator[ModuleType]:
    """The 1.3 line in place of 1.2.1."""
    with tensorrt_llm_of("1.3") as package:
        yield package


# -- log probabilities -------------------------------------------------------------------------------------------------


async def test_log_probabilities_of_a_prompt_belong_to_its_tokens_also_where_it_is_known() -> None:
    """Row t is about token t + 1: taken for token t, none of them would be among the likely ones."""

    # What the engine itself would say, so that each token is the likeliest after those before it.
    prompt = [5, *unpack_tokens(expected(make_request("r", [5], 19)))]
    async with running_engine() as told:
        for name in ("first", "again"):
            request = make_request(name, prompt, 4, prompt_logprobs=2)
            await told.finish(request)
            found = told.deltas[name][0].prompt_logprobs
            assert found is not None
            assert [each.token_id for each in found] == prompt[1:]
            assert all(UNLIKELY < each.logprob <= 0 for each in found)
            assert told.deltas[name][0].cached_tokens == 0, "the engine tells them of what it computes"
        await told.finish(make_request("plain", prompt, 4))
        assert told.deltas["plain"][0].cached_tokens == 0, "what they left is nobody's to reuse"


async def test_log_probabilities_of_the_first_token_travel_to_the_decode_worker(later: ModuleType) -> None:
    async with (
        running_engine(Role.PREFILL) as prefill,
        running_engine(Role.DECODE, max_batch_size=64) as decode,
    ):
        request = make_request("r", logprobs=2)
        params = await prefilled(prefill, request)
        made = prefill.engine._calls.library.disaggregated_params
        calls = hold(decode)
        await decode.finish(decode_leg(request, params))
        assert decode.output("r") == expected(request)
        carried = calls[0]["disaggregated_params"].first_gen_log_probs
        assert carried, "1.3 has them"
        kinds = {type(each) for row in carried for each in (row.values() if isinstance(row, dict) else [row])}
        assert kinds == {decode.engine._calls.library.logprob}, made


# -- sampling ----------------------------------------------------------------------------------------------------------


def asked(fields: dict[str, Any]) -> Generate:
    """A request with a seed, or with fields that only the engine reads."""
    more = fields if "seed" in fields else {"seed": None, "engine_fields": fields}
    return make_request("r", **more)


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 3},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ],
)
async def test_what_the_sampler_would_ignore_is_refused_by_name(given: dict[str, Any]) -> None:
    async with running_engine(override_engine_args='{"sampler_type": "TorchSampler"}') as told:
        with pytest.raises(RefusedError, match=f"{list(given)[-1]} is .* sampler_type TRTLLMSampler") as refused:
            told.engine.submit(asked(given))
        assert refused.value.kind is RefusalKind.CANNOT_DO, "another worker's may honour it"
        assert list(given)[-1] in dict(told.engine.inabilities), "and the card says it"
        neutral: dict[str, Any] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
        await told.finish(asked(neutral))
        await told.finish(make_request("t", temperature=0.0))
    async with running_engine(override_engine_args="") as told:
        assert told.engine.inabilities == ()
        await told.finish(asked(given))


async def test_a_field_that_the_engine_does_not_have_is_refused_by_name() -> None:
    async with running_engine() as told:
        with pytest.raises(RefusedError, match=r"quiet is given, and TensorRT-LLM .+ has no such") as refused:
            told.engine.submit(make_request("r", engine_fields={"min_p": 0.1, "quiet": True}))
    assert refused.value.kind is RefusalKind.CANNOT_DO, "another worker may have it"


async def test_a_guide_is_refused_where_the_engine_has_no_backend_for_it() -> None:
    async with running_engine(guided_decoding_backend=None) as told:
        assert [name for name, _ in told.engine.inabilities] == ["guided_decoding"]
        with pytest.raises(RefusedError, match=r"guided_regex is set, .* --guided-decoding-backend xgrammar"):
            told.engine.submit(make_request("r", guided_regex="a+"))


@pytest.mark.parametrize(
    ("version", "values", "sampler"),
    [
        ("1.2.1", {}, "TRTLLMSampler"),
        ("1.2.1", {"sampler_type": "TorchSampler"}, None),
        ("1.2.1", {"speculative_config": {"decoding_type": "MTP"}}, None),
        ("1.3.0", {}, None),
    ],
)
def test_the_default_sampler_is_one_that_honours_seeds(
    version: str, values: dict[str, Any], sampler: str | None
) -> None:
    assert sampler_default(version, values).get("sampler_type") == sampler


async def test_priorities_are_given_with_the_policy_that_honours_them(later: ModuleType) -> None:
    async with running_engine() as told:
        assert told.llm.args.scheduler_config.waiting_queue_policy == "priority"
        calls = hold(told)
        await told.finish(make_request("r", routing=Routing(priority=1)))
        assert calls[0]["priority"] == 0.75
        await told.finish(make_request("s"))
        assert "priority" not in calls[1]


async def test_a_turn_of_a_session_is_a_conversation_of_its_tenant(later: ModuleType) -> None:
    async with running_engine() as told:
        calls = hold(told)
        for tenant in (1, 2):
            turn = SessionTurn("s", tenant)
            await told.finish(msgspec.structs.replace(make_request(f"r{tenant}"), turn=turn))
        await told.finish(make_request("no turn"))
        named = [getattr(call.get("conversation_params"), "conversation_id", None) for call in calls]
        assert named == ["0000000000000001-s", "0000000000000002-s", None]


async def test_a_release_without_conversations_is_given_none() -> None:
    async with running_engine() as told:
        calls = hold(told)
        await told.finish(msgspec.structs.replace(make_request(), turn=SessionTurn("s")))
        assert "conversation_params" not in calls[0]


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256", "v2_sha256_64"])
async def test_events_of_the_second_cache_manager_are_understood_with_their_salts(
    later: ModuleType, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = later.LLM
    original = llm.__init__

    def with_the_second(self: Any, *args: Any, **given: Any) -> None:
        config = given["kv_cache_config"]
        values = config if isinstance(config, dict) else config.model_dump(exclude_unset=True)
        chosen = {**values, "use_kv_cache_manager_v2": True, "kv_cache_event_hash_algo": algorithm}
        original(self, *args, **{**given, "kv_cache_config": later.llmapi.KvCacheConfig(**chosen)})

    monkeypatch.setattr(llm, "__init__", with_the_second)

    async with running_engine() as told:
        prompt = list(range(9))
        for salt in ("tenant", ""):  # an event that names none says so once another named one
            await told.finish(make_request(f"r{salt}", prompt, 1, routing=Routing(cache_salt=salt)))
        wanted = {
            each
            for salt in ("", "tenant")
            for each in sequence_hashes(block_hashes(pack_tokens(prompt), BLOCK, hash_seed("", salt)))
        }
        await told.until(lambda: names(told) == wanted)
        assert feed_of(told)["lost_events"] == 0


@pytest.mark.parametrize(("algorithm", "named"), [("auto", True), ("v2_sha256", False)])
async def test_a_salt_that_1_4_does_not_name_is_known_by_the_hash_or_not_at_all(algorithm: str, named: bool) -> None:
    with tensorrt_llm_of("1.4"):
        override = json.dumps({"kv_cache_config": {"kv_cache_event_hash_algo": algorithm}})
        async with running_engine(override_engine_args=override, max_batch_size=8) as told:
            prompt, other = list(range(9)), list(range(20, 29))
            await told.finish(make_request("r", prompt, 1, routing=Routing(cache_salt="tenant"), seed=None))
            await told.finish(make_request("s", other, 1, seed=None))
            seeds = {hash_seed("", "tenant"): prompt} if named else {}
            wanted = {
                each
                for seed, tokens in {**seeds, hash_seed("", ""): other}.items()
                for each in sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK, seed))
            }
            await told.until(lambda: names(told) == wanted)


async def test_an_engine_that_sleeps_has_no_blocks() -> None:
    with tensorrt_llm_of("1.4"):
        async with running_engine(override_engine_args="", max_batch_size=8) as told:
            await told.finish(make_request("r", range(9), 1, seed=None))
            await told.until(lambda: bool(names(told)))
            await asyncio.to_thread(told.llm.release, ["model_weights"])
            assert names(told), "weights only"
            await asyncio.to_thread(told.llm.release, ["kv_cache"])
            await told.until(lambda: not names(told))


def names(told: RunningEngine) -> set[int]:
    return {
        each
        for chain in told.engine.restate(0)
        if isinstance(chain, BlocksStored)
        for each in unpack_hashes(chain.sequence_hashes)
    }


def feed_of(told: RunningEngine) -> dict[str, Any]:
    feed: Any = told.engine.describe()["feed"]
    rank: dict[str, Any] = feed["ranks"][0]
    return rank


# -- media -------------------------------------------------------------------------------------------------------------


async def test_pictures_are_prepared_beside_the_workers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(**PICTURES) as told:
        threads: list[threading.Thread] = []
        original = told.llm._prepare_input

        def prepare(inputs: Any) -> Any:
            threads.append(threading.current_thread())
            return original(inputs)

        told.llm._prepare_input = prepare
        await told.finish(with_media(make_request(), item(picture())))
        assert threads
        assert threading.main_thread() not in threads


async def test_an_output_behind_pictures_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, vocabulary_size=120)  # all of it is text

    async with running_engine(**PICTURES) as told:
        request = with_media(make_request(max_tokens=12), item(picture()))
        await told.finish(request)
        whole = told.output("r")
        moved = msgspec.structs.replace(
            request,
            request_id="moved",
            token_ids=request.token_ids + whole[:20],
            sampling=msgspec.structs.replace(request.sampling, max_tokens=7),
            routing=Routing(emitted_tokens=5),
        )
        calls = hold(told)
        await told.finish(moved)
        assert calls[0]["inputs"]["prompt"] == TEXT + "".join(chr(each - 3) for each in whole[:20:4])
        assert told.output("moved") == whole[20:]


async def test_an_output_behind_pictures_that_text_cannot_carry_on_is_refused_and_never_repeated() -> None:
    async with running_engine(**PICTURES) as told:
        request = with_media(make_request(max_tokens=12), item(picture()))
        moved = msgspec.structs.replace(
            request, token_ids=request.token_ids + pack_tokens([5000, 6000]), routing=Routing(emitted_tokens=2)
        )
        last = await told.finish(moved)
        assert (last.finish_reason, last.refusal, last.token_ids) == ("error", RefusalKind.CANNOT_DO, b"")
        assert "the output has begun on another worker (2 tokens)" in (last.error or "")
        await told.finish(make_request("s"))


def model(directory: Path, architecture: str) -> str:
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return str(directory)


async def test_a_model_that_cannot_encode_by_itself_has_no_encode_workers(tmp_path: Path) -> None:
    path = model(tmp_path, "Llama4ForConditionalGeneration")
    with pytest.raises(ValueError, match="cannot run the vision part of Llama4ForConditionalGeneration"):
        async with running_engine(Role.ENCODE, model_path=path):
            pass
    path = model(tmp_path, "LlavaNextForConditionalGeneration")
    async with running_engine(Role.ENCODE, model_path=path):
        pass


async def test_a_model_that_takes_text_only_has_no_multimodal_workers(tmp_path: Path) -> None:
    path = model(tmp_path, "Qwen3ForCausalLM")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM takes text only"):
        async with running_engine(model_path=path, **PICTURES):
            pass
    async with running_engine(model_path=path):
        pass


async def test_embeddings_are_refused_where_the_models_class_takes_none(tmp_path: Path) -> None:
    path = model(tmp_path, "Qwen2VLForConditionalGeneration")
    async with running_engine(model_path=path, **PICTURES) as told:
        tensors = MediaItem(MediaKind.EMBEDDINGS, b"x", "application/x-safetensors", digest_media(b"x"))
        media = wire_codec.multimodal.encode(MultimodalInput(TEXT, (tensors,)))
        last = await told.finish(msgspec.structs.replace(make_request(), multimodal=media))
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO)
        assert "class of this model does not take" in (last.error or "")
        await told.finish(with_media(make_request("s"), item(picture())))
        assert told.output("s") == expected(text_request("s"), seen())


async def test_a_worker_that_has_its_pictures_encoded_elsewhere_encodes_none() -> None:
    elsewhere = "dyn://dynamo.tensorrt_llm_encode.generate"
    async with (
        running_engine(Role.ENCODE) as encode,
        running_engine(encode_endpoint=elsewhere, **PICTURES) as told,
    ):
        request = with_media(make_request(), item(picture()))
        last = await told.finish(request)
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.CANNOT_DO)
        assert "which dynamo.tensorrt_llm_encode.generate makes (encode_endpoint)" in (last.error or "")
        encoded = await encode.finish(msgspec.structs.replace(request, stage=Stage.ENCODE))
        bare = msgspec.structs.replace(item(picture()), data=b"")
        leg = with_media(make_request("s"), bare)
        await told.finish(msgspec.structs.replace(leg, disaggregated_params=encoded.disaggregated_params))
        assert told.output("s") == expected(text_request("s"), seen())


# -- its log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("set_before", "wanted"), [(None, "DEBUG"), ("VERBOSE", "VERBOSE")])
def test_the_log_level_is_the_workers_unless_somebody_has_set_it(
    set_before: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if set_before is None:
        monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TLLM_LOG_LEVEL", set_before)
    before = library.log.level
    library.log.setLevel(logging.DEBUG)
    try:
        fake_library()
        assert os.environ["TLLM_LOG_LEVEL"] == wanted
    finally:
        library.log.setLevel(before)
        os.environ.pop("TLLM_LOG_LEVEL", None)
