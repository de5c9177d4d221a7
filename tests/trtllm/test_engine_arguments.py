"""Which source wins, where each value came from, what a run requires, and what is refused before the engine starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from poolgrid.kernel.wire.identifiers import Role
from poolgrid.plugins.trtllm.arguments.contract import ContractError
from poolgrid.plugins.trtllm.arguments.engine_arguments import (
    COMMAND_LINE,
    DEFAULT,
    KVBM_CONNECTOR,
    OVERRIDE,
    RUN,
    EngineArguments,
    Layer,
    merge,
    render,
    resolve,
    resolve_files,
)
from poolgrid.plugins.trtllm.arguments.engine_config import EngineFileError
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from poolgrid.server.cli.command_line import command
from poolgrid.server.cli.options import with_settings
from tests.fakes.tensorrt_llm import LLM
from tests.fakes.tensorrt_llm.llmapi.llm_args import TorchLlmArgs, update_llm_args_with_extra_dict

FILE = "f.yaml"


def at(arguments: EngineArguments, path: str) -> Any:
    value: Any = arguments.values
    for key in path.split("."):
        value = value[key]
    return value


def run(
    settings: dict[str, Any] | None = None,
    file: dict[str, Any] | None = None,
    override: dict[str, Any] | None = None,
) -> EngineArguments:
    return resolve(
        TrtllmSettings(model_path="m", **(settings or {})),
        None if file is None else Layer(FILE, file),
        None if override is None else Layer(OVERRIDE, override),
    )


BUFFER = "kv_cache_config.event_buffer_max_size"


@pytest.mark.parametrize(
    ("settings", "file", "override", "path", "value", "source"),
    [
        ({}, None, None, "max_batch_size", 2048, DEFAULT),
        ({"max_batch_size": 8}, None, None, "max_batch_size", 8, COMMAND_LINE),
        ({"max_batch_size": 2048}, None, None, "max_batch_size", 2048, COMMAND_LINE),
        ({"max_batch_size": 8}, {"max_batch_size": 9}, None, "max_batch_size", 9, FILE),
        ({"max_batch_size": 8}, {"max_batch_size": 9}, {"max_batch_size": 10}, "max_batch_size", 10, OVERRIDE),
        ({}, None, {"disable_overlap_scheduler": True}, "disable_overlap_scheduler", True, OVERRIDE),
        ({"disaggregation_mode": "prefill"}, None, None, "disable_overlap_scheduler", True, DEFAULT),
        (
            {"disaggregation_mode": "prefill"},
            {"disable_overlap_scheduler": False},
            None,
            "disable_overlap_scheduler",
            True,
            RUN,
        ),
        ({}, None, None, "kv_cache_config.free_gpu_memory_fraction", 0.9, DEFAULT),
        ({"free_gpu_memory_fraction": 0.5}, None, None, "kv_cache_config.free_gpu_memory_fraction", 0.5, COMMAND_LINE),
        ({}, {"kv_cache_config": {"dtype": "fp8"}}, None, "kv_cache_config.free_gpu_memory_fraction", 0.9, DEFAULT),
        ({}, {"kv_cache_config": {"dtype": "fp8"}}, None, "kv_cache_config.dtype", "fp8", FILE),
        (
            {},
            {"kv_cache_config": {"dtype": "fp8"}},
            {"kv_cache_config": {"dtype": "auto"}},
            "kv_cache_config.dtype",
            "auto",
            OVERRIDE,
        ),
        ({}, None, None, "scheduler_config.capacity_scheduler_policy", "GUARANTEED_NO_EVICT", DEFAULT),
        ({}, None, None, "scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window", 128, DEFAULT),
        ({}, None, None, "scheduler_config.dynamic_batch_config.enable_batch_size_tuning", True, DEFAULT),
        ({}, None, None, "scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning", False, DEFAULT),
        (
            {},
            {"scheduler_config": {"dynamic_batch_config": None}},
            None,
            "scheduler_config.dynamic_batch_config",
            None,
            FILE,
        ),
        ({"engine_argument": ("moe_expert_parallel_size=4",)}, None, None, "moe_expert_parallel_size", 4, COMMAND_LINE),
        ({"engine_argument": ("kv_cache_config.dtype=fp8",)}, None, None, "kv_cache_config.dtype", "fp8", COMMAND_LINE),
        (
            {"engine_argument": ("kv_cache_config.dtype=fp8",), "kv_block_size": 64},
            None,
            None,
            "kv_cache_config.tokens_per_block",
            64,
            COMMAND_LINE,
        ),
        ({"engine_argument": ("max_beam_width=1",)}, {"max_beam_width": 2}, None, "max_beam_width", 2, FILE),
        ({}, None, None, BUFFER, 100_000, DEFAULT),
        ({}, {"kv_cache_config": {"event_buffer_max_size": 500}}, None, BUFFER, 500, FILE),
        ({}, {"kv_cache_config": {"event_buffer_max_size": 0}}, None, BUFFER, 100_000, RUN),
        ({}, None, None, "enable_iter_perf_stats", True, RUN),
        ({}, None, {"enable_iter_perf_stats": False}, "enable_iter_perf_stats", True, RUN),
        ({"connector": "kvbm"}, None, None, "kv_cache_config.enable_partial_reuse", False, RUN),
        ({"connector": "kvbm"}, None, None, "kv_connector_config", KVBM_CONNECTOR, RUN),
        ({"disaggregation_mode": "decode"}, None, None, "cache_transceiver_config.backend", "DEFAULT", DEFAULT),
        ({}, {"model": "other"}, None, "model", "other", FILE),
        ({}, None, None, "skip_tokenizer_init", False, DEFAULT),
        ({}, None, None, "guided_decoding_backend", "xgrammar", DEFAULT),
        ({"guided_decoding_backend": None}, None, None, "skip_tokenizer_init", True, DEFAULT),
        ({"modality": "multimodal"}, None, None, "skip_tokenizer_init", False, DEFAULT),
        ({"guided_decoding_backend": "xgrammar"}, None, None, "skip_tokenizer_init", False, DEFAULT),
    ],
)
def test_the_highest_source_wins_and_is_told(
    settings: dict[str, Any],
    file: dict[str, Any] | None,
    override: dict[str, Any] | None,
    path: str,
    value: Any,
    source: str,
) -> None:
    made = run(settings, file, override)
    assert at(made, path) == value
    assert made.source(path) == source


def test_what_the_run_undoes_is_warned_about_once_with_both_sides() -> None:
    made = run(
        {"disaggregation_mode": "prefill"}, {"disable_overlap_scheduler": False}, {"enable_iter_perf_stats": False}
    )
    assert len(made.warnings) == 2
    assert any("disable_overlap_scheduler is false (from f.yaml), set to true" in each for each in made.warnings)
    assert run().warnings == ()


def test_another_kind_of_speculation_replaces_the_whole_configuration() -> None:
    eagle = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "x"}
    made = run(None, {"speculative_config": eagle}, {"speculative_config": {"decoding_type": "MTP"}})
    assert made.values["speculative_config"] == {"decoding_type": "MTP"}
    made = run(None, {"speculative_config": eagle}, {"speculative_config": {"max_draft_len": 4}})
    assert made.values["speculative_config"]["max_draft_len"] == 4
    assert made.source("speculative_config.speculative_model") == FILE


def test_without_block_reuse_no_events_are_published_and_it_is_said() -> None:
    made = run(None, {"kv_cache_config": {"enable_block_reuse": False}})
    assert not made.publishes_kv_events
    assert at(made, BUFFER) == 0
    assert at(made, "enable_iter_perf_stats") is True
    assert any("makes no KV events" in each for each in made.warnings)
    assert run().publishes_kv_events
    assert not run({"publish_events_and_metrics": False}).publishes_kv_events


@pytest.mark.parametrize(
    ("settings", "file", "override", "expected"),
    [
        (
            {},
            {"max_batchsize": 1},
            None,
            "max_batchsize: is not a known argument; did you mean 'max_batch_size'? (from f.yaml)",
        ),
        (
            {},
            None,
            {"kv_cache_config": {"dtype": 3}},
            "kv_cache_config.dtype: is 3, allowed is text (from --override-engine-args)",
        ),
        (
            {"disaggregation_mode": "decode"},
            {"cache_transceiver_config": None},
            None,
            "cache_transceiver_config.backend: is null on a decode engine",
        ),
        ({"disaggregation_mode": "decode"}, {"max_batch_size": 9000}, None, "max_num_tokens: is 8192"),
        ({"disaggregation_mode": "prefill"}, {"max_beam_width": 2}, None, "max_beam_width: is 2"),
        ({"enable_attention_dp": True}, {"pipeline_parallel_size": 2}, None, "pipeline_parallel_size: is 2"),
        (
            {},
            {"cuda_graph_config": {"batch_sizes": [1, 3], "max_batch_size": 4}},
            None,
            "cuda_graph_config.batch_sizes: is given with max_batch_size 4",
        ),
        ({}, None, {"speculative_config": {"max_draft_len": 1}}, "speculative_config.decoding_type: is required"),
        ({}, {"world_size": 4}, None, "world_size: belongs to the AutoDeploy backend"),
    ],
)
def test_a_fault_is_found_before_the_engine_starts_with_its_path_and_source(
    settings: dict[str, Any], file: dict[str, Any] | None, override: dict[str, Any] | None, expected: str
) -> None:
    with pytest.raises(ContractError) as caught:
        run(settings, file, override)
    assert any(expected in str(each) for each in caught.value.faults), caught.value.faults


def test_settings_are_options_and_only_those_that_were_given_count_as_given() -> None:
    made: list[EngineArguments] = []

    @command()
    @with_settings(TrtllmSettings)
    def application(settings: TrtllmSettings) -> None:
        made.append(resolve(settings))

    done = CliRunner().invoke(
        application,
        ["--model-path", "m", "--max-batch-size", "8", "--no-trust-remote-code"],
        env={"POOLGRID_KV_BLOCK_SIZE": "64"},
    )
    assert done.exit_code == 0, done.output
    given = {path for path, source in made[0].sources.items() if source == COMMAND_LINE}
    assert given == {"model", "max_batch_size", "kv_cache_config.tokens_per_block", "trust_remote_code"}
    done = CliRunner().invoke(
        application, ["--model-path", "m", "--modality", "video_diffusion", "--tensor-parallel-size", "2"]
    )
    assert done.exit_code == 2
    assert "--tensor-parallel-size is set with modality video_diffusion" in " ".join(done.output.split())


def test_a_run_without_a_model_is_refused() -> None:
    with pytest.raises(ContractError, match="--model-path"):
        resolve(TrtllmSettings())


def test_the_encoder_keeps_its_own_number_of_tokens_unless_told() -> None:
    encode = {"disaggregation_mode": "encode", "modality": "multimodal"}
    assert "max_num_tokens" not in run(encode).values
    assert run({**encode, "max_num_tokens": 99}).values["max_num_tokens"] == 99
    assert not run(encode).publishes_kv_events


@pytest.mark.parametrize("mode", ["prefill_and_decode", "prefill", "decode"])
def test_every_result_starts_the_contract_fake(mode: str) -> None:
    connector = "none" if mode == "decode" else "kvbm"  # KVBM has no part in decode workers
    made = run({"disaggregation_mode": mode, "connector": connector, "max_batch_size": 4})
    LLM(**made.values).shutdown()
    TorchLlmArgs(**update_llm_args_with_extra_dict({}, made.values))


def test_the_printed_form_is_a_file_with_every_source() -> None:
    made = run(
        {"max_batch_size": 8, "connector": "kvbm"}, {"moe_config": {}, "cuda_graph_config": {"batch_sizes": [1, 2]}}
    )
    text = render(made)
    assert yaml.safe_load(text) == made.values
    for line in text.splitlines():
        assert "  # " in line or line.endswith(":"), line
    assert "max_batch_size: 8" in text
    assert any(line.startswith("max_batch_size: 8") and line.endswith("# command line") for line in text.splitlines())


def test_files_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_batch_size: 5\n")
    settings = TrtllmSettings(model_path="m", extra_engine_args=file, override_engine_args='{"max_num_tokens": 99}')
    made = resolve_files(settings)
    assert (made.values["max_batch_size"], made.source("max_batch_size")) == (5, str(file))
    assert (made.values["max_num_tokens"], made.source("max_num_tokens")) == (99, OVERRIDE)
    with pytest.raises(EngineFileError, match="No such file"):
        resolve_files(TrtllmSettings(model_path="m", extra_engine_args=tmp_path / "none.yaml"))
    with pytest.raises(EngineFileError, match="line 1"):
        resolve_files(TrtllmSettings(model_path="m", override_engine_args="{"))


def test_attention_dp_makes_each_rank_a_target() -> None:
    assert run({"tensor_parallel_size": 4, "enable_attention_dp": True}).attention_dp_size == 4
    assert run({"tensor_parallel_size": 4}).attention_dp_size == 1


# merging against a naive model

TREES = st.recursive(
    st.none() | st.integers(0, 3) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    max_leaves=6,
)
LAYERS = st.lists(st.dictionaries(st.sampled_from("abc"), TREES, max_size=3), min_size=1, max_size=4)


def naive(low: Any, high: Any) -> Any:
    if isinstance(low, dict) and isinstance(high, dict):
        return {
            key: naive(low[key], high[key]) if key in low and key in high else {**low, **high}[key]
            for key in {**low, **high}
        }
    return high


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        found.update(leaves(value, where) if isinstance(value, dict) and value else {where: value})
    return found


@given(LAYERS)
def test_merging_is_recursive_and_every_value_has_the_last_source_that_set_it(values: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(values)
    made = merge([Layer(str(number), each) for number, each in enumerate(values)])
    expected: Any = {}
    for each in values:
        expected = naive(expected, each)
    assert made.values == expected
    assert values == before
    assert set(made.sources) == set(leaves(expected))
    for path, value in leaves(expected).items():
        owner = values[int(made.sources[path])]
        assert leaves(owner).get(path, "absent") == value
        later = values[int(made.sources[path]) + 1 :]
        assert not any(path in leaves(each) for each in later)


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modality": "video_diffusion", "max_batch_size": 8}, "it is for language models; diffusion models take"),
        ({"modality": "image_diffusion", "disaggregation_mode": "decode"}, "tasks have one leg"),
        ({"endpoint": "a.b"}, r"allowed is namespace\.component\.endpoint"),
        ({"endpoint": "a..c"}, r"allowed is namespace\.component\.endpoint"),
        ({"namespace": "a.b"}, "without dots"),
        ({"encode_endpoint": "a.b.c"}, "allowed is multimodal"),
        ({"encode_endpoint": "a.b.c", "modality": "multimodal", "disaggregation_mode": "decode"}, "no media to send"),
        ({"disaggregation_mode": "encode"}, "allowed is multimodal"),
        ({"free_gpu_memory_fraction": 1.5}, "less than or equal to 1"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"no_such_setting": 1}, "Extra inputs"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrtllmSettings(**settings)


@pytest.mark.parametrize(
    ("mode", "endpoint", "role"),
    [
        ("prefill_and_decode", "poolgrid.worker.generate", Role.AGGREGATED),
        ("prefill", "poolgrid.prefill.generate", Role.PREFILL),
        ("decode", "poolgrid.decode.generate", Role.DECODE),
        ("encode", "poolgrid.encode.generate", Role.ENCODE),
    ],
)
def test_the_mode_decides_about_the_endpoint_and_the_role(mode: Any, endpoint: str, role: Role) -> None:
    settings = TrtllmSettings(disaggregation_mode=mode, modality="multimodal")
    assert settings.endpoint_name == endpoint
    assert settings.role is role
    assert TrtllmSettings(endpoint="x.y.z").endpoint_name == "x.y.z"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"endpoint": "dyn://dynamo.tensorrt_llm.generate"}, "dynamo.tensorrt_llm.generate"),
        ({"endpoint": "dyn://dynamo.prefill.generate"}, "dynamo.prefill.generate"),
        ({"endpoint": "dyn://dynamo.tensorrt_llm_encode.generate"}, "dynamo.tensorrt_llm_encode.generate"),
        ({"namespace": "dyn://dynamo"}, "dynamo.worker.generate"),
    ],
)
def test_names_with_dynamos_scheme_mean_what_they_say(given: dict[str, str], name: str) -> None:
    assert TrtllmSettings.model_validate(given).endpoint_name == name


def test_a_value_of_the_command_line_that_loses_to_a_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_batch_size: 7\nmax_num_tokens: 4096\ncache_transceiver_config: {kv_transfer_timeout_ms: 9}\n")
    settings = TrtllmSettings(
        model_path="m",
        max_batch_size=64,
        max_num_tokens=4096,
        kv_transfer_timeout_ms=50.0,
        free_gpu_memory_fraction=0.5,
        disaggregation_mode="prefill",
        extra_engine_args=file,
        override_engine_args='{"kv_cache_config": {"free_gpu_memory_fraction": 0.6}}',
        engine_argument=("kv_cache_config.dtype=fp8", "cache_transceiver_config.backend=UCX", "max_num_tokens=4095"),
    )
    told = [warning for warning in resolve_files(settings).warnings if "has no effect" in warning]
    assert told == [
        f"--max-num-tokens is 4095 and has no effect: max_num_tokens is 4096 (from {file})",
        "--free-gpu-memory-fraction is 0.5 and has no effect: kv_cache_config.free_gpu_memory_fraction is 0.6 "
        "(from --override-engine-args)",
        f"--max-batch-size is 64 and has no effect: max_batch_size is 7 (from {file})",
        "--kv-transfer-timeout-ms is 50 and has no effect: cache_transceiver_config.kv_transfer_timeout_ms is 9 "
        f"(from {file})",
    ]


def test_names_follow_from_the_settings() -> None:
    assert TrtllmSettings(model_path="a/b").model_name == "a/b"
    assert TrtllmSettings(model_path="a/b", served_model_name="c").model_name == "c"


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, field in TrtllmSettings.model_fields.items():
        assert field.description, name
        assert f"`--{name.replace('_', '-')}`" in text, f"{name} is missing from docs/configuration.md"
