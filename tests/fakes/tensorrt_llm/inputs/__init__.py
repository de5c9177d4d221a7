# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""Multimodal inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from .._fake.profile import PROFILE


class _TextPrompt(TypedDict, total=False):
    """A prompt as text, with what belongs to it."""

    prompt: str
    multi_modal_data: dict[str, Any]
    multi_modal_embeddings: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    query: str


class _NamedTextPrompt(_TextPrompt, total=False):
    """The same in the 1.3 line."""

    multi_modal_uuids: dict[str, list[str | None]]


if TYPE_CHECKING:
    TextPrompt = _NamedTextPrompt
else:
    TextPrompt = _NamedTextPrompt if PROFILE.media_uuids else _TextPrompt


def default_multimodal_input_loader(
    *,
    tokenizer: Any,
    model_dir: str,
    model_type: str,
    modality: str,
    prompts: list[str],
    media: list[str] | list[list[str]] | None = None,
    image_data_format: str = "pt",
    num_frames: int = 8,
    mm_embeddings: list[Any] | list[list[Any]] | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Return one input per prompt, with its media (loaded elsewhere) or its embeddings."""
    if media is not None and mm_embeddings is not None:
        raise ValueError("Only one of media or mm_embeddings can be given")
    inputs = []
    for at, prompt in enumerate(prompts):
        made: dict[str, Any] = {"prompt": f"<image>{prompt}" if modality == "image" else prompt}
        if mm_embeddings is not None:
            given = mm_embeddings[at]
            made["multi_modal_embeddings"] = {modality: given if isinstance(given, list) else [given]}
        elif media is not None:
            files = media[at]
            made["multi_modal_data"] = {modality: files if isinstance(files, list) else [files]}
        inputs.append(made)
    return inputs
