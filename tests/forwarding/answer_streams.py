"""Streams of all APIs as two servers write the same answer, and as their clients put them together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from poolgrid.server.forwarding.event_filter import ApiForm

DONE = b"data: [DONE]\n\n"

Unit = tuple[str, str]
"""A token: which field it is in, and its text."""


def event(value: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def merged(units: Sequence[Unit], sizes: Sequence[int]) -> list[list[Unit]]:
    """Tokens as an engine puts them into events: so many of one field together."""
    found: list[list[Unit]] = []
    sizes = list(sizes) or [1]
    for unit in units:
        size = sizes[len(found) % len(sizes)]
        if found and found[-1][-1][0] == unit[0] and len(found[-1]) < size:
            found[-1].append(unit)
        else:
            found.append([unit])
    return found


def logprobs_of(units: Sequence[Unit], server: int) -> dict[str, Any]:
    return {"content": [{"token": text, "logprob": -0.5 - server / 100, "top_logprobs": []} for _, text in units]}


def chat(units: Sequence[Unit], sizes: Sequence[int], server: int) -> list[bytes]:
    """The events of a chat, as a server writes them."""
    head = {"id": f"chatcmpl-s{server}", "object": "chat.completion.chunk", "created": server, "model": "m"}

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})

    events = [chunk({"role": "assistant", "content": ""})]
    calls: list[str] = []
    for group in merged(units, sizes):
        field, text = group[0][0], "".join(text for _, text in group)
        more: dict[str, Any] = {
            "logprobs": logprobs_of(group, server),
            "token_ids": [ord(text[0]) for _, text in group],
        }
        if not field.startswith("call"):
            events.append(chunk({field: text}, **more))
            continue
        call: dict[str, Any] = {"index": int(field[4:]), "function": {"arguments": text}}
        if field not in calls:
            calls.append(field)
            call |= {"id": f"call-s{server}-{field}", "type": "function"}
            call["function"]["name"] = f"name{field}"
        events.append(chunk({"tool_calls": [call]}, **more))
    events.append(chunk({}, "stop"))
    usage = {"prompt_tokens": 7, "completion_tokens": len(units), "total_tokens": 7 + len(units)}
    return [*events, event({**head, "choices": [], "usage": usage}), DONE]


def completion(units: Sequence[Unit], sizes: Sequence[int], server: int) -> list[bytes]:
    head = {"id": f"cmpl-s{server}", "object": "text_completion", "created": server, "model": "m"}
    events = []
    for group in merged(units, sizes):
        logprobs = {
            "tokens": [text for _, text in group],
            "token_logprobs": [-0.5 - server / 100] * len(group),
            "top_logprobs": [{text: -0.5 - server / 100} for _, text in group],
            "text_offset": [0] * len(group),
        }
        text = "".join(text for _, text in group)
        events.append(event({**head, "choices": [{"index": 0, "text": text, "logprobs": logprobs}]}))
    events.append(event({**head, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    return [*events, DONE]


def messages(units: Sequence[Unit], sizes: Sequence[int], server: int) -> list[bytes]:
    start = {"id": f"msg-s{server}", "role": "assistant", "content": [], "usage": {"input_tokens": 7}}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    index, last = -1, ""
    kinds = {"content": ("text", "text_delta"), "reasoning": ("thinking", "thinking_delta")}
    for group in merged(units, sizes):
        field = group[0][0]
        kind, delta = kinds.get(field, ("tool_use", "input_json_delta"))
        name = {"tool_use": "partial_json"}.get(kind, kind)
        if field != last:
            if last:
                if last == "reasoning":
                    signature = {"type": "signature_delta", "signature": f"signed-s{server}"}
                    found.append({"type": "content_block_delta", "index": index, "delta": signature})
                found.append({"type": "content_block_stop", "index": index})
            index, last = index + 1, field
            block = {"type": kind} | ({"id": f"toolu-s{server}", "name": field} if kind == "tool_use" else {name: ""})
            found.append({"type": "content_block_start", "index": index, "content_block": block})
        text = "".join(text for _, text in group)
        found.append({"type": "content_block_delta", "index": index, "delta": {"type": delta, name: text}})
    if last:
        found.append({"type": "content_block_stop", "index": index})
    usage = {"output_tokens": len(units)}
    found += [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    return [event(each, each["type"]) for each in found]


def responses(units: Sequence[Unit], sizes: Sequence[int], server: int) -> list[bytes]:
    response = {"id": f"resp-s{server}", "created_at": server, "output": []}
    found: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
    items: list[dict[str, Any]] = []
    groups = merged(units, sizes)
    for at, group in enumerate(groups):
        field = group[0][0]
        kind = {"content": "output_text", "reasoning": "reasoning_text"}.get(field, "function_call_arguments")
        place: dict[str, Any] = {"output_index": len(items) - 1, "content_index": 0, "item_id": ""}
        if not at or groups[at - 1][0][0] != field:
            item = {"type": kind, "id": f"item-s{server}-{len(items)}", "call_id": f"call-s{server}-{len(items)}"}
            items.append(item | {"text": ""})
            place["output_index"] += 1
            found.append({"type": "response.output_item.added", "output_index": len(items) - 1, "item": item})
        place["item_id"] = items[-1]["id"]
        text = "".join(text for _, text in group)
        items[-1]["text"] += text
        found.append({"type": f"response.{kind}.delta", **place, "delta": text})
        if at + 1 == len(groups) or groups[at + 1][0][0] != field:
            done = {"type": f"response.{kind}.done", **place, "text": items[-1]["text"]}
            found += [done, {"type": "response.output_item.done", **place, "item": items[-1]}]
    found.append({"type": "response.completed", "response": {**response, "output": items}})
    return [event({**each, "sequence_number": number}, each["type"]) for number, each in enumerate(found)]


Writer = Callable[[Sequence[Unit], Sequence[int], int], list[bytes]]
FORMS: dict[str, tuple[ApiForm, Writer]] = {
    "chat": (ApiForm.CHAT, chat),
    "completion": (ApiForm.CHAT, completion),
    "messages": (ApiForm.MESSAGES, messages),
    "responses": (ApiForm.RESPONSES, responses),
}


def values_of(stream: bytes) -> list[dict[str, Any]]:
    """What a client parses, which skips comments: a router sends them where a busy machine keeps it silent for long."""
    events = [each.partition(b"data: ")[2] for each in stream.split(b"\n\n")[:-1] if not each.startswith(b":")]
    return [json.loads(each) for each in events if each != b"[DONE]"]


def folded(stream: bytes, form: ApiForm = ApiForm.CHAT) -> Any:
    """A stream as clients put it together: texts joined, all else in its order."""
    values = values_of(stream)
    return folded_chunks(values, stream.count(DONE)) if form is ApiForm.CHAT else folded_events(values)


def folded_chunks(chunks: list[dict[str, Any]], ends: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ends": ends, "usage": [], "ids": set()}
    parts: dict[str, list[str]] = {}
    for chunk in chunks:
        found["ids"].add((chunk["id"], chunk["created"]))
        found["usage"] += [chunk["usage"]] if "usage" in chunk else []
        for choice in chunk["choices"]:
            texts = {"text": choice.get("text", "")}
            for name, value in choice.get("delta", {}).items():
                if name != "tool_calls":
                    texts[name] = value
                    continue
                for call in value:
                    texts |= {f"call {call['index']} {each}": call.get(each, "") for each in ("id", "type")}
                    texts |= {f"call {call['index']} {each}": text for each, text in call["function"].items()}
            for name, text in texts.items():
                parts.setdefault(name, []).append(text)
            found.setdefault("finish", []).extend(filter(None, [choice.get("finish_reason")]))
            found.setdefault("token_ids", []).extend(choice.get("token_ids", []))
            logprobs = choice.get("logprobs") or {}
            found.setdefault("tokens", []).extend(logprobs.get("tokens", []))
            found["tokens"] += [each["token"] for each in logprobs.get("content", [])]
            counts = found.setdefault("logprobs", {"token_logprobs": 0, "top_logprobs": 0, "text_offset": 0})
            for name in counts:
                counts[name] += len(logprobs.get(name, []))
    return found | {name: "".join(texts) for name, texts in parts.items()}


def folded_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in events:
        each.pop("sequence_number", None)
        last = found[-1] if found else {}
        same = [last.get(name) for name in PLACE] == [each.get(name) for name in PLACE]
        if same and isinstance(each.get("delta"), str):
            last["delta"] += each["delta"]
        elif same and isinstance(each.get("delta"), dict) and last["delta"]["type"] == each["delta"]["type"]:
            name = next(name for name in each["delta"] if name != "type")
            last["delta"][name] += each["delta"][name]
        else:
            found.append(each)
    return found


PLACE = ("type", "index", "output_index", "content_index")


def renamed(data: bytes) -> bytes:
    """A stream under the ids of server 1."""
    return re.sub(rb'(created(?:_at)?": ?)2', rb"\g<1>1", data.replace(b"-s2", b"-s1"))


texts = st.text(st.sampled_from('ab é😀"\\\n'), min_size=1, max_size=4)
fields = st.sampled_from(["content", "content", "reasoning", "call0", "call1"])


@st.composite
def answers(draw: st.DrawFn) -> list[Unit]:
    """Tokens in some fields; a call is over when another field has begun."""
    found: list[Unit] = []
    for field in draw(st.lists(fields, max_size=4, unique=True)):
        found += [(field, text) for text in draw(st.lists(texts, min_size=1, max_size=6))]
    return found


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
