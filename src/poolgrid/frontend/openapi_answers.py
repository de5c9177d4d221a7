"""JSON schemas of the answers, for the OpenAPI page; a test holds real answers against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def _object(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}

_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)))
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object({"cache_write_tokens": _COUNT}, cached_tokens=_COUNT),
)
_TOKEN = _object(token=_TEXT, logprob=_NUMBER, bytes=_list(_INTEGER))
_CHAT_LOGPROBS = _object(
    content=_list({"allOf": [_TOKEN, _object(top_logprobs=_list(_TOKEN))]}), refusal={"type": "null"}
)
_COMPLETION_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_or_null(_NUMBER)),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_list(_INTEGER),
)
_TOOL_CALL = _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    {"reasoning_content": _TEXT, "tool_calls": _list(_TOOL_CALL)},
    role={"const": "assistant"},
    content=_or_null(_TEXT),
    refusal={"type": "null"},
)
_CHAT_CHOICE = _object(
    index=_COUNT,
    message=_MESSAGE,
    logprobs=_or_null(_CHAT_LOGPROBS),
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
)
_COMPLETION_CHOICE = _object(
    index=_COUNT, text=_TEXT, logprobs=_or_null(_COMPLETION_LOGPROBS), finish_reason={"enum": ["stop", "length"]}
)


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(id=_TEXT, object={"const": kind}, created=_INTEGER, model=_TEXT, choices=_list(choice), usage=_USAGE)


_ITEM_TEXT = _object(type={"enum": ["output_text", "reasoning_text"]}, text=_TEXT)
_ITEM = _object(
    {"content": _list(_ITEM_TEXT), "call_id": _TEXT, "name": _TEXT, "arguments": _TEXT},
    id=_TEXT,
    type={"enum": ["message", "reasoning", "function_call"]},
    status=_TEXT,
)
_RESPONSES_USAGE = _object(
    input_tokens=_COUNT,
    input_tokens_details=_object(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
    output_tokens=_COUNT,
    output_tokens_details=_object(reasoning_tokens=_COUNT),
    total_tokens=_COUNT,
)
_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_INTEGER,
    status={"enum": ["completed", "incomplete"]},
    incomplete_details=_or_null(_object(reason=_TEXT)),
    model=_TEXT,
    output=_list(_ITEM),
    usage=_RESPONSES_USAGE,
)
_BLOCK = _object(
    {"text": _TEXT, "thinking": _TEXT, "signature": _TEXT, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}},
    type={"enum": ["text", "thinking", "tool_use"]},
)
_MESSAGE_USAGE = _object(
    input_tokens=_COUNT,
    cache_creation_input_tokens=_COUNT,
    cache_creation=_object(ephemeral_5m_input_tokens=_COUNT, ephemeral_1h_input_tokens=_COUNT),
    cache_read_input_tokens=_COUNT,
    output_tokens=_COUNT,
)
_ANTHROPIC_MESSAGE = _object(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_BLOCK),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=_or_null(_TEXT),
    usage=_MESSAGE_USAGE,
)
_MESSAGE_ERROR = _object(
    type={"const": "error"},
    error=_object({"param": _or_null(_TEXT), "code": _or_null(_TEXT)}, type=_TEXT, message=_TEXT),
    request_id=_TEXT,
)
_ITEM_LIST = _object(
    object={"const": "list"},
    data=_list({"type": "object"}),
    first_id=_or_null(_TEXT),
    last_id=_or_null(_TEXT),
    has_more={"type": "boolean"},
)
_EMBEDDING = _object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]})
_RESULT_PLACE = _object({"url": _TEXT, "b64_json": _TEXT, "output_format": _TEXT})
_VIDEO = _object(
    {
        "created_at": _INTEGER,
        "created": _INTEGER,
        "completed_at": _or_null(_INTEGER),
        "expires_at": _or_null(_INTEGER),
        "prompt": _TEXT,
        "seconds": _TEXT,
        "size": _TEXT,
        "data": _list(_RESULT_PLACE),
        "error": _or_null(_object(code=_TEXT, message=_TEXT)),
        "inference_time_s": _NUMBER,
    },
    id=_TEXT,
    object={"const": "video"},
    model=_TEXT,
    status={"enum": ["queued", "in_progress", "completed", "failed"]},
    progress=_COUNT,
)
_MODEL = _object(
    {"parent": _TEXT},
    id=_TEXT,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_TEXT,
    root=_TEXT,
    max_model_len=_or_null(_COUNT),
)

ANSWERS: Mapping[str, Schema] = {
    "Error": _ERROR,
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "Response": _RESPONSE,
    "DeletedResponse": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "ItemList": _ITEM_LIST,
    "AnthropicMessage": _ANTHROPIC_MESSAGE,
    "MessageCount": _object(input_tokens=_COUNT),
    "InputTokenCount": _object(object={"const": "response.input_tokens"}, input_tokens=_COUNT),
    "MessageError": _MESSAGE_ERROR,
    "EmbeddingList": _object(
        object={"const": "list"},
        data=_list(_EMBEDDING),
        model=_TEXT,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "ImageList": _object(created=_INTEGER, data=_list(_RESULT_PLACE), output_format=_or_null(_TEXT)),
    "Video": _VIDEO,
    "DeletedVideo": _object(id=_TEXT, object={"const": "video.deleted"}, deleted={"const": True}),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
}
"""By the name of the component."""
