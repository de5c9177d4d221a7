"""Tasks: requests whose answer is not tokens. They travel in ``Generate.task``, their results in ``TokenDelta.result``.

A task has no prompt tokens, so no worker holds a prefix of it. A worker serves one kind of task, by its role.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.identifiers import U32, Identifier, Opaque, Role, Stage, Text
from poolgrid.kernel.wire.limits import (
    EMBEDDING_INPUTS_MAX,
    IMAGES_PER_TASK_MAX,
    MULTIMODAL_BYTES_MAX,
    PROMPT_CHARS_MAX,
    PROMPT_TOKENS_MAX,
)

Words = Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)]
Length = Annotated[int, Meta(ge=1, le=65_536)]
"""Pixels, frames or steps."""


class EmbeddingTask(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Texts, or token ids of texts, of each of which a vector is wanted."""

    inputs: Annotated[
        tuple[Words | Annotated[tuple[U32, ...], Meta(max_length=PROMPT_TOKENS_MAX)], ...],
        Meta(min_length=1, max_length=EMBEDDING_INPUTS_MAX),
    ]
    dimensions: U32 | None = None
    """Numbers of a vector; ``None`` = as many as the model has."""


class VisualTask(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """A prompt for images or a video; what is ``None`` is left to the model."""

    prompt: Words
    video: bool = False
    count: Annotated[int, Meta(ge=1, le=IMAGES_PER_TASK_MAX)] = 1
    """Images; 1 for a video."""
    width: Length | None = None
    """Pixels, with ``height``."""
    height: Length | None = None
    negative_prompt: Words | None = None
    steps: Length | None = None
    """Denoising steps."""
    guidance_scale: float | None = None
    seed: int | None = None
    output_format: Identifier = ""
    """``png``, ``jpeg`` or ``webp``; ``mp4`` or ``avi``. Empty = the engine's own."""
    seconds: float | None = None
    frame_rate: float | None = None
    """Frames per second."""
    frames: Length | None = None
    """Takes the place of ``seconds``."""
    reference: Annotated[bytes, Meta(max_length=MULTIMODAL_BYTES_MAX)] = b""
    """An image that guides the generation."""
    extra: Opaque | None = None
    """A JSON object of parameters of the model."""


Task = EmbeddingTask | VisualTask


class TaskResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a task is answered with; all items together have at most ``RESULT_BYTES_MAX`` bytes."""

    items: Annotated[tuple[bytes, ...], Meta(max_length=EMBEDDING_INPUTS_MAX)]
    """In the order of the inputs: vectors as float32, little-endian; encoded images; one video."""
    media_type: Text = ""
    """``image/png``, ``video/mp4``, …; empty for vectors."""
    prompt_tokens: U32 = 0
    """Of embeddings."""


TASK_ROLES: dict[Stage, Role] = {Stage.EMBEDDING: Role.EMBEDDING, Stage.IMAGE: Role.IMAGE, Stage.VIDEO: Role.VIDEO}
"""Who serves which kind of task."""

MODALITIES = {"embedding": Stage.EMBEDDING, "image_diffusion": Stage.IMAGE, "video_diffusion": Stage.VIDEO}
"""The names of kinds of tasks in ``--modality``."""


def stage_of(task: Task) -> Stage:
    """Return the kind of a task."""
    if isinstance(task, EmbeddingTask):
        return Stage.EMBEDDING
    return Stage.VIDEO if task.video else Stage.IMAGE
