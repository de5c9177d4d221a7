"""vLLM's server: its requests, its facts, its start. Pure but for its questions.

Requests go as vLLM's ``/v1/completions`` takes them, those with images as
``/inference/v1/generate`` does.

Rules:

1. Token ids go in (``prompt``) and come out (``return_token_ids``): nothing is tokenized twice. Text is not read.
2. Fields that a request omits are omitted: the server's own defaults count, as for its direct clients.
3. The reused tokens come with the usage, after the last token (``--enable-prompt-tokens-details``).
4. A prefill leg is an ordinary request for one token whose KV stays (``kv_transfer_params``), answered whole. The
   token goes out at once, and the decode leg's server gets the prompt with it: it fetches the prompt's KV and computes
   the token's own. The decode leg gives the token out again before its own, as every engine does. The token is left
   out, and the decode leg's server samples it itself, in two cases: what was asked would notice the seam
   (``is_seamless``), or the KV that stays is not the whole prompt's with room for one more token (``_has_room``).
5. Log probabilities come by token id (``return_tokens_as_token_ids``). Those of prompts come in whole answers only.
6. Token ids and images together are taken by ``/inference/v1/generate`` alone (``content_parts``), which newer
   versions have and which ``--enable-scale-out`` switches on. It fills in placeholders itself. There rule 2 does not
   hold: what is left open is what vLLM's own defaults say, and the model's ``generation_config.json`` is not read.

Endpoints with the server's facts:

/v1/models          model, adapters, max_model_len
/version            its version
/metrics            vllm:cache_config_info: block size, device blocks of a rank
/kv_event_sources   publishers by rank (0.26 and newer): a map by rank, or a list
/openapi.json       whether it takes images next to token ids
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import (
    BrokenError,
    TokenId,
    UnableError,
    cached_of,
    count_of,
    digits_of,
    logprob_of,
)
from poolgrid.workers.engines.server.core.calls import Call, Failure, ServerAnswerPiece
from poolgrid.workers.engines.server.core.engine_figures import EngineFigures, lines_of
from poolgrid.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer
from poolgrid.workers.engines.server.core.openai_words import (
    FINISH_REASONS,
    ErrorInfo,
    answer_failure,
    best_of,
    common_sampling,
    guide_of,
    is_seamless,
    leave,
    left_for,
    prompt_of,
    prompt_with_pictures,
    read_answer,
    refuse_what_nobody_has,
    trace_headers,
    without_none,
)
from poolgrid.workers.engines.server.core.server_facts import (
    RANKS_MAX,
    EventSource,
    ListedModel,
    ServerFacts,
    doubt_of_family,
    reachable,
)
from poolgrid.workers.engines.server.kinds import ServerKind, version_of
from poolgrid.workers.engines.server.server_client import NOT_THERE, SCHEMA_BYTES_MAX, ServerClient, ServerError

if TYPE_CHECKING:
    from poolgrid.workers.engines.server.settings import EngineServerSettings

TITLE = "vLLM"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
TOKEN_ID = "token_id:"
"""How a token is written among log probabilities when asked for by id."""

ENDS = {**FINISH_REASONS, "repetition": FinishReason.STOP}

KEEP_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill leg asks of the server's KV connector."""

BLOCK_SIZE_UNIT = 16
"""What vLLM's block sizes are multiples of where groups of layers have different ones."""

FIRST = "first_token"
"""Where a prefill leg puts a token that is out (``_First``), among what the server left for the decode leg."""


class _TokenLogprob(msgspec.Struct, gc=False):
    """One token among others."""

    token_id: TokenId
    logprob: float


class _Position(_TokenLogprob, gc=False):
    """A token that was generated."""

    top_logprobs: list[_TokenLogprob] = []


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Position] | None = None
    """All of it, as ``/inference/v1/generate`` has it."""


class _PromptLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Any = None
    error: ErrorInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _First(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The token that a prefill leg gave out."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None


class _KeptBlocks(msgspec.Struct, gc=False):
    """What NIXL's connector says of the KV that stays; other connectors and older versions say less."""

    remote_num_tokens: int
    remote_block_ids: list[list[int]]
    """By group of layers; those with a sliding window name its blocks only."""


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class VllmDialect:
    """``poolgrid.workers.engines.server.core.calls.ServerDialect`` for vLLM."""

    model: str
    """Served model name."""
    ranks: Sequence[int] = (0,)
    """Global number of each data-parallel rank; with more than one, requests name theirs."""
    priorities: bool = False
    """Whether the server schedules by priority; one that does not refuses requests that have any."""
    takes_pictures: bool = False
    """Whether it takes images next to token ids."""
    block_size: int = 0
    """Tokens in a block; 0 = unknown."""
    title: str = TITLE
    tells_reuse_first: bool = False

    def call(self, request: Generate) -> Call:
        """Return how to ask for a request; raises ``RefusedError`` for what vLLM cannot do."""
        refuse_what_nobody_has(TITLE, request)
        if request.multimodal is not None:
            return self._call_with_pictures(request)
        sampling = request.sampling
        routing = request.routing
        whole = sampling.prompt_logprobs is not None
        body: dict[str, Any] = {
            "model": routing.lora_name or self.model,
            "prompt": prompt_of(request),
            "max_tokens": sampling.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "add_special_tokens": False,
            **_sampling(sampling),
        }
        if request.stop_token_ids:
            body["stop_token_ids"] = list(request.stop_token_ids)
        if routing.cache_salt:
            body["cache_salt"] = routing.cache_salt
        if self.priorities and routing.priority:
            body["priority"] = -routing.priority  # lower is earlier there
        leaves_kv = request.stage is Stage.PREFILL and sampling.max_tokens > 1
        reader = _Reader(sampling.logprobs, sampling.prompt_logprobs, leaves_kv)
        if leaves_kv:
            if is_seamless(sampling):
                reader.gives_first(len(body["prompt"]), self.block_size)
            whole = True
            body["max_tokens"] = 1
            body["min_tokens"] = min(1, sampling.min_tokens)
            body["kv_transfer_params"] = KEEP_KV
        elif request.stage is Stage.DECODE:
            body["kv_transfer_params"] = params = left_for(request, TITLE, dict[str, Any])
            if FIRST in params:
                first = _first_of(params.pop(FIRST))
                reader.repeats(first)
                body["prompt"].append(first.token_id)
                body["max_tokens"] = max(1, sampling.max_tokens - 1)
                if sampling.min_tokens:
                    body["min_tokens"] = sampling.min_tokens - 1
        if whole:
            body["stream"] = False
            del body["stream_options"]
        return Call(COMPLETIONS, _encode(body), reader.read, not whole, self._headers(request))

    def _call_with_pictures(self, request: Generate) -> Call:
        if not self.takes_pictures:
            raise UnableError(
                f"the request has media, which are not given to this {TITLE}: its worker needs image_placeholder, and "
                "the server --enable-scale-out"
            )
        token_ids, pictures = prompt_with_pictures(TITLE, request)
        sampling, routing = request.sampling, request.routing
        asked = {"max_tokens": sampling.max_tokens, "detokenize": False, **_sampling(sampling)}
        asked.pop("return_tokens_as_token_ids", None)  # there it is always so
        if request.stop_token_ids:
            asked["stop_token_ids"] = list(request.stop_token_ids)
        body: dict[str, Any] = {
            "model": routing.lora_name or self.model,
            "token_ids": token_ids,
            "content_parts": [{"type": "image_url", "url": each.url, "uuid": each.name} for each in pictures],
            "sampling_params": asked,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if routing.cache_salt:
            body["cache_salt"] = routing.cache_salt
        if self.priorities and routing.priority:
            body["priority"] = -routing.priority
        reader = _Reader(sampling.logprobs, None, leaves_kv=False)
        return Call(GENERATE, _encode(body), reader.read, headers=self._headers(request))

    def _headers(self, request: Generate) -> tuple[str, ...]:
        headers = [f"X-Request-Id: {_header_text(request.request_id)}"]
        if len(self.ranks) > 1:
            headers.append(f"X-data-parallel-rank: {self.ranks[request.routing.dp_rank]}")
        return (*headers, *trace_headers(request))


def _first_of(said: Any) -> _First:
    try:
        return msgspec.convert(said, _First)
    except msgspec.ValidationError as error:
        raise BrokenError(f"the first token of the prefill leg is none: {error}") from None


def _has_room(params: dict[str, Any], prompt_tokens: int, block_size: int) -> bool:
    """Return whether the KV that stays is all of the prompt's, in blocks with room for one more token.

    A decode server takes all tokens that it is given for transferred, and then computes the last one again. Without
    that room it has a block more than there are to fetch, and its engine ends by an assertion (0.25 and 0.32). Models
    with state-space layers keep the KV of fewer tokens, and the prefill leg's token is one of the prompt's there.
    """
    try:
        kept = msgspec.convert(params, _KeptBlocks)
    except msgspec.ValidationError:
        return False
    if len(kept.remote_block_ids) > 1 and prompt_tokens % BLOCK_SIZE_UNIT == 0:
        return False  # the blocks of a group may be smaller than ``block_size``, and all full
    room = block_size * max(map(len, kept.remote_block_ids), default=0)
    return kept.remote_num_tokens == prompt_tokens < room


def _header_text(text: str) -> str:
    return "".join(each if each.isprintable() and each.isascii() else "_" for each in text)


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Return what was asked of sampling, in vLLM's names."""
    guide = guide_of(sampling)
    given: dict[str, Any] = {
        **common_sampling(sampling),
        "structured_outputs": None if guide is None else dict([guide]),
        "logprobs": sampling.logprobs,
        "return_tokens_as_token_ids": None if sampling.logprobs is None else True,
        "prompt_logprobs": sampling.prompt_logprobs,
    }
    return without_none(given)


class _Reader:
    """Reads the answer to one request."""

    __slots__ = ("_alternatives", "_block_size", "_first", "_has_output", "_leaves_kv", "_of_prompt", "_prompt_tokens")

    def __init__(self, alternatives: int | None, of_prompt: int | None, leaves_kv: bool) -> None:
        self._alternatives = alternatives
        self._of_prompt = of_prompt
        self._leaves_kv = leaves_kv
        self._has_output = False
        self._first: _First | None = None
        self._prompt_tokens = self._block_size = 0

    def gives_first(self, prompt_tokens: int, block_size: int) -> None:
        """Give the token of a prefill leg out where the decode leg can continue after it."""
        self._prompt_tokens, self._block_size = prompt_tokens, block_size

    def repeats(self, first: _First) -> None:
        """Put the prefill leg's token before those of the decode leg's server."""
        self._first = first

    def read(self, data: bytes) -> ServerAnswerPiece | None:
        """Return what a chunk, or a whole answer, says."""
        chunk = read_answer(_decode, data, TITLE)
        if chunk.error is not None:
            return ServerAnswerPiece(failure=answer_failure(TITLE, chunk.error, self._has_output))
        cached = None if chunk.usage is None else cached_of(chunk.usage)
        if not chunk.choices:
            return None if cached is None else ServerAnswerPiece(cached_tokens=cached)
        choice = chunk.choices[0]
        tokens = choice.token_ids
        if tokens is None:
            return ServerAnswerPiece(
                failure=Failure(
                    f"{TITLE} gave no token ids: return_token_ids needs version 0.10.2 or newer", RefusalKind.BROKEN
                )
            )
        self._has_output = self._has_output or bool(tokens)
        piece = ServerAnswerPiece(tokens, cached_tokens=cached)
        if self._alternatives is not None and choice.logprobs is not None:
            piece.logprobs = _logprobs(tokens, choice.logprobs, self._alternatives)
        if self._of_prompt is not None and choice.prompt_logprobs:
            piece.prompt_logprobs = _prompt_logprobs(choice.prompt_logprobs, self._of_prompt)
        if self._first is not None and (tokens or choice.finish_reason is not None):
            self._repeat(piece, self._first)
        if choice.finish_reason is not None:
            self._end(piece, choice.finish_reason, chunk.kv_transfer_params)
        return piece

    def _repeat(self, piece: ServerAnswerPiece, first: _First) -> None:
        if first.logprobs is not None and (piece.logprobs is not None or not piece.tokens):
            piece.logprobs = (first.logprobs, *(piece.logprobs or ()))
        piece.tokens = [first.token_id, *piece.tokens]
        self._first = None

    def _end(self, piece: ServerAnswerPiece, reason: str, params: dict[str, Any] | None) -> None:
        if reason not in ENDS:
            # "abort" and "error": the server ended it, and not of the request's own accord.
            piece.failure = Failure(f"{TITLE} ended the request with {reason!r}", RefusalKind.BROKEN)
            return
        piece.finish = ENDS[reason]
        if self._leaves_kv and reason == "length":
            if params is not None:
                params.pop(FIRST, None)
                if self._can_give(piece, params):
                    logprobs = None if piece.logprobs is None else piece.logprobs[0]
                    params[FIRST] = _First(piece.tokens[0], logprobs)
            gives_token = params is not None and FIRST in params
            leave(piece, params, TITLE, "kv_transfer_params", "--kv-transfer-config", gives_token)

    def _can_give(self, piece: ServerAnswerPiece, params: dict[str, Any]) -> bool:
        return (
            len(piece.tokens) == 1
            and (self._alternatives is None or piece.logprobs is not None)
            and _has_room(params, self._prompt_tokens, self._block_size)
        )


def _token_id(text: str) -> int:
    token_id = digits_of(text.removeprefix(TOKEN_ID))
    if token_id is None:
        raise DecodeError(f"log probabilities of {TITLE}", f"a token is {text[:40]!r}, not {TOKEN_ID}N")
    return token_id


def _logprobs(tokens: Sequence[int], said: _Logprobs, alternatives: int) -> tuple[TokenLogprobs, ...]:
    if said.content is not None:
        if [each.token_id for each in said.content] != list(tokens):
            raise DecodeError(
                f"log probabilities of {TITLE}", f"{len(said.content)} do not go with {len(tokens)} tokens"
            )
        return tuple(
            best_of(each.token_id, each.logprob, {top.token_id: top.logprob for top in each.top_logprobs}, alternatives)
            for each in said.content
        )
    tops = said.top_logprobs or [None] * len(tokens)
    if len(said.token_logprobs) != len(tokens) or len(tops) != len(tokens):
        raise DecodeError(f"log probabilities of {TITLE}", f"{len(said.token_logprobs)} come with {len(tokens)} tokens")
    return tuple(
        best_of(token_id, own, {_token_id(text): value for text, value in (top or {}).items()}, alternatives)
        for token_id, own, top in zip(tokens, said.token_logprobs, tops, strict=True)
    )


def _prompt_logprobs(rows: Sequence[dict[str, _PromptLogprob] | None], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the prompt's tokens from the second on; a row begins with the token's own."""
    report = []
    for row in rows[1:]:
        if not row:
            continue
        values = {_token_id(text): logprob_of(each.logprob) for text, each in row.items()}
        own = next(iter(values))
        report.append(best_of(own, values[own], values, alternatives))
    return tuple(report)


# -- facts of a server

CACHE_CONFIG = b"vllm:cache_config_info"
CACHE_CONFIG_BYTES_MAX = 256 * 1024
"""Of its lines that are read, at 0.3 ms a kilobyte: those of 256 ranks."""

EVENTS_OPTION = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\''
)


class _Source(msgspec.Struct):
    """One publisher, in the map's form or in the list's."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True
    data_parallel_rank: int = 0


class _Schema(msgspec.Struct):
    properties: dict[str, Any] = {}


class _Components(msgspec.Struct):
    schemas: dict[str, _Schema] = {}


class _OpenApi(msgspec.Struct):
    components: _Components = msgspec.field(default_factory=_Components)
    paths: dict[str, Any] = {}


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server; raises ``ServerError`` when it does not answer."""
    block_size, total_blocks, numbers = await _cache_config(client)
    sources = await _sources(client)
    missing = ""
    if sources is None:
        missing = "this version does not list its publishers (/kv_event_sources): give kv_events_endpoint"
    elif not sources:
        missing = f"it publishes no cache events: start it with {EVENTS_OPTION}"
    else:
        missing = "; ".join(each.problem for each in sources if each.problem)
    return ServerFacts(
        version=await version_of(client),
        model_path=model.root or "",
        block_size=block_size,
        max_sequence_length=model.max_model_len,
        total_blocks=total_blocks,
        ranks=max(1, len(numbers), len(sources or ())),
        rank_numbers=numbers,
        sources=sources or (),
        events_missing=missing,
    )


async def _cache_config(client: ServerClient) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Return tokens in a block, device blocks of a rank, and the numbers of its ranks; ``None`` = it does not say."""
    try:
        page = await client.ask("/metrics")
    except ServerError as error:
        if error.status in NOT_THERE:
            return None, None, ()  # started with --disable-metrics, or behind something that has them elsewhere
        raise
    text = b"\n".join(islice(lines_of(page, CACHE_CONFIG), RANKS_MAX))[:CACHE_CONFIG_BYTES_MAX]
    try:
        families = text_string_to_metric_families(text.decode(errors="replace"))
        samples = [sample.labels for family in families for sample in family.samples]
    except ValueError:
        samples = []  # it is no page of metrics
    if not samples:
        return None, None, ()
    blocks = [digits_of(labels.get("num_gpu_blocks"), 1) for labels in samples]
    known = [each for each in blocks if each is not None]
    return digits_of(samples[0].get("block_size"), 1), min(known) if known else None, _numbers(samples)


def _numbers(samples: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Return the numbers of the ranks that metrics are about: by their labels, else counted."""
    labels = [digits_of(each.get("engine")) for each in samples]
    numbers = {each for each in labels if each is not None}
    return tuple(sorted(numbers)) if None not in labels else tuple(range(len(samples)))


async def _sources(client: ServerClient) -> tuple[EventSource, ...] | None:
    """Return the publishers by rank; ``None`` where the server does not list them."""
    said = await client.ask_if_there("/kv_event_sources", Any)
    if isinstance(said, dict):
        listed = [(digits_of(rank), each) for rank, each in said.items()]
    elif isinstance(said, list):
        listed = [(count_of(each.get("data_parallel_rank", 0)) if isinstance(each, dict) else 0, each) for each in said]
    else:
        return None
    found = []
    for rank, each in listed[:RANKS_MAX]:
        try:
            source = msgspec.convert(each, _Source)
        except msgspec.ValidationError as error:
            raise DecodeError("the answer to /kv_event_sources", str(error)) from None
        if rank is None or rank >= RANKS_MAX:
            raise DecodeError("the answer to /kv_event_sources", f"a rank is none, allowed are 0 to {RANKS_MAX - 1}")
        if source.enable_kv_cache_events and source.publisher == "zmq" and source.endpoint:
            found.append(_source(rank, source, client.target.host))
    return tuple(sorted(found, key=lambda source: source.dp_rank))


def _source(rank: int, said: _Source, host: str) -> EventSource:
    assert said.endpoint is not None, "it publishes"
    try:
        endpoint = reachable(said.endpoint, host)
        replay = reachable(said.replay_endpoint, host) if said.replay_endpoint else ""
    except ValueError as error:
        return EventSource(rank, "", problem=f"the publisher of rank {rank}: {error}")
    # It connects where there is no wildcard, unless the system chose its port: then it says its own address here.
    family = doubt_of_family(said.endpoint, host)
    doubt = (
        (family and f"{family} (tcp://*:0 with VLLM_HOST_IP)")
        if "*" in said.endpoint or "::" in said.endpoint or said.endpoint.startswith("ipc://")
        else f"its endpoint {said.endpoint} has no *, so it probably connects there instead of binding: {EVENTS_OPTION}"
    )
    return EventSource(rank, endpoint, replay, said.topic, doubt=doubt)


async def pictures_missing(client: ServerClient) -> str:
    """Return why a server takes no images next to token ids, and what to do; empty = it takes them."""
    said = await client.ask_if_there("/openapi.json", _OpenApi, SCHEMA_BYTES_MAX) or _OpenApi()
    asked = said.components.schemas.get("GenerateRequest", _Schema())
    if GENERATE in said.paths and "content_parts" in asked.properties:
        return ""
    return (
        f"its /openapi.json names no content_parts of {GENERATE}: start version 0.32 or newer with --enable-scale-out, "
        "and without --disable-fastapi-docs"
    )


# -- starting

OWN = {
    "--kv-events-config": "it has cache events published where it reads them (--no-follow-events leaves them off)",
    "--port": "give --engine-port",
    "--uds": "it asks the server over TCP",
    "--api-key": "give --engine-api-key, or POOLGRID_ENGINE_API_KEY",
    "--model": "give --model-path",
    "--ssl-keyfile": "it asks its own server without TLS, on this machine",
    "--ssl-certfile": "it asks its own server without TLS, on this machine",
    "--no-enable-prefix-caching": "without a prefix cache there is nothing to route by",
    "--headless": "a server without HTTP cannot be asked",
}
"""What the worker sets, and what to do instead."""


def command(wanted: WantedServer) -> ServerCommand:
    """Return the arguments of a server."""
    arguments = [wanted.model_path, *wanted.arguments]
    arguments += ["--port", str(wanted.port), *wanted.unless_given("--host", wanted.host)]
    arguments += wanted.unless_given("--served-model-name", wanted.model_name)
    arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if wanted.block_size is not None:
        arguments += ["--block-size", str(wanted.block_size)]
    publishing = wanted.publishing
    if publishing is not None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publishing.endpoint,
            "replay_endpoint": publishing.replay_endpoint,
        }
        arguments += ["--kv-events-config", msgspec.json.encode(events).decode()]
    # Not among the arguments, which every user of the machine can read.
    return ServerCommand(tuple(arguments), {"VLLM_API_KEY": wanted.api_key} if wanted.api_key else {})


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> VllmDialect:
    """Return how requests are put to a server."""
    pictures = bool(settings.image_placeholder)
    return VllmDialect(facts.model, facts.numbers, settings.engine_priorities, pictures, facts.block_size or 0)


KIND = ServerKind(
    "vllm",
    TITLE,
    "vllm",
    learn,
    make_dialect,
    Launch("vllm serve", OWN, command, rank_options=("--data-parallel-size", "-dp")),
    EVENTS_OPTION,
    "--block-size N",
    pictures_missing,
    figures=EngineFigures("/metrics", b"vllm:num_requests_running", b"vllm:num_requests_waiting"),
    reuse_option="--enable-prompt-tokens-details",
)
