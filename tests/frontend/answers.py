"""Read an answer of any of the three chat APIs, whole or streamed, into one form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
"""The APIs by name."""

_FINISH = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
    "completed": "stop", "incomplete": "length",
}  # fmt: skip


@dataclass
class Answer:
    """What a client sees."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    finish: str = ""
    """As chat calls it; Responses does not tell calls from an end."""
    stop: str | None = None
    """The stop string that is named; Messages alone does."""
    output_tokens: int = 0


def body_for(api: str, prompt: str = "hi", *, max_tokens: int = 500, **fields: Any) -> dict[str, Any]:
    """Return the body of a request in one of the APIs; ``stop`` and ``tools`` are chat's and are put in its words."""
    tools, stop = fields.pop("tools", None), fields.pop("stop", None)
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
    if stop is not None:
        body["stop_sequences" if api == "messages" else "stop"] = stop
    if tools is not None:
        body["tools"] = [_tool(api, tool["function"]) for tool in tools]
    body["max_output_tokens" if api == "responses" else "max_tokens"] = max_tokens
    if api == "responses":
        body["input"] = body.pop("messages")[0]["content"]
    if api == "chat" and body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return body


def read(api: str, response: httpx.Response) -> Answer:
    """Return what a response of status 200 answers."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return {"chat": _chat, "messages": _message, "responses": _response}[api](response.json())
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", response.text, re.MULTILINE)]
    if api == "responses":
        return _response(events[-1]["response"])
    return _chunks(events) if api == "chat" else _blocks(events)


def _tool(api: str, function: dict[str, Any]) -> dict[str, Any]:
    if api == "messages":
        return {"name": function["name"], "input_schema": function["parameters"]}
    return {"type": "function", **function} if api == "responses" else {"type": "function", "function": function}


def _chat(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        calls,
        choice["finish_reason"],
        output_tokens=body["usage"]["completion_tokens"],
    )


def _chunks(chunks: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for chunk in chunks:
        assert "error" not in chunk, chunk
        if chunk["usage"]:
            answer.output_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            answer.content += delta.get("content") or ""
            answer.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    answer.calls.append((call["function"]["name"], ""))
                name, arguments = answer.calls[call["index"]]
                answer.calls[call["index"]] = (name, arguments + call["function"]["arguments"])
            answer.finish = choice["finish_reason"] or answer.finish
    return answer


def _message(body: dict[str, Any]) -> Answer:
    answer = Answer(
        finish=_FINISH[body["stop_reason"]], stop=body["stop_sequence"], output_tokens=body["usage"]["output_tokens"]
    )
    for block in body["content"]:
        if block["type"] == "tool_use":
            answer.calls.append((block["name"], json.dumps(block["input"])))
        elif block["type"] == "thinking":
            answer.reasoning += block["thinking"]
        else:
            answer.content += block["text"]
    return answer


def _blocks(events: list[dict[str, Any]]) -> Answer:
    answer = Answer()
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            answer.calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            answer.content += delta.get("text", "")
            answer.reasoning += delta.get("thinking", "")
            if "partial_json" in delta:
                name, arguments = answer.calls[-1]
                answer.calls[-1] = (name, arguments + delta["partial_json"])
        elif event["type"] == "message_delta":
            answer.finish, answer.stop = _FINISH[event["delta"]["stop_reason"]], event["delta"]["stop_sequence"]
            answer.output_tokens = event["usage"]["output_tokens"]
    return answer


def _response(body: dict[str, Any]) -> Answer:
    answer = Answer(finish=_FINISH[body["status"]], output_tokens=body["usage"]["output_tokens"])
    for item in body["output"]:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            answer.reasoning += "".join(part["text"] for part in item["content"])
        else:
            answer.content += "".join(part["text"] for part in item["content"])
    return answer
