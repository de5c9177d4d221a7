"""A global router whose start fails half way, or is given up, closes what it had opened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.global_router import bootstrap
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.serving.router_process import RouterProcess
from tests.global_router.documents import disagg
from tests.process.leftovers import Broken, breaks, ended_leaving_nothing, load_once, refused_for_its_port


def starting(
    directory: Path, place: GroupPlace | None = None, ready: Callable[[str], None] = lambda url: None, **settings: Any
) -> Callable[[], Any]:
    """Return what starts a global router whose pools are not there, and stops it as soon as it is ready."""
    path = directory / "document.json"
    path.write_text(json.dumps(disagg()))

    async def serve() -> None:
        stop = asyncio.Event()

        def on_ready(url: str, *_: str) -> None:
            ready(url)
            stop.set()

        await bootstrap.serve(
            GlobalRouterSettings(**{"config": path, "port": 0, "shutdown_timeout_ms": 100, **settings}),
            FrontendSettings(),
            stop,
            on_ready,
            place,
        )

    return serve


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptModel, "load", load_once)


def test_one_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    ended_leaving_nothing(starting(tmp_path))


def test_one_whose_port_is_taken_leaves_nothing(tmp_path: Path) -> None:
    refused_for_its_port(partial(starting, tmp_path), "port")


STEPS = [
    *((bootstrap, name) for name in vars(bootstrap) if name.startswith(("_open_", "_make_", "_take_"))),
    *((RouterProcess, name) for name in vars(RouterProcess) if name.startswith(("open_", "start_", "join_", "serve_"))),
]


@pytest.mark.parametrize(("owner", "step"), STEPS)
def test_one_whose_start_fails_at_any_step_leaves_nothing(
    owner: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, step, breaks)

    ended_leaving_nothing(starting(tmp_path, GroupPlace(tmp_path, 0, 1)), Broken)


def test_one_that_cannot_say_that_it_is_ready_leaves_nothing(tmp_path: Path) -> None:
    ended_leaving_nothing(starting(tmp_path, GroupPlace(tmp_path, 0, 1), ready=breaks), Broken)
