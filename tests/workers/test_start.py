"""A worker whose start fails half way, or is given up, closes what it had opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from poolgrid.plugins.simulated import opening
from poolgrid.server.process.tasks import on_fatal
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.timing import TableError
from tests.process.leftovers import Broken, breaks, ended_leaving_nothing, refused_for_its_port
from tests.workers.fakes import FakeConsolidator, Journal
from tests.workers.running import make_settings


def starting(ready: Callable[[str], None] = lambda url: None, **settings: Any) -> Callable[[], Any]:
    """Return what starts a worker, and stops it as soon as its consolidator has welcomed it."""

    async def serve() -> None:
        stop = asyncio.Event()

        def on_ready(url: str) -> None:
            ready(url)
            stop.set()

        on_fatal.set(lambda name, error: stop.set())
        async with FakeConsolidator(Journal()) as consolidator:
            await bootstrap.serve(make_settings(consolidator.endpoint, **settings), stop, on_ready)

    return serve


@pytest.mark.parametrize("modality", ["text", "multimodal"])
def test_one_that_is_stopped_leaves_nothing(modality: str) -> None:
    ended_leaving_nothing(starting(modality=modality))


@pytest.mark.parametrize("port", ["http_port", "request_port", "tensor_port"])
def test_one_whose_port_is_taken_leaves_nothing(port: str) -> None:
    refused_for_its_port(starting, port, modality="multimodal")


@pytest.mark.parametrize("step", [name for name in vars(bootstrap) if name.startswith(("_open_", "_start_"))])
def test_one_whose_start_fails_at_any_step_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, step, breaks)

    ended_leaving_nothing(starting(), Broken)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (opening, "KvFetcher"),
        (opening, "EmbeddingFetcher"),
        (bootstrap, "WorkerService"),
        (bootstrap, "PushStream"),
        (bootstrap, "EventPublisher"),
    ],
)
def test_one_that_breaks_around_its_engine_leaves_nothing(
    place: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, breaks)

    ended_leaving_nothing(starting(modality="multimodal"), Broken)


def test_one_whose_timing_table_is_none_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    ended_leaving_nothing(starting(timing=str(tmp_path / "none.json")), TableError)


def test_one_that_cannot_say_that_it_is_ready_ends_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended_leaving_nothing(starting(ready=breaks))

    assert "task 'announcement' failed: what it is part of ends" in caplog.text
