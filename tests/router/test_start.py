"""A router whose start fails half way, or is given up, closes what it had opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.router import bootstrap
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.router_process import RouterProcess
from tests.process.leftovers import Broken, breaks, ended_leaving_nothing, load_once, refused_for_its_port


def starting(
    directory: Path | None = None,
    place: GroupPlace | None = None,
    ready: Callable[[bootstrap.Endpoints], None] = lambda at: None,
    **settings: Any,
) -> Callable[[], Any]:
    """Return what starts a router with the consolidator inside, which stops as soon as it is ready."""

    async def serve() -> None:
        stop = asyncio.Event()

        def on_ready(at: bootstrap.Endpoints) -> None:
            ready(at)
            stop.set()

        routers = {name: value for name, value in settings.items() if name in RouterSettings.model_fields}
        rest = {name: value for name, value in settings.items() if name not in routers}
        await bootstrap.serve(
            RouterSettings(**{"port": 0, "select_port": 0, "shutdown_timeout_ms": 100, **routers}),
            FrontendSettings(),
            ConsolidatorSettings(data_dir=directory, **{"ingest_port": 0, **rest}),
            stop,
            on_ready,
            place,
        )

    return serve


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptModel, "load", load_once)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which one has begun and ended, so that every other one finds what it left there."""
    directory = tmp_path_factory.mktemp("used")
    ended_leaving_nothing(starting(directory))
    return directory


def test_one_that_is_stopped_leaves_nothing(directory: Path) -> None:
    ended_leaving_nothing(starting(directory))


@pytest.mark.parametrize("port", ["port", "select_port", "ingest_port", "query_port"])
def test_one_whose_port_is_taken_leaves_nothing(port: str, directory: Path) -> None:
    refused_for_its_port(partial(starting, directory), port)


STEPS = [
    *((bootstrap, name) for name in vars(bootstrap) if name.startswith(("_open_", "_make_", "_take_"))),
    *((RouterProcess, name) for name in vars(RouterProcess) if name.startswith(("open_", "start_", "join_", "serve_"))),
]


@pytest.mark.parametrize(("owner", "step"), STEPS)
def test_one_whose_start_fails_at_any_step_leaves_nothing(
    owner: Any, step: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, step, breaks)

    ended_leaving_nothing(starting(directory), Broken)


def test_one_whose_journal_cannot_be_opened_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")

    ended_leaving_nothing(starting(tmp_path / "journal", record_decisions=False), OSError, "journal")


def test_one_that_cannot_say_that_it_is_ready_leaves_nothing(directory: Path) -> None:
    ended_leaving_nothing(starting(directory, ready=breaks), Broken)


def test_one_loads_its_vocabulary_before_it_judges_anybody_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def take(*given: Any, **named: Any) -> Any:
            result = real(*given, **named)
            done.append(step)
            return result

        return take

    monkeypatch.setattr(RouterProcess, "start_clock", noted("start clock", RouterProcess.start_clock))
    monkeypatch.setattr(PromptModel, "load", noted("load model", PromptModel.load))

    asyncio.run(starting()())

    assert done == ["load model", "start clock"]


def test_one_that_is_stopped_before_it_knows_its_pool_leaves_nothing() -> None:
    async def serve() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stop.set)
        nobody = {"feed_endpoint": "tcp://127.0.0.1:9", "query_endpoint": "tcp://127.0.0.1:9"}
        await bootstrap.serve(
            RouterSettings(port=0, select_port=0, shutdown_timeout_ms=100, **nobody),
            FrontendSettings(),
            ConsolidatorSettings(),
            stop,
            breaks,
        )

    ended_leaving_nothing(serve)
