"""Command lines of Dynamo's documents, old and newest: each option works, or is refused with the alternative."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import click
import pytest
from click.testing import CliRunner

from poolgrid.cli import main
from poolgrid.cli.dynamo_options import OPTIONS, in_our_words
from poolgrid.process.settings import Settings
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings
from tests.cases import for_each

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
    ("worker", (*TRTLLM, "--dyn-reasoning-parser", "gpt_oss"), {"reasoning_parser": "harmony"}),
    ("worker", (*TRTLLM, "--dyn-reasoning-parser", "basic"), {"reasoning_parser": "qwen3"}),
    ("worker", (*TRTLLM, "--dyn-tool-call-parser", "harmony"), {"tool_call_parser": "harmony"}),
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
    ("router", ("--router-mode", "kv", "--http-port", "8001"), {"policy": "kv", "port": 8001}),
    ("router", ("--router-mode", "round-robin"), {"policy": "round-robin"}),
    ("router", ("--router-mode=random", "--http-host", "::1"), {"policy": "random", "host": "::1"}),
    ("router", ("--no-kv-events",), {"policy": "approximate"}),
    ("router", ("--dyn-reasoning-parser", "gpt_oss"), {"reasoning_parser": "harmony"}),
]

VARIABLES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"DYN_TRTLLM_MODEL": "m"}, {"model_path": "m"}),
    ({"DYN_TRTLLM_MAX_BATCH_SIZE": "7"}, {"max_batch_size": 7}),
    ({"DYN_TRTLLM_ENABLE_ATTENTION_DP": "true"}, {"enable_attention_dp": True}),
    ({"DYN_TRTLLM_PUBLISH_KV_EVENTS": "false"}, {"publish_events_and_metrics": False}),
    ({"DYN_TRTLLM_DISAGGREGATION_MODE": "prefill"}, {"role": "PREFILL"}),
    ({"DYN_TRTLLM_MODEL": "m", "POOLGRID_MODEL": "n", "POOLGRID_MODEL_PATH": "p"}, {"model_path": "p"}),
]


@pytest.mark.parametrize(("command", "words", "settings"), WORKS, ids=[" ".join(words) for _, words, _ in WORKS])
def test_a_documented_option_means_the_same_here(
    monkeypatch: pytest.MonkeyPatch, command: str, words: tuple[str, ...], settings: dict[str, Any]
) -> None:
    said, found = started_with(monkeypatch, command, words)
    assert {name: found.get(name) for name in settings} == settings, said


@pytest.mark.parametrize(("env", "settings"), VARIABLES)
def test_a_documented_variable_means_the_same_here(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], settings: dict[str, Any]
) -> None:
    said, found = started_with(monkeypatch, "worker", ["--engine", "trtllm"], env)
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
