"""The body of ``/v1/responses`` and what is refused in it.

Responses are kept (``store``) and may be continued (``previous_response_id``), and their items referred to, where
the server keeps any. Other things that would have to be kept (``conversation``) are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.server.frontend.field_words import allowed, refused
from poolgrid.server.frontend.schema import (
    AllowedTokens,
    AnyReasoning,
    AnyThinking,
    BadWords,
    Count,
    PlainPriority,
    SamplingFields,
    ToolChoice,
    TruncatedPrompt,
)

ITEMS_MAX = 16_384
"""Most input items of one request: the turns of a very long agent run."""


class TextOptions(Struct):
    """What the text of the answer is to be."""

    format: Annotated[dict[str, Any] | None, allowed("an object with the type text, json_object or json_schema")] = None
    """``{"type": "text"}``, ``json_object``, or ``json_schema`` with ``name`` and ``schema``."""


class ResponsesBody(SamplingFields, kw_only=True):
    """Body of ``/v1/responses``."""

    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=ITEMS_MAX)],
        allowed("a string or a list of items"),
    ]
    instructions: Annotated[str | list[dict[str, Any]] | None, allowed("a string or a list of items")] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: AnyReasoning = None
    thinking: AnyThinking = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    """Whether the response is to be found again; ``None`` = where the server keeps any."""
    previous_response_id: Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)] | None = None
    """The response that the conversation continues."""
    include: Annotated[list[str] | None, allowed("a list of names of further output")] = None
    """Ignored, but for log probabilities: what else there is belongs to tools that do not run here."""
    # Beyond OpenAI's, as in chat.
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    # Known elsewhere, refused here when they ask for something.
    conversation: Annotated[
        Any, refused("no conversations are kept; send previous_response_id, or the whole conversation as input")
    ] = None
    background: Annotated[Any, refused("an answer is given on the connection that asked for it", False)] = None
    prompt: Annotated[Any, refused("there are no stored prompts; send input and instructions")] = None
    top_logprobs: Annotated[Any, refused("use /v1/chat/completions for log probabilities", 0)] = None
    bad_words: BadWords = None
    allowed_token_ids: AllowedTokens = None
    truncate_prompt_tokens: TruncatedPrompt = None
    priority: PlainPriority = None
