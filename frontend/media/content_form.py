"""How a model's chat template takes content: as a string, or as a list of parts in which media have their place.

Templates do not say which; so each is asked once, with messages that only differ in the form of their content. A
template that takes lists writes the placeholder of a medium itself; with one that takes strings only, the placeholder
on the worker's card is written into the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from poolgrid.frontend.chat_template import ChatTemplate, TemplateFailure

_PROBE: Final = "q7Xw probe 3Zk"
"""Words that no template contains."""

_PROBE_CHARS_MAX: Final = 1024 * 1024

IMAGE_PART: Mapping[str, str] = {"type": "image"}
"""How published templates know a medium; embeddings of an image stand where the image would."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What one template takes."""

    takes_strings: bool
    takes_parts: bool
    """Lists of ``{"type": "text", "text": ...}`` and ``{"type": "image"}``."""


def probe_content_form(template: ChatTemplate) -> ContentForm:
    """Return what a template takes; a template that fails every probe is taken to want strings."""
    parts = [IMAGE_PART, {"type": "text", "text": _PROBE}]
    with_parts = _render(template, parts)
    takes_parts = (
        with_parts is not None
        # A template that prints the list shows its keys as well.
        and _PROBE in with_parts
        and "'text'" not in with_parts
        and '"text"' not in with_parts
        and with_parts != _render(template, [{"type": "text", "text": _PROBE}])
    )
    with_string = _render(template, _PROBE)
    return ContentForm(takes_strings=not takes_parts or _PROBE in (with_string or ""), takes_parts=takes_parts)


def _render(template: ChatTemplate, content: str | Sequence[Mapping[str, str]]) -> str | None:
    try:
        return template.render([{"role": "user", "content": content}], max_chars=_PROBE_CHARS_MAX)
    except TemplateFailure:
        return None


class ContentForms:
    """The form of each template, found out at its first use."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ChatTemplate, ContentForm]] = {}

    def of(self, template: ChatTemplate) -> ContentForm:
        """Return what a template takes."""
        known = self._known.get(id(template))
        if known is None or known[0] is not template:
            # The template is kept with its form, so that its id stays its own.
            known = self._known[id(template)] = (template, probe_content_form(template))
        return known[1]


def shape_content(
    pieces: Sequence[str | None], form: ContentForm, placeholder: str
) -> str | list[Mapping[str, str]] | None:
    """Return a message's content as the template takes it; ``pieces`` are its texts, with ``None`` for each medium.

    ``None`` is returned where the template cannot show a medium and ``placeholder`` is empty.
    """
    if form.takes_parts and (not form.takes_strings or None in pieces):
        return [IMAGE_PART if piece is None else {"type": "text", "text": piece} for piece in pieces]
    if not placeholder and None in pieces:
        return None
    return "".join(placeholder if piece is None else piece for piece in pieces)
