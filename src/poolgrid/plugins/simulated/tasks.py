"""Tasks of the simulated engine: embeddings, images and videos, in the time that they take on a real one.

Times are those of one H100: an embedding model of 300 M parameters, FLUX.1-dev with 1 megapixel, and Wan 2.1 1.3B with
81 frames of 480p; they grow with tokens, and with steps times pixels.
"""

from __future__ import annotations

import asyncio

from poolgrid.kernel.wire.limits import RESULT_BYTES_MAX
from poolgrid.kernel.wire.tasks import EmbeddingTask, TaskResult, VisualTask
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnsupportedError
from poolgrid.plugins.simulated.core.pictures import DIMENSIONS, image, vector, video
from poolgrid.server.workers.engines.tasks import Told

MS_PER_EMBEDDED_TOKEN = 0.02
IMAGE_STEPS, IMAGE_STEP_MS, IMAGE_SIDE = 28, 120.0, 1024
VIDEO_STEPS, VIDEO_STEP_MS = 50, 1200.0
VIDEO_SIZE, VIDEO_FRAME_RATE, VIDEO_SECONDS = (832, 480), 24.0, 4.0
"""Dynamo's defaults."""
VIDEO_PIXELS = 832 * 480 * 81
"""To which ``VIDEO_STEP_MS`` applies."""

PIXELS_MAX = 4096 * 4096 * 64
"""Of a video, or of the images of a task, together: a minute of 1080p at 8 frames per second."""


class SimulatedEmbeddings:
    """Embeds texts, several requests at a time."""

    concurrency = 16
    is_interruptible = True

    def __init__(self, speedup: float) -> None:
        self._speedup = speedup

    async def make(self, task: EmbeddingTask, told: Told) -> TaskResult:
        tokens = sum(len(each.encode()) // 4 + 1 if isinstance(each, str) else len(each) for each in task.inputs)
        await asyncio.sleep(tokens * MS_PER_EMBEDDED_TOKEN / self._speedup / 1e3)
        dimensions = task.dimensions or DIMENSIONS
        if 4 * dimensions * len(task.inputs) > RESULT_BYTES_MAX:
            raise RefusedError(f"{len(task.inputs)} vectors of {dimensions} numbers exceed {RESULT_BYTES_MAX} bytes")
        return TaskResult(tuple(vector(each, dimensions) for each in task.inputs), prompt_tokens=tokens)


class SimulatedDiffusion:
    """Makes images or videos, one request at a time, as diffusion pipelines do."""

    concurrency = 1
    is_interruptible = True

    def __init__(self, speedup: float) -> None:
        self._speedup = speedup

    async def make(self, task: VisualTask, told: Told) -> TaskResult:
        if task.extra:
            raise UnsupportedError("extra_params are set, and the simulated engine has no model that takes any")
        form = "mp4" if task.video else "png"
        if task.output_format not in ("", form):
            raise UnsupportedError(f"output_format is {task.output_format!r}, the simulated engine makes {form}")
        if task.video:
            return await self._video(task, told)
        width, height = task.width or IMAGE_SIDE, task.height or IMAGE_SIDE
        share = task.count * width * height / IMAGE_SIDE**2
        await self._steps(task.steps or IMAGE_STEPS, IMAGE_STEP_MS * share, width * height * task.count, told)
        images = [await asyncio.to_thread(image, task, width, height, number) for number in range(task.count)]
        return TaskResult(tuple(images), "image/png")

    async def _video(self, task: VisualTask, told: Told) -> TaskResult:
        width, height = (task.width, task.height) if task.width and task.height else VIDEO_SIZE
        frame_rate = task.frame_rate or VIDEO_FRAME_RATE
        frames = task.frames or max(1, int((task.seconds or VIDEO_SECONDS) * frame_rate))
        share = width * height * frames / VIDEO_PIXELS
        await self._steps(task.steps or VIDEO_STEPS, VIDEO_STEP_MS * share, width * height * frames, told)
        made = await asyncio.to_thread(video, task, width, height, frames, frame_rate)
        return TaskResult((made,), "video/mp4")

    async def _steps(self, steps: int, ms_per_step: float, pixels: int, told: Told) -> None:
        if pixels > PIXELS_MAX:
            raise UnsupportedError(f"{pixels} pixels are asked for, the simulated engine makes up to {PIXELS_MAX}")
        for step in range(steps):
            told(100 * step // steps)
            await asyncio.sleep(ms_per_step / self._speedup / 1e3)
