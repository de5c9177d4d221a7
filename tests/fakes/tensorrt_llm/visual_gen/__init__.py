"""The surface of ``VisualGen`` that releases after 1.2 have; the pictures are those of our simulated engine.

As the real one it reports no progress, cannot cancel, refuses unknown parameters, and returns nothing that is encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from poolgrid.kernel.wire.tasks import VisualTask
from poolgrid.plugins.simulated.core import pictures

from .._fake.profile import PROFILE  # noqa: TID252 - the fake is imported as tensorrt_llm

STEP_S = 0.002


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class VisualGenArgs(_Strict):
    model: str = ""
    revision: str | None = None
    dtype: str = "bfloat16"
    parallel_config: dict[str, int] | None = None
    quant_config: dict[str, Any] | None = None


class VisualGenParams(_Strict):
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    seed: int | None = None
    num_frames: int | None = None
    frame_rate: float | None = None
    negative_prompt: str | None = None
    image_reference: Any = None
    num_images_per_prompt: int = 1
    extra_params: dict[str, Any] | None = None


@dataclass
class VisualGenOutput:
    request_id: int
    task: VisualTask
    params: VisualGenParams
    frame_rate: float | None = None
    error: str | None = None

    def save(self, path: Any, *, format: str | None = None, frame_rate: float | None = None) -> Path | list[Path]:
        paths = [Path(each) for each in (path if isinstance(path, list) else [path])]
        height, width = self.params.height or 0, self.params.width or 0
        for number, each in enumerate(paths):
            if self.task.video:
                rate = frame_rate or self.frame_rate
                if rate is None:
                    raise ValueError("Cannot save video: frame_rate is not set")
                data = pictures.video(self.task, width, height, self.params.num_frames or 1, rate)
            else:
                data = pictures.image(self.task, width, height, number)
            each.write_bytes(data)
        return paths if isinstance(path, list) else paths[0]


class VisualGenResult:
    def __init__(self, output: VisualGenOutput, steps: int) -> None:
        self._output = output
        self._steps = steps

    def __await__(self) -> Generator[Any, None, VisualGenOutput]:
        return self.aresult().__await__()

    async def aresult(self, timeout: float | None = None) -> VisualGenOutput:
        await asyncio.sleep(self._steps * STEP_S)
        return self._output

    def cancel(self) -> None:
        raise NotImplementedError("Cancel request (not yet implemented).")


class VisualGen:
    def __init__(self, model: str | Path, args: VisualGenArgs | None = None) -> None:
        self.model = str(model)
        self.args = (args or VisualGenArgs()).model_copy(update={"model": self.model})
        self.video = "video" in self.model
        self._count = 0

    @property
    def default_params(self) -> VisualGenParams:
        frames: dict[str, Any] = {"num_frames": 8, "frame_rate": 16.0} if self.video else {}
        return VisualGenParams(height=32, width=48, num_inference_steps=10, guidance_scale=5.0, **frames)

    def generate_async(self, inputs: str, params: VisualGenParams | None = None) -> VisualGenResult:
        params = params or self.default_params
        if params.extra_params:
            raise ValueError(f"Parameter validation failed:\n  - Unknown extra_params {sorted(params.extra_params)}")
        self._count += 1
        task = VisualTask(inputs, self.video, seed=params.seed, negative_prompt=params.negative_prompt)
        output = VisualGenOutput(self._count, task, params, params.frame_rate)
        return VisualGenResult(output, params.num_inference_steps or 1)

    def shutdown(self) -> None:
        """End; the real one does so when it is forgotten."""


if PROFILE.version.startswith("1.2"):
    del VisualGen  # that release has none
