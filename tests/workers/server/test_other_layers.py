"""Layers of hybrid models, of which some servers' events say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poolgrid.server.workers.engines.server.core.server_facts import ListedModel, other_layers
from poolgrid.server.workers.engines.server.dialects import sglang

SLIDING = ["sliding_attention", "full_attention"] * 2
STATES = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({}, set()),
        ({"layer_types": ["full_attention"] * 4}, set()),
        ({"layer_types": SLIDING}, {"sliding_attention"}),
        ({"text_config": {"layer_types": STATES}}, {"linear_attention"}),
        ({"layer_types": "full_attention"}, set()),
        ([], set()),
    ],
)
def test_other_layers_are_those_that_the_configuration_names(tmp_path: Path, config: Any, others: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert other_layers(str(tmp_path)) == others


def test_other_layers_of_a_model_of_another_machine_are_unknown() -> None:
    assert other_layers("openai/gpt-oss-120b") == set()


class Server:
    """Answers ``/server_info``."""

    def __init__(self, **info: Any) -> None:
        self.target = SimpleNamespace(host="127.0.0.1")
        self._info = info

    async def ask_if_there(self, path: str, kind: type[Any]) -> Any:
        events = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557"})
        return kind(page_size=16, kv_events_config=events, **self._info)


@pytest.mark.parametrize(
    ("types", "keeps_all", "hidden"),
    [
        (["full_attention"], False, ""),
        (SLIDING, False, "sliding_attention"),
        (SLIDING, True, ""),
        ([*SLIDING, *STATES], True, "linear_attention"),
    ],
)
async def test_events_of_sglang_are_followed_where_they_say_of_all_layers(
    tmp_path: Path, types: list[str], keeps_all: bool, hidden: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": types}))
    server: Any = Server(model_path=str(tmp_path), disable_hybrid_swa_memory=keeps_all)
    facts = await sglang.learn(server, ListedModel("tiny"))

    assert bool(facts.events_missing) == bool(hidden)
    assert hidden in facts.events_missing
