"""TensorRT-LLM's ``VisualGen``: images and videos of diffusion models, as tasks.

Its class came after 1.2, and takes other arguments than ``LLM``: those of ``VisualGenArgs``, from the engine file and
``--override-engine-args``. It reports no progress, and cannot stop a request: a cancelled one keeps its place.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from poolgrid.kernel.wire.tasks import MODALITIES, TaskResult, VisualTask
from poolgrid.kernel.worker_protocol.refusal import BrokenError, UnableError, UnsupportedError
from poolgrid.plugins.trtllm.arguments.engine_config import parse_json, read_yaml
from poolgrid.plugins.trtllm.library import LibraryMissingError, import_library, start_library
from poolgrid.plugins.trtllm.settings import TrtllmSettings, TrtllmWorkerSettings
from poolgrid.server.workers.engines.definition import EngineHost, OpenedEngine, StartPlan
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread, end_engine
from poolgrid.server.workers.engines.tasks import TaskEngine, Told, task_card

log = logging.getLogger(__name__)

MEDIA_TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "mp4": "video/mp4",
    "avi": "video/x-msvideo",
}
"""By the ending of the file that the library writes."""


class TrtllmVisual:
    """Makes images or videos with one ``VisualGen``, which runs one request at a time."""

    concurrency = 1
    is_interruptible = False

    def __init__(self, thread: EngineThread, generator: Any, folder: Path) -> None:
        self._thread = thread
        self._generator = generator
        self._folder = folder
        self._number = 0

    async def make(self, task: VisualTask, told: Told) -> TaskResult:
        told(0)
        self._number += 1
        return await self._thread.run(lambda: self._made(task, self._folder / str(self._number)), "diffusion")

    async def _made(self, task: VisualTask, path: Path) -> TaskResult:
        """Generate, encode and read what was encoded; in the engine's thread."""
        generator = self._generator
        reference = path.with_suffix(".reference")
        try:
            if task.reference:
                reference.write_bytes(task.reference)
            params = self._params(task, reference)
            output = await generator.generate_async(inputs=task.prompt, params=params)
        except (ValueError, TypeError) as error:
            raise UnableError(f"TensorRT-LLM refuses the request: {error}") from error
        except MemoryError as error:
            raise UnableError(f"the request needs more memory than the engine has: {error}") from error
        finally:
            reference.unlink(missing_ok=True)
        if output is None or getattr(output, "error", None):
            log.error("generating failed: %s", getattr(output, "error", "no output"))
            raise BrokenError("TensorRT-LLM failed to generate")
        files = await asyncio.to_thread(_saved, output, task, path, params)
        try:
            return TaskResult(tuple(each.read_bytes() for each in files), MEDIA_TYPES.get(files[0].suffix[1:], ""))
        finally:
            for each in files:
                each.unlink(missing_ok=True)

    def _params(self, task: VisualTask, reference: Path) -> Any:
        """Return the library's parameters: its model's defaults, and what the request asks for."""
        params = self._generator.default_params
        given: dict[str, Any] = {
            "width": task.width,
            "height": task.height,
            "negative_prompt": task.negative_prompt,
            "num_inference_steps": task.steps,
            "guidance_scale": task.guidance_scale,
            "seed": task.seed,
        }
        if task.video:
            given |= {"frame_rate": task.frame_rate, "num_frames": task.frames}
            if task.frames is None and task.seconds is not None:
                rate = task.frame_rate or params.frame_rate
                if not rate:
                    raise UnsupportedError("seconds is set without fps, and the model has no frame rate of its own")
                given["num_frames"] = max(1, int(task.seconds * rate))
        else:
            given["num_images_per_prompt"] = task.count
        if task.reference:
            # Versions differ in the name.
            given["image_reference" if hasattr(params, "image_reference") else "image"] = str(reference)
        for name, value in given.items():
            if value is not None:
                setattr(params, name, value)
        if task.extra:
            params.extra_params = {**(params.extra_params or {}), **msgspec.json.decode(task.extra)}
        return params


def _saved(output: Any, task: VisualTask, path: Path, params: Any) -> list[Path]:
    """Have the library encode an output; return the files in order."""
    form = task.output_format or ("mp4" if task.video else "png")
    if task.video:
        rate = output.frame_rate or task.frame_rate or params.frame_rate
        saved = output.save(path.with_suffix(f".{form}"), format=form, frame_rate=rate)
    else:
        form = "jpg" if form == "jpeg" else form
        count = task.count
        paths = [path.with_name(f"{path.name}-{number}.{form}") for number in range(count)]
        saved = output.save(paths if count > 1 else paths[0], format=form)
    files = [Path(each) for each in (saved if isinstance(saved, list | tuple) else [saved])]
    if not files or not all(each.is_file() for each in files):
        raise BrokenError("TensorRT-LLM has written no file")
    return files


@asynccontextmanager
async def open_visual(settings: TrtllmWorkerSettings, host: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Load a diffusion model; takes minutes. Raises ``LibraryMissingError``, ``EngineBrokenError``."""
    stage = MODALITIES[settings.modality]
    values = arguments_of(settings)
    thread = EngineThread()
    try:
        version, generator_class, arguments_class = await thread.call(_library)
        log.info("starting TensorRT-LLM %s with %s", version, settings.model_path)
        generator = await start_library(
            thread, version, lambda: generator_class(settings.model_path, args=arguments_class(**values)), _shut_down
        )
        try:
            with tempfile.TemporaryDirectory(prefix="poolgrid-visual-") as folder:
                maker = TrtllmVisual(thread, generator, Path(folder))
                engine = TaskEngine(stage, maker)
                host.metrics.engine_healthy.set(1)
                card = task_card(
                    stage,
                    settings.model_name,
                    f"TensorRT-LLM {version}",
                    maker.concurrency,
                    f"tcp://{settings.advertised_host}:{host.request_port}",
                    f"{settings.http_scheme}://{settings.advertised_host}:{host.http_port}",
                )
                try:
                    yield OpenedEngine(engine, msgspec.structs.replace(card, endpoint_name=settings.endpoint_name))
                finally:
                    await engine.close()
        finally:
            await end_engine(thread, generator, _shut_down)
    finally:
        thread.end()


def _library() -> tuple[str, Any, Any]:
    version = import_library()
    try:
        module = importlib.import_module("tensorrt_llm.visual_gen")
        return version, module.VisualGen, module.VisualGenArgs
    except (ImportError, AttributeError) as error:
        raise LibraryMissingError(
            f"starting a diffusion model: tensorrt_llm {version} has no visual_gen.VisualGen ({error}); later ones have"
        ) from error


def plan_visual(settings: TrtllmSettings) -> StartPlan:
    """Return what a diffusion model would be started with."""
    values = arguments_of(settings)
    parallel = {name: size for name, size in (values.get("parallel_config") or {}).items() if type(size) is int}
    made_of = " x ".join(f"{name} {size}" for name, size in parallel.items())
    return StartPlan(
        yaml.safe_dump({"model": settings.model_path, **values}), (), math.prod(parallel.values()), made_of
    )


def arguments_of(settings: TrtllmSettings) -> dict[str, Any]:
    """Return the arguments of ``VisualGenArgs``; raises ``EngineFileError``."""
    values = {} if settings.extra_engine_args is None else read_yaml(settings.extra_engine_args)
    if settings.override_engine_args:
        values |= parse_json(settings.override_engine_args, "--override-engine-args")
    return values


def _shut_down(generator: Any) -> None:
    close = getattr(generator, "shutdown", None)
    if close is not None:
        close()
