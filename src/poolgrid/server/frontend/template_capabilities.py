"""What one chat template can show, and in which form it takes each part of a conversation.

A pure value. ``template_probes.py`` finds it out once for each template, and ``message_adaptation.py``
writes the messages of every request accordingly. The defaults are the conventions of most published templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
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


class Arguments(Enum):
    """The form in which a template takes the arguments of an earlier call."""

    AS_SENT = auto()
    """Text and objects give the same prompt."""
    OBJECT = auto()
    """Objects; text that is not JSON is printed in some way."""
    OBJECT_ONLY = auto()
    """Objects; the template fails on text."""
    TEXT = auto()


class EmptyContent(Enum):
    """What stands for the missing content of a message with calls."""

    AS_SENT = auto()
    """``null`` and an empty string are both served."""
    NULL = auto()
    EMPTY = auto()
    ABSENT = auto()
    """The message has no key ``content``."""


class TextWithCalls(Enum):
    """Where the text of a message goes that also has calls."""

    CONTENT = auto()
    TOOL_PLAN = auto()
    """In ``tool_plan``, as Cohere's templates name it."""
    CONTENT_OF_FIRST = auto()
    """In the content of the first message with calls, and later as ``OWN_MESSAGE``."""
    CONTENT_UNTIL_ANSWER = auto()
    """In the content, or behind the reasoning, as long as no answer follows; then as ``OWN_MESSAGE``."""
    OWN_MESSAGE = auto()
    """In a message before the calls."""
    CALLS_AS_TEXT = auto()
    """In the content, and the calls as text behind it."""
    ROUND_AS_TEXT = auto()
    """As before, and the results of these calls are text of the user's."""


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What one template can show. Flags that are false name what ``adapt`` rewrites."""

    user_form: ContentForm = ContentForm()
    system_form: ContentForm = ContentForm()
    """Also of developer messages."""
    assistant_form: ContentForm = ContentForm()
    tool_form: ContentForm = ContentForm()

    system: bool = True
    system_before_result: bool = True
    """A system message in a conversation that ends with a tool's result."""
    developer: bool = True
    function: bool = True
    """Messages of the role ``function``, which came before ``tool``."""
    several_system: bool = True
    """More than one system message at the beginning."""
    late_system: bool = True
    """A system message behind others, when the conversation begins with one."""
    lone_late_system: bool = True
    """The only system message of a conversation, behind others."""
    consecutive_user: bool = True
    consecutive_assistant: bool = True
    user_after_tool: bool = True

    null_tools: bool = True
    """``tools`` may be null; false for an empty list."""
    bare_tools: bool = True
    """Tools may be without description and parameters."""
    calls: bool = True
    parallel_calls: bool = True
    """More than one call in a message."""
    results: bool = True
    """Messages of the role ``tool``."""
    results_without_name: bool = True
    long_call_ids: bool = True
    """Ids other than nine letters and digits."""
    arguments: Arguments = Arguments.OBJECT
    empty_content: EmptyContent = EmptyContent.AS_SENT
    null_content: bool = True
    """``null`` as the content of an assistant's message without calls."""
    text_with_calls: TextWithCalls = TextWithCalls.CONTENT

    reasoning: str = "reasoning_content"
    """The name of an assistant's reasoning."""

    # What follows from the others, so that a request finds it with one look.
    strings: bool = field(init=False)
    """The content of all roles but a tool's may be a string."""
    rewritten_roles: frozenset[str] = field(init=False)
    """Roles whose messages are never taken as they are."""
    any_order: bool = field(init=False)
    """No message is rewritten for the messages around it, or for its calls."""

    def __post_init__(self) -> None:
        system = self.system and self.system_before_result
        taken = {
            "system": system,
            "developer": system and self.developer,
            "tool": self.results and self.results_without_name,
            "function": self.function,
        }
        order = (
            self.several_system
            and self.late_system
            and self.lone_late_system
            and self.consecutive_user
            and self.consecutive_assistant
            and self.user_after_tool
        )
        in_place = self.text_with_calls in (TextWithCalls.CONTENT, TextWithCalls.TOOL_PLAN)
        strings = self.user_form.strings and self.assistant_form.strings and self.system_form.strings
        object.__setattr__(self, "strings", strings)
        object.__setattr__(self, "rewritten_roles", frozenset(role for role, as_it_is in taken.items() if not as_it_is))
        object.__setattr__(self, "any_order", order and self.calls and self.parallel_calls and in_place)

    def form(self, role: str) -> ContentForm:
        if role == "user":
            return self.user_form
        if role == "assistant":
            return self.assistant_form
        return self.tool_form if role in ("tool", "function") else self.system_form
