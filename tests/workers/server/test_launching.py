"""How servers are started: arguments of each engine, and what is refused among those that somebody gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from poolgrid.server.cli.main import app
from poolgrid.server.workers.engines.registry import engine_definition
from poolgrid.server.workers.engines.server.core.launching import (
    Publishing,
    WantedServer,
    options_in,
    publishing_at,
    publishing_in,
    shown,
    without_option,
)
from poolgrid.server.workers.engines.server.dialects import sglang, trtllm_serve, vllm


def wanted(*arguments: str, publishing: Publishing | None = None, **changes: Any) -> WantedServer:
    how: dict[str, Any] = {
        "model_path": "/models/small",
        "model_name": "small",
        "host": "127.0.0.1",
        "port": 8123,
        "arguments": arguments,
        "role": "aggregated",
        "block_size": None,
        "api_key": "",
        "directory": "/run/one",
        "follows_events": True,
        "publishing": publishing or publishing_in("/run/one"),
        **changes,
    }
    return WantedServer(**how)


def test_options_are_found_in_every_form() -> None:
    words = ("--dtype", "float32", "--enforce_eager", "--seed=-1", "-dp", "2", "--top", "-5", "--a.b", "c")
    assert options_in(words) == {
        "--dtype": "float32",
        "--enforce-eager": "",
        "--seed": "-1",
        "-dp": "2",
        "--top": "-5",
        "--a": "c",
    }
    assert without_option(("--config", "x.yaml", "--tp_size", "2", "--config=y"), ("--config",)) == ("--tp_size", "2")


def test_a_command_is_shown_without_what_is_secret() -> None:
    words = (
        "serve",
        "--api-key",
        "s1",
        "--hf-token=s2",
        "--max-num-batched-tokens",
        "64",
        "--enable-prompt-tokens-details",
    )
    assert shown(words) == [
        *("serve", "--api-key", "…", "--hf-token=…", "--max-num-batched-tokens", "64", "--enable-prompt-tokens-details")
    ]
    assert "s1" not in "".join(shown(sglang.KIND.launch.command(wanted(api_key="s1")).arguments))


def test_vllm_is_told_where_to_listen_and_to_publish() -> None:
    command = vllm.KIND.launch.command(wanted("--max-model-len", "8192", api_key="secret", block_size=32))
    words = list(command.arguments)
    assert words[:3] == ["/models/small", "--max-model-len", "8192"]
    options = options_in(words)
    assert (options["--port"], options["--host"], options["--served-model-name"]) == ("8123", "127.0.0.1", "small")
    assert options["--block-size"] == "32"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(options)
    assert json.loads(options["--kv-events-config"]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/one/events",
        "replay_endpoint": "ipc:///run/one/replays",
    }
    assert command.environment == {"VLLM_API_KEY": "secret"}
    assert "secret" not in words


def test_several_ranks_count_ports_up_and_none_collide() -> None:
    assert vllm.KIND.launch.ranks({"--data-parallel-size": "3"}) == 3
    with pytest.raises(ValueError, match="--data-parallel-size is 'all', allowed are integers from 1"):
        vllm.KIND.launch.ranks({"--data-parallel-size": "all"})
    places = publishing_at(7000, 3)
    assert (places.endpoint, places.replay_endpoint) == ("tcp://*:7000", "tcp://*:7003")
    assert [each.endpoint[-4:] for each in places.sources] == ["7000", "7001", "7002"]
    assert [each.replay_endpoint[-4:] for each in places.sources] == ["7003", "7004", "7005"]
    of_sglang = sglang.KIND.launch.as_it_publishes(places)
    assert [bool(each.replay_endpoint) for each in of_sglang.sources] == [True, False, False]


def test_sglang_is_told_its_page_size_and_its_part() -> None:
    options = options_in(sglang.KIND.launch.command(wanted(role="prefill", api_key="secret")).arguments)
    assert (options["--model-path"], options["--page-size"]) == ("/models/small", "32")
    assert (options["--disaggregation-mode"], options["--api-key"]) == ("prefill", "secret")
    assert json.loads(options["--kv-events-config"])["endpoint"] == "ipc:///run/one/events"
    assert "--disaggregation-mode" not in options_in(sglang.KIND.launch.command(wanted()).arguments)


def test_trtllm_serve_gets_a_file_with_what_it_had_and_what_is_needed() -> None:
    own = "max_batch_size: 8\nkv_cache_config: {free_gpu_memory_fraction: 0.5, tokens_per_block: 64}"
    command = trtllm_serve.KIND.launch.command(wanted("--tp_size", "2", "--config", "mine.yaml", given_file=own))
    assert command.arguments[:3] == ("/models/small", "--tp_size", "2")
    assert "mine.yaml" not in command.arguments
    assert options_in(command.arguments)["--extra-llm-api-options"] == "/run/one/server.yaml"
    assert command.block_size == 64
    assert yaml.safe_load(command.files["server.yaml"]) == {
        "max_batch_size": 8,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.5,
            "tokens_per_block": 64,
            "event_buffer_max_size": 100_000,
            "enable_block_reuse": True,
        },
    }
    assert trtllm_serve.KIND.launch.command(wanted()).block_size == 32


def test_trtllm_serve_publishes_where_its_worker_listens_if_its_file_asks_for_the_stream() -> None:
    own = "kv_cache_config: {kv_events_config: {enable_kv_cache_events: true, endpoint: 'tcp://*:1', hwm: 9}}"
    command = trtllm_serve.KIND.launch.command(wanted(given_file=own))
    assert command.publishes
    cache = yaml.safe_load(command.files["server.yaml"])["kv_cache_config"]
    assert cache == {
        "tokens_per_block": 32,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "ipc:///run/one/events",
            "replay_endpoint": "ipc:///run/one/replays",
            "hwm": 9,
            "topic": "",
        },
    }
    without = trtllm_serve.KIND.launch.command(wanted(given_file=own.replace("true", "false")))
    assert not without.publishes
    assert yaml.safe_load(without.files["server.yaml"])["kv_cache_config"]["event_buffer_max_size"] == 100_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "given_file": "enable_attention_dp: true\n"
                "kv_cache_config: {kv_events_config: {enable_kv_cache_events: true}}"
            },
            "it chooses the rank of a request itself",
        ),
        ({"given_file": "kv_cache_config: {event_buffer_max_size: 0}"}, "event_buffer_max_size is 0"),
        ({"given_file": "kv_cache_config: {tokens_per_block: 64}", "block_size": 32}, "tokens_per_block is 64"),
        ({"given_file": "kv_cache_config: 5"}, "kv_cache_config is 5"),
        ({"given_file": "[1"}, "reading the file of the server's settings"),
        ({"given_file": "just text"}, "no map of settings"),
        ({"api_key": "secret"}, "trtllm-serve asks for none"),
    ],
)
def test_what_trtllm_serve_cannot_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trtllm_serve.KIND.launch.command(wanted(**changes))


@pytest.mark.parametrize(
    ("engine", "changes", "words"),
    [
        ("vllm", {}, "neither engine_url nor model_path is given"),
        ("vllm", {"engine_argument": ("--kv-events-config", "{}")}, "--kv-events-config is among"),
        ("vllm", {"engine_argument": ("--kv_events_config.endpoint=x",)}, "--kv-events-config is among"),
        ("vllm", {"engine_argument": ("--port=1",)}, "give --engine-port"),
        ("vllm", {"engine_argument": ("/models/other",)}, "begin with '/models/other'"),
        ("sglang", {"engine_argument": ("--disaggregation-mode", "decode")}, "give --role"),
        ("trtllm-serve", {"engine_argument": ("--disable_kv_cache_reuse",)}, "nothing to route by"),
        ("vllm", {"model_path": "/m", "kv_events_endpoint": ("tcp://127.0.0.1:1",)}, "it is for a server that runs"),
        ("vllm", {"engine_url": ("http://a",), "engine_argument": ("--x",)}, "for a server that the worker starts"),
        ("vllm", {"engine_url": ("http://a",), "engine_port": 5}, "for a server that the worker starts"),
    ],
)
def test_arguments_that_are_the_workers_to_give_are_refused_by_name(
    engine: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        engine_definition(engine).settings.model_validate(changes)


def test_a_model_path_that_is_the_routers_disturbs_no_worker_in_front_of_a_server(tmp_path: Path) -> None:
    settings = engine_definition("vllm").settings.model_validate(
        {"engine_url": ("http://a",), "model_path": str(tmp_path)}
    )
    assert not settings.starts_server


def test_what_stands_after_two_dashes_is_the_servers() -> None:
    refused = CliRunner().invoke(app, ["worker", "--engine", "vllm", "--model-path", "/m", "--", "--port", "1"])
    assert refused.exit_code == 2
    assert "--port is among the server's arguments, and is the worker's to give: give --engine-port" in refused.output
    other = CliRunner().invoke(app, ["worker", "--", "--port", "1"])
    assert other.exit_code == 2
    assert "--engine-argument: --engine simulated has no such option" in other.output
