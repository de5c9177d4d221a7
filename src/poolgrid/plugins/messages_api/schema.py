"""The body of ``/v1/messages``.

Its other fields ask for nothing that this server could do otherwise, and are not read: ``context_management`` saves
prompt tokens on a server that applies it, ``container`` and ``betas`` belong to tools that run at Anthropic.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from poolgrid.server.frontend.field_words import allowed
from poolgrid.server.frontend.schema import Count, SamplingFields, Thinking

MESSAGES_MAX = 100_000
"""Most messages of one request; Anthropic's own limit."""

Blocks = Annotated[str | list[dict[str, Any]], allowed("a string or a list of content blocks")]


class TurnMessage(Struct):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks | None = None


class MessageTool(Struct):
    """A function that the model may call. Without a schema it is a tool of Anthropic's servers or models."""

    name: str | None = None
    input_schema: Annotated[dict[str, Any] | None, allowed("a JSON schema, an object")] = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Whether the model is shown it only where a result of a search refers to it."""
    display_width_px: Count | None = None
    display_height_px: Count | None = None
    cache_control: Annotated[Any, allowed('an object such as {"type": "ephemeral"}')] = None


class MessageToolChoice(Struct):
    """Whether the model must call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Struct):
    """What the text of the answer is to be, and how much effort goes into it."""

    format: Annotated[dict[str, Any] | None, allowed("an object with the type json_schema and a schema")] = None
    effort: str | None = None


class CountedBody(SamplingFields, kw_only=True):
    """The fields that make a prompt: the body of ``/v1/messages/count_tokens``, which says nothing of an answer."""

    messages: Annotated[
        list[TurnMessage], Meta(min_length=1, max_length=MESSAGES_MAX), allowed("a list of at least one message")
    ]
    system: Annotated[str | list[dict[str, Any]] | None, allowed("a string or a list of text blocks")] = None
    tools: list[MessageTool] | None = None
    tool_choice: Annotated[
        MessageToolChoice | None, allowed('an object such as {"type": "auto"}, with a name for the type tool')
    ] = None
    thinking: Annotated[Thinking | None, allowed('an object such as {"type": "enabled", "budget_tokens": 1024}')] = None
    output_config: Annotated[OutputConfig | None, allowed("an object with a format or an effort")] = None
    output_format: Annotated[dict[str, Any] | None, allowed("an object with the type json_schema and a schema")] = None
    """An older name of ``output_config.format``."""
    cache_control: Annotated[Any, allowed('an object such as {"type": "ephemeral"}')] = None
    """Of the whole request, next to that of its blocks and tools."""
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Annotated[list[dict[str, Any]] | None, allowed("a list of servers")] = None


class MessagesBody(CountedBody, kw_only=True):
    """Body of ``/v1/messages``."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
