"""The fake's surface agrees with the contract facts: names, order, defaults, types, enums, unknown-argument errors."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import tests.fakes.tensorrt_llm as fake
from tests.fakes import FAKES_PATH, install_tensorrt_llm
from tests.fakes.tensorrt_llm._fake.block_key import block_key_hash
from tests.fakes.tensorrt_llm.bindings import executor as bindings
from tests.fakes.tensorrt_llm.disaggregated_params import DisaggregatedParams
from tests.fakes.tensorrt_llm.executor.request import LoRARequest
from tests.fakes.tensorrt_llm.executor.result import CompletionOutput, GenerationResult
from tests.fakes.tensorrt_llm.inputs import default_multimodal_input_loader
from tests.fakes.tensorrt_llm.llmapi import LLM, MultimodalEncoder, llm_args
from tests.fakes.tensorrt_llm.sampling_params import (
    BatchedLogitsProcessor,
    GuidedDecodingParams,
    LogitsProcessor,
    SamplingParams,
)
from tests.fakes.tensorrt_llm.scheduling_params import SchedulingParams
from tests.trtllm.facts import facts, fields_of

MODELS: dict[str, type[BaseModel]] = {
    "llm_args": llm_args.TorchLlmArgs,
    "kv_cache_config": llm_args.KvCacheConfig,
    "scheduler_config": llm_args.SchedulerConfig,
    "dynamic_batch_config": llm_args.DynamicBatchConfig,
    "cache_transceiver_config": llm_args.CacheTransceiverConfig,
    "cuda_graph_config": llm_args.CudaGraphConfig,
    "moe_config": llm_args.MoeConfig,
    "moe_load_balancer_config": llm_args.MoeLoadBalancerConfig,
    "attention_dp_config": llm_args.AttentionDpConfig,
    "nvfp4_gemm_config": llm_args.Nvfp4GemmConfig,
    "kv_connector_config": llm_args.KvCacheConnectorConfig,
    "peft_cache_config": llm_args.PeftCacheConfig,
    "torch_compile_config": llm_args.TorchCompileConfig,
    "lora_config": llm_args.LoraConfig,
}
SPECULATIVE: dict[str, type[BaseModel]] = {
    "Eagle": llm_args.EagleDecodingConfig,
    "MTP": llm_args.MTPDecodingConfig,
    "NGram": llm_args.NGramDecodingConfig,
}
DATACLASSES: dict[str, type] = {
    "disaggregated_params": DisaggregatedParams,
    "sampling_params": SamplingParams,
    "guided_decoding_params": GuidedDecodingParams,
    "completion_output": CompletionOutput,
    "lora_request": LoRARequest,
    "scheduling_params": SchedulingParams,
    "kv_cache_retention_config": bindings.KvCacheRetentionConfig,
}
REQUIRED = "<required>"
PLAIN_TYPE = re.compile(r"(bool|int|float|str|list\[(int|str|list\[int\])\]|dict\[(int,int|str,str)\])( \| None)?$")


def shown(annotation: Any) -> str:
    """A type as the facts write it."""
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return text.replace(", ", ",").replace("typing.", "")


def plain(value: Any) -> Any:
    """A default as the facts write it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    return value


def written(value: Any) -> Any:
    """A default of the facts, without the enum's class."""
    if isinstance(value, str) and re.match(r"(LoadFormat|SamplerType)\.", value):
        return value.partition(".")[2]
    return value


def check_model(model: type[BaseModel], section: dict[str, dict[str, Any]], where: str) -> None:
    for name, fact in section.items():
        assert name in model.model_fields, f"{where}.{name} is missing from the fake"
        field = model.model_fields[name]
        default = field.get_default(call_default_factory=True)
        if fact["default"] == REQUIRED:
            assert default is PydanticUndefined, f"{where}.{name} has the default {default!r}"
        elif where != "auto_deploy" or name != "kv_cache_config":
            assert plain(default) == written(fact["default"]), f"{where}.{name}"
        if fact["type"] and PLAIN_TYPE.match(fact["type"]):
            assert shown(field.annotation) == fact["type"], f"{where}.{name}"


@pytest.mark.parametrize("section", sorted(MODELS))
def test_argument_models_have_the_fields_defaults_and_types_of_the_contract(section: str) -> None:
    known = fields_of(facts()[section])
    check_model(MODELS[section], known, section)
    assert list(MODELS[section].model_fields) == list(known)


@pytest.mark.parametrize("kind", sorted(SPECULATIVE))
def test_speculative_models_have_the_base_and_their_own_fields(kind: str) -> None:
    spec = facts()["speculative"]
    known = {**spec["decoding_base"], **spec[kind]}
    check_model(SPECULATIVE[kind], known, kind)
    assert set(SPECULATIVE[kind].model_fields) == {*known, "decoding_type"}


@pytest.mark.parametrize("section", sorted(DATACLASSES))
def test_dataclasses_have_the_fields_and_defaults_of_the_contract(section: str) -> None:
    kind = DATACLASSES[section]
    public = {field.name: field for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    known = {
        name: each
        for name, each in fields_of(facts()[section]).items()
        if name not in ("properties", "TokenRangeRetentionConfig")
    }
    assert list(public) == list(known)
    for name, fact in known.items():
        field = public[name]
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if fact["default"] == REQUIRED:
            assert default is dataclasses.MISSING, name
        else:
            assert plain(default) == fact["default"], name
    declared = facts()[section].get("_kind", "")
    if "slots=True" in declared:
        assert hasattr(kind, "__slots__")
        with pytest.raises(AttributeError):
            cast(Any, object.__new__(kind)).no_such_field = 1


def test_retention_ranges_have_the_fields_of_the_contract() -> None:
    known = facts()["kv_cache_retention_config"]["TokenRangeRetentionConfig"]
    for name, fact in known.items():
        field = {each.name: each for each in dataclasses.fields(bindings.TokenRangeRetentionConfig)}[name]
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
        assert default == fact["default"]


def check_signature(function: Any, known: dict[str, dict[str, Any]], keyword_only: bool = False) -> None:
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    named = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [each.name for each in named] == list(known)
    for each in named:
        default = REQUIRED if each.default is inspect.Parameter.empty else each.default
        assert default == known[each.name]["default"], each.name
        assert (each.kind is inspect.Parameter.KEYWORD_ONLY) == keyword_only


def test_signatures_have_the_order_and_defaults_of_the_contract() -> None:
    check_signature(LLM.__init__, fields_of(facts()["llm_constructor"]))
    check_signature(LLM.generate, facts()["generate"])
    check_signature(LLM.generate_async, facts()["generate_async"])
    check_signature(MultimodalEncoder.__init__, fields_of(facts()["multimodal_encoder"]["init"]))
    check_signature(default_multimodal_input_loader, facts()["default_multimodal_input_loader"]["params"], True)
    for name in ("get_stats", "get_stats_async", "get_kv_cache_events", "get_kv_cache_events_async"):
        assert facts()["llm_methods"][name].startswith("(timeout: float|None = 2)")
        assert inspect.signature(getattr(LLM, name)).parameters["timeout"].default == 2
    for name in facts()["llm_methods"]:
        assert name.startswith("_iteration") or name == "tokenizer" or hasattr(LLM, name), name
    processor = facts()["logits_processor"]
    for kind, key in ((LogitsProcessor, "__call__"), (BatchedLogitsProcessor, "batched.__call__")):
        names = [each.partition(":")[0] for each in processor[key]]
        assert list(inspect.signature(kind.__call__).parameters)[1:] == names


def test_a_result_has_the_fields_and_methods_of_the_contract() -> None:
    with LLM("m") as llm:
        result = llm.generate_async([5], SamplingParams(max_tokens=1))
        known = fields_of(facts()["request_output"])
        assert not result.finished
        for name, fact in known.items():
            if name in ("methods", "outputs") or fact["default"] == REQUIRED:
                assert name == "methods" or hasattr(result, name)
                continue
            assert getattr(result, name) == fact["default"], name
        for name in known["methods"]:
            for each in name.split("/"):
                assert callable(getattr(GenerationResult, each)), each
        for name in facts()["completion_output"]["properties"]:
            assert hasattr(result.outputs[0], name)
        for name in facts()["request_output"]["_repr_fields"]:
            assert f"{name}=" in repr(result)
        result.result()


def test_enums_have_the_members_of_the_contract() -> None:
    enums = facts()["enums"]
    for name in ("CapacitySchedulerPolicy", "ContextChunkingPolicy", "BatchingType", "LoadFormat", "SamplerType"):
        assert [each.name for each in getattr(llm_args, name)] == enums[name], name
    assert {each.name: each.value for each in bindings.KvCacheTransferMode} == enums["KvCacheTransferMode"]

    def words(annotation: Any) -> list[Any]:
        found: list[Any] = []
        for each in typing.get_args(annotation) or ():
            found += words(each) if typing.get_args(each) else [each]
        return [each for each in found if each is not type(None)]

    arguments = llm_args.TorchLlmArgs.model_fields
    assert words(llm_args.CacheTransceiverConfig.model_fields["backend"].annotation) == enums["CacheTransceiverBackend"]
    assert words(llm_args.MoeConfig.model_fields["backend"].annotation) == enums["MoeBackend"]
    assert words(arguments["allreduce_strategy"].annotation) == enums["AllReduceStrategy"]
    assert words(arguments["guided_decoding_backend"].annotation) == enums["guided_decoding_backend"]
    assert [None, *words(arguments["orchestrator_type"].annotation)] == enums["orchestrator_type"]
    for request_type in enums["request_type"]:
        assert DisaggregatedParams(request_type=request_type.upper()).request_type == request_type
    with pytest.raises(ValueError, match="Unknown request type"):
        DisaggregatedParams(request_type="prefill")


@pytest.mark.parametrize("key", ["max_batchsize", "model_kwargs", "no_such_thing"])
def test_an_unknown_argument_is_a_value_error_that_names_it(key: str) -> None:
    with pytest.raises(ValueError, match=f"LLM got invalid argument: {key}"):
        LLM("m", **cast(Any, {key: 1}))


@pytest.mark.parametrize("vector", facts()["block_hash"]["vectors"], ids=lambda each: str(each["hash"]))
def test_block_hashes_are_the_check_vectors(vector: dict[str, Any]) -> None:
    tokens = vector["tokens"]
    if isinstance(tokens, str):
        first, last = tokens.split("..")
        tokens = list(range(int(first), int(last) + 1))
    found = block_key_hash(tokens, vector["parent"], vector.get("cache_salt_id"), vector.get("lora_task_id"))
    assert found == vector["hash"]


def test_the_fake_can_be_imported_as_tensorrt_llm() -> None:
    install_tensorrt_llm()
    assert sys.modules["tensorrt_llm"] is fake
    program = (
        "import tensorrt_llm, tensorrt_llm.llmapi as a; print(tensorrt_llm.__version__, a.LLM is tensorrt_llm.LLM)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{FAKES_PATH}:{root}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [facts()["version"], "True"]
