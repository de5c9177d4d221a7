"""``/tokenize`` and ``/detokenize``: a model's own tokenizer, as its prompts and answers see it.

A chat is tokenized exactly as ``/v1/chat/completions`` would: the token ids are those that a worker would get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import Struct

from poolgrid.kernel.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.server.frontend.access.gate import caller_of
from poolgrid.server.frontend.errors import invalid
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompts import check_vocabulary
from poolgrid.server.frontend.prompts import tokenize as tokenized
from poolgrid.server.frontend.schema import AnyReasoning, AnyThinking, ChatBody, Message, TokenId, parse

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"


class TokenizeBody(Struct, kw_only=True):
    """Body of ``/tokenize``: a ``prompt``, or a chat with what shapes its prompt."""

    model: str | None = None
    """May be left out where one is served."""
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for a chat, whose template writes them."""
    return_token_strs: bool | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: AnyThinking = None
    reasoning: AnyReasoning = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    """As in ``TokenizeBody``."""
    tokens: list[TokenId]


class Tokenized(Struct):
    """Answer of ``/tokenize``, as documented: ``_tokenized`` writes it piece by piece."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """Answer of ``/detokenize``; special tokens are in the text."""

    prompt: str


_CHAT_FIELDS = sorted(set(TokenizeBody.__struct_fields__) & set(ChatBody.__struct_fields__) - {"model"})

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def add_tokenizer_endpoints(front: FrontEnd) -> None:
    """Add the endpoints to a front end."""
    app, preparation, tokenization = front.app, front.preparation, front.tokenization

    @app.post(TOKENIZE_PATH, tags=["tokenizer"])
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or a chat."""
        raw = await front.bodies.read(request)
        body = parse(_tokenize_decoder, raw)
        model = _model(request, body.model, preparation)
        claim = partial(front.domains.claim, caller=caller_of(request.scope), headers=request.headers.raw)
        return _answer(await tokenization.run(len(raw), partial(_tokenized, preparation, body, model, claim)))

    @app.post(DETOKENIZE_PATH, tags=["tokenizer"])
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        raw = await front.bodies.read(request)
        body = parse(_detokenize_decoder, raw)
        model = _model(request, body.model, preparation)
        return _answer(await tokenization.run(len(raw), partial(_detokenized, preparation, body, model)))


TOKENS_PER_STEP = 16_384
"""Tokens that are encoded as JSON at a time: the encoder keeps the interpreter's lock, and others wait for it."""


def _tokenized(
    preparation: Preparation, body: TokenizeBody, name: str, claim: Callable[[PreparedRequest], None]
) -> bytes:
    """Return the answer as JSON: of a long prompt it takes longer than the event loop may stand still."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "prompt and messages: allowed is one of them", "missing_required_parameter")
    served, model = preparation.found(name)
    if body.messages is None:
        packed = model.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        if not body.messages:
            raise invalid("messages", "messages is []: allowed is a list of at least one message")
        chat = ChatBody(model=name, **{field: getattr(body, field) for field in _CHAT_FIELDS})
        job = preparation.chat_job(chat)
        claim(job)
        (prompt,) = tokenized(job)
        packed = prompt.token_ids
    limit = min(served.max_sequence_length, model.max_position_embeddings)
    ids: list[bytes] = []
    texts: list[bytes] = []
    view = memoryview(packed)
    for at in range(0, len(view), TOKENS_PER_STEP * TOKEN_BYTES):
        tokens = unpack_tokens(view[at : at + TOKENS_PER_STEP * TOKEN_BYTES])
        ids.append(_inside(tokens))
        if body.return_token_strs:
            texts.append(_inside([model.token_bytes(token).decode("utf-8", "replace") for token in tokens]))
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(packed) // TOKEN_BYTES, limit)
    strings = b"[" + b",".join(texts) + b"]" if body.return_token_strs else b"null"
    return b"".join((head, b",".join(ids), b'],"token_strs":', strings, b"}"))


def _inside(values: Sequence[int | str]) -> bytes:
    """Return the JSON of a list without its brackets."""
    return msgspec.json.encode(values)[1:-1]


def _detokenized(preparation: Preparation, body: DetokenizeBody, name: str) -> bytes:
    _, model = preparation.found(name)
    check_vocabulary(body.tokens, model.vocab_size, "tokens")
    return msgspec.json.encode(Detokenized(model.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _model(request: Request, named: str | None, preparation: Preparation) -> str:
    """Return the model that a body names, or the only one there is; raises ``RequestError``, ``Refused`` (403)."""
    model = preparation.only_model() if named is None else named
    caller = caller_of(request.scope)
    if caller is not None:
        caller.check_model(model)
    return model


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")
