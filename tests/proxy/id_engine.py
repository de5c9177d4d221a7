"""The script of a server that makes prompts itself, shows their token ids and takes some beside the text, as vLLM."""

from __future__ import annotations

import json
from typing import Any, Final

from tokenizers import Tokenizer

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.proxy.scripted_server import LAST_CHUNK, Call, chunk, stream_head, whole

TOKENIZER: Final = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
OUTPUT_IDS: Final = (72, 105)
VOCABULARY: Final = 100_000


def packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def prompt_of(asked: dict[str, Any]) -> list[int]:
    """Return the ids that the engine makes of a body's text."""
    if "prompt" in asked:
        text = asked["prompt"]
    else:
        turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in asked["messages"]]
        text = "".join(turns) + "<|im_start|>assistant\n"
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


class IdEngine:
    """Answers chat, text completions and messages, streamed and whole."""

    def __init__(self) -> None:
        self.other_ids = False
        """Whether its prompts differ from the router's."""
        self.refuses_ids = False
        self.refuses_all = False
        self.sent: list[tuple[str, dict[str, Any]]] = []
        """How each prompt came: ``text``, ``checked`` or ``ids``; and the body."""

    def __call__(self, call: Call) -> None:
        asked = json.loads(call.body)
        params = asked.get("kv_transfer_params") or {}
        prompt = asked.get("prompt")
        given = params.get("prompt_token_ids") or (prompt if isinstance(prompt, list) else None)
        kind = "ids" if given else "checked" if asked.get("return_token_ids") else "text"
        self.sent.append((kind, asked))
        if self.refuses_all or (given and self.refuses_ids):
            call.send(whole(packed({"error": {"message": "ids" if given else "text", "code": 400}}), 400))
            return
        ids = given or prompt_of(asked)
        if self.other_ids:
            ids = [*ids[:-1], ids[-1] + 1]
        call.send(answer_of(call.target, asked, ids, bool(asked.get("return_token_ids"))))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]


def answer_of(target: str, asked: dict[str, Any], ids: list[int], shows_ids: bool) -> bytes:
    """Return an answer as vLLM writes it, its token ids null where they were not asked for."""
    usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 2, "completion_tokens": 2}
    shown, out = (ids, list(OUTPUT_IDS)) if shows_ids else (None, None)
    if target.endswith("/messages"):
        counts = {"input_tokens": len(ids), "output_tokens": 2}
        return whole(packed({"id": "chatcmpl-1", "type": "message", "content": [], "usage": counts}))
    is_chat = target.endswith("/chat/completions")
    if not asked.get("stream"):
        said = {"message": {"role": "assistant", "content": "Hi"}} if is_chat else {"text": "Hi"}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop", "token_ids": out}
        at_top = {"prompt_token_ids": shown} if is_chat else {}
        choice |= {} if is_chat else {"prompt_token_ids": shown}
        return whole(packed({"id": "cmpl-1", "choices": [choice], "usage": usage, **at_top, "prompt_text": None}))
    head = {"id": "cmpl-1", "created": 5, "model": "tiny"}
    events: list[dict[str, Any]] = []
    if is_chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events.append({**head, "choices": [role], "prompt_token_ids": shown, "prompt_text": None})
    for at, (text, finish) in enumerate((("H", None), ("i", "stop"))):
        choice = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text}), "logprobs": None}
        choice |= {"finish_reason": finish, "stop_reason": None}
        choice |= {} if is_chat else {"prompt_token_ids": shown if at == 0 else None}
        events.append({**head, "choices": [{**choice, "token_ids": out and out[at : at + 1]}]})
        if shows_ids and is_chat and at == 0:  # half of a tool call, of which the client gets nothing
            silent = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]}
            events.append({**head, "choices": [silent]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": usage})
    data = b"".join(b"data: " + packed(each) + b"\n\n" for each in events) + b"data: [DONE]\n\n"
    return stream_head() + chunk(data) + LAST_CHUNK
