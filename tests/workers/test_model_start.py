"""A worker starts in phases, with its model from a hub where it has the name of one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.adapters.http_api import HttpApi
from poolgrid.server.workers.engines.registry import engine_definition
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.model_fetch import ModelFetchError, fetched_model
from poolgrid.server.workers.settings import WorkerProcessSettings
from poolgrid.server.workers.start_phases import Phase, StartPhases
from tests.clock import HandClock
from tests.process.leftovers import ended_leaving_nothing
from tests.workers.fakes import FakeConsolidator, Journal
from tests.workers.hub_server import file_server
from tests.workers.running import make_settings


class Start(StartPhases):
    """A start whose words are kept."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.registry = CollectorRegistry()
        self.clock = HandClock()
        super().__init__(WorkerMetrics(self.registry), self.clock, self.said.append)

    def seconds(self) -> dict[str, float]:
        (family,) = (each for each in self.registry.collect() if each.name == "poolgrid_worker_start_seconds")
        return {sample.labels["phase"]: sample.value for sample in family.samples}


def settings_of(engine: str, **given: Any) -> WorkerProcessSettings:
    settings: WorkerProcessSettings = engine_definition(engine).settings.model_validate(given)
    return settings


async def with_hub(settings: Any, start: StartPhases) -> Any:
    definition = engine_definition(settings.engine_name)
    return await fetched_model(settings, definition.loads(settings), definition.with_model, start)


def test_each_phase_has_its_time_and_says_what_is_left() -> None:
    start = Start()

    start.enter(Phase.FETCH, 1000)
    start.clock.now_ms = 1500.0
    start.move(400, 1000)
    assert start.left_bytes == 600
    start.enter(Phase.LOAD)
    start.clock.now_ms = 2000.0
    start.enter(Phase.FETCH)
    start.clock.now_ms = 2250.0
    start.end()

    assert start.seconds() == {"fetch": 1.75, "load": 0.5}
    assert (start.phase, start.left_bytes) == (None, 0)
    assert start.said[1] == "the model is fetched: 400 B of 1000 B"


@pytest.mark.parametrize(
    "given",
    [
        {"engine": "trtllm", "model_path": "/nowhere/model"},
        {"engine": "trtllm", "model_path": "HERE"},
        {"engine": "vllm", "engine_url": ("http://gpu1:8000",)},
        {"engine": "simulated"},
    ],
)
def test_nothing_is_fetched_for_a_model_that_is_no_hub_name_or_that_a_server_loads(given: Any, tmp_path: Path) -> None:
    settings = settings_of(**{name: str(tmp_path) if value == "HERE" else value for name, value in given.items()})

    assert asyncio.run(with_hub(settings, Start())) is settings
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "sglang", "trtllm-serve", "simulated"])
def test_an_engine_loads_the_fetched_directory_under_the_name_that_clients_know(engine: str, tmp_path: Path) -> None:
    definition = engine_definition(engine)
    (tmp_path / "tokenizer.json").write_text("{}")
    given = {} if engine == "simulated" else {"model_path": "org/model"}
    assert definition.with_model is not None

    made: Any = definition.with_model(settings_of(engine, **given), tmp_path)

    if engine == "simulated":
        assert made.tokenizer_path == tmp_path
    else:
        assert (made.model_path, made.served_model_name) == (str(tmp_path), "org/model")


async def test_a_worker_fetches_its_model_and_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start()
    with file_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        hub.serve_model("org/model", {"config.json": b"{}", "m.safetensors": bytes(3_000_000)})
        hub.holds["/store/m.safetensors"] = 1_000_000
        fetching = asyncio.ensure_future(with_hub(settings_of("trtllm", model_path="org/model"), start))
        async with asyncio.timeout(60):
            while not start.total_bytes or start.done_bytes < 2:  # noqa: ASYNC110 - another process reports it
                await asyncio.sleep(0.05)
            assert start.total_bytes == 3_000_002
            hub.go_on.set()
            settings = await fetching

    assert (Path(settings.model_path) / "m.safetensors").stat().st_size == 3_000_000
    assert settings.served_model_name == "org/model"
    assert start.seconds()["fetch"] == 0.0, "by a clock that stands"


def test_a_model_that_cannot_be_fetched_ends_the_start_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with pytest.raises(ModelFetchError, match=rf"^fetching org/none at {hub.url}: .*404"):
            asyncio.run(with_hub(settings_of("trtllm", model_path="org/none"), Start()))


def test_a_worker_that_loads_says_how_far_it_is_and_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    async def scenario() -> None:
        stop = asyncio.Event()

        def say(api: HttpApi, reason: str) -> None:
            said.append(reason)
            if "GiB" in reason:
                stop.set()

        monkeypatch.setattr(HttpApi, "say_start", say)
        async with FakeConsolidator(Journal()) as consolidator:
            settings = make_settings(consolidator.endpoint, load_ms=3_600_000, load_bytes=10**10)
            await bootstrap.serve(settings, stop, lambda url: None)

    ended_leaving_nothing(scenario)
    assert re.fullmatch(r"the engine loads its model: .* of 9\.3 GiB", said[1])
