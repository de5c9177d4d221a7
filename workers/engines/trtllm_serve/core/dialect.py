"""Requests as trtllm-serve's ``/v1/completions`` takes them, and its answers. Pure.

Rules:

1. Token ids go in (``prompt``) and come out: with ``detokenize`` off the server gives ids in place of text.
2. How much was reused is told with the usage, after the last token.
3. A prefill leg is a ``context_only`` request, answered whole. What it returns is given on as it is, as
   ``generation_only``; the first token is among it, and the decode leg gives it out.
4. Alternatives of log probabilities come as texts, which are no token ids: they are refused.
5. A request's salt and priority have no field here, and an adapter would need its path: they are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import UnableError
from poolgrid.workers.core.vetting import TokenId, cached_of, logprob_of
from poolgrid.workers.engines.server.core.calls import Call, Failure, Piece
from poolgrid.workers.engines.server.core.left_kv import leave, left_for
from poolgrid.workers.engines.server.core.openai_words import (
    FINISH_REASONS,
    ErrorInfo,
    bias_of,
    failure_amid,
    guide_text,
    prompt_of,
    refusal_of,
    refuse_what_nobody_has,
)

TITLE = "trtllm-serve"
COMPLETIONS = "/v1/completions"
CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
GOES_ON = frozenset({"length", "not_finished"})
"""Ends of a context request after which another server goes on."""

FIRST_REQUEST_ID = 1 << 42
"""Request ids of two legs must be above what servers count by themselves."""

REQUEST_ID_BITS = (1 << 62) - 1


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    disaggregated_params: dict[str, Any] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Any = None
    error: ErrorInfo | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TrtllmServeDialect:
    """``poolgrid.workers.engines.server.core.calls.Dialect`` for trtllm-serve."""

    model: str
    """Served model name."""
    health_path: str = "/health"
    tells_reuse_first: bool = False

    def call(self, request: Generate) -> Call:
        """Return how to ask for a request; raises ``RefusedError`` for what trtllm-serve cannot do."""
        refuse_what_nobody_has(TITLE, request)
        _refuse(request)
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt_of(request),
            "max_tokens": sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "detokenize": False,
            "add_special_tokens": False,
            **_sampling(sampling),
        }
        if request.stop_token_ids:
            body["stop_token_ids"] = list(request.stop_token_ids)
        leaves_kv = request.stage is Stage.PREFILL and sampling.max_tokens > 1
        if leaves_kv:
            request_id = FIRST_REQUEST_ID + (stable_u64(request.request_id) & REQUEST_ID_BITS) // 2
            body["disaggregated_params"] = {"request_type": CONTEXT_ONLY, "disagg_request_id": request_id}
            body["stream"] = False
            del body["stream_options"]
        elif request.stage is Stage.DECODE:
            body["disaggregated_params"] = {**left_for(request, TITLE, dict[str, Any]), "request_type": GENERATION_ONLY}
        headers: tuple[str, ...] = ()
        if request.trace is not None:
            headers = tuple(f"{name}: {value}" for name, value in request.trace.headers.items())
        reader = _Reader(sampling.logprobs is not None, leaves_kv)
        return Call(COMPLETIONS, _encode(body), reader.read, not leaves_kv, headers)

    def refusal(self, status: int, body: bytes, retry_after_ms: int | None = None) -> Failure:
        """Return what an answer with another status than 200 means."""
        return refusal_of(TITLE, status, body, retry_after_ms)


def _refuse(request: Generate) -> None:
    """Refuse what has no place in its requests, by name."""
    sampling, routing = request.sampling, request.routing
    if request.multimodal is not None:
        raise UnableError(
            f"the request has media, and {COMPLETIONS} of {TITLE} takes none beside token ids: a worker with the "
            "engine trtllm does"
        )
    if routing.lora_name:
        raise UnableError(f"lora_name is {routing.lora_name!r}, {TITLE} would need the adapter's path with the request")
    if routing.cache_salt:
        raise UnableError(f"cache_salt is set, {TITLE} takes none")
    if sampling.prompt_logprobs is not None:
        raise UnableError(f"prompt_logprobs are set, {TITLE} gives none")
    if sampling.logprobs:
        raise UnableError(
            f"logprobs is {sampling.logprobs}: {TITLE} names alternatives by their texts, which are no token ids; 0 "
            "gives those of the tokens themselves"
        )


def _sampling(sampling: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens or None,
        "ignore_eos": sampling.ignore_eos or None,
        "logit_bias": bias_of(sampling),
        "response_format": _guide(sampling),
        "logprobs": None if sampling.logprobs is None else 1,
    }
    return {name: value for name, value in given.items() if value is not None}


def _guide(sampling: Sampling) -> dict[str, Any] | None:
    if sampling.guided_json is not None:
        return {"type": "json", "schema": msgspec.Raw(guide_text(sampling.guided_json).encode())}
    if sampling.guided_regex is not None:
        return {"type": "regex", "regex": sampling.guided_regex}
    if sampling.guided_grammar is not None:
        return {"type": "ebnf", "ebnf": sampling.guided_grammar}
    if sampling.guided_choice is not None:
        return {"type": "regex", "regex": "(" + "|".join(re.escape(each) for each in sampling.guided_choice) + ")"}
    if sampling.structural_tag is not None:
        raise UnableError(f"structural_tag is set, which {TITLE} takes in a form of its own")
    return None


class _Reader:
    """Reads the answer to one request."""

    __slots__ = ("_has_output", "_leaves_kv", "_wants_logprobs")

    def __init__(self, wants_logprobs: bool, leaves_kv: bool) -> None:
        self._wants_logprobs = wants_logprobs
        self._leaves_kv = leaves_kv
        self._has_output = False

    def read(self, data: bytes) -> Piece | None:
        """Return what a chunk, or a whole answer, says."""
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(f"an answer of {TITLE}", str(error)) from None
        if chunk.error is not None:
            return Piece(failure=failure_amid(TITLE, chunk.error, self._has_output))
        cached = None if chunk.usage is None else cached_of(chunk.usage)
        if not chunk.choices:
            return None if cached is None else Piece(cached_tokens=cached)
        choice = chunk.choices[0]
        if choice.token_ids is None:
            return Piece(failure=Failure(f"{TITLE} gave no token ids though detokenize is off", RefusalKind.BROKEN))
        self._has_output = self._has_output or bool(choice.token_ids)
        piece = Piece(choice.token_ids, cached_tokens=cached)
        if self._wants_logprobs and choice.logprobs is not None:
            values = choice.logprobs.token_logprobs
            if len(values) != len(choice.token_ids):
                said = f"{len(values)} come with {len(choice.token_ids)} tokens"
                raise DecodeError(f"log probabilities of {TITLE}", said)
            piece.logprobs = tuple(
                TokenLogprobs(token_id, logprob_of(value))
                for token_id, value in zip(choice.token_ids, values, strict=True)
            )
        if choice.finish_reason is not None:
            self._end(piece, choice.finish_reason, choice.disaggregated_params)
        return piece

    def _end(self, piece: Piece, reason: str, params: dict[str, Any] | None) -> None:
        if self._leaves_kv and reason in GOES_ON:
            leave(piece, params, TITLE, "disaggregated_params", "cache_transceiver_config")
        elif reason in FINISH_REASONS:
            piece.finish = FINISH_REASONS[reason]
        else:
            piece.failure = Failure(f"{TITLE} ended the request with {reason!r}", RefusalKind.BROKEN)
