"""The prompt of a request that a gateway forwards, as the engine will make it of the body that it gets unchanged.

Only the fields that shape a prompt are looked at: what else a body asks for is between client and engine. What cannot
be read here (another API, media, a field of the engine's own, a prompt that is too long) is no error: the engine will
answer for it, and the request is placed by load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from poolgrid.frontend.access.tenants import CacheDomains
from poolgrid.frontend.errors import RequestError, unsupported
from poolgrid.frontend.preparation import Preparation, parse_responses
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.prompts import tokenize
from poolgrid.frontend.request_body import SHORT_BYTES, check_shape
from poolgrid.frontend.responses_api.kept import references
from poolgrid.frontend.sequences import sequences_of
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.inference import InferenceRequest

log = logging.getLogger(__name__)

Kept = Raw | UnsetType


class _PromptFields(Struct, kw_only=True, omit_defaults=True):
    """What makes a prompt in any of the APIs, byte for byte as the client wrote it.

    ``tool_choice`` is not among it: vLLM shows the model its tools also where it must not use them (tried on 0.32).
    """

    model: Kept = UNSET
    cache_salt: Kept = UNSET
    tools: Kept = UNSET
    chat_template_kwargs: Kept = UNSET


class _ChatFields(_PromptFields, kw_only=True, omit_defaults=True):
    messages: Kept = UNSET
    documents: Kept = UNSET
    reasoning_effort: Kept = UNSET
    add_generation_prompt: Kept = UNSET
    continue_final_message: Kept = UNSET
    add_special_tokens: Kept = UNSET


class _CompletionFields(Struct, kw_only=True, omit_defaults=True):
    model: Kept = UNSET
    cache_salt: Kept = UNSET
    prompt: Kept = UNSET
    add_special_tokens: Kept = UNSET


class _MessagesFields(_PromptFields, kw_only=True, omit_defaults=True):
    messages: Kept = UNSET
    system: Kept = UNSET
    thinking: Kept = UNSET
    max_tokens: Kept = UNSET


class _ResponsesFields(_PromptFields, kw_only=True, omit_defaults=True):
    input: Kept = UNSET
    instructions: Kept = UNSET
    reasoning: Kept = UNSET
    previous_response_id: Kept = UNSET
    conversation: Kept = UNSET
    prompt: Kept = UNSET


class PromptReading(Struct, frozen=True):
    """What was read of a body."""

    model: str
    """Model that the fleet calls so; empty when the body names none that it has."""
    request: InferenceRequest | None
    """The first prompt; ``None`` where there is none."""
    isl: int = 0
    """Prompt tokens of all prompts together."""
    why: str = ""
    """Why there is no prompt."""


class PromptReader:
    """Reads bodies with the parts of the front end that read them for its own endpoints."""

    def __init__(
        self, preparation: Preparation, tokenization: TokenizationPool, domains: CacheDomains, values_max: int
    ) -> None:
        """``values_max`` are the values that a JSON body may have."""
        self._preparation = preparation
        self._tokenization = tokenization
        self._domains = domains
        self._values_max = values_max
        self._prepare: dict[str, tuple[msgspec.json.Decoder[Any], Callable[[bytes], PreparedRequest]]] = {
            "/v1/chat/completions": (msgspec.json.Decoder(_ChatFields), preparation.chat),
            "/v1/completions": (msgspec.json.Decoder(_CompletionFields), preparation.completion),
            "/v1/responses": (msgspec.json.Decoder(_ResponsesFields), self._prepare_response),
            "/v1/messages": (msgspec.json.Decoder(_MessagesFields), preparation.messages),
        }

    def _prepare_response(self, raw: bytes) -> PreparedRequest:
        """Check a Responses request; raises ``RequestError`` for one that continues what its engine keeps."""
        body = parse_responses(raw)
        if body.previous_response_id is not None or any(references(body.input)):
            raise unsupported("previous_response_id", "the engine keeps the conversation")
        return self._preparation.responses(body, ())

    async def read(self, path: str, body: bytes, request_id: str) -> PromptReading:
        """Return what a body of ``POST path`` asks for, ``request_id`` being what it is called here."""
        known = self._prepare.get(path.partition("?")[0])
        if known is None:
            return PromptReading("", None, why="another API")
        decoder, prepare = known
        try:
            if len(body) > SHORT_BYTES:
                await check_shape(body, self._values_max, self._tokenization)
            job = prepare(msgspec.json.encode(decoder.decode(body)))
            if job.media:
                return PromptReading(job.served.name, None, why="media")
            self._domains.claim(job, None, ())
            prompts = await self._tokenization.run(len(body), partial(tokenize, job), job.model.tokenizes_fast())
            # One entry on the books for the whole body: choices and further prompts go to the same engine.
            request = sequences_of(job, prompts[:1], [request_id] * job.choices_per_prompt)[0]
        except (RequestError, msgspec.MsgspecError, RecursionError) as error:
            why = error.code if isinstance(error, RequestError) else "invalid_json"
            log.debug("a body of %d bytes is placed by load: %s", len(body), error)
            return PromptReading("", None, why=why)
        return PromptReading(request.model, request, sum(prompt.isl for prompt in prompts))
