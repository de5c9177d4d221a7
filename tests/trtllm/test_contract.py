"""The run-time argument facts are the contract's, and the checker finds every fault by its path."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.plugins.trtllm.arguments.contract import contract
from poolgrid.plugins.trtllm.arguments.engine_config import EngineFileError, parse_json, parse_yaml
from tests.trtllm.facts import facts, fields_of

RUN_TIME = json.loads(resources.files("poolgrid.plugins.trtllm.arguments").joinpath("arguments_1_2_1.json").read_text())

REWRITTEN = {
    ("llm_args", "tokenizer"),
    ("llm_args", "load_format"),
    ("llm_args", "batched_logits_processor"),
    ("llm_args", "sparse_attention_config"),
    ("llm_args", "speculative_config"),
    ("llm_args", "decoding_config"),
    ("llm_args", "mpi_session"),
    ("llm_args", "checkpoint_loader"),
    ("llm_args", "allreduce_strategy"),
    ("llm_args", "sampler_type"),
    ("llm_args", "ray_placement_config"),
    ("llm_args", "backend"),
    ("llm_args", "env_overrides"),
    ("nvfp4_gemm_config", "allowed_backends"),
    ("moe_load_balancer_config", "layer_updates_per_iter"),
    ("moe_config", "load_balancer"),
}
"""Types that the contract gives in words, or that a file can only hold in part."""


def uniform(type_text: str) -> str:
    """A type of the contract as the run-time facts write it."""
    for spelled, meant in (("pathlib.Path", "str"), ("str | Path", "str"), ("str | str", "str")):
        type_text = type_text.replace(spelled, meant)
    words = type_text.split(" | ")
    classes = {
        "KvCacheConfig": "kv_cache_config",
        "SchedulerConfig": "scheduler_config",
        "DynamicBatchConfig": "dynamic_batch_config",
        "CacheTransceiverConfig": "cache_transceiver_config",
        "CudaGraphConfig": "cuda_graph_config",
        "MoeConfig": "moe_config",
        "AttentionDpConfig": "attention_dp_config",
        "Nvfp4GemmConfig": "nvfp4_gemm_config",
        "KvCacheConnectorConfig": "kv_connector_config",
        "PeftCacheConfig": "peft_cache_config",
        "TorchCompileConfig": "torch_compile_config",
        "LoraConfig": "lora_config",
    }
    return " | ".join(classes.get(word, word) for word in words)


@pytest.mark.parametrize("section", sorted(RUN_TIME["sections"]))
def test_run_time_sections_have_the_contracts_fields_defaults_ranges_and_types(section: str) -> None:
    known = fields_of(facts()[section])
    made = RUN_TIME["sections"][section]
    assert list(made) == list(known)
    for name, fact in known.items():
        assert made[name]["default"] == fact["default"], name
        if "range" in fact:
            assert made[name]["range"] == fact["range"], name
        if (section, name) not in REWRITTEN:
            assert made[name]["type"] == uniform(fact["type"]), name


def test_run_time_speculation_and_enums_are_the_contracts() -> None:
    spec = facts()["speculative"]
    variants = RUN_TIME["unions"]["speculative"]["variants"]
    for kind in ("Eagle", "MTP", "NGram"):
        assert set(variants[kind]) == {*spec["decoding_base"], *spec[kind]}
        for name, fact in spec[kind].items():
            assert variants[kind][name]["default"] == fact["default"]
    for name, members in RUN_TIME["enums"].items():
        assert members == facts()["enums"][name]
    assert RUN_TIME["version"] == facts()["version"]


@pytest.mark.parametrize("section", sorted(RUN_TIME["sections"]))
def test_every_default_passes_its_own_type(section: str) -> None:
    for name, field in RUN_TIME["sections"][section].items():
        default = field["default"]
        if default == "<required>" or (isinstance(default, str) and default.endswith("()")):
            continue
        if isinstance(default, str):
            default = default.removeprefix("LoadFormat.").removeprefix("SamplerType.")
        nested: dict[str, Any] = {name: default}
        for outer in OUTER.get(section, ()):
            nested = {outer: nested}
        faults = contract().check(nested)
        assert not [each for each in faults if "required and absent" not in each.message], name


OUTER: dict[str, tuple[str, ...]] = {
    section: (section,)
    for section in RUN_TIME["sections"]
    if section not in ("llm_args", "dynamic_batch_config", "moe_load_balancer_config")
}
OUTER["dynamic_batch_config"] = ("dynamic_batch_config", "scheduler_config")
OUTER["moe_load_balancer_config"] = ("load_balancer", "moe_config")


OF_1_4 = """
iter_perf_stats_interval: 10
load_format: gms
attention_dp_config:
  enable_packed_sync: true
  enable_kv_balanced_admission: true
  enable_kv_cache_aware_routing: true
  kv_cache_routing_fair_share_multiplier: 2.0
  kv_cache_routing_cold_start_warmup: true
  kv_cache_routing_account_for_in_transfer: true
  kv_cache_routing_conversation_affinity: true
  kv_cache_routing_max_sessions: 1024
  kv_cache_routing_new_conv_placement: least_prefill
  kv_cache_routing_strict_conversation_affinity: true
  kv_cache_routing_strict_affinity_max_wait_iters: 0
cache_transceiver_config:
  backend: NIXL
  transceiver_runtime: PYTHON
  kv_cache_bounce_size_mb: 64
  agent_bounce_buffer_enable: true
  agent_bounce_params: {max_chunk_size: 32MB}
cuda_graph_config: {mode: decode, enable_padding: true}
moe_config: {backend: MEGAMOE_DEEPGEMM}
nvfp4_gemm_config: {allowed_backends: [marlin]}
kv_connector_config: {connector: kvbm}
lora_config: {overlap_lora_and_base: true}
ray_placement_config: {defer_workers_init: true}
speculative_config: {decoding_type: DFlash, max_draft_len: 3, block_size: 8, mask_token_id: 5}
sparse_attention_config: {algorithm: deepseek_v4, index_topk: 512, indexer_k_dtype: fp4}
"""


def test_arguments_of_1_4_pass_without_the_package() -> None:
    assert contract().check(yaml.safe_load(OF_1_4)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("backend: _autodeploy", "backend: run trtllm-serve MODEL --backend _autodeploy"),
        ("iter_perf_stats_interval: 0", "iter_perf_stats_interval: greater than 0"),
        ("load_format: gmz", "load_format: did you mean 'GMS'?"),
        (
            "attention_dp_config: {kv_cache_routing_new_conv_placement: least_token}",
            "attention_dp_config.kv_cache_routing_new_conv_placement: did you mean 'least_tokens'?",
        ),
        (
            "cache_transceiver_config: {agent_bounce_params: 3}",
            "cache_transceiver_config.agent_bounce_params: a mapping",
        ),
        ("cache_transceiver_config: {backend: ucx}", "cache_transceiver_config.backend: did you mean 'UCX'?"),
        ("max_batchsize: 3", "max_batchsize: did you mean 'max_batch_size'?"),
        ('max_batch_size: "3"', "max_batch_size: without quotes"),
        ("max_batch_size: true", "max_batch_size: allowed is an integer"),
        ("tensor_parallel_size: null", "tensor_parallel_size: is null"),
        ("tokens_per_block: 32", "tokens_per_block: did you mean 'kv_cache_config.tokens_per_block'?"),
        ("build_config: {}", "build_config: TensorRT engine backend"),
        ("mpi_session: x", "mpi_session: is a Python object"),
        ("kv_cache_config: 3", "kv_cache_config: a mapping"),
        (
            "kv_cache_config: {free_gpu_memory_fraction: 1.4}",
            "kv_cache_config.free_gpu_memory_fraction: or equal to 1",
        ),
        ("kv_cache_config: {max_attention_window: [8, 0]}", "kv_cache_config.max_attention_window[1]: greater than 0"),
        ("kv_cache_config: {max_attention_window: []}", "kv_cache_config.max_attention_window: at least one"),
        ("kv_cache_config: {max_attention_window: [a]}", "kv_cache_config.max_attention_window[0]: an integer"),
        (
            "cache_transceiver_config: {kv_transfer_timeout_ms: 0}",
            "cache_transceiver_config.kv_transfer_timeout_ms: than 0",
        ),
        ("speculative_config: {max_draft_len: 3}", "speculative_config.decoding_type: is required"),
        ("speculative_config: {decoding_type: eagle}", "speculative_config.decoding_type: did you mean 'Eagle'?"),
        ("speculative_config: {decoding_type: Medusa}", "speculative_config.decoding_type: 'Eagle', 'MTP'"),
        ("speculative_config: {decoding_type: Eagle}", "speculative_config.max_draft_len: required"),
        (
            "speculative_config: {decoding_type: Eagle, max_draft_len: 1, speculative_model_dir: a, "
            "speculative_model: b}",
            "speculative_config.speculative_model_dir: not a known",
        ),
        (
            "speculative_config: {decoding_type: MTP, eagle_choices: null}",
            "speculative_config.eagle_choices: not a known",
        ),
        ("moe_config: {load_balancer: {num_slot: 3}}", "moe_config.load_balancer.num_slot: did you mean 'num_slots'?"),
        ("nvfp4_gemm_config: {allowed_backends: [cutlas]}", "nvfp4_gemm_config.allowed_backends[0]: 'cutlass'"),
        ("sparse_attention_config: {algorithm: rocket, topk: x}", "sparse_attention_config.topk: an integer"),
        ("batch_wait_timeout_ms: 1e-3", "batch_wait_timeout_ms: 1.0e-3"),
        ("batch_wait_timeout_ms: .inf", "batch_wait_timeout_ms: a number"),
        ("kv_cache_config: {3: 4}", "kv_cache_config.3: the key is no text"),
    ],
)
def test_a_fault_names_its_path_and_what_is_allowed(text: str, expected: str) -> None:
    path, _, message = expected.partition(": ")
    faults = contract().check(parse_yaml(text, "f.yaml"))
    assert any(each.path == path and message in str(each) for each in faults), [str(each) for each in faults]


@pytest.mark.parametrize(
    "text",
    [
        "load_format: dummy",
        "cuda_graph_config: null",
        "moe_config: {load_balancer: eplb.yaml}",
        "moe_config: {load_balancer: {initial_global_assignments: {0: [1, 2]}}}",
        "env_overrides: {A: 1, B: x}",
        "batch_wait_timeout_ms: 3",
        "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: x}",
        "sparse_attention_config: {algorithm: dsa, index_topk: 3}",
        "cp_config: {anything: [1]}",
        "backend: pytorch",
        "",
    ],
)
def test_what_the_contract_allows_passes(text: str) -> None:
    assert contract().check(parse_yaml(text, "f.yaml")) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(RUN_TIME["sections"]["llm_args"])) | st.text(max_size=8), JSON))
def test_no_value_breaks_the_checker(arguments: dict[str, Any]) -> None:
    for fault in contract().check(arguments):
        assert str(fault)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is written twice"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: [", "line"),
        ("- 1", "the top is a list"),
        ("3: 4", "the key 3 at the top is not text"),
        ("? [1]\n: 2", "neither text nor an integer"),
        ("a: !!python/object:os.system 1", "could not determine a constructor"),
        ("[" * 5000, "deep"),
        ("a" * 2_000_000, "longer than"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_says_why(text: str, message: str) -> None:
    with pytest.raises(EngineFileError, match=r"reading engine arguments: f\.yaml") as caught:
        parse_yaml(text, "f.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "a is there more than once"),
        ('{"a": [{"b": 1, "b": 2}]}', "a[0].b is there more than once"),
        ('{"a": NaN}', "a is not a number that JSON has"),
        ('{"a": [1e999]}', "a[0] is not a number that JSON has"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"a": 1', "line 1"),
        ("[]", "the top is a list"),
        ("[" * 100_000, "deep"),
    ],
)
def test_a_json_object_that_cannot_be_used_says_why(text: str, message: str) -> None:
    with pytest.raises(EngineFileError) as caught:
        parse_json(text, "--override-engine-args")
    assert message in str(caught.value)
