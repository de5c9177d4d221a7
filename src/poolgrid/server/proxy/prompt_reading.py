"""The prompt of a forwarded request, as its engine will make it of the body that it gets unchanged.

Only the fields that shape a prompt are looked at: what else a body asks for is between client and engine. Tokens only
decide which worker gets the request, so nothing here is an error: where they cannot be had (media, a template that
fails, a part that is not known, a tokenizer that is missing or busy) the prompt counts by the bytes of its text, and
where there is no text either, the request is placed by load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.limits import U32_MAX
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.frontend.access.tenants import CacheDomains
from poolgrid.server.frontend.api_endpoint import installed_endpoints
from poolgrid.server.frontend.chat_endpoint import CHAT
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompts import tokenize
from poolgrid.server.frontend.request_body import SHORT_BYTES, check_shape
from poolgrid.server.frontend.tokenization import TokenizationPool

log = logging.getLogger(__name__)


class PromptReading(Struct, frozen=True):
    """What was read of a body."""

    model: str
    """Model that the fleet calls so; empty when the body names none that it has."""
    request: InferenceRequest | None
    """The first prompt, by its tokens or by its text; ``None`` where neither is known."""
    isl: int = 0
    """Prompt tokens of all prompts together; an estimate where the tokens are not known."""
    why: str = ""
    """Why the tokens are not known; empty = they are."""
    detail: str = ""
    """What of the body that is about: a field, or the words of its template."""
    after_tool: bool = False
    """Whether the prompt ends in the results of tools."""
    answer: int = 0
    """Key of the answer that it continues (``poolgrid.server.frontend.session_fields``); 0 = none is known."""


TEXT_FIELDS: Final = ("tools", "system", "instructions", "messages", "input", "prompt", "text", "query", "documents")
"""Fields whose bytes are a prompt's text, in the order in which templates write them: what stays the same in a
conversation comes first."""

PLAIN_FIELDS: Final = frozenset(
    ("model", "messages", "prompt", "tools", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed")
)
"""Fields of nearly every body, each of which has one meaning here and at engines: a body of these is read as it is."""

CLOSING: Final = b' \t\r\n]}"'
"""Bytes that end a list or a string, and that the next turn of a conversation has in another place."""

TEXT_BYTES_MAX: Final = 1 << 20
"""Bytes of a prompt's text that are compared: some 250,000 tokens."""

MEDIA: Final = (b'"image_url"', b'"input_image"', b'"video_url"', b'"audio_url"', b'"input_audio"', b'"image"')
"""Names in bodies with media."""

CONTINUED: Final = frozenset(("previous_response_id", "conversation"))
"""Members by which a request continues what its server keeps."""

TOLD: Final = frozenset(("chat_template_error", "no_chat_template", "no_prompt_model"))
"""Errors whose words are the model's own. Those of others may quote the client."""

UNLIMITED: Final = Sampling(max_tokens=U32_MAX)
"""What a forwarded request asks for is its server's business."""


def text_of(values: Mapping[str, Raw]) -> bytes:
    """Return the bytes by which prompts are compared without their tokens: those that the next turn of a conversation
    begins with, in whole units of four. Empty for a body without a prompt."""
    parts = [bytes(values[name]) for name in TEXT_FIELDS if name in values]
    text = b"\n".join(parts)[:TEXT_BYTES_MAX].rstrip(CLOSING)
    return text[: len(text) // TOKEN_BYTES * TOKEN_BYTES]


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
            path: (msgspec.json.Decoder(prompt.fields), partial(prompt.prepare, preparation))
            for endpoint in (CHAT, *installed_endpoints())
            for path, prompt in endpoint.prompts.items()
        }

    async def read(
        self, path: str, body: bytes, request_id: str, values: Mapping[str, Raw] | None = None
    ) -> PromptReading:
        """Return what a body of ``POST path`` asks for, ``request_id`` being what it is called here.

        ``values`` are the members of the body, by name, where the caller has them.
        """
        if values is None:
            values = members_of(body)
        reading = await self._by_tokens(path.partition("?")[0], body, request_id, values)
        if reading.request is not None:
            return reading
        model, lora_name = self._named(values)
        text = text_of(values)
        if not model or not text:
            return PromptReading(model, None, why=reading.why, detail=reading.detail)
        request = InferenceRequest(request_id, model, text, UNLIMITED, lora_name=lora_name, by_text=True)
        return PromptReading(model, request, len(text) // TOKEN_BYTES, reading.why, reading.detail)

    def count_tokens(self, model: str, text: str) -> int | None:
        """Return how many tokens a text has; ``None`` where the tokenizer of the model that a client names is not
        known."""
        try:
            return len(self._preparation.found(model)[1].encode(text)) // TOKEN_BYTES
        except RequestError:
            return None

    def served(self, name: str) -> tuple[str, str]:
        """Return the served model that clients call so, and the adapter if it is one; empty when there is none."""
        found = self._preparation.served(name)
        return ("", "") if found is None else (found[0].name, found[1])

    def _named(self, values: Mapping[str, Raw]) -> tuple[str, str]:
        """Return the served model that a body names, and the adapter if it named one."""
        try:
            name = msgspec.json.decode(values["model"], type=str)
        except (KeyError, msgspec.MsgspecError):
            return "", ""
        return self.served(name)

    async def _by_tokens(self, path: str, body: bytes, request_id: str, values: Mapping[str, Raw]) -> PromptReading:
        known = self._prepare.get(path)
        if known is None:
            return PromptReading("", None, why="another API")
        decoder, prepare = known
        try:
            if len(body) > SHORT_BYTES:
                await check_shape(body, self._values_max, self._tokenization)
            # A field that is the server's business, or is refused by it, need not keep the prompt from being read.
            job = prepare(body if PLAIN_FIELDS.issuperset(values) else msgspec.json.encode(decoder.decode(body)))
            if job.media:
                return PromptReading(job.served.name, None, why="media")
            self._domains.claim(job, None, ())
            if self._tokenization.is_short(len(body), job.model.tokenizes_fast()):
                prompts = tokenize(job)
            else:
                prompts = await self._tokenization.run(len(body), partial(tokenize, job), job.model.tokenizes_fast())
            # One entry on the books for the whole body: choices and further prompts go to the same engine.
            salt = job.own_salt or job.client_salt
            request = InferenceRequest(
                request_id, job.served.name, prompts[0].token_ids, UNLIMITED, lora_name=job.lora_name, cache_salt=salt
            )
        except (RequestError, msgspec.MsgspecError, RecursionError) as error:
            log.debug("the tokens of a body of %d bytes are not known: %s", len(body), error)
            if any(mark in body for mark in MEDIA):
                return PromptReading("", None, why="media")
            if not isinstance(error, RequestError):
                return PromptReading("", None, why="invalid_json")
            if error.param in CONTINUED:
                return PromptReading("", None, why="kept")
            detail = error.message if error.code in TOLD else error.param or ""
            return PromptReading("", None, why=error.code, detail=detail)
        isl = sum(prompt.isl for prompt in prompts)
        return PromptReading(request.model, request, isl, after_tool=job.after_tool, answer=job.answer)


_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


def members_of(body: bytes) -> Mapping[str, Raw]:
    """Return the members of a JSON object by name, unread; none for anything else."""
    try:
        return _decode_members(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
