"""What a reader of Dynamo's TensorRT-LLM documents types: it works, or is refused by name with the alternative.

One row for each command, option, variable, field, file, endpoint, header, health check and page. Tables of their own
have all options and variables (``test_dynamo_options``) and all fields (``tests.frontend.test_dynamo_fields``); each
script is planned in ``test_launch_plan`` and run in ``tests.e2e.test_launch``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.kernel.wire.answers import EndpointRow
from poolgrid.server.cli.main import app
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process
from tests.global_router.documents import dynamo_disagg
from tests.installed import needs, needs_parsers

ROOT = Path(__file__).parents[2]
LAUNCH = {path.stem: path.read_text() for path in (ROOT / "launch").glob("*.sh")}
CONFIGS = ROOT / "engine_configs"
EIGHT = ("--gpus", "0,1,2,3,4,5,6,7")

Check = Callable[[], None]


def command(words: str, text: str, status: int = 0, **environment: str) -> Check:
    """Run a command in this process; its output has ``text``."""

    def check() -> None:
        done = CliRunner().invoke(app, words.split(), env=environment)
        said = " ".join((done.output + str(done.exception or "")).split())
        assert (done.exit_code, text in said) == (status, True), said

    return check


def worker(words: str, text: str, status: int = 0, **environment: str) -> Check:
    return command(f"worker --engine trtllm --model-path m --print-engine-args {words}", text, status, **environment)


def request(method: str, path: str, body: dict[str, Any] | None, status: int, text: str) -> Check:
    """Ask a router whose worker is played; the answer has ``text``."""

    def check() -> None:
        answer = asyncio.run(_asked(method, path, body))
        assert (answer.status_code, text in answer.text) == (status, True), answer.text

    return check


def health(pattern: str) -> Check:
    """Look for what the documents' own scripts grep for in plain ``/health``."""

    def check() -> None:
        answer = asyncio.run(_asked("GET", "/health", None))
        assert answer.status_code == 200
        assert re.search(pattern, answer.text), answer.text

    return check


def with_priority_header() -> None:
    backend = FakeBackend()
    asyncio.run(_asked("POST", "/v1/chat/completions", CHAT, {"X-Dynamo-Request-Priority": "7"}, backend))
    assert [request.priority for request in backend.requests] == [7]


def engine_file(text: str, said: str, status: int = 0) -> Check:
    def check() -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "agg.yaml"
            path.write_text(text)
            command(f"engine-config check {path}", said, status)()

    return check


def converted(frontend: str, said: str) -> Check:
    """Convert a graph whose frontend has arguments; the values or the remarks have ``said``."""

    def check() -> None:
        graph = {
            "kind": "DynamoGraphDeployment",
            "spec": {
                "services": {
                    "Frontend": program_of("frontend", "dynamo.frontend", frontend),
                    "Worker": program_of("worker", "dynamo.trtllm", "--model-path m"),
                }
            },
        }
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "graph.json"
            path.write_text(json.dumps(graph, indent=1))
            command(f"config convert {path}", said)()

    return check


def program_of(kind: str, module: str, words: str) -> dict[str, Any]:
    main = {"command": ["python3", "-m", module], "args": words.split()}
    return {"componentType": kind, "extraPodSpec": {"mainContainer": main}}


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def chat(fields: dict[str, Any], status: int = 200, text: str = "") -> Check:
    return request("POST", "/v1/chat/completions", {**CHAT, **fields}, status, text)


async def _asked(
    method: str,
    path: str,
    body: dict[str, Any] | None,
    headers: dict[str, str] | None = None,
    backend: FakeBackend | None = None,
) -> httpx.Response:
    served = [
        EndpointRow(endpoint=f"poolgrid.{name}.generate", model="tiny", role=role, workers=1, ready=1, instances=[])
        for name, role in (("prefill", "prefill"), ("worker", "aggregated"), ("encode", "encode"))
    ]
    async with in_process(application(backend or FakeBackend(), endpoints=lambda: served)) as client:
        return await client.request(method, path, json=body, headers=headers)


def script(name: str) -> Check:
    def check() -> None:
        assert os.access(ROOT / "launch" / f"{name}.sh", os.X_OK)

    return check


def read_by_scripts(variable: str) -> Check:
    def check() -> None:
        assert variable in "".join(LAUNCH.values())

    return check


def page(name: str, *texts: str) -> Check:
    def check() -> None:
        found = (ROOT / name).read_text()
        assert not [each for each in texts if each not in found]

    return check


def check_of_dynamos_document() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dynamo.json"
        path.write_text(json.dumps(dynamo_disagg()))
        command(f"config check {path}", "ok, ")()


def program(name: str, ours: str) -> Check:
    def check() -> None:
        assert ours in app.commands
        page("docs/comparison.md", f"`{name}`")()

    return check


WIDE = f"--engine-args prefill={CONFIGS}/deepseek-r1/wide_ep/prefill.yaml --prefill 1 --decode 1"
UP = "up --engine trtllm --dry-run"
IMAGE = {"type": "video_url", "video_url": {"url": "http://h/v.mp4"}}

ROWS: dict[str, Check] = {
    # programs, scripts, variables of scripts
    "dynamo.frontend": program("dynamo.frontend", "router"),
    "dynamo.router": program("dynamo.router", "router"),
    "dynamo.trtllm": program("dynamo.trtllm", "worker"),
    "dynamo.mocker": program("dynamo.mocker", "worker"),
    "dynamo.global_router": program("dynamo.global_router", "global-router"),
    **{f"launch/{name}.sh": script(name) for name in ("agg", "agg_router", "disagg", "disagg_router")},
    **{f"launch/{name}.sh": script(name) for name in ("gpt_oss_disagg", "agg_multimodal", "disagg_multimodal")},
    "launch/epd_disagg.sh": script("epd_disagg"),
    "launch/epd_multimodal_image_and_embeddings.sh": script("epd_multimodal_image_and_embeddings"),
    **{
        name: read_by_scripts(name)
        for name in (
            *("MODEL_PATH", "SERVED_MODEL_NAME", "MODALITY", "MAX_FILE_SIZE_MB", "CUSTOM_TEMPLATE", "ENCODE_ENDPOINT"),
            *("ALLOWED_LOCAL_MEDIA_PATH", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "PREFILL_ENGINE_ARGS"),
            *("DECODE_ENGINE_ARGS",),
        )
    },
    "AGG_ENGINE_ARGS": read_by_scripts("_ENGINE_ARGS"),
    "ENCODE_ENGINE_ARGS": read_by_scripts("_ENGINE_ARGS"),
    "PREFILL_CUDA_VISIBLE_DEVICES": read_by_scripts("_CUDA_VISIBLE_DEVICES"),
    "PREFILL_MAX_BATCH_SIZE": read_by_scripts("max_batch_size"),
    "DECODE_FREE_GPU_MEMORY_FRACTION": read_by_scripts("_FREE_GPU_MEMORY_FRACTION"),
    "DYNAMO_HOME": worker("", "tensor_parallel_size: 1", DYNAMO_HOME="/dynamo"),  # paths are the repository's
    "DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR": worker(
        "", "DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR: Use --logits-processors", 2, DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR="1"
    ),
    "DYN_ENABLE_TEST_LOGITS_PROCESSOR": worker(
        "", "DYN_ENABLE_TEST_LOGITS_PROCESSOR: Use --logits-processors", 2, DYN_ENABLE_TEST_LOGITS_PROCESSOR="1"
    ),
    "run_engines.sh: one role alone": command("up --prefill 4", "prefill workers need a decode worker", 2),
    # hub names: tests/cli/test_hub_names.py and tests/workers/test_model_hub.py fetch from a hub of their own
    # options of workers and routers
    "--dyn-reasoning-parser gpt_oss": worker("--dyn-reasoning-parser gpt_oss", "trust_remote_code: false"),
    "--dyn-tool-call-parser harmony": worker("--dyn-tool-call-parser harmony", "trust_remote_code: false"),
    "--model": command("worker --engine trtllm --model m --print-engine-args", "model: m"),
    "--disaggregation-mode agg": worker("--disaggregation-mode agg", "trust_remote_code: false"),
    "--disaggregation-mode pd": worker("--disaggregation-mode pd", "trust_remote_code: false"),
    "--disaggregation-strategy": worker("--disaggregation-strategy prefill_first", "--disaggregation-strategy: ", 2),
    "--publish-kv-events": worker("--publish-kv-events", "event_buffer_max_size: 100000"),
    "--publish-events-and-metrics": worker("--publish-events-and-metrics", "event_buffer_max_size: 100000"),
    "--use-kv-events": worker("--use-kv-events", "event_buffer_max_size: 100000"),
    "--durable-kv-events": worker("--durable-kv-events --nats-url nats://n:4222", "event_buffer_max_size: 100000"),
    "--enable-multimodal": worker("--enable-multimodal", "trust_remote_code: false"),
    "--request-plane tcp": worker("--request-plane tcp", "trust_remote_code: false"),
    "--request-plane nats": worker("--request-plane nats", "--request-plane: Requests travel over ZMQ", 2),
    "--store-kv etcd": worker("--store-kv etcd", "--store-kv: There is no etcd: use --names", 2),
    "--allowed-local-media-path of a worker": worker("--allowed-local-media-path /tmp", "to poolgrid router", 2),
    "--modality video_diffusion": worker("--modality video_diffusion", "model: m"),
    "--endpoint dyn://": worker("--endpoint dyn://ns.tensorrt_llm_encode.generate", "trust_remote_code: false"),
    "--expert-parallel-size": worker(
        "--tensor-parallel-size 4 --expert-parallel-size 4", "moe_expert_parallel_size: 4 # command line"
    ),
    "--pipeline-parallel-size": worker("--pipeline-parallel-size 2", "pipeline_parallel_size: 2"),
    "--max-beam-width": worker("--max-beam-width 1", "max_beam_width: 1"),
    "--gpus-per-node": worker("--gpus-per-node 8", "gpus_per_node: 8"),
    "--load-format": worker("--load-format dummy", "load_format: dummy"),
    "--load-format of no release": worker("--load-format gmz", 'load_format: is "GMZ", allowed is', 1),
    **{
        f"DYN_TRTLLM_{name}": worker("", f"{argument}: {value}", 0, **{f"DYN_TRTLLM_{name}": value})
        for name, argument, value in (
            ("EXPERT_PARALLEL_SIZE", "moe_expert_parallel_size", "4"),
            ("PIPELINE_PARALLEL_SIZE", "pipeline_parallel_size", "2"),
            ("MAX_BEAM_WIDTH", "max_beam_width", "1"),
            ("GPUS_PER_NODE", "gpus_per_node", "8"),
            ("LOAD_FORMAT", "load_format", "dummy"),
            ("TENSOR_PARALLEL_SIZE", "tensor_parallel_size", "4"),
            ("KV_BLOCK_SIZE", "tokens_per_block", "64"),
            ("MAX_NUM_TOKENS", "max_num_tokens", "4096"),
            ("MAX_SEQ_LEN", "max_seq_len", "4096"),
            ("FREE_GPU_MEMORY_FRACTION", "free_gpu_memory_fraction", "0.5"),
        )
    },
    "prefill line of the gpt-oss guide": worker(
        f"--served-model-name gpt --extra-engine-args {CONFIGS}/gpt-oss-120b/prefill.yaml "
        "--dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony --disaggregation-mode prefill "
        "--max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9 "
        "--tensor-parallel-size 4 --expert-parallel-size 4",
        "moe_expert_parallel_size",
    ),
    "--disaggregation-mode aggregated": worker("--disaggregation-mode aggregated", "trust_remote_code: false"),
    "--dyn-endpoint-types": worker("--dyn-endpoint-types chat", "--dyn-endpoint-types: A model is served at", 2),
    "--event-buffer-max-size": worker("--event-buffer-max-size 9", "kv_cache_config.event_buffer_max_size", 2),
    "--default-ttft-target": command(
        f"global-router --config {ROOT}/none.json --default-ttft-target x", "'--ttft-target-ms'", 2
    ),
    "--default-itl-target": command(
        f"global-router --config {ROOT}/none.json --default-itl-target x", "'--itl-target-ms'", 2
    ),
    "--model-name of a global router": command("global-router --model-name m", "--model-name: Use --model-path", 2),
    **{
        option: command(f"router {option} 1", f"{option}: {answer}", 2)
        for option, answer in (
            ("--router-policy", "Use --policy"),
            ("--router-policy-config", "Use --policy"),
            ("--router-session-affinity-ttl-secs", "Policy kv sends a session's turns"),
            ("--router-session-affinity-mode", "Policy kv sends a session's turns"),
            ("--router-kv-overlap-score-credit", "Costs are milliseconds"),
            ("--router-kv-overlap-score-weight", "Costs are milliseconds"),
            ("--router-prefill-load-scale", "Costs are milliseconds"),
            ("--router-host-cache-hit-weight", "A block on the host counts 0.75"),
            ("--router-disk-cache-hit-weight", "A block on the host counts 0.75"),
            ("--router-temperature", "Policy kv takes the least cost"),
            ("--router-ttl-secs", "Policy approximate assumes for 120 s"),
            ("--router-queue-threshold", "Use --max-queue-requests"),
            ("--router-queue-policy", "Use --max-queue-requests"),
            ("--kv-cache-block-size", "The block size is that of the workers"),
        )
    },
    "--override-engine-args that is no JSON": worker('--override-engine-args {"a":1,,}', "line 1, column 8", 1),
    "--extra-engine-args of upstream's examples": worker(
        "--extra-engine-args ./examples/backends/trtllm/engine_configs/qwen3/agg.yaml", "no such file", 2
    ),
    "--connector kvbm": worker("--connector kvbm", "connector_module: kvbm"),
    "--connector kvbm with images": worker("--connector kvbm --modality multimodal", "modality multimodal", 1),
    "--connector kvbm on decode": worker("--connector kvbm --disaggregation-mode decode", "a decode worker", 1),
    "--connector kvbm with LoRA": worker(
        '--connector kvbm --override-engine-args {"enable_lora":true}', "adapters would share blocks", 1
    ),
    # what is started
    "DeepSeek-R1 wide EP on one node": command(f"{UP} --model-path m {WIDE} {' '.join(EIGHT)}", "GPUs are needed", 2),
    "pools of TensorRT-LLM": command(
        f"{UP} --model-path m --pools {ROOT}/pool_configs/disagg_two_by_two.json {' '.join(EIGHT)}", "global router"
    ),
    "config check of Dynamo's JSON": check_of_dynamos_document,
    "engine-config check": command(f"engine-config check {CONFIGS}", "0 with faults"),
    "wide_ep YAML whose eplb.yaml is not there": engine_file(
        "moe_config: {backend: WIDEEP, load_balancer: /mnt/engine_configs/eplb.yaml}",
        "/mnt/engine_configs/eplb.yaml",
        1,
    ),
    "engine file of 1.4": engine_file(
        "iter_perf_stats_interval: 10\nattention_dp_config: {kv_cache_routing_conversation_affinity: true}\n"
        "cache_transceiver_config: {backend: NIXL, agent_bounce_params: {max_chunk_size: 32MB}}\n",
        "0 with faults",
    ),
    "backend: _autodeploy": engine_file("backend: _autodeploy", "run trtllm-serve MODEL --backend _autodeploy", 1),
    # graphs of Kubernetes
    "graph with --no-kv-events": converted("--router-mode kv --no-kv-events", "policy: approximate"),
    "graph with least-loaded": converted("--router-mode least-loaded", "policy: least-loaded"),
    "graph with --router-temperature": converted(
        "--router-mode kv --router-temperature 0.5", "--router-temperature: Policy kv takes the least cost"
    ),
    "graph with --kv-cache-block-size": converted(
        "--router-mode kv --kv-cache-block-size 128", "--kv-cache-block-size: The block size is that of the workers."
    ),
    # requests
    "chat_template_args": chat({"chat_template_args": {"reasoning_effort": "low"}}),
    "reasoning_effort": chat({"reasoning_effort": "low"}),
    "nvext.ignore_eos": chat({"nvext": {"ignore_eos": True}}),
    "nvext.agent_hints": chat({"nvext": {"agent_hints": {"priority": 5, "osl": 50}}}),
    "nvext.annotations": chat({"nvext": {"annotations": ["query_instance_id:"]}}, 400, "nvext.annotations"),
    "extra_args.ttft_target": chat({"extra_args": {"ttft_target": 100}}),
    "response_format": chat({"response_format": {"type": "json_object"}}),
    "seed": chat({"seed": 3}),
    "frequency_penalty": chat({"frequency_penalty": 0.5}),
    "stream": chat({"stream": True}, 200, "data: "),
    "video input": chat({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "video_url"),
    # endpoints
    "POST /v1/completions": request("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"}, 200, "choices"),
    "POST /v1/responses": request("POST", "/v1/responses", {"model": "tiny", "input": "hi"}, 200, "output"),
    "GET /v1/models": request("GET", "/v1/models", None, 200, "tiny"),
    "GET /live": request("GET", "/live", None, 200, ""),
    "GET /metrics": request("GET", "/metrics", None, 200, "poolgrid_"),
    "x-dynamo-request-priority": with_priority_header,
    'health: grep "healthy"': health('"status":"healthy"'),
    "health: grep of prefill": health(r'"endpoints":\[[^]]*"dyn://dynamo\.prefill\.generate"'),
    "health: grep of tensorrt_llm": health(r'"endpoints":\[[^]]*"dyn://dynamo\.tensorrt_llm\.generate"'),
    "health: grep of encode": health(r'"endpoints":\[[^]]*"dyn://dynamo\.tensorrt_llm_encode\.generate"'),
    # pages
    "bench.sh": page("docs/measuring.md", "poolgrid bench", "aiperf profile"),
    "KVBM": page("docs/trtllm.md", "DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_DISK_CACHE_GB", "--connector kvbm"),
    "gpt-oss-120b": page("docs/trtllm_examples.md", "reasoning_effort", "gpt_oss_disagg.sh", "--ulimit"),
    "TRTLLM_ENABLE_PDL": page("docs/trtllm_configuration.md", "TRTLLM_ENABLE_PDL", "ulimit", "--shm-size"),
    "DeepSeek-R1": page("docs/trtllm_examples.md", "wide_ep", "mpirun", "srun"),
    "Llama 4 with Eagle": page("docs/trtllm_configuration.md", "llama4-maverick-eagle", "Eagle"),
    "Gemma 3 with sliding windows": page("docs/trtllm_configuration.md", "Gemma 3", "window"),
    "Qwen-VL": page("docs/trtllm_configuration.md", "qwen2.5-vl"),
    "Llama 4 encode.yaml": page("engine_configs/README.md", "llama4-scout"),
    "tuning": page("docs/trtllm_configuration.md", "kv_block_size", "Pipeline parallel", "dynamic", "light", "heavy"),
    "troubleshooting": page("docs/troubleshooting.md", "Container Toolkit", "cache_transceiver_config"),
    "logits processors": page("docs/trtllm_configuration.md", "--logits-processors"),
    "engines over several nodes": page("docs/kubernetes.md", "LeaderWorkerSet"),
    "where tensorrt_llm and torch come from": page("pyproject.toml", 'trtllm = ["tensorrt-llm', "extra-index-url"),
    "the index": page("README.md", "radix"),
}

PARSERS = ("--dyn-reasoning-parser gpt_oss", "--dyn-tool-call-parser harmony", "prefill line of the gpt-oss guide")
"""Rows that name one."""


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param(each, marks=[needs(each.removeprefix("POST ")), *([needs_parsers] if each in PARSERS else [])])
        for each in ROWS
    ],
)
def test_what_the_walkthroughs_type_works_or_is_refused_by_name(typed: str) -> None:
    ROWS[typed]()
