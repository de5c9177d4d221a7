"""Requests as SGLang's ``/generate`` takes them, and its answers. Pure.

Rules:

1. Token ids go in (``input_ids``) and come out (``output_ids``). A chunk holds all tokens so far, or those that are new
   (``--incremental-streaming-output``): how many there are in all tells which.
2. How much was reused comes with every chunk.
3. Both legs of a request run at the same time: the prefill server waits for the decode server to ask for the KV, by a
   room that both are told. So a prefill leg counts as prefilled as soon as its server has it.
4. Events name neither salts nor adapters: blocks under one would be taken for everybody's. Requests with one are
   refused while events are followed.
5. Pictures go beside token ids (``image_data``). The server then makes text of the ids, and tokens of the text with
   what stands for the pictures, which are numbers of its own in its events: no text has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import UnableError
from poolgrid.workers.core.vetting import TokenCount, TokenId, count_of, logprob_of
from poolgrid.workers.engines.server.core.calls import Call, Failure, Piece
from poolgrid.workers.engines.server.core.left_kv import left_for
from poolgrid.workers.engines.server.core.openai_words import (
    FINISH_REASONS,
    ErrorInfo,
    best_of,
    bias_of,
    failure_amid,
    failure_of_status,
    guide_text,
    prompt_of,
    refusal_of,
    refuse_what_nobody_has,
)
from poolgrid.workers.engines.server.core.pictures import prompt_with_pictures

TITLE = "SGLang"
GENERATE = "/generate"
ROOM_MASK = (1 << 63) - 1
"""Rooms are signed 64-bit integers."""

Logprob = tuple[float | None, TokenId, str | None]
"""A value, its token, and the token's text if it was asked for."""


class _Finish(msgspec.Struct, gc=False):
    type: str = ""
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Finish | None = None
    completion_tokens: TokenCount = 0
    """Which tells chunks that are new from chunks of all so far: an answer with none is unreadable."""
    cached_tokens: Any = None
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None
    input_token_logprobs: list[Logprob] | None = None
    input_top_logprobs: list[list[Logprob] | None] | None = None


class _Chunk(msgspec.Struct, gc=False):
    output_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None
    error: ErrorInfo | None = None


class Room(msgspec.Struct, frozen=True):
    """Where a decode server asks for the KV of one request."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """``poolgrid.workers.engines.server.core.calls.Dialect`` for SGLang."""

    ranks: int = 1
    priorities: bool = False
    lower_is_earlier: bool = False
    """How the server orders by priority (``--schedule-low-priority-values-first``)."""
    follows_events: bool = True
    bootstrap_host: str = ""
    bootstrap_port: int = 8998
    takes_pictures: bool = False
    """Whether its model takes pictures."""
    health_path: str = "/health"
    tells_reuse_first: bool = True

    def call(self, request: Generate) -> Call:
        """Return how to ask for a request; raises ``RefusedError`` for what SGLang cannot do."""
        refuse_what_nobody_has(TITLE, request)
        sampling, routing = request.sampling, request.routing
        self._refuse_unnamed(request)
        whole = sampling.prompt_logprobs is not None
        token_ids, pictures = self._prompt(request)
        body: dict[str, Any] = {
            "input_ids": token_ids,
            "sampling_params": _sampling(request),
            "stream": not whole,
            "rid": request.request_id,
        }
        if pictures:
            body["image_data"] = pictures
        if routing.lora_name:
            body["lora_path"] = routing.lora_name
        if routing.cache_salt:
            body["extra_key"] = routing.cache_salt
        if self.priorities and routing.priority:
            body["priority"] = -routing.priority if self.lower_is_earlier else routing.priority
        if self.ranks > 1:
            body["data_parallel_rank"] = routing.dp_rank
        if sampling.logprobs is not None or whole:
            body["return_logprob"] = True
            body["top_logprobs_num"] = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
            body["logprob_start_len"] = 0 if whole else -1
        left: bytes | None = None
        if request.stage is Stage.PREFILL and sampling.max_tokens > 1:
            room = Room(self.bootstrap_host, self.bootstrap_port, stable_u64(request.request_id) & ROOM_MASK)
            left = _encode(room)
            body.update(msgspec.to_builtins(room))
        elif request.stage is Stage.DECODE:
            body.update(msgspec.to_builtins(left_for(request, TITLE, Room)))
        headers: tuple[str, ...] = ()
        if request.trace is not None:
            headers = tuple(f"{name}: {value}" for name, value in request.trace.headers.items())
        reader = _Reader(sampling.logprobs, sampling.prompt_logprobs)
        return Call(GENERATE, _encode(body), reader.read, not whole, headers, left)

    def refusal(self, status: int, body: bytes, retry_after_ms: int | None = None) -> Failure:
        """Return what an answer with another status than 200 means."""
        return refusal_of(TITLE, status, body, retry_after_ms)

    def _prompt(self, request: Generate) -> tuple[list[int], list[str]]:
        """Return the token ids, and the pictures as URLs."""
        if request.multimodal is None:
            return prompt_of(request), []
        if not self.takes_pictures:
            raise UnableError(
                f"the request has media, which are not given to this {TITLE}: its worker needs image_placeholder"
            )
        token_ids, pictures = prompt_with_pictures(TITLE, request)
        return token_ids, [each.url for each in pictures]

    def _refuse_unnamed(self, request: Generate) -> None:
        if not self.follows_events:
            return
        for name, value in (("cache_salt", request.routing.cache_salt), ("lora_name", request.routing.lora_name)):
            if value:
                raise UnableError(
                    f"{name} is set, and the cache events of {TITLE} do not say which blocks have one: they would be "
                    "taken for everybody's. A worker with --no-follow-events takes such requests"
                )


def _sampling(request: Generate) -> dict[str, Any]:
    """Return what was asked of sampling, in SGLang's names."""
    sampling = request.sampling
    given: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,  # 0 is no number of tokens there
        "min_p": sampling.min_p,
        "sampling_seed": sampling.seed,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens or None,
        "ignore_eos": sampling.ignore_eos or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "logit_bias": bias_of(sampling),
        **_guide(sampling),
    }
    return {name: value for name, value in given.items() if value is not None}


def _guide(sampling: Sampling) -> dict[str, str]:
    if sampling.guided_json is not None:
        return {"json_schema": guide_text(sampling.guided_json)}
    if sampling.guided_regex is not None:
        return {"regex": sampling.guided_regex}
    if sampling.guided_grammar is not None:
        return {"ebnf": sampling.guided_grammar}
    if sampling.guided_choice is not None:
        return {"regex": "(" + "|".join(re.escape(each) for each in sampling.guided_choice) + ")"}
    if sampling.structural_tag is not None:
        return {"structural_tag": sampling.structural_tag}
    return {}


class _Reader:
    """Reads the answer to one request."""

    __slots__ = ("_alternatives", "_of_prompt", "_taken")

    def __init__(self, alternatives: int | None, of_prompt: int | None) -> None:
        self._alternatives = alternatives
        self._of_prompt = of_prompt
        self._taken = 0

    def read(self, data: bytes) -> Piece | None:
        """Return what a chunk, or a whole answer, says."""
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(f"an answer of {TITLE}", str(error)) from None
        if chunk.error is not None:
            return Piece(failure=failure_amid(TITLE, chunk.error, self._taken > 0))
        meta = chunk.meta_info
        if meta is None or chunk.output_ids is None:
            return Piece(
                failure=Failure(f"{TITLE} gave no token ids: output_ids need version 0.5 or newer", RefusalKind.BROKEN)
            )
        total = meta.completion_tokens
        fresh = chunk.output_ids[self._taken :] if len(chunk.output_ids) == total else chunk.output_ids
        piece = Piece(fresh, cached_tokens=count_of(meta.cached_tokens))
        if self._alternatives is not None and meta.output_token_logprobs is not None:
            piece.logprobs = self._logprobs(fresh, meta, total)
        if self._of_prompt is not None and meta.input_token_logprobs:
            piece.prompt_logprobs = _prompt_logprobs(meta, self._of_prompt)
        self._taken += len(fresh)
        if meta.finish_reason is not None:
            _end(piece, meta.finish_reason)
        return piece

    def _logprobs(self, fresh: Sequence[int], meta: _Meta, total: int) -> tuple[TokenLogprobs, ...]:
        values = meta.output_token_logprobs or []
        tops = meta.output_top_logprobs or [None] * len(values)
        if len(values) == total:
            values, tops = values[self._taken :], tops[self._taken :]
        if len(values) != len(fresh) or len(tops) != len(fresh):
            raise DecodeError(f"log probabilities of {TITLE}", f"{len(values)} come with {len(fresh)} tokens")
        assert self._alternatives is not None, "they were asked for"
        return tuple(
            best_of(token_id, own[0], _by_token(top), self._alternatives)
            for token_id, own, top in zip(fresh, values, tops, strict=True)
        )


def _by_token(rows: Sequence[Logprob] | None) -> dict[int, float]:
    return {token_id: logprob_of(value) for value, token_id, _ in rows or ()}


def _prompt_logprobs(meta: _Meta, alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the prompt's tokens from the second on."""
    values = meta.input_token_logprobs or []
    tops = meta.input_top_logprobs or [None] * len(values)
    if len(tops) != len(values):
        raise DecodeError(
            f"log probabilities of {TITLE}", f"{len(tops)} rows come with {len(values)} tokens of the prompt"
        )
    return tuple(
        best_of(token_id, value, _by_token(top), alternatives)
        for (value, token_id, _), top in zip(values[1:], tops[1:], strict=True)
    )


def _end(piece: Piece, finish: _Finish) -> None:
    if finish.type in FINISH_REASONS:
        piece.finish = FINISH_REASONS[finish.type]
        return
    if finish.status_code is not None:
        piece.failure = failure_of_status(TITLE, finish.status_code, finish.message or "")
    else:
        words = finish.message or "no reason given"
        piece.failure = Failure(f"{TITLE} ended the request with {finish.type[:40]!r}", RefusalKind.BROKEN, words)
