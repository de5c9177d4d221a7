"""Command lines of Dynamo's documents, old and newest: each option works, or is refused with the alternative."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import click
import pytest
from click.testing import CliRunner

from poolgrid.plugins.trtllm.settings import TrtllmWorkerSettings
from poolgrid.server.cli import main
from poolgrid.server.cli.dynamo_options import OPTIONS, in_our_words
from poolgrid.server.process.settings import Settings
from tests.cases import for_each
from tests.installed import needs_parsers

TRTLLM = ("--engine", "trtllm", "--model-path", "m")


def started_with(
    monkeypatch: pytest.MonkeyPatch, command: str, words: Sequence[str], env: dict[str, str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return what a command says, and the settings that it would run with."""
    found: dict[str, Any] = {}

    def run(*settings: Settings, **values: Any) -> None:
        for each in [*settings, *values.values()]:
            if isinstance(each, Settings):
                found.update({**each.model_dump(), **found})
            if isinstance(each, TrtllmWorkerSettings):
                found["role"] = each.role.name

    command_object = main.app.commands[command]
    assert command_object.callback is not None
    inner = command_object.callback
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    cells = _cells(command_object.callback, inner)
    assert cells, "the command's own function is called by its options"
    for cell in cells:
        monkeypatch.setattr(cell, "cell_contents", run)
    result = CliRunner().invoke(main.app, [command, *words], env=env)
    return result.output + str(result.exception or ""), found


def _cells(function: Any, inner: Any) -> list[Any]:
    """Return the closure cells through which decorators reach the function itself."""
    cells: list[Any] = []
    while function is not inner:
        cells += [each for each in function.__closure__ or () if each.cell_contents is inner]
        function = function.__wrapped__
    return cells


WORKS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("worker", ("--model", "Qwen/Qwen3-0.6B", "--engine", "trtllm"), {"model_path": "Qwen/Qwen3-0.6B"}),
    ("worker", ("--engine=trtllm", "--model=m"), {"model_path": "m"}),
    ("worker", (*TRTLLM, "--disaggregation-mode", "agg"), {"role": "AGGREGATED"}),
    ("worker", (*TRTLLM, "--disaggregation-mode", "pd"), {"role": "AGGREGATED"}),
    ("worker", (*TRTLLM, "--disaggregation-mode", "prefill_and_decode"), {"role": "AGGREGATED"}),
    ("worker", (*TRTLLM, "--disaggregation-mode", "decode"), {"role": "DECODE"}),
    ("worker", (*TRTLLM, "--no-publish-kv-events"), {"publish_events_and_metrics": False}),
    ("worker", (*TRTLLM, "--publish-kv-events"), {"publish_events_and_metrics": True}),
    ("worker", (*TRTLLM, "--publish-events-and-metrics"), {"publish_events_and_metrics": True}),
    ("worker", (*TRTLLM, "--use-kv-events"), {"publish_events_and_metrics": True}),
    ("worker", (*TRTLLM, "--enable-multimodal"), {"modality": "multimodal"}),
    ("worker", (*TRTLLM, "--modality", "multimodal"), {"modality": "multimodal"}),
    ("worker", (*TRTLLM, "--request-plane", "tcp"), {"role": "AGGREGATED"}),
    ("worker", (*TRTLLM, "--event-plane", "zmq"), {"event_plane": "zmq"}),
    ("worker", (*TRTLLM, "--durable-kv-events", "--nats-url", "nats://n:4222"), {"event_plane": "nats"}),
    ("worker", (*TRTLLM, "--connector", "null"), {"connector": "none"}),
    ("worker", (*TRTLLM, "--connector", "none"), {"connector": "none"}),
    ("worker", (*TRTLLM, "--endpoint", "dyn://d.tensorrt_llm.generate"), {"endpoint": "d.tensorrt_llm.generate"}),
    ("worker", (*TRTLLM, "--namespace", "dynamo"), {"namespace": "dynamo"}),
    ("worker", (*TRTLLM, "--guided-decoding-backend", "xgrammar"), {"guided_decoding_backend": "xgrammar"}),
    ("worker", (*TRTLLM, "--expert-parallel-size", "4"), {"engine_argument": ("moe_expert_parallel_size=4",)}),
    ("worker", (*TRTLLM, "--pipeline-parallel-size", "2"), {"engine_argument": ("pipeline_parallel_size=2",)}),
    ("worker", (*TRTLLM, "--max-beam-width", "1"), {"engine_argument": ("max_beam_width=1",)}),
    ("worker", (*TRTLLM, "--gpus-per-node", "8"), {"engine_argument": ("gpus_per_node=8",)}),
    ("worker", (*TRTLLM, "--load-format", "dummy"), {"engine_argument": ("load_format=dummy",)}),
    ("router", ("--router-mode", "kv", "--http-port", "8001"), {"policy": "kv", "port": 8001}),
    ("router", ("--router-mode", "round-robin"), {"policy": "round-robin"}),
    ("router", ("--router-mode=random", "--http-host", "::1"), {"policy": "random", "host": "::1"}),
    ("router", ("--no-kv-events",), {"policy": "approximate"}),
    ("router", ("--router-replica-sync", "--enforce-disagg"), {"policy": "kv"}),
    ("global-router", ("--config", __file__, "--default-ttft-target", "300"), {"ttft_target_ms": 300.0}),
    ("global-router", ("--config", __file__, "--default-itl-target-ms", "20"), {"itl_target_ms": 20.0}),
]

PARSERS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("worker", (*TRTLLM, "--dyn-reasoning-parser", "gpt_oss"), {"reasoning_parser": "harmony"}),
    ("worker", (*TRTLLM, "--dyn-reasoning-parser", "basic"), {"reasoning_parser": "qwen3"}),
    ("worker", (*TRTLLM, "--dyn-tool-call-parser", "harmony"), {"tool_call_parser": "harmony"}),
    ("router", ("--dyn-reasoning-parser", "gpt_oss"), {"reasoning_parser": "harmony"}),
]

VARIABLES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("worker", {"DYN_TRTLLM_MODEL": "m"}, {"model_path": "m"}),
    ("worker", {"DYN_TRTLLM_MAX_BATCH_SIZE": "7"}, {"max_batch_size": 7}),
    ("worker", {"DYN_TRTLLM_ENABLE_ATTENTION_DP": "true"}, {"enable_attention_dp": True}),
    ("worker", {"DYN_TRTLLM_PUBLISH_KV_EVENTS": "false"}, {"publish_events_and_metrics": False}),
    ("worker", {"DYN_TRTLLM_DISAGGREGATION_MODE": "prefill"}, {"role": "PREFILL"}),
    ("worker", {"DYN_TRTLLM_EXPERT_PARALLEL_SIZE": "4"}, {"engine_argument": ("moe_expert_parallel_size=4",)}),
    ("worker", {"DYN_TRTLLM_PIPELINE_PARALLEL_SIZE": "2"}, {"engine_argument": ("pipeline_parallel_size=2",)}),
    ("worker", {"DYN_TRTLLM_MAX_BEAM_WIDTH": "1"}, {"engine_argument": ("max_beam_width=1",)}),
    ("worker", {"DYN_TRTLLM_GPUS_PER_NODE": "8"}, {"engine_argument": ("gpus_per_node=8",)}),
    ("worker", {"DYN_TRTLLM_LOAD_FORMAT": "dummy"}, {"engine_argument": ("load_format=dummy",)}),
    ("worker", {"DYN_TRTLLM_MODEL": "m", "POOLGRID_MODEL_PATH": "p"}, {"model_path": "p"}),
    ("router", {"DYN_ROUTER_MODE": "round-robin"}, {"policy": "round-robin"}),
    ("router", {"DYN_ROUTER_MODE": "random", "POOLGRID_POLICY": "kv"}, {"policy": "kv"}),
    ("global-router", {"DYN_GLOBAL_ROUTER_CONFIG": __file__}, {"ttft_target_ms": None}),
    (
        "global-router",
        {"DYN_GLOBAL_ROUTER_CONFIG": __file__, "DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET": "300"},
        {"ttft_target_ms": 300.0},
    ),
]


@pytest.mark.parametrize(
    ("command", "words", "settings"),
    [
        pytest.param(*row, id=" ".join(row[1]), marks=[needs_parsers] if row in PARSERS else [])
        for row in (*WORKS, *PARSERS)
    ],
)
def test_a_documented_option_means_the_same_here(
    monkeypatch: pytest.MonkeyPatch, command: str, words: tuple[str, ...], settings: dict[str, Any]
) -> None:
    said, found = started_with(monkeypatch, command, words)
    assert {name: found.get(name) for name in settings} == settings, said


@pytest.mark.parametrize(("command", "env", "settings"), VARIABLES)
def test_a_documented_variable_means_the_same_here(
    monkeypatch: pytest.MonkeyPatch, command: str, env: dict[str, str], settings: dict[str, Any]
) -> None:
    said, found = started_with(monkeypatch, command, ["--engine", "trtllm"] if command == "worker" else [], env)
    assert {name: found.get(name) for name in settings} == settings, said


WITHOUT_OURS = sorted(each for each, meaning in OPTIONS.items() if meaning[:2] not in ("", "--"))


@for_each("entry, form", itertools.product(WITHOUT_OURS, ["{} x", "{}=x"]))
def test_a_documented_option_without_ours_is_refused_with_the_alternative(entry: str, form: str) -> None:
    command, _, option = entry.rpartition(" ")
    result = CliRunner().invoke(main.app, [command or "worker", *form.format(option).split()])
    assert result.exit_code == 2
    assert result.output.startswith(f"{option}: ")
    named = [each.rstrip("-") for each in re.findall(r"--[a-z][a-z-]+", OPTIONS[entry])]
    known = {each for each in main.app.commands for each in _options(each)}
    assert set(named) <= known, "what it names exists"


UPSTREAM = {
    "worker": """
        --model --model-path --served-model-name --tensor-parallel-size --pipeline-parallel-size
        --expert-parallel-size --enable-attention-dp --no-enable-attention-dp --conversation-affinity
        --conversation-affinity-dp-rank-source --kv-block-size --gpus-per-node --max-batch-size
        --max-num-tokens --max-seq-len --max-beam-width --free-gpu-memory-fraction --extra-engine-args
        --override-engine-args --publish-kv-events --no-publish-kv-events --publish-events-and-metrics
        --load-format --model-loader-extra-config --disaggregation-mode --disaggregation-strategy
        --enable-multimodal --modality --encode-endpoint --allowed-local-media-path --max-file-size-mb
        --frontend-decoding --guided-decoding-backend --quant-algo --quant-dynamic --enable-teacache
        --teacache-use-ret-steps --teacache-thresh --torch-dtype --revision --disable-torch-compile
        --enable-fullgraph --enable-cuda-graph --attn-backend --dit-ulysses-size --dit-ring-size
        --dit-cfg-size --enable-layerwise-nvtx-marker --skip-warmup --default-height --default-width
        --default-num-inference-steps --default-guidance-scale --default-num-frames
        --default-num-images-per-prompt --namespace --endpoint --discovery-backend --request-plane
        --event-plane --connector --durable-kv-events --no-durable-kv-events --store-kv --dyn-tool-call-parser
        --dyn-reasoning-parser --custom-jinja-template --endpoint-types --dyn-endpoint-types --dump-config-to
        --multimodal-embedding-cache-capacity-gb --output-modalities --media-output-fs-url
        --media-output-http-url --migration-limit --router-mode --router-kv-events --router-temperature
        --router-policy-config --router-session-affinity-ttl-secs
    """,
    "router": """
        --load-aware --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay
        --router-kv-overlap-score-weight --kv-overlap-score-weight --router-prefill-load-scale
        --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-temperature --router-kv-events
        --no-router-kv-events --kv-events --no-kv-events --durable-kv-events --router-replica-sync
        --no-router-replica-sync --router-track-active-blocks --no-router-track-active-blocks
        --router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse
        --router-track-prefill-tokens --no-router-track-prefill-tokens --router-prefill-load-model
        --router-snapshot-threshold --router-reset-states --router-ttl-secs --router-queue-threshold
        --router-policy --router-policy-config --router-event-threads --router-queue-policy
        --use-remote-indexer --serve-indexer --shared-cache-multiplier --shared-cache-type
        --router-predicted-ttl-secs --router-conditional-prefill --router-conditional-prefill-policy
        --router-conditional-prefill-bypass-below-tokens --router-mode --router-min-initial-workers
        --enforce-disagg --admission-control --router-session-affinity-ttl-secs --router-session-affinity-mode
        --active-decode-blocks-threshold --active-prefill-tokens-threshold
        --active-prefill-tokens-threshold-frac --interactive --namespace --namespace-prefix
        --kv-cache-block-size --http-host --http-port --tls-cert-path --tls-key-path --migration-limit
        --migration-max-seq-len --model-name --model-path --metrics-prefix --kserve-grpc-server
        --grpc-metrics-port --dump-config-to --discovery-backend --request-plane --event-plane
        --enable-anthropic-api --strip-anthropic-preamble --enable-streaming-tool-dispatch
        --enable-streaming-reasoning-dispatch --exclude-tools-when-tool-choice-none --dyn-chat-processor
        --dyn-debug-perf --dyn-preprocess-workers --tokenizer --trust-remote-code
    """,
    "global-router": """
        --config --model-name --model-path --revision --kv-cache-block-size --context-length
        --reasoning-parser --tool-call-parser --namespace --component-name --default-ttft-target
        --default-ttft-target-ms --default-itl-target --default-itl-target-ms --discovery-backend
        --request-plane
    """,
}
"""Every option of Dynamo's TensorRT-LLM worker, frontend with KV router, and global router, 1.5 to 1.7."""


@for_each("command, option", [(command, option) for command, names in UPSTREAM.items() for option in names.split()])
def test_an_option_of_upstream_is_ours_or_is_answered_by_name(command: str, option: str) -> None:
    assert option in _options(command) or f"{command} {option}" in OPTIONS or option in OPTIONS


@for_each("entry", sorted(each for each, meaning in OPTIONS.items() if meaning[:2] == "--"))
def test_what_a_documented_option_becomes_exists(entry: str) -> None:
    command, _, option = entry.rpartition(" ")
    assert OPTIONS[entry].partition("=")[0] in _options(command or "worker")
    assert option not in _options(command or "worker") or entry == "worker --model", "ours would never be reached"


def _options(command: str) -> set[str]:
    with click.Context(main.app) as context:
        found = main.app.get_command(context, command)
    assert found is not None
    parameters = list(found.params)
    if isinstance(found, click.Group):
        parameters = [each for inner in found.commands.values() for each in inner.params]
    return {name for each in parameters for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize(
    ("command", "variable", "value", "line"),
    [
        ("router", "DYN_ROUTER_MODE", "direct", "DYN_ROUTER_MODE direct: no policy does this"),
        ("global-router", "DYN_GLOBAL_ROUTER_MODEL_NAME", "m", "DYN_GLOBAL_ROUTER_MODEL_NAME: Use --model-path"),
        ("worker", "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG", "{}", "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG: Give gms_"),
    ],
)
def test_a_variable_without_ours_is_refused_by_its_name(command: str, variable: str, value: str, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        in_our_words(command, ["--engine=trtllm"], {variable: value})


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        ("worker", ["--request-plane", "nats"], "--request-plane: Requests travel over ZMQ on TCP; tcp is accepted."),
        ("router", ["--router-mode", "direct"], "--router-mode direct: no policy does this"),
        ("worker", ["--store-kv", "etcd"], "--store-kv: There is no etcd"),
    ],
)
def test_a_value_that_is_not_to_be_had_is_refused(command: str, words: list[str], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        in_our_words(command, words, {})
