"""Engines of tasks: order, places and ends; the simulated ones, engine servers, and TensorRT-LLM's VisualGen."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from poolgrid.kernel.wire.events import RequestFinished, RequestStarted
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenDelta
from poolgrid.kernel.wire.tasks import EmbeddingTask, Task, TaskResult, VisualTask, stage_of
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.refusal import BrokenError, BusyError, RefusedError, UnableError
from poolgrid.plugins.simulated.tasks import SimulatedDiffusion, SimulatedEmbeddings
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from poolgrid.plugins.trtllm.visual import TrtllmVisual, plan_visual
from poolgrid.server.workers.engines import tasks as engine_of_tasks
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread
from poolgrid.server.workers.engines.tasks import TaskEngine, TaskMaker, Told
from tests.fakes import tensorrt_llm_of
from tests.workers.running import running_worker

CAT = VisualTask("a cat", width=32, height=16, steps=2)
FILM = VisualTask("a cat", video=True, width=32, height=16, steps=2, frames=3, frame_rate=8.0)


def generate(name: str, task: Task = CAT) -> Generate:
    return Generate(name, b"", Sampling(1), stage=stage_of(task), task=task)


class Painter:
    """Makes what a test lets it make."""

    is_interruptible = True

    def __init__(self, concurrency: int = 1) -> None:
        self.concurrency = concurrency
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Future[TaskResult]] = {}
        self.interrupted: list[str] = []

    async def make(self, task: VisualTask, told: Told) -> TaskResult:
        name = task.prompt
        self.begun.append(name)
        told(len(self.begun))
        self.ends[name] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.shield(self.ends[name])
        except asyncio.CancelledError:
            self.interrupted.append(name)
            raise


class Watched:
    """An engine that runs, and what it reports."""

    def __init__(self, engine: TaskEngine) -> None:
        self.engine = engine
        self.reports: list[EngineReport] = []
        self._news = asyncio.Event()

    def take(self, report: EngineReport) -> None:
        self.reports.append(report)
        self._news.set()

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for report in self.reports for delta in report.deltas]

    @property
    def events(self) -> list[Any]:
        return [event for report in self.reports for event in report.ranks[0].events]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not holds():
                self._news.clear()
                await asyncio.sleep(0)
                if not holds():
                    await asyncio.wait([asyncio.ensure_future(self._news.wait())], timeout=0.05)

    async def last(self, name: str) -> TokenDelta:
        def ends() -> list[TokenDelta]:
            return [delta for delta in self.deltas if delta.request_id == name and delta.finish_reason]

        await self.until(ends)
        [last] = ends()
        return last


@asynccontextmanager
async def watched(maker: TaskMaker, stage: Stage = Stage.IMAGE) -> AsyncIterator[Watched]:
    engine = TaskEngine(stage, maker)
    seen = Watched(engine)
    running = asyncio.create_task(engine.run(seen.take))
    try:
        yield seen
    finally:
        running.cancel()
        await engine.close()


async def test_tasks_are_begun_in_order_as_many_as_have_places_and_their_load_is_told() -> None:
    painter = Painter(concurrency=2)
    async with watched(painter) as seen:
        for name in "abc":
            seen.engine.submit(generate(name, VisualTask(name)))
        await seen.until(lambda: len(painter.begun) == 2)
        load = seen.engine.load()
        assert (load.running_requests, load.waiting_requests) == (2, 1)

        painter.ends["b"].set_result(TaskResult((b"picture",), "image/png"))
        assert (await seen.last("b")).result == TaskResult((b"picture",), "image/png")
        await seen.until(lambda: painter.begun == ["a", "b", "c"])
    assert [event.request_id for event in seen.events if isinstance(event, RequestStarted)] == ["a", "b", "c"]
    assert [delta.progress for delta in seen.deltas if delta.request_id == "b"][:1] == [2]


@pytest.mark.parametrize("interruptible", [True, False])
async def test_a_cancelled_task_ends_at_once_and_keeps_its_place_only_where_it_cannot_be_interrupted(
    interruptible: bool,
) -> None:
    painter = Painter()
    painter.is_interruptible = interruptible
    async with watched(painter) as seen:
        for name in "ab":
            seen.engine.submit(generate(name, VisualTask(name)))
        await seen.until(lambda: painter.begun)

        seen.engine.cancel("a")

        assert (await seen.last("a")).finish_reason is FinishReason.CANCELLED
        if interruptible:
            await seen.until(lambda: painter.begun == ["a", "b"])
            assert painter.interrupted == ["a"]
        else:
            await asyncio.sleep(0.02)
            assert painter.begun == ["a"], "its place is taken"
            painter.ends["a"].set_result(TaskResult((b"nobody's",)))
            await seen.until(lambda: painter.begun == ["a", "b"])
        painter.ends["b"].set_result(TaskResult((b"b",)))
        await seen.last("b")
        assert [delta.request_id for delta in seen.deltas if delta.finish_reason] == ["a", "b"]


def test_what_fails_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_of_tasks, "RESULT_BYTES_MAX", 4)
    ends: dict[str, TaskResult | Exception] = {
        "unable": UnableError("not here"),
        "broken": BrokenError("failed"),
        "bug": KeyError("x"),
        "large": TaskResult((b"123", b"45")),
        "fits": TaskResult((b"1234",)),
    }

    async def go() -> dict[str, tuple[Any, Any]]:
        painter = Painter(concurrency=len(ends))
        async with watched(painter) as seen:
            for name in ends:
                seen.engine.submit(generate(name, VisualTask(name)))
            await seen.until(lambda: len(painter.ends) == len(ends))
            for name, end in ends.items():
                if isinstance(end, Exception):
                    painter.ends[name].set_exception(end)
                else:
                    painter.ends[name].set_result(end)
            lasts = {name: await seen.last(name) for name in ends}
            finished = {event.request_id for event in seen.events if isinstance(event, RequestFinished)}
            assert finished == set(ends)
            return {name: (last.finish_reason, last.refusal) for name, last in lasts.items()}

    error = FinishReason.ERROR
    assert asyncio.run(go()) == {
        "unable": (error, RefusalKind.CANNOT_DO),
        "broken": (error, RefusalKind.BROKEN),
        "bug": (error, RefusalKind.BROKEN),
        "large": (error, None),
        "fits": (FinishReason.STOP, None),
    }


async def test_a_request_of_another_kind_and_one_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_of_tasks, "WAITING_MAX", 1)

    async with watched(Painter()) as seen:
        with pytest.raises(UnableError, match="tasks of the kind image"):
            seen.engine.submit(generate("film", FILM))
        with pytest.raises(UnableError):
            seen.engine.submit(Generate("text", b"\1\0\0\0", Sampling(1)))
        seen.engine.submit(generate("a"))
        with pytest.raises(BusyError, match="1 tasks are waiting"):
            seen.engine.submit(generate("b"))


# -- the simulated engine ----------------------------------------------------------------------------------------------


def made(maker: TaskMaker, task: Task) -> tuple[TaskResult, list[int]]:
    told: list[int] = []
    return asyncio.run(maker.make(task, told.append)), told


def test_vectors_have_length_1_and_equal_texts_have_equal_ones() -> None:
    result, _ = made(SimulatedEmbeddings(1000.0), EmbeddingTask(("a", "b", "a", (5, 6)), dimensions=16))
    vectors = [np.frombuffer(item, "<f4") for item in result.items]

    assert [len(each) for each in vectors] == [16] * 4
    assert np.allclose([np.linalg.norm(each) for each in vectors], 1.0)
    assert result.items[0] == result.items[2] != result.items[1]
    assert result.prompt_tokens == 1 + 1 + 1 + 2


def test_images_are_png_files_of_the_size_that_was_asked_for() -> None:
    result, told = made(SimulatedDiffusion(1e6), VisualTask("a cat", count=2, width=40, height=30, steps=4))

    images = [Image.open(io.BytesIO(item)) for item in result.items]
    for each in images:
        each.load()
    assert [each.size for each in images] == [(40, 30)] * 2
    assert result.items[0] != result.items[1]
    assert told == [0, 25, 50, 75]


def test_a_video_is_an_mp4_file_with_a_frame_for_each_image() -> None:
    result, _ = made(SimulatedDiffusion(1e6), FILM)
    [data] = result.items

    assert data[4:8] == b"ftyp"
    assert data.count(b"\x89PNG") == 3
    at = data.index(b"\x89PNG")
    assert data.index(b"stco") > at
    place = data.index(b"stco") + 12
    assert int.from_bytes(data[place : place + 4], "big") == at, "the table says where the first frame begins"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (VisualTask("x", output_format="webp"), "output_format is 'webp'"),
        (VisualTask("x", extra=b"{}", steps=1), "extra_params"),
        (VisualTask("x", video=True, width=4096, height=4096, frames=65_536), "pixels are asked for"),
    ],
)
def test_what_the_simulated_engine_cannot_make_is_refused_by_name(task: VisualTask, why: str) -> None:
    if task.extra == b"{}":
        task = VisualTask("x", extra=b'{"a":1}')
    with pytest.raises(Exception, match=why):
        made(SimulatedDiffusion(1e6), task)


@pytest.mark.parametrize(
    ("modality", "task", "role"),
    [
        ("embedding", EmbeddingTask(("a",)), Role.EMBEDDING),
        ("image_diffusion", CAT, Role.IMAGE),
        ("video_diffusion", FILM, Role.VIDEO),
    ],
)
async def test_a_worker_of_tasks_serves_them_and_nothing_else(modality: str, task: Task, role: Role) -> None:
    async with running_worker(modality=modality, speedup=1e4) as worker:
        assert worker.journal.cards[0].role is role
        await worker.router.send(generate("r", task))
        await worker.router.send(Generate("t", b"\1\0\0\0", Sampling(1)))
        await worker.router.until_finished("r", "t")
        result = worker.router.last("r").result
        assert result is not None
        assert result.items
        assert worker.router.last("t").refusal is RefusalKind.BROKEN
        state = (await worker.get("/health")).json()
        assert (state["status"], state["role"]) == ("ready", role.name.lower())


# -- engine servers ----------------------------------------------------------------------------------------------------


# -- TensorRT-LLM ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def visual(tmp_path: Path, model: str) -> AsyncIterator[tuple[Any, TrtllmVisual]]:
    with tensorrt_llm_of("1.3"):
        module = importlib.import_module("tensorrt_llm.visual_gen")
        generator = module.VisualGen(model, args=module.VisualGenArgs(parallel_config={"cfg_size": 2}))
        thread = EngineThread()
        try:
            yield generator, TrtllmVisual(thread, generator, tmp_path)
        finally:
            thread.end()


async def test_visual_gen_makes_images_with_what_the_client_asked_for_and_its_own_defaults(tmp_path: Path) -> None:
    async with visual(tmp_path, "flux") as (_, maker):
        plain = await maker.make(VisualTask("a cat"), lambda percent: None)
        several = await maker.make(VisualTask("a cat", count=2, width=20, height=10), lambda percent: None)
    sizes = [Image.open(io.BytesIO(item)).size for item in (*plain.items, *several.items)]
    assert sizes == [(48, 32), (20, 10), (20, 10)]
    assert plain.media_type == "image/png"
    assert os.listdir(tmp_path) == [], "nothing is left behind"


async def test_visual_gen_makes_a_video_of_as_many_seconds(tmp_path: Path) -> None:
    async with visual(tmp_path, "wan-video") as (_, maker):
        result = await maker.make(VisualTask("a cat", video=True, seconds=0.25), lambda percent: None)
    assert result.media_type == "video/mp4"
    assert result.items[0].count(b"\x89PNG") == 4, "a quarter of a second at the model's 16 frames per second"


@pytest.mark.parametrize(
    ("model", "task", "why"),
    [
        ("flux", VisualTask("x", extra=b'{"stg_scale":1}'), "Unknown extra_params"),
        ("flux", VisualTask("x", video=True, seconds=1.0), "no frame rate of its own"),
    ],
)
def test_what_visual_gen_refuses_reaches_the_client(tmp_path: Path, model: str, task: VisualTask, why: str) -> None:
    async def go() -> None:
        async with visual(tmp_path, model) as (_, maker):
            await maker.make(task, lambda percent: None)

    with pytest.raises(RefusedError, match=why):
        asyncio.run(go())


def test_what_a_diffusion_model_would_be_started_with_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("parallel_config: {cfg_size: 2, ulysses_size: 2}\n")
    settings = TrtllmSettings(model_path="wan", modality="video_diffusion", extra_engine_args=file)

    plan = plan_visual(settings)

    assert (plan.gpus, plan.gpus_made_of) == (4, "cfg_size 2 x ulysses_size 2")
    assert "model: wan" in plan.text
