"""Plain sampled text whose server died, continued by another server from its last character.

A sampled answer is not computed alike twice. Where it is text alone, another server is asked to continue it: the text
so far becomes the end of the prompt. The client gets one text without a seam, whose rest is sampled as its beginning
was. Requests that ask for more than text are refused here: what their servers derive from a whole answer (calls,
reasoning, guides, log probabilities, penalties, stop strings) they would derive from its second part.

How each server takes the text so far:

- Text completions append it to the prompt: vLLM, SGLang and trtllm-serve.
- Chats send it as the final message with ``continue_final_message``. SGLang appends its tokens to those of the prompt.
  vLLM renders it by the model's template, which may cut white space at its end. So white space at the end is not sent,
  and the server must repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from poolgrid.server.forwarding.body_edit import edit, elements, top_level
from poolgrid.server.forwarding.continuation import (
    DIFFERS,
    DONE,
    ContinuationError,
    encoded_json,
    events_of,
    parsed_json,
    split_events,
    stream_ids,
)
from poolgrid.server.forwarding.event_filter import AnswerNotes, data_of, with_data

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

KINDS: Final[Mapping[str, frozenset[str]]] = {
    CHAT: frozenset(("vllm", "sglang")),
    COMPLETIONS: frozenset(("vllm", "sglang", "trtllm-serve")),
}
"""Servers that continue a text, by the path of the request."""

FREE_FIELDS: Final = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
        *("max_tokens", "max_completion_tokens", "user", "cache_salt", "priority", "metadata", "store", "request_id"),
        *(
            "logit_bias",
            "ignore_eos",
            "repetition_penalty",
            "chat_template_kwargs",
            "reasoning_effort",
            "safety_identifier",
        ),
        *("skip_special_tokens", "stream_interval", "session_id", "prompt_cache_key", "service_tier", "verbosity"),
    )
)
"""Fields that may have any value: each token is chosen by them as before, or they are not about the text."""

PLAIN_VALUES: Final[Mapping[str, tuple[bytes, ...]]] = {
    "n": (b"1",),
    "best_of": (b"1",),
    "frequency_penalty": (b"0", b"0.0"),
    "presence_penalty": (b"0", b"0.0"),
    "min_tokens": (b"0",),
    "logprobs": (b"false",),
    "echo": (b"false",),
    "stop": (b"[]",),
    "stop_token_ids": (b"[]",),
    "tools": (b"[]",),
    "tool_choice": (b'"none"',),
    "parallel_tool_calls": (b"true", b"false"),
    "response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    "include_reasoning": (b"true", b"false"),
    "separate_reasoning": (b"true", b"false"),
}
"""Fields that may have these values, or null."""

PROMPT_IDS: Final = ("kv_transfer_params", "input_ids")
"""Members with which the router may have sent a prompt's token ids, vLLM's and SGLang's: those of the prompt alone."""

LIMITS: Final = ("max_tokens", "max_completion_tokens")

TEMPLATE_MARKS: Final = ("<think", "</think", "<|")
"""Texts that templates read in a message: thoughts are cut out of it, control tokens end it."""


class TextSoFar(msgspec.Struct, frozen=True):
    """What a client has of a plain text."""

    text: str
    has_role: bool
    ids: Mapping[str, bytes]
    """Members of the stream's chunks that are the stream's, as raw JSON."""


def text_so_far(had: bytes) -> TextSoFar:
    """Read the events that a client has.

    Raises:
        ContinuationError: They hold more than text.
    """
    pieces: list[str] = []
    has_role = False
    ids: dict[str, bytes] = {}
    for event in events_of(had):
        data = data_of(event)
        if not data:
            continue
        chunk = parsed_json(data)
        if chunk is None or data == DONE:
            raise ContinuationError("the stream has an event that is no text")
        ids = ids or stream_ids(data)
        for choice in _choices_of(chunk):
            text, role = _text_of(choice)
            has_role = has_role or role
            pieces.append(text)
            if choice.get("finish_reason") is not None:
                raise ContinuationError("its text is at its end")
    return TextSoFar("".join(pieces), has_role, ids)


def _choices_of(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices")
    if not isinstance(choices, list) or any(choice.get("index", 0) != 0 for choice in choices):
        raise ContinuationError("the stream has more than one text")
    return choices


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text in a choice of a chunk, and whether it has a role; raises ``ContinuationError`` for more."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        for name, value in delta.items():
            if name not in ("role", "content") and value:
                raise ContinuationError(f"the stream has {name} besides its text")
        return delta.get("content") or "", delta.get("role") is not None
    return choice.get("text") or "", False


class TextContinuation:
    """A request that continues a text, and how its answer is joined to the first stream."""

    def __init__(self, so_far: TextSoFar, body: bytes, repeated: str, tokens: int) -> None:
        self._so_far = so_far
        self.body = body
        """For the server."""
        self._repeated = repeated
        """White space that the server must begin with: the client has it, the server has not."""
        self._tokens = tokens
        """Of the text so far."""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take more of the second stream; return what is for the client.

        Raises:
            ContinuationError: It is no text, or does not begin as it must.
        """
        events, self._held = split_events(self._held + data)
        return b"".join(map(self._rest, events))

    def finish(self) -> None:
        """Take note that the second stream has ended.

        Raises:
            ContinuationError: It ended before the white space that it was to begin with.
        """
        if self._repeated:
            raise ContinuationError(DIFFERS)

    def correct(self, notes: AnswerNotes) -> None:
        """Correct what the second stream reports: the text so far is in its prompt, not in its answer."""
        if notes.prompt_tokens is not None:
            notes.prompt_tokens -= self._tokens
        if notes.completion_tokens is not None:
            notes.completion_tokens += self._tokens

    def _rest(self, event: bytes) -> bytes:
        data = data_of(event)
        chunk = parsed_json(data) if data and data != DONE else None
        if chunk is None:
            if data == DONE:
                self.finish()
            return event
        if chunk.get("error"):
            return event
        is_new = not chunk.get("choices")
        for choice in _choices_of(chunk):
            is_new = self._cut(choice) or is_new
        if not is_new:
            return b""
        return with_data(event, lambda raw: self._changed(raw, chunk))

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Cut what the client has from a choice; return whether anything is left."""
        text, has_role = _text_of(choice)
        if self._repeated and text:
            count = min(len(text), len(self._repeated))
            if text[:count] != self._repeated[:count]:
                raise ContinuationError(DIFFERS)
            self._repeated, text = self._repeated[count:], text[count:]
            if "delta" in choice:
                choice["delta"]["content"] = text
            else:
                choice["text"] = text
        if choice.get("finish_reason") is not None:
            self.finish()
            return True
        if has_role and self._so_far.has_role:
            del choice["delta"]["role"]
        return bool(text) or (has_role and not self._so_far.has_role)

    def _changed(self, data: bytes, chunk: dict[str, Any]) -> bytes:
        fields = top_level(data)
        changes = {name: value for name, value in self._so_far.ids.items() if name in fields.values}
        if chunk.get("choices"):
            changes["choices"] = encoded_json(chunk["choices"])
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            for name, change in (("prompt_tokens", -self._tokens), ("completion_tokens", self._tokens)):
                if isinstance(usage.get(name), int):
                    usage[name] += change
            changes["usage"] = encoded_json(usage)
        return edit(fields, changes)


def continue_text(
    path: str,
    kind: str,
    body: bytes,
    values: Mapping[str, msgspec.Raw],
    had: bytes,
    count_tokens: Callable[[str], int | None],
) -> TextContinuation:
    """Return the request that continues a text on a server of a kind.

    ``body`` is what the first server got, ``values`` are its members, ``count_tokens`` returns how many tokens a text
    has.

    Raises:
        ContinuationError: It cannot be continued; says why.
    """
    if kind not in KINDS.get(path, ()):
        raise ContinuationError(f"{kind} continues no text of {path}")
    for name, raw in values.items():
        if name not in FREE_FIELDS and bytes(raw) not in (b"null", *PLAIN_VALUES.get(name, ())):
            raise ContinuationError(f"{name} is asked for")
    so_far = text_so_far(had)
    tokens = count_tokens(so_far.text)
    if tokens is None:
        raise ContinuationError("the router has no tokenizer of its model")
    fields = top_level(body)
    changes: dict[str, bytes] = {name: b"null" for name in PROMPT_IDS if name in fields.values}
    for name in LIMITS:
        limit = _int(values.get(name))
        if limit is not None:
            if limit <= tokens:
                raise ContinuationError("its text is as long as it may be")
            changes[name] = b"%d" % (limit - tokens)
    text = so_far.text
    if path == CHAT:
        if kind != "sglang":
            text = text.rstrip()
        if not text or any(mark in text for mark in TEMPLATE_MARKS):
            raise ContinuationError("its template may change the text so far")
        changes["messages"] = _with_answer(values.get("messages"), text)
        changes["continue_final_message"] = b"true"
        if kind != "sglang":
            changes["add_generation_prompt"] = b"false"
    else:
        changes["prompt"] = encoded_json(_text(values.get("prompt")) + text)
    return TextContinuation(so_far, edit(fields, changes), so_far.text[len(text) :], tokens)


def _int(raw: msgspec.Raw | None) -> int | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=int | None)
    except msgspec.MsgspecError:
        raise ContinuationError("its limit is no number") from None


def _text(raw: msgspec.Raw | None) -> str:
    try:
        return msgspec.json.decode(raw or b"", type=str)
    except msgspec.MsgspecError:
        raise ContinuationError("its prompt is no text") from None


class _Message(msgspec.Struct):
    role: str = ""


def _with_answer(raw: msgspec.Raw | None, text: str) -> bytes:
    """The messages with the text so far behind them."""
    try:
        messages = elements(bytes(raw or b"[]"))
        last = msgspec.json.decode(messages[-1], type=_Message)
    except (ValueError, IndexError, msgspec.MsgspecError):
        raise ContinuationError("its messages cannot be read") from None
    if last.role == "assistant":
        raise ContinuationError("its request ends with an answer")
    return b"[%b]" % b",".join([*messages, encoded_json({"role": "assistant", "content": text})])
