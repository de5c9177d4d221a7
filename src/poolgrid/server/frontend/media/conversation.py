"""A conversation with media: what the parts of its messages name, how these are rendered, what the prompt becomes.

The one module of media that the preparation of requests uses. A request without media passes through here at the cost
of one look at each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from poolgrid.kernel.requests.inference import CacheDomain
from poolgrid.kernel.wire.card import MediaSpec
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX, MULTIMODAL_BYTES_MAX, PROMPT_CHARS_MAX
from poolgrid.kernel.wire.multimodal import MediaItem, MultimodalInput
from poolgrid.server.frontend.errors import RequestError, invalid, missing, quoted, unsupported
from poolgrid.server.frontend.media.placeholders import place_media
from poolgrid.server.frontend.media.references import (
    IMAGE_PARTS,
    MediaReference,
    MediaRefused,
    decode_data_url,
    read_reference,
)
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.schema import ContentPart, Message, PlacedPart
from poolgrid.server.frontend.template_capabilities import ContentForm, shape_content, text_part

TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS: Final = ("thinking", "reasoning", "redacted_thinking")

FILES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Text in the files of one request, a million tokens; decoding it takes 16 ms of the event loop."""

ITEM_BYTES_MAX: Final = 512
"""Size of a medium in a message in addition to its bytes: hash, type, place."""

NO_MEDIA: Final = "[an image, which is left out: this model takes text only]"
"""Stands for an image that a tool returned, or that an earlier message brought: the client sends it with every later
turn, so that a refusal would end the conversation."""

REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
"""Size of the rest of a request in addition to prompt and media: sampling, a JSON schema, output that moves along."""


def find_media(messages: Sequence[Message], spec: MediaSpec, model: str) -> tuple[MediaReference, ...]:
    """Return the media that the messages name, in order; their other parts become text, or reasoning, in place.

    Raises ``RequestError`` for a part that is not served, in the latest user message or a system message. In any other
    message a line of text stands for it.
    """
    found: list[MediaReference] = []
    latest: int | None = None
    room = FILES_BYTES_MAX
    for index, message in enumerate(messages):
        content = message.content
        if not isinstance(content, list):
            continue
        has_reasoning = False
        for number, part in enumerate(content):
            if part.type in TEXT_PARTS:
                continue
            where = _place(part, index, number)
            if part.type in IMAGE_PARTS and spec.kinds:
                found.append(_reference(part, where, spec, model))
            elif part.type in _REASONING_PARTS and message.role == "assistant":
                has_reasoning = True
            else:
                if latest is None:
                    latest = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
                try:
                    text = _text(part, where, model, room)
                except RequestError:
                    if index == latest or message.role in ("system", "developer"):
                        raise
                    text = _left_out(part)
                if part.type == "file":
                    room -= len(_file_data(part) or "") // 4 * 3  # decoded, whatever came of it
                content[number] = ContentPart("text", text)
        if has_reasoning:
            _take_reasoning(message, content)
    return tuple(found)


def _take_reasoning(message: Message, content: Sequence[ContentPart]) -> None:
    """Move the parts of an assistant's message that are its reasoning to their own field."""
    parts = [part for part in content if part.type in _REASONING_PARTS]
    message.content = [part for part in content if part.type not in _REASONING_PARTS] or None
    if message.reasoning_content is None:
        message.reasoning_content = "\n".join(filter(None, map(_reasoning, parts))) or None


def _reasoning(part: ContentPart) -> str:
    for value in (part.thinking, part.reasoning, part.text):
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            texts = (each.get("text") for each in value if isinstance(each, dict))
            return "".join(text for text in texts if isinstance(text, str))
    return ""


def _text(part: ContentPart, where: str, model: str, room: int) -> str:
    """Return the text of a part that is neither text nor an image that the model takes; raises ``RequestError``.

    ``room``: the most bytes that a file may have.
    """
    if part.type in IMAGE_PARTS:
        words = f"{quoted(part.type)} is not supported by model {quoted(model)}, which takes text only"
        raise _refused(f"{where}.type", MediaRefused("media_not_supported", words))
    if part.type == "file":
        return _file_text(part, where if isinstance(part, PlacedPart) else f"{where}.file", room)
    text = part.text or _reasoning(part)
    if not text:
        raise unsupported(f"{where}.type", f"text, images and files of text are served (got {quoted(part.type)})")
    return text


def _file_data(part: ContentPart) -> str | None:
    data = part.file.get("file_data") if isinstance(part.file, dict) else None
    return data if isinstance(data, str) else None


def _file_text(part: ContentPart, where: str, room: int) -> str:
    file = part.file if isinstance(part.file, dict) else {}
    data = _file_data(part)
    if data is None:
        named = next((name for name in ("file_id", "file_url") if file.get(name) is not None), "file_data")
        raise unsupported(f"{where}.{named}", "no files are kept here or fetched; send text as file_data")
    url = data if data.startswith("data:") else f"data:;base64,{data}"
    try:
        text = decode_data_url(url, max(room, 0)).decode()
    except (MediaRefused, UnicodeDecodeError) as error:
        reason = error.message if isinstance(error, MediaRefused) else "it is not UTF-8"
        raise unsupported(f"{where}.file_data", f"files of text are served ({reason})") from None
    if "\0" in text or text.startswith("%PDF-"):
        raise unsupported(f"{where}.file_data", "files of text are served (it is binary)")
    name = file.get("filename")
    return f"{name}\n{text}" if isinstance(name, str) and name else text


def _left_out(part: ContentPart) -> str:
    if part.type in IMAGE_PARTS:
        return NO_MEDIA
    return f"[a part of the type {quoted(part.type)}, which is left out: this server reads text]"


def shape_message(
    content: str | list[ContentPart] | None, index: int, form: ContentForm, placeholder: str
) -> str | list[Mapping[str, str]] | None:
    """Return a message's content as its template takes it; raises ``RequestError``."""
    if not isinstance(content, list):
        return content if content is None or form.strings else [text_part(content)]
    pieces: list[str | None] = []
    for number, part in enumerate(content):
        where = _place(part, index, number)
        if part.type in IMAGE_PARTS:
            pieces.append(None)
        elif part.text is None:
            raise invalid(f"{where}.text", f"{where}.text is missing: allowed is a string")
        else:
            pieces.append(part.text)
    shaped = shape_content(pieces, form, placeholder)
    if shaped is None:
        raise RequestError(
            400,
            "media_not_supported",
            f"messages[{index}].content holds media, which the model's chat template cannot show, and its workers name "
            "no placeholder. The request was not run.",
            param=f"messages[{index}].content",
        )
    return shaped


def with_media(
    text: str,
    items: Sequence[MediaItem],
    spec: MediaSpec,
    model: PromptModel,
    add_special_tokens: bool,
    domain: CacheDomain | None = None,
) -> tuple[bytes, MultimodalInput]:
    """Return the tokens of a rendered prompt with its media in place, and the media inputs of the engine.

    ``items`` is not empty. Raises ``RequestError`` when placeholders and media do not match, or when all of it does not
    fit into a message.
    """
    if spec.placeholder_token_id is None and spec.placeholder:
        # As one token it is found anywhere in the prompt, and text that only looks like it is not.
        spec = msgspec.structs.replace(spec, placeholder_token_id=model.tokenizer.token_to_id(spec.placeholder))
    special = add_special_tokens or spec.adds_special_tokens
    try:
        token_ids, placed = place_media(text, items, spec, lambda part: model.encode(part, special, domain))
        size = sum(len(item.data) + ITEM_BYTES_MAX for item in placed) + 4 * len(text)
        if (
            len(text) > PROMPT_CHARS_MAX
            or size > MULTIMODAL_BYTES_MAX
            or size + len(token_ids) + REQUEST_BYTES_MAX > FRAME_BYTES_MAX
        ):
            raise MediaRefused(
                "media_too_large",
                f"media and text take {size + len(token_ids)} bytes in a message to a worker, allowed are at most "
                f"{min(MULTIMODAL_BYTES_MAX, FRAME_BYTES_MAX - REQUEST_BYTES_MAX)}",
            )
    except MediaRefused as refusal:
        message = f"messages: {refusal.message}. The request was not run."
        raise RequestError(refusal.status, refusal.code, message, param="messages") from None
    return token_ids, MultimodalInput(text, placed)


def _place(part: ContentPart, index: int, number: int) -> str:
    return part.place if isinstance(part, PlacedPart) else f"messages[{index}].content[{number}]"


def _reference(part: ContentPart, where: str, spec: MediaSpec, model: str) -> MediaReference:
    value: Any = part.image_url
    param = f"{where}.image_url" if isinstance(value, str) else f"{where}.image_url.url"
    url = value if isinstance(value, str) or value is None else value.url
    if url is None:
        raise missing(param, "a URL")
    try:
        reference = read_reference(url, param)
        if reference.kind.value not in spec.kinds:
            raise MediaRefused(
                "media_not_supported",
                f"{reference.shown} names {reference.kind.value}: model {quoted(model)} takes {', '.join(spec.kinds)}",
            )
    except MediaRefused as refusal:
        raise _refused(param, refusal) from None
    return reference


def _refused(param: str, refusal: MediaRefused) -> RequestError:
    message = f"{param}: {refusal.message}. The request was not run."
    return RequestError(refusal.status, refusal.code, message, param=param)
