"""The body of ``/v1/responses`` and what is refused in it.

Responses are kept (``store``) and may be gone on from (``previous_response_id``), and their items referred to, where
the server keeps any. Other things that would have to be kept (``conversation``) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from poolgrid.frontend.field_words import allowed
from poolgrid.frontend.schema import JSON_NUMBER_MAX, JSON_NUMBER_MIN, REFUSED, Count, Nvext, TokenId, ToolChoice, TopK
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX, STOP_TOKENS_MAX, U32_MAX

ITEMS_MAX = 16_384
"""Most input items of one request: the turns of a very long agent run."""


class TextOptions(Struct):
    """What the text of the answer is to be."""

    format: Annotated[dict[str, Any] | None, allowed("an object with the type text, json_object or json_schema")] = None
    """``{"type": "text"}``, ``json_object``, or ``json_schema`` with ``name`` and ``schema`` beside it."""


class ReasoningOptions(Struct):
    """How much the model is to reason: a variable of the chat template."""

    effort: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """Body of ``/v1/responses``."""

    model: str
    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=ITEMS_MAX)],
        allowed("a string or a list of items"),
    ]
    instructions: Annotated[str | list[dict[str, Any]] | None, allowed("a string or a list of items")] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Annotated[ReasoningOptions | None, allowed('an object such as {"effort": "low"}')] = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    """Whether the response is to be found again; ``None`` = where the server keeps any."""
    previous_response_id: Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)] | None = None
    """The response that the conversation goes on from."""
    include: Annotated[list[str] | None, allowed("a list of names of further output")] = None
    """Ignored, but for log probabilities: what else there is belongs to tools that do not run here."""
    # Beyond OpenAI's, as in chat.
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=JSON_NUMBER_MIN, le=JSON_NUMBER_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX // 2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=U32_MAX)] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=IDENTIFIER_BYTES_MAX)] | None = None
    nvext: Nvext | None = None
    # Known elsewhere, refused here when they ask for something: see REFUSED_RESPONSES.
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    priority: Any = None


REFUSED_RESPONSES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "conversation": ((), "no conversations are kept; send previous_response_id, or the whole conversation as input"),
    "background": ((False,), "an answer is given on the connection that asked for it"),
    "prompt": ((), "there are no stored prompts; send input and instructions"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log probabilities"),
    **{name: REFUSED[name] for name in ("bad_words", "allowed_token_ids", "truncate_prompt_tokens", "priority")},
}
"""As ``REFUSED`` of chat."""
