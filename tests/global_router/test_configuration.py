"""The document in force: replaced when its file changes, kept when the new one is broken, rolled back on request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from poolgrid.kernel.pool_grids.grid import GridRequest
from poolgrid.kernel.pool_grids.grid_document import TargetDefaults
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.document.history import Reload
from poolgrid.server.global_router.document_file import read_document_file
from tests.clock import HandClock
from tests.global_router.documents import aggregated, changed

DEFAULT = ("defaults",)


def version(ttft_ms: float) -> str:
    return json.dumps(changed(aggregated(), DEFAULT, {"ttft_target_ms": ttft_ms, "itl_target_ms": 0}))


class Scene:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(version(900))
        self.configuration = Configuration(read_document_file(path), path, HandClock())
        self.outcomes: asyncio.Queue[Reload] = asyncio.Queue()
        self.configuration.listen(self.outcomes.put_nowait)

    def pool(self) -> str:
        return self.configuration.active.grid.select("aggregated", GridRequest(0)).pool


async def test_a_changed_file_is_noticed_and_put_in_force(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "grid.json")
    before = scene.configuration.active
    watching = asyncio.create_task(scene.configuration.watch(0.005, asyncio.Event()))
    scene.path.write_text(version(100))

    outcome = await scene.outcomes.get()
    watching.cancel()

    assert outcome.outcome == "replaced"
    assert [str(change) for change in outcome.changes] == ["$.defaults.ttft_target_ms: 900.0 is now 100.0"]
    assert scene.pool() == "a"
    assert scene.configuration.active.revision == 2
    assert before.revision == 1, "what a request holds does not change"
    assert scene.configuration.active.outputs is before.outputs, "what was learned is kept"


def test_targets_of_the_process_count_where_the_document_has_none(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(changed(aggregated(), DEFAULT, {"ttft_target_ms": 900})))
    defaults = TargetDefaults(ttft_target_ms=1.0, itl_target_ms=2.0)

    active = Configuration(read_document_file(path), path, HandClock(), defaults).active

    readings = active.grid.select("aggregated", GridRequest(0)).readings
    assert [reading.value for reading in readings if reading.axis.name in ("ttft", "itl")] == [900.0, 2.0]
    assert active.document.defaults.itl_target_ms is None, "the document in force stays what the file says"


async def test_a_signal_reads_the_file_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "grid.json")
    wake = asyncio.Event()
    watching = asyncio.create_task(scene.configuration.watch(3600, wake))
    wake.set()
    assert (await scene.outcomes.get()).outcome == "unchanged"
    scene.path.write_text(version(100))
    wake.set()
    assert (await scene.outcomes.get()).outcome == "replaced"
    watching.cancel()


async def test_a_broken_file_changes_nothing_and_every_problem_is_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "grid.json")
    raw: dict[str, Any] = changed(aggregated(), ("adpat",), True)
    scene.path.write_text(json.dumps(changed(raw, ("aggregated", "isl_max"), -1)))

    outcome = await scene.configuration.reload()

    assert outcome is not None
    assert outcome.outcome == "refused"
    assert len(outcome.problems) >= 2
    assert (scene.configuration.active.revision, scene.pool()) == (1, "b")
    assert scene.configuration.reloads[-1][1] is outcome


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hunter2@fast:8000",
        "http://u:pass/hunter2@fast:8000",
        "https://fast:8000?key=hunter2",
        "u:hunter2@fast:8000",
        "dyn://u:hunter2@blue.router.select",
        "http://u:hunter2@fast:8000/" + "x" * 3000,
    ],
)
async def test_a_refused_url_is_named_by_its_place_and_shows_no_password(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "grid.json")
    scene.path.write_text(json.dumps(changed(aggregated(), ("aggregated", "pools", 0, "url"), url)))

    outcome = await scene.configuration.reload()

    assert outcome is not None
    assert outcome.outcome == "refused"
    assert any(each.path[-1] == "url" for each in outcome.problems)
    assert "fast" in caplog.text or "blue" in caplog.text
    assert "hunter2" not in "".join([caplog.text, *map(str, outcome.problems)])


async def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "grid.json")
    scene.path.unlink()

    assert await scene.configuration.reload() is None
    assert scene.configuration.active.revision == 1


async def test_a_rollback_is_a_new_revision_and_stands_until_the_file_changes(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "grid.json")
    scene.path.write_text(version(100))
    await scene.configuration.reload()

    assert (await scene.configuration.rollback()).outcome == "rolled-back"
    assert (scene.configuration.active.revision, scene.pool()) == (3, "b")
    assert (await scene.configuration.rollback()).outcome == "unchanged"

    scene.outcomes = asyncio.Queue()
    scene.configuration.listen(scene.outcomes.put_nowait)
    watching = asyncio.create_task(scene.configuration.watch(0.005, asyncio.Event()))
    scene.path.write_text(version(101))
    assert (await scene.outcomes.get()).outcome == "replaced"
    watching.cancel()
    assert (scene.configuration.active.revision, scene.pool()) == (4, "a")
