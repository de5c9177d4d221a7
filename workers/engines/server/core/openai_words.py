"""What servers with OpenAI's completions API have in common: errors, ends, log probabilities by token id. Pure.

A request's images as engine servers take them: data URLs next to token ids, a placeholder each. Pure.

Rules:

1. The bytes were fetched, checked and hashed by the front end. A server is given the bytes, and never an address: it
   opens nothing that a client wrote.
2. An image is one token of the prompt: the server puts in its place as many as its model makes of it. Where a router
   has put them there already they are taken out again.
3. An image is named by the hash of its bytes, where the server takes names: equal images share what it caches.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec

from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.limits import OPAQUE_BYTES_MAX, TEXT_CHARS_MAX
from poolgrid.wire.multimodal import MediaItem, MediaKind
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import BrokenError, RefusedError, UnableError, UnsupportedError, logprob_of
from poolgrid.workers.engines.server.core.calls import Failure, ServerAnswerPiece

T = TypeVar("T")

BUSY_STATUSES = frozenset({408, 429, 503})
"""Statuses of a server that has no room now."""

OF_THE_REQUEST = frozenset({400, 404, 413, 422})
"""Statuses of a request that this server does not take; another kind of server may."""

KEY_REFUSED = frozenset({401, 403})
"""Statuses of a server that does not take the API key it was given."""

STATUS_OF_TYPE = {
    "BadRequestError": 400,
    "invalid_request_error": 400,
    "NotFoundError": 404,
    "RateLimitError": 429,
    "ServiceUnavailableError": 503,
}
"""Status that an error event without a code stands for."""

WORDS_CHARS_MAX = 500
"""How much of a server's own message clients get."""

RETRY_AFTER_MAX_MS = 60_000
"""Longest ``Retry-After`` that is followed: a server that is gone for longer is asked again meanwhile."""

NEVER = -100.0
"""Logit bias of a token that is not to be generated: OpenAI's own form for it."""


class ErrorInfo(msgspec.Struct, gc=False):
    """What went wrong, in OpenAI's form or in the flat form of older servers."""

    message: str = ""
    code: int | str | None = None
    type: str | None = None


class _Wrapped(msgspec.Struct, gc=False):
    error: ErrorInfo | None = None
    message: str = ""
    detail: Any = None


_ADDRESS = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://\S+")

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


def message_for_clients(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, as one line; empty for any other form."""
    try:
        wrapped = _decode_error(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return _one_line(wrapped.error.message if wrapped.error is not None else wrapped.message)


def _one_line(message: str) -> str:
    """Return a message that was written for clients, without addresses; empty for a page."""
    begin = message[:WORDS_CHARS_MAX].lower()
    if "<html" in begin or "<!doctype" in begin:
        return ""
    line = " ".join("".join(each if each.isprintable() else " " for each in message[:TEXT_CHARS_MAX]).split())
    return _ADDRESS.sub("(address)", line)[:WORDS_CHARS_MAX]


def retry_after_ms(value: str, now_s: float) -> int | None:
    """Return a ``Retry-After`` header, seconds or a date, as a time from now; ``None`` where it is neither."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError, OSError):
            return None
    if not math.isfinite(seconds):
        return None
    return round(min(RETRY_AFTER_MAX_MS, max(0.0, seconds * 1000)))


def refusal_of(title: str, status: int, body: bytes, retry_after_ms: int | None = None) -> Failure:
    """Return what an answer with another status than 200 means."""
    return _failure(title, status, message_for_clients(body), error_text(body), retry_after_ms)


def answer_failure(title: str, error: ErrorInfo, has_output: bool) -> Failure:
    """Return what an error in a stream means: before any output it may be the request's fault."""
    try:
        code = int(error.code) if error.code is not None else 0
    except ValueError:
        code = 0
    if not code:
        code = STATUS_OF_TYPE.get(error.type or "", 0)
    words = (error.message or error.type or "no reason given")[:TEXT_CHARS_MAX]
    if code in BUSY_STATUSES or (code in OF_THE_REQUEST and not has_output):
        return _failure(title, code, _one_line(error.message), words)
    return Failure(f"{title} failed within its answer", RefusalKind.BROKEN, words)


def failure_of_status(title: str, status: int, message: str) -> Failure:
    """Return what a status within an answer means."""
    return _failure(title, status, _one_line(message), message[:TEXT_CHARS_MAX])


def _failure(title: str, status: int, message: str, words: str, retry_after_ms: int | None = None) -> Failure:
    if status in BUSY_STATUSES:
        return Failure(f"{title} has no room (status {status})", RefusalKind.BUSY, words, retry_after_ms)
    if status in OF_THE_REQUEST:
        detail = f": {message}" if message else ""
        unknown = status == 404 and bool(message)  # without a message it is the path that the server does not know
        return Failure(
            f"{title} refuses the request (status {status}){detail}",
            RefusalKind.CANNOT_DO,
            words,
            unknown_model=unknown,
        )
    if status in KEY_REFUSED:
        return Failure(f"{title} does not serve its worker", RefusalKind.BROKEN, words, key_refused=True)
    return Failure(f"{title} failed (status {status})", RefusalKind.BROKEN, words)


def read_answer(decode: Callable[[bytes], T], data: bytes, title: str) -> T:
    """Return a chunk of an answer, or a whole one; raises ``DecodeError``."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"an answer of {title}", str(error)) from None


def session_headers(request: Generate) -> tuple[str, ...]:
    """Return the header by which servers that keep conversations know a request's session."""
    turn = request.turn
    if turn is None or not (turn.session.isascii() and turn.session.isprintable()):
        return ()
    # Tenants may choose the same names.
    return (f"X-Session-ID: {turn.tenant:016x}-{turn.session}",)


def trace_headers(request: Generate) -> tuple[str, ...]:
    """Return the headers that carry a request's trace."""
    return () if request.trace is None else tuple(f"{name}: {value}" for name, value in request.trace.headers.items())


def common_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return what all such servers take of sampling, in OpenAI's names; ``None`` = left open."""
    return {
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
    }


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not left open."""
    return {name: value for name, value in given.items() if value is not None}


def choice_regex(choices: Iterable[str]) -> str:
    """Return the expression of one of several texts."""
    return "(" + "|".join(re.escape(each) for each in choices) + ")"


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


def guide_of(sampling: Sampling, choices_as_regex: bool = False) -> tuple[str, Any] | None:
    """Return the kind of guide that is set (json, regex, grammar, choice or structural_tag) and its content.

    Raises ``UnsupportedError``.
    """
    if sampling.guided_json is not None:
        return "json", guide_text(sampling.guided_json)
    if sampling.guided_regex is not None:
        return "regex", sampling.guided_regex
    if sampling.guided_grammar is not None:
        return "grammar", sampling.guided_grammar
    if sampling.guided_choice is not None:
        choices = sampling.guided_choice
        return ("regex", choice_regex(choices)) if choices_as_regex else ("choice", list(choices))
    return None if sampling.structural_tag is None else ("structural_tag", sampling.structural_tag)


def best_of(token_id: int, logprob: float | None, others: Mapping[int, float], alternatives: int) -> TokenLogprobs:
    """Return one token's log probabilities: its own, and the best ``alternatives`` of those that were reported."""
    vetted = [(other, logprob_of(value)) for other, value in others.items()]
    best = sorted(vetted, key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprobs(token_id, logprob_of(logprob), tuple(best))


FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""Ends that are the request's own."""


_encode = msgspec.json.Encoder().encode


def left_for(request: Generate, title: str, form: type[T]) -> T:
    """Return what the prefill leg left for a decode leg; raises ``RefusedError`` without it, ``BrokenError``."""
    if request.disaggregated_params is None:
        raise RefusedError("a decode leg comes without disaggregated_params: the place of its KV is unknown")
    try:
        return msgspec.json.decode(request.disaggregated_params, type=form)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenError(f"the KV of the prefill leg is not {title}'s: {error}") from None


def is_seamless(sampling: Sampling) -> bool:
    """Return whether an answer that continues after its first token as after a prompt is the same as one that did not
    stop: nothing looks back at the output but for its length."""
    return not (
        sampling.guide
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.prompt_logprobs is not None
        or (sampling.seed is not None and sampling.temperature != 0)  # the random numbers would begin again
    )


def leave(
    piece: ServerAnswerPiece,
    params: dict[str, Any] | None,
    title: str,
    field: str,
    needs: str,
    gives_token: bool = False,
) -> None:
    """End a prefill leg with ``params``, which the server gave as ``field``; without any it ``needs`` an option.

    ``gives_token``: its token goes out, else the decode leg samples it.
    """
    if params is None:
        piece.failure = Failure(f"{title} kept no KV for a decode leg: its server needs {needs}", RefusalKind.CANNOT_DO)
        return
    left = _encode(params)
    if len(left) > OPAQUE_BYTES_MAX:
        piece.failure = Failure(f"{field} have {len(left)} bytes, allowed are {OPAQUE_BYTES_MAX}", RefusalKind.BROKEN)
        return
    piece.finish, piece.params = FinishReason.PREFILLED, left
    if not gives_token:
        piece.tokens, piece.logprobs = [], None


@dataclass(frozen=True, slots=True)
class RequestPicture:
    """One image."""

    url: str
    """A data URL with its bytes."""
    name: str
    """BLAKE3 of its bytes, 64 hexadecimal digits."""


def prompt_with_pictures(title: str, request: Generate) -> tuple[list[int], list[RequestPicture]]:
    """Return the token ids of a prompt with one placeholder for each image, and the images in their order.

    The request has media. Raises ``RefusedError`` for those that no such server takes with token ids.
    """
    assert request.multimodal is not None, "it has media"
    if request.stage is not Stage.WHOLE:
        raise UnableError(
            f"the request has images and disaggregated prefill and decode: {title} takes images with whole "
            "requests only"
        )
    if request.sampling.prompt_logprobs is not None:
        raise UnableError(
            f"prompt_logprobs are set and the request has images: {title} would give them for tokens that it puts "
            "in the place of an image, which no other process knows"
        )
    try:
        items = codec.multimodal.decode(request.multimodal).items
    except DecodeError as error:
        raise RefusedError(f"multimodal: {error}") from None
    pictures = [_picture(title, at, item) for at, item in enumerate(items)]
    return _with_one_token_each(request.token_ids, items), pictures


def _picture(title: str, at: int, item: MediaItem) -> RequestPicture:
    if item.kind is not MediaKind.IMAGE:
        raise UnableError(f"media {at} are {item.kind.value}, {title} takes images only")
    if not item.data:
        raise UnableError(f"image {at} comes without its bytes, {title} encodes images itself")
    return RequestPicture(f"data:{item.media_type};base64,{b64encode(item.data).decode()}", item.media_hash.hex())


def _with_one_token_each(token_ids: bytes, items: tuple[MediaItem, ...]) -> list[int]:
    pieces: list[bytes] = []
    at = 0
    for item in items:
        if item.token_count > 1:
            first = item.first_token * TOKEN_BYTES
            end = first + item.token_count * TOKEN_BYTES
            if first < at or end > len(token_ids):
                raise RefusedError(
                    f"an image has the tokens {item.first_token} to {item.first_token + item.token_count - 1} "
                    f"of {len(token_ids) // TOKEN_BYTES}: allowed are tokens of the prompt, in order"
                )
            pieces.append(token_ids[at : first + TOKEN_BYTES])
            at = end
    return list(unpack_tokens(b"".join([*pieces, token_ids[at:]])))
