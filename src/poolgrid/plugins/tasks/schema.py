"""The bodies of tasks, and the tasks that they ask for."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from poolgrid.kernel.wire.limits import EMBEDDING_INPUTS_MAX, IMAGES_PER_TASK_MAX, U32_MAX
from poolgrid.kernel.wire.tasks import EmbeddingTask, Task, VisualTask
from poolgrid.plugins.tasks.forms import read_form
from poolgrid.server.frontend.errors import invalid, missing, quoted, wrong_type
from poolgrid.server.frontend.field_words import allowed, refused
from poolgrid.server.frontend.media.image_headers import check_image
from poolgrid.server.frontend.media.references import MediaRefused
from poolgrid.server.frontend.schema import JSON_NUMBER_MAX, JSON_NUMBER_MIN, TruncatedPrompt, parse, refuse

SIDE_MAX: Final = 4096
"""Largest width and height in pixels: the limit that Dynamo's diffusion workers have."""

PROMPT_CHARS_MAX: Final = 32_768
"""Of a prompt of images or videos, which is kept with its results; OpenAI's own limit is 32,000."""

Prompt = Annotated[str, Meta(min_length=1, max_length=PROMPT_CHARS_MAX)]
Unwanted = Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)]
Pixels = Annotated[int, Meta(ge=1, le=SIDE_MAX)]
Steps = Annotated[int, Meta(ge=1, le=1000)]
Frames = Annotated[int, Meta(ge=1, le=65_536)]
Rate = Annotated[float, Meta(gt=0, le=240)]
Guidance = Annotated[float, Meta(ge=0, le=1000)]
Seed = Annotated[int, Meta(ge=JSON_NUMBER_MIN, le=JSON_NUMBER_MAX)]
Where = Literal["url", "b64_json"]
ExtraParams = Annotated[dict[str, Any], allowed("an object with parameters of the model")]


class EmbeddingBody(Struct, kw_only=True):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    """May be left out where one model is served that makes embeddings; so in the other bodies."""
    input: str | list[Any]
    dimensions: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: TruncatedPrompt = None


class VisualNvext(Struct, kw_only=True):
    """Dynamo's names for what diffusion models take."""

    fps: Rate | None = None
    num_frames: Frames | None = None
    negative_prompt: Unwanted | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    seed: Seed | None = None
    annotations: list[str] | None = None
    """Those that ask for events next to the answer are ignored."""
    boundary_ratio: Annotated[Any, refused("give it in extra_params")] = None
    guidance_scale_2: Annotated[Any, refused("give it in extra_params")] = None


class VisualBody(Struct, kw_only=True):
    """What images and videos have in common."""

    model: str | None = None
    prompt: Prompt
    size: Annotated[str, allowed("WIDTHxHEIGHT in pixels, or auto")] | None = None
    width: Pixels | None = None
    height: Pixels | None = None
    negative_prompt: Unwanted | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    seed: Seed | None = None
    response_format: Where | None = None
    input_reference: Annotated[Any, allowed("an image: base64, or a data: URL")] = None
    extra_params: ExtraParams | None = None
    nvext: VisualNvext | None = None
    stream: Annotated[Any, refused("results come whole", False)] = None
    max_sequence_length: Annotated[Any, refused("give it in extra_params")] = None


class ImageBody(VisualBody, kw_only=True):
    """Body of ``/v1/images/generations``."""

    n: Annotated[int, Meta(ge=1, le=IMAGES_PER_TASK_MAX)] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    quality: Annotated[Any, refused("give num_inference_steps", "auto", "standard")] = None
    style: Annotated[Any, refused("say it in the prompt")] = None
    background: Annotated[Any, refused("say it in the prompt", "auto")] = None
    output_compression: Annotated[Any, refused("engines choose it")] = None
    partial_images: Annotated[Any, refused("results come whole", 0)] = None


class VideoBody(VisualBody, kw_only=True):
    """Body of ``/v1/videos``."""

    seconds: Annotated[float | str, allowed("a number of seconds above 0")] | None = None
    fps: Rate | None = None
    frame_rate: Rate | None = None
    num_frames: Frames | None = None
    output_format: Literal["mp4", "avi", "auto"] | None = None
    n: Annotated[Any, refused("a request makes one video", 1)] = None


class PreparedTask(NamedTuple):
    """A body that was read and checked."""

    model: str | None
    task: Task
    body: EmbeddingBody | ImageBody | VideoBody
    tokens: int = 0
    """Of embeddings, as tenants are charged: of a text one for four bytes."""


_embedding_decoder: Final = msgspec.json.Decoder(EmbeddingBody)
_image_decoder: Final = msgspec.json.Decoder(ImageBody)
_video_decoder: Final = msgspec.json.Decoder(VideoBody)

Reader = Callable[[bytes, bytes], PreparedTask]
"""Returns what a body of a content type asks for; raises ``RequestError``."""


def read_embeddings(raw: bytes, content_type: bytes) -> PreparedTask:
    """Read the body of ``/v1/embeddings``; raises ``RequestError``."""
    body = parse(_embedding_decoder, raw)
    refuse(body)
    given: Sequence[Any] = [body.input] if isinstance(body.input, str) else body.input
    if given and all(type(each) is int for each in given):
        given = [given]
    if not 1 <= len(given) <= EMBEDDING_INPUTS_MAX:
        raise invalid("input", f"input has {len(given)} texts: allowed are 1 to {EMBEDDING_INPUTS_MAX}")
    inputs = tuple(_input(each, f"input[{index}]") for index, each in enumerate(given))
    tokens = sum(len(each.encode()) // 4 if isinstance(each, str) else len(each) for each in inputs)
    return PreparedTask(body.model, EmbeddingTask(inputs, body.dimensions), body, tokens)


def _input(given: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(type(each) is int and 0 <= each <= U32_MAX for each in given):
        return tuple(given)
    raise wrong_type(where, given, "a string that is not empty, or a list of token ids")


def read_images(raw: bytes, content_type: bytes) -> PreparedTask:
    """Read the body of ``/v1/images/generations``; raises ``RequestError``."""
    body = parse(_image_decoder, raw)
    return PreparedTask(body.model, _visual(body, video=False, count=body.n or 1), body)


def read_video(raw: bytes, content_type: bytes) -> PreparedTask:
    """Read the body of ``/v1/videos``, JSON or a form; raises ``RequestError``."""
    if content_type.lower().startswith(b"multipart/form-data"):
        raw = read_form(raw, content_type)
    body = parse(_video_decoder, raw)
    nvext = body.nvext or VisualNvext()
    output = "" if body.output_format in (None, "auto") else body.output_format
    return PreparedTask(
        body.model,
        _visual(
            body,
            video=True,
            output_format=output,
            seconds=None if body.seconds is None else _seconds(body.seconds),
            frame_rate=_either(body.fps, body.frame_rate, nvext.fps),
            frames=_either(body.num_frames, nvext.num_frames),
        ),
        body,
    )


def _visual(body: ImageBody | VideoBody, **more: Any) -> VisualTask:
    refuse(body)
    nvext = body.nvext or VisualNvext()
    width, height = body.width, body.height
    if (width is None) != (height is None):
        raise missing("width" if width is None else "height", "width and height together")
    if width is None and body.size not in (None, "auto"):
        width, height = _size(body.size or "")
    if isinstance(body, ImageBody):
        more["output_format"] = body.output_format or ""
    return VisualTask(
        body.prompt,
        width=width,
        height=height,
        negative_prompt=_either(body.negative_prompt, nvext.negative_prompt),
        steps=_either(body.num_inference_steps, nvext.num_inference_steps),
        guidance_scale=_either(body.guidance_scale, nvext.guidance_scale),
        seed=_either(body.seed, nvext.seed),
        reference=b"" if body.input_reference is None else _reference(body.input_reference),
        extra=msgspec.json.encode(body.extra_params) if body.extra_params else None,
        **more,
    )


def _either(*given: Any) -> Any:
    return next((each for each in given if each is not None), None)


_SIZE: Final = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")


def _size(given: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(given)
    if match is None or max(width := int(match[1]), height := int(match[2])) > SIDE_MAX:
        raise invalid("size", f"size is {quoted(given)}: allowed is WIDTHxHEIGHT, each up to {SIDE_MAX}, or auto")
    return width, height


def _seconds(given: float | str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise invalid("seconds", f"seconds is {quoted(given)}: allowed is a number above 0, up to 3600")
    return seconds


def _reference(given: Any) -> bytes:
    """Return the file of a reference; it is given, and never fetched."""
    if isinstance(given, dict):
        given = given.get("image_url", given)
    if not isinstance(given, str):
        raise wrong_type("input_reference", given, "a file, base64 or a data: URL")
    text = given.partition(",")[2] if given.startswith("data:") else given
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            "input_reference", f"input_reference is {quoted(given)}: allowed is an image, as base64 or a data: URL"
        ) from None
    try:
        check_image(data)
    except MediaRefused as refused:
        raise invalid("input_reference", f"input_reference: {refused}") from None
    return data
