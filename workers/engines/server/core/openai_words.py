"""What servers with OpenAI's completions API have in common: errors, ends, log probabilities by token id. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from poolgrid.wire.hashing import unpack_tokens
from poolgrid.wire.limits import TEXT_CHARS_MAX
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import UnableError, UnsupportedError
from poolgrid.workers.core.vetting import logprob_of
from poolgrid.workers.engines.server.core.calls import Failure

BUSY_STATUSES = frozenset({408, 429, 503})
"""Statuses of a server that has no room now."""

OF_THE_REQUEST = frozenset({400, 404, 413, 422})
"""Statuses of a request that this server does not take; another kind of server may."""

NEVER = -100.0
"""Logit bias of a token that is not to be generated: OpenAI's own way to say so."""


class ErrorInfo(msgspec.Struct, gc=False):
    """What went wrong, in OpenAI's form or in the flat form of older servers."""

    message: str = ""
    code: int | str | None = None
    type: str | None = None


class _Wrapped(msgspec.Struct, gc=False):
    error: ErrorInfo | None = None
    message: str = ""
    detail: Any = None


_decode_error = msgspec.json.Decoder(_Wrapped, strict=False).decode


def error_text(body: bytes) -> str:
    """Return the words of an error answer, whatever its form."""
    try:
        wrapped = _decode_error(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return body[:TEXT_CHARS_MAX].decode(errors="replace").strip() or "no reason given"
    said = wrapped.error.message if wrapped.error is not None else wrapped.message
    if not said and wrapped.detail is not None:
        said = wrapped.detail if isinstance(wrapped.detail, str) else msgspec.json.encode(wrapped.detail).decode()
    return said[:TEXT_CHARS_MAX] or "no reason given"


def refusal_of(title: str, status: int, body: bytes) -> Failure:
    """Return what an answer with another status than 200 means."""
    text = error_text(body)
    if status in BUSY_STATUSES:
        return Failure(f"{title} has no room (status {status}): {text}", RefusalKind.BUSY)
    if status in OF_THE_REQUEST:
        return Failure(f"{title} refuses the request (status {status}): {text}", RefusalKind.CANNOT_DO)
    if status in (401, 403):
        return Failure(f"{title} does not take the API key (engine_api_key): {text}", RefusalKind.BROKEN)
    return Failure(f"{title} failed (status {status}): {text}", RefusalKind.BROKEN)


def failure_amid(title: str, error: ErrorInfo, has_output: bool) -> Failure:
    """Return what an error in a stream means: before any output it may be the request's fault."""
    try:
        code = int(error.code) if error.code is not None else 0
    except ValueError:
        code = 0
    text = error.message or error.type or "no reason given"
    if code in OF_THE_REQUEST and not has_output:
        return Failure(f"{title} refuses the request: {text}"[:TEXT_CHARS_MAX], RefusalKind.CANNOT_DO)
    return Failure(f"{title} failed amid its answer: {text}"[:TEXT_CHARS_MAX], RefusalKind.BROKEN)


def prompt_of(request: Generate) -> list[int]:
    """Return the prompt's token ids as JSON has them."""
    return list(unpack_tokens(request.token_ids))


def bias_of(sampling: Sampling) -> dict[str, float] | None:
    """Return the logit bias with the tokens that are never to be generated, by token id as JSON has its keys."""
    if not sampling.logit_bias and not sampling.bad_token_ids:
        return None
    bias = {str(token_id): value for token_id, value in (sampling.logit_bias or {}).items()}
    bias.update(dict.fromkeys(map(str, sampling.bad_token_ids), NEVER))
    return bias


def refuse_what_nobody_has(title: str, request: Generate) -> None:
    """Refuse what no such server does, by name."""
    if request.sampling.logits_processors:
        names = ", ".join(each.name for each in request.sampling.logits_processors)
        raise UnableError(f"logits_processors are set ({names}), {title} runs none that a request brings")
    if request.retention is not None:
        raise UnableError(
            f"kv_cache_retention_config is given, and {title} takes none with a request over HTTP: leave it out"
        )
    if request.sampling.guide and request.routing.emitted_tokens:
        raise UnableError(
            f"{request.sampling.guide} is set, and the output has begun on another worker "
            f"({request.routing.emitted_tokens} tokens): {title} would keep to the guide from its beginning again, "
            "after what the client has"
        )


def guide_text(schema: bytes) -> str:
    """Return a JSON schema as text; raises ``UnsupportedError``."""
    try:
        return schema.decode()
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"guided_json is not UTF-8: {error}") from None


def best_of(token_id: int, logprob: float | None, others: Mapping[int, float], alternatives: int) -> TokenLogprobs:
    """Return one token's log probabilities: its own, and the best ``alternatives`` of those that were reported."""
    vetted = [(other, logprob_of(value)) for other, value in others.items()]
    best = sorted(vetted, key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprobs(token_id, logprob_of(logprob), tuple(best))


FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Ends that are the request's own."""
