"""Requests of every kind to every endpoint of a vLLM server, each of which has one answer: what is compared."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.real_vllm.servers import MODEL

Body = dict[str, Any]

JSON = {"content-type": "application/json"}
SENTENCE = "The harbour lies east of the old town, and every morning its boats leave for the islands before sunrise. "
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence. " + SENTENCE},
    {"role": "user", "content": "Where is the harbour? " + SENTENCE},
]
"""More than one block, so that the cache takes part."""

PICTURE = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301"
        "0100c9fe92ef0000000049454e44ae426082"
    )
).decode()


@dataclass(frozen=True, slots=True)
class Case:
    """One request. ``{id}`` in its path and body is the id in the answer to ``follows``, sent before it."""

    name: str
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    chunked: bool = False
    follows: Case | None = None

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0].partition("{")[0].rstrip("/") or "/"


def _tool(name: str, strict: bool = False) -> Body:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    more: Body = {"strict": True} if strict else {}
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": parameters, **more}}


SCHEMA = {
    "type": "object",
    "properties": {"zebra": {"enum": ["yes", "no"]}, "apple": {"type": "boolean"}},
    "required": ["zebra", "apple"],
    "additionalProperties": False,
}
"""Its keys are not in the order of the alphabet: an order that is changed changes the answer."""

DIRECT = {"chat_template_kwargs": {"enable_thinking": False}}
"""The reasoning parser of the server (qwen3) takes all text for content then."""

TOOLS = {"tools": [_tool("weather"), _tool("tides")], "max_tokens": 40}
HISTORY = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Rome","days":2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sun": true}'},
]


def _named(name: str) -> Body:
    return {"type": "function", "function": {"name": name}}


def _json_schema(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _parts(*parts: Body) -> list[Body]:
    return [{"role": "user", "content": [{"type": "text", "text": "Where?"}, *parts]}]


CHAT: dict[str, Body] = {
    "plain": {},
    "thinking off": DIRECT,
    "content parts": {"messages": _parts({"type": "text", "text": SENTENCE})},
    "developer role": {"messages": [{"role": "developer", "content": "Short."}, *MESSAGES[1:]]},
    "names": {"messages": [{"role": "user", "name": "Ann", "content": "Hello"}]},
    "unicode": {"messages": [{"role": "user", "content": "Grüße, 世界 🌍  \t\r\n"}]},
    "several turns": {"messages": [*MESSAGES, {"role": "assistant", "content": "East."}, *MESSAGES[1:]]},
    "tools": TOOLS,
    "tools, thinking off": {**TOOLS, **DIRECT},
    "tool_choice none": {**TOOLS, "tool_choice": "none"},
    "tool_choice required": {**TOOLS, **DIRECT, "tool_choice": "required", "max_tokens": 80},
    "tool_choice required, thinking": {**TOOLS, "tool_choice": "required"},
    "tool_choice named": {**TOOLS, **DIRECT, "tool_choice": _named("weather"), "max_tokens": 60},
    "tool_choice named, one call": {
        **TOOLS,
        **DIRECT,
        "tool_choice": _named("tides"),
        "parallel_tool_calls": False,
        "max_tokens": 60,
    },
    "tool_choice of an absent tool": {**TOOLS, "tool_choice": _named("nothing")},
    "tool_choice without tools": {"tool_choice": "required"},
    "strict tool": {"tools": [_tool("weather", strict=True)], **DIRECT, "tool_choice": "required", "max_tokens": 60},
    "results of tools": {"messages": HISTORY, "tools": TOOLS["tools"]},
    "reasoning left out": {"include_reasoning": False},
    "reasoning effort": {"reasoning_effort": "low"},
    "json_object": {"response_format": {"type": "json_object"}, **DIRECT, "max_tokens": 12},
    "json_schema": {"response_format": _json_schema(SCHEMA), **DIRECT, "max_tokens": 40},
    "json_schema, thinking": {"response_format": _json_schema(SCHEMA), "max_tokens": 12},
    "json_schema that is none": {"response_format": _json_schema({"type": 5}), **DIRECT},
    "guide json": {"structured_outputs": {"json": SCHEMA}, **DIRECT, "max_tokens": 40},
    "guide regex": {"structured_outputs": {"regex": "(north|south)-[0-9]{3}"}, **DIRECT, "max_tokens": 20},
    "guide choice": {"structured_outputs": {"choice": ["harbour", "island"]}, **DIRECT, "max_tokens": 20},
    "guide grammar": {"structured_outputs": {"grammar": 'root ::= "a" | "bc"'}, **DIRECT, "max_tokens": 20},
    "two guides": {"structured_outputs": {"choice": ["a"], "regex": "b"}},
    "regex that is none": {"structured_outputs": {"regex": "(("}, **DIRECT},
    "logprobs": {"logprobs": True},
    "logprobs of content": {"logprobs": True, "top_logprobs": 3, **DIRECT},
    "top_logprobs 0": {"logprobs": True, "top_logprobs": 0, **DIRECT},
    "top_logprobs alone": {"top_logprobs": 2},
    "too many logprobs": {"logprobs": True, "top_logprobs": 1000},
    "prompt_logprobs": {"prompt_logprobs": 1, "messages": [{"role": "user", "content": "Hi"}]},
    "n 2": {"n": 2, "temperature": 0.7, "max_tokens": 2},
    "n 3, usage": {"n": 3, "temperature": 0.7, "max_tokens": 1, **DIRECT},
    "n 2, greedy": {"n": 2},
    "n 0": {"n": 0},
    "stop": {"stop": "s", **DIRECT, "max_tokens": 30},
    "stop list": {"stop": ["zzz", "e", "a"], **DIRECT, "max_tokens": 30},
    "stop kept": {"stop": ["s"], "include_stop_str_in_output": True, **DIRECT, "max_tokens": 30},
    "stop in thinking": {"stop": ["s"], "max_tokens": 30},
    "stop tokens": {"stop_token_ids": list(range(100, 4000)), "max_tokens": 8},
    "empty stop": {"stop": [""]},
    "min_tokens": {"min_tokens": 4, "max_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "max_completion_tokens": {"max_completion_tokens": 3, "max_tokens": None},
    "sampled": {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 2**53 + 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"300": 100, "301": -100}},
    "logit_bias of an absent token": {"logit_bias": {"999999": 1}},
    "bad_words": {"bad_words": ["ssl", "the"]},
    "allowed_token_ids": {"allowed_token_ids": [300, 301, 302]},
    "beam search": {"use_beam_search": True, "n": 1, "max_tokens": 3},
    "echo": {"echo": True},
    "continued message": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "The harbour is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "both prompts": {"continue_final_message": True},
    "special tokens": {
        "add_special_tokens": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "template of the client": {"chat_template": "{{ messages[0].content }}"},
    "documents": {"documents": [{"title": "Harbour", "text": SENTENCE}]},
    "token ids": {"return_token_ids": True},
    "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1, **DIRECT},
    "ids instead of text": {"kv_transfer_params": {"prompt_token_ids": [2116, 78, 329, *range(100, 150)]}},
    "ids beyond the vocabulary": {"kv_transfer_params": {"prompt_token_ids": [999_999]}},
    "cache_salt": {"cache_salt": "tenant"},
    "cache_salt that is empty": {"cache_salt": ""},
    "priority": {"priority": 3},
    "priority that is no number": {"priority": "high"},
    "request_id": {"request_id": "0123456789abcdef0123456789abcdef"},
    "extra arguments": {"vllm_xargs": {"note": "a"}, "mm_processor_kwargs": None},
    "fields of OpenAI": {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    "unknown fields": {"x_unknown": {"deep": [1, None, {"a": 1e2}]}, "zzz": "\u0000"},
    "image": {"messages": _parts({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}})},
    "audio": {"messages": _parts({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}})},
    "unknown part": {"messages": _parts({"type": "hologram", "hologram": 1})},
    "no messages": {"messages": []},
    "messages of a wrong type": {"messages": "Hello"},
    "role that is none": {"messages": [{"role": "oracle", "content": "Hello"}]},
    "temperature below 0": {"temperature": -1},
    "temperature of a wrong type": {"temperature": "hot"},
    "top_p 2": {"top_p": 2},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens below 0": {"max_tokens": -1},
    "max_tokens too large": {"max_tokens": 100_000},
    "prompt too long": {"messages": [{"role": "user", "content": "word " * 6000}]},
    "unknown model": {"model": "nothing"},
    "model of a wrong type": {"model": 5},
    "empty model": {"model": ""},
    "usage without stream": {"stream_options": {"include_usage": True}, "stream": False},
}

COMPLETIONS: dict[str, Body] = {
    "plain": {},
    "ids": {"prompt": [2116, 78, 329, *range(100, 150)]},
    "several prompts": {"prompt": ["Hello", "Harbour"], "max_tokens": 1},
    "several prompts of ids": {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1},
    "no prompt": {"prompt": ""},
    "empty ids": {"prompt": []},
    "id beyond the vocabulary": {"prompt": [999_999]},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 1, "prompt": "Hello there"},
    "echo alone": {"echo": True, "max_tokens": 0, "prompt": "Hello there"},
    "suffix": {"suffix": " end"},
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "n 2": {"n": 2, "temperature": 0.7, "max_tokens": 1},
    "best_of": {"best_of": 2, "n": 1, "temperature": 0.7},
    "stop": {"stop": ["s", "e"], "max_tokens": 30},
    "guide choice": {"structured_outputs": {"choice": ["harbour", "island"]}, "max_tokens": 20},
    "guide json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    "response_format": {"response_format": _json_schema(SCHEMA), "max_tokens": 40},
    "token ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 0, "prompt": "Hello there"},
    "truncated": {"truncate_prompt_tokens": 4},
    "cache_salt": {"cache_salt": "tenant"},
    "add_special_tokens": {"add_special_tokens": False},
    "unknown model": {"model": "nothing"},
    "prompt too long": {"prompt": "word " * 6000},
    "prompt of a wrong type": {"prompt": {"text": "Hello"}},
}

_ANTHROPIC_TOOL = {"name": "weather", "description": "Weather.", "input_schema": SCHEMA}

MESSAGES_API: dict[str, Body] = {
    "plain": {},
    "system": {"system": "Answer shortly. " + SENTENCE},
    "system blocks": {"system": [{"type": "text", "text": SENTENCE, "cache_control": {"type": "ephemeral"}}]},
    "content blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": SENTENCE}]}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 4}},
    "no thinking": {"thinking": {"type": "disabled"}},
    "tools": {"tools": [_ANTHROPIC_TOOL], "max_tokens": 30},
    "tool_choice any": {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, **DIRECT, "max_tokens": 60},
    "tool_choice tool": {
        "tools": [_ANTHROPIC_TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "disabled"},
        "max_tokens": 60,
    },
    "results of tools": {
        "tools": [_ANTHROPIC_TOOL],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}]},
        ],
    },
    "stop_sequences": {"stop_sequences": ["s"], "thinking": {"type": "disabled"}, "max_tokens": 30},
    "sampling": {"temperature": 0.0, "top_p": 0.9, "top_k": 30},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
                ],
            }
        ]
    },
    "metadata": {"metadata": {"user_id": "u"}},
    "unknown fields": {"x_unknown": {"a": 1e2}},
    "no max_tokens": {"max_tokens": None},
    "no messages": {"messages": []},
    "unknown model": {"model": "nothing"},
    "prompt too long": {"messages": [{"role": "user", "content": "word " * 6000}]},
}

_RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}

RESPONSES: dict[str, Body] = {
    "plain": {},
    "instructions": {"instructions": "Answer shortly."},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": SENTENCE}]}]},
    "several turns": {
        "input": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Where?"},
        ]
    },
    "reasoning": {"reasoning": {"effort": "low"}},
    "tools": {"tools": [_RESPONSES_TOOL], "max_output_tokens": 30},
    "tool_choice required": {"tools": [_RESPONSES_TOOL], "tool_choice": "required", "max_output_tokens": 60},
    "results of tools": {
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        ],
        "tools": [_RESPONSES_TOOL],
    },
    "json_schema": {
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 40,
    },
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "ids instead of text": {"kv_transfer_params": {"prompt_token_ids": [2116, 78, 329, *range(100, 150)]}},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "not stored": {"store": False},
    "metadata": {"metadata": {"a": "b"}, "user": "u"},
    "truncation": {"truncation": "auto"},
    "unknown fields": {"x_unknown": {"a": 1e2}},
    "image": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]
    },
    "unknown previous": {"previous_response_id": "resp_0123456789abcdef"},
    "bad previous": {"previous_response_id": "nothing"},
    "no input": {"input": None},
    "unknown model": {"model": "nothing"},
    "input too long": {"input": "word " * 6000},
}

BASES: dict[str, tuple[Body, dict[str, Body]]] = {
    "/v1/chat/completions": (
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "seed": 1},
        CHAT,
    ),
    "/v1/completions": (
        {"model": MODEL, "prompt": SENTENCE * 2, "max_tokens": 6, "temperature": 0, "seed": 1},
        COMPLETIONS,
    ),
    "/v1/messages": ({"model": MODEL, "messages": MESSAGES[1:], "max_tokens": 6, "temperature": 0}, MESSAGES_API),
    "/v1/responses": ({"model": MODEL, "input": SENTENCE * 2, "max_output_tokens": 6, "temperature": 0}, RESPONSES),
}

STREAMED_USAGE = (
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": False},
)

_BATCH = {"model": MODEL, "messages": [MESSAGES, MESSAGES[1:]], "max_tokens": 3, "temperature": 0}
_GENERATE = {"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "temperature": 0}}
_CHAT = BASES["/v1/chat/completions"][0]
_MESSAGE = BASES["/v1/messages"][0]

ONCE: tuple[tuple[str, str, Body], ...] = (
    ("/v1/messages/count_tokens", "plain", {"model": MODEL, "messages": MESSAGES[1:]}),
    ("/v1/messages/count_tokens", "unknown model", {"model": "nothing", "messages": MESSAGES[1:]}),
    ("/v1/messages/count_tokens", "no messages", {"model": MODEL}),
    ("/v1/chat/completions/batch", "plain", _BATCH),
    ("/v1/chat/completions/batch", "streamed", {**_BATCH, "stream": True}),
    ("/tokenize", "text", {"model": MODEL, "prompt": SENTENCE}),
    ("/tokenize", "text with pieces", {"model": MODEL, "prompt": SENTENCE, "return_token_strs": True}),
    ("/tokenize", "messages", {"model": MODEL, "messages": MESSAGES}),
    ("/tokenize", "messages with tools", {"model": MODEL, "messages": MESSAGES, "tools": TOOLS["tools"]}),
    ("/tokenize", "without a model", {"prompt": "Hello"}),
    ("/tokenize", "unknown model", {"model": "nothing", "prompt": "Hello"}),
    ("/tokenize", "nothing", {"model": MODEL}),
    ("/detokenize", "plain", {"model": MODEL, "tokens": [2116, 78, 329]}),
    ("/detokenize", "wrong type", {"model": MODEL, "tokens": "abc"}),
    ("/detokenize", "beyond the vocabulary", {"model": MODEL, "tokens": [999_999]}),
    ("/v1/chat/completions/render", "plain", _CHAT),
    ("/v1/chat/completions/render", "tools", {**_CHAT, **TOOLS}),
    ("/v1/chat/completions/render", "image", {**_CHAT, **CHAT["image"]}),
    ("/v1/completions/render", "plain", {"model": MODEL, "prompt": SENTENCE, "max_tokens": 3}),
    ("/v1/messages/render", "plain", _MESSAGE),
    ("/v1/responses/render", "plain", BASES["/v1/responses"][0]),
    ("/inference/v1/generate", "plain", _GENERATE),
    ("/inference/v1/generate", "streamed", {**_GENERATE, "stream": True}),
    ("/inference/v1/generate", "wrong", {"model": MODEL}),
    ("/invocations", "chat", _CHAT),
    ("/invocations", "chat, streamed", {**_CHAT, "stream": True}),
    ("/invocations", "completion", BASES["/v1/completions"][0]),
    ("/invocations", "neither", {"model": MODEL}),
    (
        "/generative_scoring",
        "plain",
        {"model": MODEL, "query": "Is it", "items": [" east", " west"], "label_token_ids": [300, 301]},
    ),
    ("/generative_scoring", "wrong", {"model": MODEL}),
    ("/v1/systemone", "wrong", {"model": MODEL}),
    ("/v1/embeddings", "text", {"model": MODEL, "input": SENTENCE}),
    ("/v1/embeddings", "texts", {"model": MODEL, "input": ["Hello", SENTENCE]}),
    ("/v1/embeddings", "ids", {"model": MODEL, "input": [[5, 6, 7], [8]]}),
    ("/v1/embeddings", "base64", {"model": MODEL, "input": "Hello", "encoding_format": "base64"}),
    ("/v1/embeddings", "messages", {"model": MODEL, "messages": MESSAGES}),
    ("/v1/embeddings", "dimensions", {"model": MODEL, "input": "Hello", "dimensions": 7}),
    ("/v1/embeddings", "too long", {"model": MODEL, "input": "word " * 6000}),
    ("/v1/embeddings", "no input", {"model": MODEL}),
    ("/v1/embeddings", "unknown model", {"model": "nothing", "input": "Hello"}),
    ("/v2/embed", "texts", {"model": MODEL, "texts": ["Hello"], "input_type": "search_query"}),
    ("/v2/embed", "wrong", {"model": MODEL}),
    ("/pooling", "text", {"model": MODEL, "input": "Hello"}),
    ("/pooling", "wrong", {"model": MODEL}),
    ("/score", "texts", {"model": MODEL, "text_1": "Hello", "text_2": ["harbour", "island"]}),
    ("/v1/score", "queries", {"model": MODEL, "queries": "Hello", "documents": ["harbour", "island"]}),
    ("/v1/score", "wrong", {"model": MODEL, "text_1": "Hello"}),
    ("/rerank", "plain", {"model": MODEL, "query": "Hello", "documents": ["harbour", "island"]}),
    ("/v1/rerank", "top_n", {"model": MODEL, "query": "Hello", "documents": ["harbour", "island", "a"], "top_n": 2}),
    ("/v2/rerank", "unknown model", {"model": "nothing", "query": "Hello", "documents": ["harbour"]}),
    ("/classify", "text", {"model": MODEL, "input": "Hello"}),
    ("/v1/audio/transcriptions", "not a form", {"model": MODEL}),
    ("/v1/images/generations", "unknown path", {"model": MODEL, "prompt": "Hello"}),
    ("/v1/nothing", "unknown path", {"model": MODEL}),
)
"""Requests whose answers are never streamed, or that are sent once."""

_TEXT = json.dumps(MESSAGES)

ODD_JSON: dict[str, bytes] = {
    "order of keys": f'{{"seed":1,"temperature":0,"messages":{_TEXT},"max_tokens":3,"model":"{MODEL}"}}'.encode(),
    "spaces": f'\n {{ "model" :\t"{MODEL}" , "messages" : {_TEXT} ,\r\n"max_tokens" : 3,"temperature":0 }}\n'.encode(),
    "1e0": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":3e0,"temperature":0e0}}'.encode(),
    "temperature 0.0000": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":3,"temperature":0.0000}}'.encode(),
    "seed 2**53+1": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":3,"seed":9007199254740993}}'.encode(),
    "seed 2**63": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":3,"seed":9223372036854775808}}'.encode(),
    "long number": f'{{"model":"{MODEL}","messages":{_TEXT},"seed":1,"max_tokens":3,"top_p":0.{"1" * 99}e-9}}'.encode(),
    "escapes": (
        rf'{{"mod\u0065l":"{MODEL}","messages":[{{"role":"user","content":"\u0048\u00e9\/ \ud83c\udf0d"}}],'
        r'"max_tokens":3,"temperature":0}'
    ).encode(),
    "lone surrogate": (
        rf'{{"model":"{MODEL}","messages":[{{"role":"user","content":"\ud800"}}],"max_tokens":3,"temperature":0}}'
    ).encode(),
    "key twice": f'{{"model":"{MODEL}","max_tokens":2,"messages":{_TEXT},"max_tokens":4,"temperature":0}}'.encode(),
    "model twice": f'{{"model":"nothing","max_tokens":1,"messages":{_TEXT},"model":"{MODEL}","seed":1}}'.encode(),
    "model twice, wrong": f'{{"model":"{MODEL}","max_tokens":2,"messages":{_TEXT},"model":"nothing"}}'.encode(),
    "stream twice": (
        f'{{"stream":true,"model":"{MODEL}","max_tokens":2,"messages":{_TEXT},"stream":false,"temperature":0}}'
    ).encode(),
    "deep field": (
        f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":2,"temperature":0,"x":{"[" * 200}{"]" * 200}}}'
    ).encode(),
    "NaN": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":2,"temperature":NaN}}'.encode(),
    "Infinity": f'{{"model":"{MODEL}","messages":{_TEXT},"max_tokens":2,"temperature":Infinity}}'.encode(),
    "byte order mark": b"\xef\xbb\xbf" + json.dumps({**_CHAT, "max_tokens": 3}).encode(),
    "UTF-16": json.dumps({**_CHAT, "max_tokens": 3}).encode("utf-16"),
    "invalid UTF-8": b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}],"max_tokens":3}',
    "number as a string": json.dumps({**_CHAT, "max_tokens": "3"}).encode(),
    "null fields": json.dumps({**_CHAT, "stop": None, "tools": None, "stream": None, "user": None}).encode(),
    "no JSON": b"{",
    "empty body": b"",
    "list": b"[]",
    "text": b'"Hello"',
    "null": b"null",
    "text behind it": json.dumps(_CHAT).encode() + b" x",
    "no model": json.dumps({key: value for key, value in _CHAT.items() if key != "model"}).encode(),
}

_SMALL = json.dumps({**_CHAT, "max_tokens": 3}).encode()
_STREAM = json.dumps({**_CHAT, "max_tokens": 3, "stream": True}).encode()
_ORIGIN = {"origin": "http://page.example"}

HTTP: tuple[Case, ...] = (
    Case("request id", "/v1/chat/completions", _SMALL, headers={**JSON, "X-Request-Id": "mine-42"}),
    Case("request id, streamed", "/v1/chat/completions", _STREAM, headers={**JSON, "X-Request-Id": "mine-43"}),
    Case("request id", "/v1/messages", json.dumps(_MESSAGE).encode(), headers={**JSON, "X-Request-Id": "mine-44"}),
    Case("query", "/v1/chat/completions?a=b&c=%2F", _SMALL),
    Case("chunked upload", "/v1/chat/completions", _SMALL, chunked=True),
    Case("charset", "/v1/chat/completions", _SMALL, headers={"content-type": "application/json; charset=utf-8"}),
    Case("no type", "/v1/chat/completions", _SMALL, headers={}),
    Case("type of a form", "/v1/chat/completions", _SMALL, headers={"content-type": "text/plain"}),
    Case("origin", "/v1/chat/completions", _SMALL, headers={**JSON, **_ORIGIN}),
    Case("accepts gzip", "/v1/chat/completions", _SMALL, headers={**JSON, "accept-encoding": "gzip, br"}),
    Case("load asked for", "/v1/chat/completions", _SMALL, headers={**JSON, "endpoint-load-metrics-format": "TEXT"}),
    Case(
        "trace and session",
        "/v1/chat/completions",
        _SMALL,
        headers={
            **JSON,
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "x-session-id": "s",
            "x-custom": "a" * 4000,
        },
    ),
    Case(
        "Anthropic's headers",
        "/v1/messages",
        json.dumps(_MESSAGE).encode(),
        headers={**JSON, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"},
    ),
    Case(
        "preflight",
        "/v1/chat/completions",
        method="OPTIONS",
        headers={**_ORIGIN, "access-control-request-method": "POST"},
    ),
    Case("wrong method", "/v1/chat/completions", method="GET", headers={}),
    Case("wrong method", "/v1/responses", method="DELETE", headers={}),
    Case("unknown path", "/v1/nothing/at/all", method="GET", headers={}),
    Case("list", "/v1/models", method="GET", headers={}),
    Case("list with an origin", "/v1/models", method="GET", headers=_ORIGIN),
    Case("list with a slash", "/v1/models/", method="GET", headers={}),
    Case("head of the list", "/v1/models", method="HEAD", headers={}),
    Case("one", f"/v1/models/{MODEL}", method="GET", headers={}),
    Case("unknown one", "/v1/models/nothing", method="GET", headers={}),
    Case("unknown id", "/v1/responses/resp_0123456789abcdef", method="GET", headers={}),
    Case("no id", "/v1/responses/nothing", method="GET", headers={}),
    Case("unknown id", "/v1/responses/resp_0123456789abcdef/cancel", headers={}),
)

_STORED = Case("stored", "/v1/responses", json.dumps(BASES["/v1/responses"][0]).encode())
_CONTINUED = {**BASES["/v1/responses"][0], "input": "And then?", "previous_response_id": "{id}"}

STATE: tuple[Case, ...] = (
    Case("stored one", "/v1/responses/{id}", method="GET", headers={}, follows=_STORED),
    Case("continued", "/v1/responses", json.dumps(_CONTINUED).encode(), follows=_STORED),
    Case(
        "continued, streamed",
        "/v1/responses",
        json.dumps({**_CONTINUED, "stream": True}).encode(),
        follows=_STORED,
    ),
    Case("cancelled when done", "/v1/responses/{id}/cancel", headers={}, follows=_STORED),
)


def cases() -> Iterator[Case]:
    """Yield every case; what a server does not serve is its 404."""
    for path, (base, variants) in BASES.items():
        for name, fields in variants.items():
            body = {key: value for key, value in {**base, **fields}.items() if value is not None or key == "input"}
            yield Case(name, path, json.dumps(body).encode())
            if "stream" not in fields:
                yield Case(f"{name}, streamed", path, json.dumps({**body, "stream": True}).encode())
        if path.endswith("completions"):
            for number, usage in enumerate(STREAMED_USAGE):
                for name in ("plain", "n 2", "logprobs", "token ids"):
                    body = {**base, **variants[name], "stream": True, "stream_options": usage}
                    yield Case(f"{name}, usage {number}", path, json.dumps(body).encode())
    yield from (Case(name, path, json.dumps(body).encode()) for path, name, body in ONCE)
    yield from (Case(f"JSON: {name}", "/v1/chat/completions", body) for name, body in ODD_JSON.items())
    yield from HTTP
    yield from STATE


def by_endpoint(chosen: Sequence[Case]) -> dict[str, int]:
    """Return how many cases each endpoint has."""
    counts: dict[str, int] = {}
    for case in chosen:
        counts[case.endpoint] = counts.get(case.endpoint, 0) + 1
    return counts
