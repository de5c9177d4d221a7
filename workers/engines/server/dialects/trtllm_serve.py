"""trtllm-serve: its requests, its facts, its start. Pure but for its questions.

Requests go as ``/v1/completions`` takes them.

Rules:

1. Token ids go in (``prompt``) and come out: with ``detokenize`` off the server gives ids in place of text.
2. The reused tokens come with the usage, after the last token.
3. A prefill leg is a ``context_only`` request, answered whole. What it returns is given on as it is, as
   ``generation_only``; the first token is among it, and the decode leg gives it out.
4. Alternatives of log probabilities come as texts, which are no token ids: they are refused.
5. A request's salt and priority have no field here, and an adapter would need its path: they are refused.

It reports the model's name and its version only; options give the rest. Its cache events are drained over
HTTP (``/kv_cache_events``): each event is given to one reader only. From 1.4 on the server gives out what
routers need only, so its numbers have holes, and it keeps the newest ``FANOUT_EVENTS_MAX``. Settings of its cache are
taken in a file of YAML only: an operator's own file is taken over, with what the worker needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from poolgrid.kv_events.trtllm import parse_event
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import TokenId, UnableError, cached_of, logprob_of
from poolgrid.workers.engines.server.core.calls import Call, Failure, ServerAnswerPiece
from poolgrid.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer, without_option
from poolgrid.workers.engines.server.core.openai_words import (
    FINISH_REASONS,
    ErrorInfo,
    answer_failure,
    common_sampling,
    guide_of,
    leave,
    left_for,
    prompt_of,
    read_answer,
    refuse_what_nobody_has,
    session_headers,
    trace_headers,
    without_none,
)
from poolgrid.workers.engines.server.core.server_facts import ListedModel, ServerFacts, events_leave_out, other_layers
from poolgrid.workers.engines.server.kinds import ServerKind, version_of
from poolgrid.workers.engines.server.server_client import ServerClient

if TYPE_CHECKING:
    from poolgrid.workers.engines.server.settings import EngineServerSettings

TITLE = "trtllm-serve"
COMPLETIONS = "/v1/completions"
CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"
GOES_ON = frozenset({"length", "not_finished"})
"""Ends of a context request after which another server continues."""

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
    """``poolgrid.workers.engines.server.core.calls.ServerDialect`` for trtllm-serve."""

    model: str
    """Served model name."""
    title: str = TITLE
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
        reader = _Reader(sampling.logprobs is not None, leaves_kv)
        headers = (*session_headers(request), *trace_headers(request))
        return Call(COMPLETIONS, _encode(body), reader.read, not leaves_kv, headers)


def _refuse(request: Generate) -> None:
    sampling, routing = request.sampling, request.routing
    if request.multimodal is not None:
        raise UnableError(
            f"the request has media, and {COMPLETIONS} of {TITLE} takes none together with token ids: a "
            "worker with the engine trtllm does"
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
        **common_sampling(sampling),
        "response_format": _guide(sampling),
        "logprobs": None if sampling.logprobs is None else 1,
    }
    return without_none(given)


def _guide(sampling: Sampling) -> dict[str, Any] | None:
    guide = guide_of(sampling, choices_as_regex=True)
    if guide is None:
        return None
    kind, value = guide
    match kind:
        case "json":
            return {"type": "json", "schema": msgspec.Raw(value.encode())}
        case "grammar":
            return {"type": "ebnf", "ebnf": value}
        case "structural_tag":
            raise UnableError(f"structural_tag is set, which {TITLE} takes in a form of its own")
    return {"type": kind, kind: value}


class _Reader:
    """Reads the answer to one request."""

    __slots__ = ("_has_output", "_leaves_kv", "_wants_logprobs")

    def __init__(self, wants_logprobs: bool, leaves_kv: bool) -> None:
        self._wants_logprobs = wants_logprobs
        self._leaves_kv = leaves_kv
        self._has_output = False

    def read(self, data: bytes) -> ServerAnswerPiece | None:
        """Return the content of a chunk, or of a whole answer."""
        chunk = read_answer(_decode, data, TITLE)
        if chunk.error is not None:
            return ServerAnswerPiece(failure=answer_failure(TITLE, chunk.error, self._has_output))
        cached = None if chunk.usage is None else cached_of(chunk.usage)
        if not chunk.choices:
            return None if cached is None else ServerAnswerPiece(cached_tokens=cached)
        choice = chunk.choices[0]
        if choice.token_ids is None:
            return ServerAnswerPiece(
                failure=Failure(f"{TITLE} gave no token ids though detokenize is off", RefusalKind.BROKEN)
            )
        self._has_output = self._has_output or bool(choice.token_ids)
        piece = ServerAnswerPiece(choice.token_ids, cached_tokens=cached)
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

    def _end(self, piece: ServerAnswerPiece, reason: str, params: dict[str, Any] | None) -> None:
        if self._leaves_kv and reason in GOES_ON:
            leave(piece, params, TITLE, "disaggregated_params", "cache_transceiver_config")
        elif reason in FINISH_REASONS:
            piece.finish = FINISH_REASONS[reason]
        else:
            piece.failure = Failure(f"{TITLE} ended the request with {reason!r}", RefusalKind.BROKEN)


# -- facts of a server

EVENTS_PATH = "/kv_cache_events"
FANOUT_EVENTS_MAX = 1024
"""Events that a server with a fan-out keeps for its reader over HTTP."""

EVENTS_OPTION = "kv_cache_config: {event_buffer_max_size: 100000, enable_block_reuse: true} in its YAML"


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server; raises ``ServerError`` when it does not answer."""
    version = await version_of(client)
    has_fanout = _has_fanout(version)
    return ServerFacts(
        version=version,
        drained_events=EVENTS_PATH,
        kept_events_max=FANOUT_EVENTS_MAX if has_fanout else 0,
        events_missing=events_leave_out(other_layers(model.root or model.id)) if has_fanout else "",
    )


def _has_fanout(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (1, 4)


async def pictures_missing(client: ServerClient) -> str:
    """Return that it takes no images next to token ids, and which engine does."""
    return "its /v1/completions takes none together with token ids: a worker with --engine trtllm does"


# -- starting

FILE_OPTIONS = ("--extra-llm-api-options", "--config")

OWN = {
    "--port": "give --engine-port",
    "--disable-kv-cache-reuse": "without a prefix cache there is nothing to route by",
    "--grpc": "it asks the server over HTTP",
}
"""What the worker sets, and what to do instead."""

FILE = "server.yaml"

BLOCK_SIZE = 32
"""Tokens in a block, as TensorRT-LLM has it."""

EVENTS_MAX = 100_000
"""Events that wait for the worker: it asks every 50 ms, and what overflows costs the whole index."""


def command(wanted: WantedServer) -> ServerCommand:
    """Return the arguments and the file of a server."""
    if wanted.api_key:
        raise ValueError("engine_api_key is given: trtllm-serve asks for none, leave it out")
    settings = _settings(wanted.given_file)
    cache = settings.setdefault("kv_cache_config", {})
    if not isinstance(cache, dict):
        raise ValueError(f"kv_cache_config is {cache!r} in the file of the server's settings, allowed is a map")
    asked, given = wanted.block_size, cache.get("tokens_per_block")
    if asked is not None and given is not None and asked != given:
        raise ValueError(
            f"kv_cache_config.tokens_per_block is {given} in the file of the server's settings, and kv_block_size is "
            f"{asked}: give one of them"
        )
    block_size = cache["tokens_per_block"] = asked or given or BLOCK_SIZE
    if wanted.follows_events:
        for name, usual in (("event_buffer_max_size", EVENTS_MAX), ("enable_block_reuse", True)):
            if not cache.setdefault(name, usual):
                raise ValueError(
                    f"kv_cache_config.{name} is {cache[name]!r} in the file of the server's settings: without cache "
                    "events there is nothing to follow, leave it out or give --no-follow-events"
                )
    file = f"{wanted.directory}/{FILE}"
    arguments = [wanted.model_path, *without_option(wanted.arguments, FILE_OPTIONS)]
    arguments += ["--port", str(wanted.port), *wanted.unless_given("--host", wanted.host)]
    arguments += ["--extra_llm_api_options", file]
    return ServerCommand(tuple(arguments), files={FILE: yaml.safe_dump(settings)}, block_size=block_size)


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        raise ValueError(f"reading the file of the server's settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError("reading the file of the server's settings: it has no map of settings")
    return settings


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> TrtllmServeDialect:
    """Return how requests are put to a server."""
    return TrtllmServeDialect(facts.model)


KIND = ServerKind(
    "trtllm-serve",
    TITLE,
    "tensorrt_llm",
    learn,
    make_dialect,
    Launch(TITLE, OWN, command, file_options=FILE_OPTIONS, publishes=False, shares_ports=False),
    EVENTS_OPTION,
    "kv_cache_config: {tokens_per_block: N} in its YAML",
    pictures_missing,
    parse_event,
    figures=EngineFigures("/prometheus/metrics", b"trtllm_num_requests_running", b"trtllm_num_requests_waiting"),
)
