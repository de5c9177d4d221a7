"""How a model's chat template takes content: as a string, or as a list of parts in which media have their place.

A template that takes media in lists writes their placeholder itself; with any other, the placeholder on the worker's
card is written into the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

IMAGE_PART: Final[Mapping[str, str]] = {"type": "image"}
"""How published templates know a medium; embeddings of an image stand where the image would."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What one template takes as the content of one role."""

    strings: bool = True
    """False: where there is no other reason for a list, one of a single part."""
    parts: bool = False
    """Lists of any number of ``{"type": "text", "text": ...}``."""
    media: bool = False
    """``{"type": "image"}`` in such lists."""


def text_part(text: str) -> Mapping[str, str]:
    """Return a part of a list of content."""
    return {"type": "text", "text": text}


def shape_content(
    pieces: Sequence[str | None], form: ContentForm, placeholder: str
) -> str | list[Mapping[str, str]] | None:
    """Return a list of content as the template takes it; ``pieces`` are its texts, with ``None`` for each medium.

    ``None`` is returned where the template cannot show a medium and ``placeholder`` is empty.
    """
    if pieces and (form.media or (form.parts and None not in pieces)):
        return [IMAGE_PART if piece is None else text_part(piece) for piece in pieces]
    if not placeholder and None in pieces:
        return None
    text = "".join(placeholder if piece is None else piece for piece in pieces)
    return text if form.strings else [text_part(text)]
