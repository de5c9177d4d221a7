"""What workers with real engines say of their step times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poolgrid.wire.card import NO_STEP_TIMES
from poolgrid.workers.engines.registry import engine_definition
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.workers.engines.server.dialects.vllm import KIND
from poolgrid.workers.engines.server.opening import make_card
from poolgrid.workers.settings import StepTimesSettings

OWN = {"prefill": [[1, 10.0], [1000, 60.0]], "decode": [[0.0, 5.0], [1.0, 20.0]]}


def test_a_measurement_of_ones_own_is_said(tmp_path: Path) -> None:
    table = tmp_path / "own.json"
    table.write_text(json.dumps(OWN))

    times = StepTimesSettings(timing=str(table)).step_times()

    assert dict(times.prefill)[1] == 10.0
    assert dict(times.decode)[0.5] == 12.5


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_a_table_that_cannot_be_used_is_refused_before_an_engine_is_loaded(engine: str, tmp_path: Path) -> None:
    table = tmp_path / "own.json"
    table.write_text(json.dumps({**OWN, "prefill": [[1, -3.0]]}))

    with pytest.raises(ValueError, match=r"own\.json: prefill\[0\] has -3"):
        engine_definition(engine).settings(model_path="m", timing=str(table))


def test_the_card_of_a_worker_before_a_server_says_them() -> None:
    settings = engine_definition("vllm").settings(engine_url=("http://127.0.0.1:8001",), timing="h200-qwen3-8b")

    card = make_card(settings, ServerFacts("vllm", model="m", block_size=16), KIND, 5000, 5001)

    assert card.step_times == settings.step_times() != NO_STEP_TIMES
