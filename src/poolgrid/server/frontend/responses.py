"""The bytes of answers: whole JSON bodies, and the events of a stream from parts encoded once per request.

A chunk is ``prefix · index · key · content · middle · finish reason · suffix``; only the content is encoded per chunk.
Text is JSON-escaped so that no client that splits lines by Unicode's rules sees a line end inside an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import isnan
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.sequence_output import PlacedLogprobs, SequenceOutput

LOGPROB_MIN: Final = -9999.0
"""What OpenAI reports for a token of no probability; JSON has no minus infinity."""

DONE: Final = b"data: [DONE]\n\n"

_encode: Final = msgspec.json.Encoder().encode


def encode_text(text: str) -> bytes:
    """Return ``text`` as a JSON string that has no line separator of any kind in it."""
    encoded = _encode(text)
    return encoded if text.isascii() else escape_line_ends(encoded)


def escape_line_ends(encoded: bytes) -> bytes:
    """Return JSON with the line separators escaped that JSON allows inside strings."""
    # UTF-8 is self-synchronizing: these byte runs are exactly U+0085, U+2028 and U+2029.
    return (
        encoded.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, written_tokens: int | None = None
) -> dict[str, Any]:
    """Return OpenAI's usage object; ``written_tokens`` are those newly kept, for a request that asks to keep any."""
    details = {"cached_tokens": cached_tokens}
    if written_tokens is not None:
        details["cache_write_tokens"] = written_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


def counts_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return what of it is known while an answer is being written."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _parts(chat: bool, include_usage: bool) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Return what chunks of one form have in common: key, close, suffix, the middle without log probabilities, and all
    that follows plain content."""
    key = b',"delta":{"content":' if chat else b',"text":'
    close = b'},"logprobs":' if chat else b',"logprobs":'
    suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
    middle = close + b'null,"finish_reason":'
    return key, close, suffix, middle, middle + b"null" + suffix


_PARTS: Final = {(chat, counts): _parts(chat, counts) for chat in (False, True) for counts in (False, True)}


class AnswerEncoder:
    """Encodes everything one request is answered with."""

    outputs: Sequence[SequenceOutput] = ()
    """The request's choices, for the line at the end that tells how they ended; set by the server of the request."""

    def __init__(
        self, *, chat: bool, request_id: str, model_name: str, created_s: int, model: PromptModel, include_usage: bool
    ) -> None:
        self._chat = chat
        self._model = model
        self._include_usage = include_usage
        self._envelope: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created_s,
            "model": model_name,
        }
        self._key, self._close, self._suffix, self._middle_plain, self._plain = _PARTS[chat, include_usage]
        self._heads: dict[int, bytes] = {}
        self._counts: Callable[[int], Mapping[str, int]] | None = None

    def count_in_chunks(self, counts: Callable[[int], Mapping[str, int]]) -> None:
        self._counts = counts

    def _end_of_chunk(self, index: int) -> bytes:
        if self._counts is None:
            return self._suffix
        return b'}],"usage":' + _encode(self._counts(index)) + b"}\n\n"

    @cached_property
    def _prefix(self) -> bytes:
        """What each event begins with; a whole answer never asks for it."""
        return b"data: " + _encode(self._envelope)[:-1] + b',"choices":['

    def begin(self) -> bytes:
        return b""

    def end(self, counts: dict[str, Any]) -> bytes:
        return self.usage_chunk(counts) + DONE if self._include_usage else DONE

    def error(self, error: RequestError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def role(self, index: int) -> bytes:
        """Return the first chunk of a chat choice; completions have none."""
        if not self._chat:
            return b""
        return b"".join(
            (
                self._prefix,
                b'{"index":%d,"delta":{"role":"assistant","content":""}' % index,
                b',"logprobs":null,"finish_reason":null',
                self._end_of_chunk(index),
            )
        )

    def chunk(
        self, index: int, text: str, logprobs: Sequence[PlacedLogprobs] = (), finish_reason: str | None = None
    ) -> bytes:
        """Return one chunk with new text, and the finish reason if it is the choice's last."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._prefix + b'{"index":%d' % index + self._key
        if not logprobs and finish_reason is None and self._counts is None:
            return head + encode_text(text) + self._plain
        if logprobs:
            middle = self._close + _encode(self.logprobs(logprobs)) + b',"finish_reason":'
        else:
            middle = self._middle_plain
        return b"".join((head, encode_text(text), middle, _encode(finish_reason), self._end_of_chunk(index)))

    def usage_chunk(self, counts: dict[str, Any]) -> bytes:
        """Return the chunk without choices that ends a stream with ``include_usage``."""
        return self._prefix + b'],"usage":' + _encode(counts) + b"}\n\n"

    def whole(self, outputs: Sequence[SequenceOutput], counts: dict[str, Any]) -> bytes:
        """Return the body of an answer that is not a stream."""
        answer = self._envelope
        if self._chat:
            answer["object"] = "chat.completion"
        answer["choices"] = [self._choice(output) for output in outputs]
        answer["usage"] = counts
        return _encode(answer)

    def logprobs(self, placed: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return self._chat_logprobs(placed) if self._chat else self._completion_logprobs(placed)

    def _choice(self, output: SequenceOutput) -> dict[str, Any]:
        logprobs = self.logprobs(output.new_logprobs) if output.new_logprobs else None
        text, reason = output.text, output.finish_reason
        if not self._chat:
            return {"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _chat_logprobs(self, placed: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token.token_id, entry.token.logprob),
                    "top_logprobs": [self._token(token_id, value) for token_id, value in entry.token.alternatives],
                }
                for entry in placed
            ],
            "refusal": None,
        }

    def _completion_logprobs(self, placed: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [self._text(entry.token.token_id) for entry in placed],
            "token_logprobs": [
                None if isnan(entry.token.logprob) else max(entry.token.logprob, LOGPROB_MIN) for entry in placed
            ],
            "top_logprobs": [
                None
                if isnan(entry.token.logprob)
                else {self._text(token_id): max(value, LOGPROB_MIN) for token_id, value in entry.token.alternatives}
                for entry in placed
            ],
            "text_offset": [entry.text_offset for entry in placed],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._model.token_bytes(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": list(raw),
        }

    def _text(self, token_id: int) -> str:
        return self._model.token_bytes(token_id).decode("utf-8", "replace")
