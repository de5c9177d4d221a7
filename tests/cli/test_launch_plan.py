"""What `poolgrid up` and the launch scripts would start: processes, GPUs and commands, on machines of several sizes."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from rich.console import Console

from poolgrid.plugins.trtllm.arguments.contract import ContractError
from poolgrid.server.cli.launch_plan import (
    INGEST,
    GpusMissing,
    OptionProblem,
    PlannedWorker,
    options_as_arguments,
    options_as_settings,
    show,
)
from poolgrid.server.cli.local_pool import UpSettings, plan, planned_parts
from poolgrid.server.cli.main import app

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "engine_configs"
MODEL = Path("/models/some-model")


def files(directory: str, **counts: int) -> dict[str, Any]:
    """Settings of a pool of one directory's engine files."""
    given: dict[str, Any] = {}
    for kind, count in counts.items():
        name = "agg" if kind == "workers" else kind
        given[kind] = count
        role = "worker" if kind == "workers" else kind
        given["engine_args"] = (*given.get("engine_args", ()), f"{role}={CONFIGS / directory / name}.yaml")
    return given


PAIR = {"prefill": 1, "decode": 1}
EPD = {**PAIR, "encode": 1}
TWO = {1: "2 needed", 2: "0 1", 4: "0 1", 8: "0 1"}
THREE = {1: "3 needed", 2: "3 needed", 4: "0 1 2", 8: "0 1 2"}
TWICE_FOUR = {1: "8 needed", 2: "8 needed", 4: "8 needed", 8: "0,1,2,3 4,5,6,7"}

EXPECTED: dict[str, tuple[dict[str, Any], dict[int, str]]] = {
    "qwen3 agg": (files("qwen3", workers=1), {1: "0", 2: "0", 4: "0", 8: "0"}),
    "Qwen-VL agg": (files("qwen2.5-vl", workers=1), {1: "0", 2: "0", 4: "0", 8: "0"}),
    "Qwen-VL EPD": (files("qwen2.5-vl", **EPD), THREE),
    "qwen3 agg twice": (files("qwen3", workers=2), TWO),
    "qwen3 disagg": (files("qwen3", **PAIR), TWO),
    "qwen3 disagg, two prefill": (files("qwen3", prefill=2, decode=1), THREE),
    "gpt-oss": (files("gpt-oss-120b", **PAIR), TWICE_FOUR),
    "gpt-oss on Blackwell": (
        files("gpt-oss-120b/blackwell", **PAIR),
        {1: "5 needed", 2: "5 needed", 4: "5 needed", 8: "0 1,2,3,4"},
    ),
    "Scout agg": (
        files("llama4-scout", workers=1),
        {1: "8 needed", 2: "8 needed", 4: "8 needed", 8: "0,1,2,3,4,5,6,7"},
    ),
    "Scout disagg": (files("llama4-scout", **PAIR), TWICE_FOUR),
    "Maverick": (files("llama4-maverick-eagle", **PAIR), TWICE_FOUR),
    "LLaVA disagg": (files("llava-v1.6-mistral-7b-hf", **PAIR), TWO),
    "LLaVA EPD": (files("llava-v1.6-mistral-7b-hf", **EPD), THREE),
    "Gemma": (files("gemma3", **PAIR), TWO),
    "R1 agg": (files("deepseek-r1", workers=1), {1: "4 needed", 2: "4 needed", 4: "0,1,2,3", 8: "0,1,2,3"}),
    "R1": (files("deepseek-r1/simple", **PAIR), TWICE_FOUR),
    "R1 with MTP": (files("deepseek-r1/mtp", **PAIR), TWICE_FOUR),
    "R1 wide": (
        files("deepseek-r1/wide_ep", **PAIR),
        {1: "32 needed", 2: "32 needed", 4: "32 needed", 8: "32 needed"},
    ),
}
"""GPUs of each worker in their order, or how many are needed, by how many there are."""

SCRIPTS: dict[str, tuple[dict[str, str], str]] = {
    "agg": ({}, "worker-0=0"),
    "agg_router": ({}, "worker-0=0 worker-1=1"),
    "disagg": ({}, "prefill-0=0 decode-0=1"),
    "disagg_router": ({}, "prefill-0=0 prefill-1=1 decode-0=2"),
    "gpt_oss_disagg": ({}, "prefill-0=0,1,2,3 decode-0=4,5,6,7"),
    "agg_multimodal": ({}, "worker-0=0"),
    "disagg_multimodal": ({}, "prefill-0=0 decode-0=1"),
    "epd_disagg": ({}, "prefill-0=0 decode-0=1 encode-0=2"),
    "epd_multimodal_image": ({}, "prefill-0=0 decode-0=1 encode-0=2"),
    "epd_multimodal_image_and_embeddings": (
        {"ALLOWED_LOCAL_MEDIA_PATH": "/data"},
        "prefill-0=0 decode-0=1 encode-0=2",
    ),
}


def made(present: int, **given: Any) -> list[PlannedWorker]:
    settings = UpSettings(engine="trtllm", model_path=MODEL, **given)
    return plan(settings, None, lambda named: tuple(str(at) for at in range(present)))


def test_every_shipped_configuration_is_in_the_table() -> None:
    known = {Path(each.partition("=")[2]) for given, _ in EXPECTED.values() for each in given["engine_args"]}
    assert known == set(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", EXPECTED)
def test_gpus_are_computed_from_the_configuration_and_too_few_are_refused(name: str, gpus: int) -> None:
    given, expected = EXPECTED[name]
    if expected[gpus].endswith(" needed"):
        with pytest.raises(GpusMissing, match=f"^{expected[gpus].partition(' ')[0]} GPUs? (is|are) needed"):
            made(gpus, **given)
        return
    workers = made(gpus, **given)
    assert " ".join(",".join(worker.gpus or ()) for worker in workers) == expected[gpus]
    assert [worker.environment()["CUDA_VISIBLE_DEVICES"] for worker in workers] == expected[gpus].split()


def command_of(name: str, *arguments: str, **environment: str) -> list[str]:
    """What a script calls: with a command in poolgrid's place that prints its arguments, a line each."""
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / f"{name}.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "POOLGRID": r"printf %s\n", "MODEL_PATH": str(MODEL), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_plans_as_its_name_says_and_starts_nothing(name: str) -> None:
    environment, expected = SCRIPTS[name]
    done = CliRunner().invoke(app, [*command_of(name, GPUS="0,1,2,3,4,5,6,7", **environment), "--dry-run"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.partition("\n\n")[0].splitlines()[2:]]
    assert [f"{row[0]}={row[1]}" for row in rows if row[1] != "-"] == expected.split()
    assert [row[0] for row in rows if row[1] == "-"] == ["consolidator", "router"]


def test_every_script_is_in_the_table() -> None:
    assert {path.stem for path in (ROOT / "launch").glob("*.sh")} - {"lib", "epd"} == set(SCRIPTS)


def test_a_script_hands_on_what_it_is_called_with_and_what_overrides_its_files() -> None:
    command = command_of(
        "gpt_oss_disagg",
        *("--decode", "2", "--enable-otel"),
        PREFILL_MAX_BATCH_SIZE="16",
        DECODE_FREE_GPU_MEMORY_FRACTION="0.8",
        DECODE_CUDA_VISIBLE_DEVICES="4,5,6,7",
    )
    assert command[-2:] == ["--decode", "2"]
    options = [each.partition("=")[2] for each in command if ".override-engine-args=" in each]
    traces = {"otlp_traces_endpoint": "http://127.0.0.1:4317", "return_perf_metrics": True}
    assert [json.loads(each) for each in options] == [
        {"max_batch_size": 16, **traces},
        {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}, **traces},
    ]
    done = CliRunner().invoke(app, [*command, "--gpus", "0,1,2,3,4,5,6,7", "--dry-run"])
    assert [line.split()[1] for line in done.stdout.splitlines()[4:7]] == ["0,1,2,3", "4,5,6,7", "4,5,6,7"], done.output


def test_a_dry_run_prints_processes_gpus_ports_and_commands() -> None:
    given = {**files("qwen3", **PAIR), "port": 8123, "part_option": ("decode.no-publish-events-and-metrics",)}
    settings = UpSettings(engine="trtllm", model_path=MODEL, log_level="info", **given)
    parts = planned_parts(settings, made(2, log_level="info", **given))
    shown = io.StringIO()
    show(parts, Console(file=shown, width=80))
    table, _, commands = shown.getvalue().partition("\n\n")
    assert [line.rstrip() for line in table.splitlines()] == [
        "part          GPUs  made of      port",
        "─" * len("consolidator  GPUs  TP 1 x PP 1  any free"),
        "consolidator  -                  any free",
        "router        -                  8123",
        "prefill-0     0     TP 1 x PP 1  any free",
        "decode-0      1     TP 1 x PP 1  any free",
    ]
    consolidator, router, _, decode = commands.splitlines()
    assert consolidator == (
        "poolgrid consolidator --host 127.0.0.1 --ingest-port=5701 --feed-port=5702 --query-port=5703"
    )
    assert router.endswith("--feed-endpoint tcp://127.0.0.1:5702 --query-endpoint tcp://127.0.0.1:5703")
    assert "--consolidator=tcp://127.0.0.1:5701" in decode, "the commands work when they are typed"
    assert decode.startswith("CUDA_VISIBLE_DEVICES=1 poolgrid worker --engine=trtllm --worker-id=decode-0")
    assert "--disaggregation-mode=decode" in decode
    assert f"--extra-engine-args={CONFIGS}/qwen3/decode.yaml" in decode
    assert "--served-model-name=some-model" in decode
    assert decode.endswith("--no-publish-events-and-metrics --log-level info")


def test_a_dry_run_prints_its_plan_as_json_and_a_pool_that_runs_has_none() -> None:
    done = CliRunner().invoke(app, ["up", "--dry-run", "--json", "--workers", "1", "--port", "8123"])
    assert done.exit_code == 0, done.output
    consolidator, router, worker = json.loads(done.stdout)["parts"]
    assert [part["name"] for part in (consolidator, router, worker)] == ["consolidator", "router", "worker-0"]
    assert (router["port"], worker["gpus"], worker["environment"]) == ("8123", None, {})
    assert worker["command"][:2] == ["poolgrid", "worker"]
    running = CliRunner().invoke(app, ["up", "--json"])
    assert (running.exit_code, running.stdout) == (2, "")
    assert "--json needs --dry-run" in running.stderr


@pytest.mark.parametrize("engine", ["simulated", "trtllm"])
@pytest.mark.parametrize("plane", [(), ("--event-plane", "nats", "--nats-url", "nats://127.0.0.1:4222")])
def test_a_dry_run_of_a_fleet_prints_commands_of_every_pool(engine: str, plane: tuple[str, ...]) -> None:
    words = ["up", "--pools", str(ROOT / "pool_configs" / "disagg_two_by_two.json"), "--dry-run", "--json", *plane]
    real = ["--engine", engine, "--model-path", str(MODEL), "--gpus", ",".join("01234567")]
    done = CliRunner().invoke(app, words + (real if engine == "trtllm" else []))
    assert done.exit_code == 0, done.output
    parts = json.loads(done.stdout)["parts"]
    workers = [part for part in parts if part["command"][1] == "worker"]
    assert len(workers) == 8
    assert [part["gpus"] for part in workers] == [[str(at)] if engine == "trtllm" else None for at in range(8)]
    for part in parts:
        name, *given = part["command"][1:]
        app.commands[name].make_context(name, list(given))  # raises when an option or a value is wrong
    (front,) = [part for part in parts if part["command"][1] == "global-router"]
    urls = {each for each in front["command"] if each.startswith("--pool-url=")}
    ports = {part["command"][2].partition("=")[2] for part in parts if part["command"][1] == "router"}
    assert {each.rpartition(":")[2] for each in urls} == ports
    assert len(ports) == 4
    consolidators = [part for part in parts if part["command"][1] == "consolidator"]
    assert len(consolidators) == (4 if plane else 0)


def test_the_command_of_a_plan_is_one_that_workers_take() -> None:
    for worker in made(8, **files("gpt-oss-120b", **PAIR), part_option=("worker.trust-remote-code=false",)):
        command = [each.replace(INGEST, "tcp://127.0.0.1:1") for each in worker.arguments]
        done = CliRunner().invoke(app, [*command, "--print-engine-args"])
        assert done.exit_code == 0, done.output
        assert "tensor_parallel_size: 4" in done.output


def test_gpus_can_be_named_per_kind_and_shared() -> None:
    workers = made(8, **files("qwen3", **PAIR), gpus=("prefill=5", "decode=5"))
    assert [worker.gpus for worker in workers] == [("5",), ("5",)]
    workers = made(8, **files("qwen3", workers=2), gpus=("worker=7,3",))
    assert [worker.gpus for worker in workers] == [("7",), ("3",)]
    workers = made(8, **files("qwen3", workers=2), gpus=("worker=4",))
    assert [worker.gpus for worker in workers] == [("4",), ("4",)]
    with pytest.raises(GpusMissing, match=r"1 GPU is needed \(worker-2"):
        made(2, **files("qwen3", workers=3), gpus=("worker=0,1",))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("max-batchsize=4", "--max-batchsize: is no option of this worker"),
        ("max-batch-size=many", "--max-batch-size: Input should be a valid integer"),
        ("max batch=4", "'max batch=4' is handed on as an option"),
        ("extra-engine-args=/nowhere.yaml", "/nowhere.yaml"),
        ('override-engine-args={"max_batchsize": 4}', "did you mean 'max_batch_size'"),
    ],
)
def test_what_a_worker_would_refuse_is_refused_before_anything_starts(option: str, words: str) -> None:
    with pytest.raises((OptionProblem, ContractError, ValueError), match=words):
        made(8, workers=1, part_option=(f"worker.{option}",))


def test_the_environment_counts_as_workers_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLGRID_TENSOR_PARALLEL_SIZE", "2")
    (worker,) = made(8, workers=1)
    assert worker.gpus == ("0", "1")


def test_options_become_arguments_and_settings() -> None:
    given = ("max-num-tokens=8", "--trust-remote-code", "no-publish-events-and-metrics")
    assert options_as_arguments(given) == [
        "--max-num-tokens=8",
        "--trust-remote-code",
        "--no-publish-events-and-metrics",
    ]
    assert options_as_settings(given) == {
        "max_num_tokens": "8",
        "trust_remote_code": True,
        "publish_events_and_metrics": False,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "trtllm"}, "model_path is not given"),
        ({"engine": "trtllm", "model_path": MODEL, "speedup": 2.0}, "speedup is 2.0 with engine trtllm"),
        ({"gpus": ("0",)}, "gpus is .* with engine simulated"),
    ],
)
def test_options_of_the_other_engine_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        UpSettings(**given)


def test_the_same_topology_of_simulated_workers_has_the_limits_of_the_files() -> None:
    done = CliRunner().invoke(
        app,
        [
            *("up", "--dry-run", "--prefill", "1", "--decode", "1"),
            *("--engine-args", f"prefill={CONFIGS}/qwen3/prefill.yaml"),
            *("--engine-args", f"decode={CONFIGS}/qwen3/decode.yaml"),
        ],
    )
    assert done.exit_code == 0, done.output
    table, _, commands = done.output.partition("\n\n")
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [
        ["consolidator", "-"],
        ["router", "-"],
        ["prefill-0", "-"],
        ["decode-0", "-"],
    ]
    assert "--max-batch-size=16" in commands
    assert "--max-seq-len=40960" in commands


def test_a_plan_that_cannot_be_is_said_in_one_line_with_status_2() -> None:
    done = CliRunner().invoke(
        app,
        ["up", "--engine", "trtllm", "--model-path", str(MODEL), "--workers", "9", "--gpus", "0,1", "--dry-run"],
    )
    assert done.exit_code == 2
    assert "9 GPUs are needed" in done.output


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["worker-0", "worker-1", "worker-2", "worker-3"]),
        ({"workers": 1, "encode": 1}, ["worker-0", "encode-0"]),
        ({"prefill": 1, "decode": 2}, ["prefill-0", "decode-0", "decode-1"]),
        ({"workers": 1, "decode": 1}, ["worker-0", "decode-0"]),
    ],
)
def test_workers_are_named_after_their_roles(given: dict[str, Any], names: list[str]) -> None:
    assert list(UpSettings(**given).workers_by_name()) == names


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 2}, "prefill is 2 and decode is 0"),
        ({"workers": 0}, "workers and decode are 0"),
        ({"workers": 0, "encode": 1}, "workers and decode are 0"),
    ],
)
def test_a_pool_that_could_not_answer_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        UpSettings(**given)
