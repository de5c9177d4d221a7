"""SGLang's server: its requests, its facts, its start. Pure but for its questions.

Requests go as ``/generate`` takes them.

Rules:

1. Token ids go in (``input_ids``) and come out (``output_ids``). A chunk holds all tokens so far, or those that are new
   (``--incremental-streaming-output``): their total number decides which.
2. How much was reused comes with every chunk.
3. Both legs of a request run at the same time: the prefill server waits for the decode server to ask for the KV, by a
   room that both know. So a prefill leg counts as prefilled as soon as its server has it. Servers started for a leg
   (``--disaggregation-mode``) take no request without a room (seen with 0.5.16: status 400), one of a single token too.
4. Salts go as ``cache_salt`` from 0.5.23 on, whose events name them, and adapters too. Before, events name neither:
   blocks under one would look like blocks without, so requests with one are refused while events are followed.
5. Images go next to token ids (``image_data``). The server then makes text of the ids, and tokens of the text with
   placeholders of the images, which are numbers of its own in its events: no text has them.

Endpoints with the server's facts:

/v1/models      model, adapters, max_model_len
/server_info    its arguments and its scheduler's numbers: page size, ranks, publishers, bootstrap port
                (``/get_server_info`` in old versions)
/model_info     whether the model takes images (``/get_model_info`` in old versions)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from poolgrid.wire.addresses import PORT_MAX
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import Generate, RefusalKind, Sampling, TokenLogprobs
from poolgrid.workers.core.refusal import TokenCount, TokenId, UnableError, count_of, logprob_of
from poolgrid.workers.engines.server.core.calls import Call, Failure, ServerAnswerPiece
from poolgrid.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.workers.engines.server.core.launching import Launch, Publishing, ServerCommand, WantedServer
from poolgrid.workers.engines.server.core.openai_words import (
    FINISH_REASONS,
    ErrorInfo,
    answer_failure,
    best_of,
    common_sampling,
    failure_of_status,
    guide_of,
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
    events_leave_out,
    other_layers,
    reachable,
)
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.server_client import ServerClient

if TYPE_CHECKING:
    from poolgrid.workers.engines.server.settings import EngineServerSettings

TITLE = "SGLang"
GENERATE = "/generate"
ROOM_MASK = (1 << 63) - 1
"""Rooms are signed 64-bit integers."""

SAMPLING_NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
"""What is called otherwise than in OpenAI's API."""

GUIDE_NAMES = {"json": "json_schema", "grammar": "ebnf"}

Logprob = tuple[float | None, TokenId, str | None]
"""A value, its token, and the token's text if it was asked for."""


class _Finish(msgspec.Struct, gc=False):
    type: str = ""
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Finish | None = None
    completion_tokens: TokenCount = 0
    """Distinguishes new chunks from chunks of all so far: an answer with none is unreadable."""
    cached_tokens: Any = None
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob] | None] | None = None
    input_token_logprobs: list[Logprob] | None = None
    input_top_logprobs: list[list[Logprob] | None] | None = None


class _Chunk(msgspec.Struct, gc=False):
    output_ids: list[TokenId] | None = None
    meta_info: _Meta | None = None
    error: ErrorInfo | None = None


class BootstrapRoom(msgspec.Struct, frozen=True):
    """Where a decode server asks for the KV of one request."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class SglangDialect:
    """``poolgrid.workers.engines.server.core.calls.ServerDialect`` for SGLang."""

    ranks: int = 1
    priorities: bool = False
    lower_is_earlier: bool = False
    """How the server orders by priority (``--schedule-low-priority-values-first``)."""
    follows_events: bool = True
    names_tenants: bool = False
    """Whether its events name salts and adapters."""
    bootstrap_host: str = ""
    bootstrap_port: int = 8998
    takes_pictures: bool = False
    """Whether its model takes images."""
    title: str = TITLE
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
            body["cache_salt" if self.names_tenants else "extra_key"] = routing.cache_salt
        if self.priorities and routing.priority:
            body["priority"] = -routing.priority if self.lower_is_earlier else routing.priority
        if self.ranks > 1:
            body["data_parallel_rank"] = routing.dp_rank
        if sampling.logprobs is not None or whole:
            body["return_logprob"] = True
            body["top_logprobs_num"] = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
            body["logprob_start_len"] = 0 if whole else -1
        left: bytes | None = None
        if request.stage is Stage.PREFILL:
            room = BootstrapRoom(self.bootstrap_host, self.bootstrap_port, stable_u64(request.request_id) & ROOM_MASK)
            left = _encode(room)
            body.update(msgspec.to_builtins(room))
        elif request.stage is Stage.DECODE:
            body.update(msgspec.to_builtins(left_for(request, TITLE, BootstrapRoom)))
        reader = _Reader(sampling.logprobs, sampling.prompt_logprobs)
        return Call(GENERATE, _encode(body), reader.read, not whole, trace_headers(request), left)

    def _prompt(self, request: Generate) -> tuple[list[int], list[str]]:
        """Return the token ids, and the images as URLs."""
        if request.multimodal is None:
            return prompt_of(request), []
        if not self.takes_pictures:
            raise UnableError(
                f"the request has media, which are not given to this {TITLE}: its worker needs image_placeholder"
            )
        token_ids, pictures = prompt_with_pictures(TITLE, request)
        return token_ids, [each.url for each in pictures]

    def _refuse_unnamed(self, request: Generate) -> None:
        if self.names_tenants or not self.follows_events:
            return
        for name, value in (("cache_salt", request.routing.cache_salt), ("lora_name", request.routing.lora_name)):
            if value:
                raise UnableError(
                    f"{name} is set, and the cache events of {TITLE} before 0.5.23 do not mark which blocks have one: "
                    "they would be shared between all tenants. A worker with --no-follow-events takes such requests"
                )


def _sampling(request: Generate) -> dict[str, Any]:
    """Return what was asked of sampling, in SGLang's names."""
    sampling = request.sampling
    given: dict[str, Any] = {
        **{SAMPLING_NAMES.get(name, name): value for name, value in common_sampling(sampling).items()},
        "max_new_tokens": sampling.max_tokens,
        "top_k": sampling.top_k or None,  # 0 is no number of tokens there
        "stop_token_ids": list(request.stop_token_ids) or None,
        **_guide(sampling),
    }
    return without_none(given)


def _guide(sampling: Sampling) -> dict[str, str]:
    guide = guide_of(sampling, choices_as_regex=True)
    return {} if guide is None else {GUIDE_NAMES.get(guide[0], guide[0]): guide[1]}


class _Reader:
    """Reads the answer to one request."""

    __slots__ = ("_alternatives", "_of_prompt", "_taken")

    def __init__(self, alternatives: int | None, of_prompt: int | None) -> None:
        self._alternatives = alternatives
        self._of_prompt = of_prompt
        self._taken = 0

    def read(self, data: bytes) -> ServerAnswerPiece | None:
        """Return the content of a chunk, or of a whole answer."""
        chunk = read_answer(_decode, data, TITLE)
        if chunk.error is not None:
            return ServerAnswerPiece(failure=answer_failure(TITLE, chunk.error, self._taken > 0))
        meta = chunk.meta_info
        if meta is None or chunk.output_ids is None:
            return ServerAnswerPiece(
                failure=Failure(f"{TITLE} gave no token ids: output_ids need version 0.5 or newer", RefusalKind.BROKEN)
            )
        total = meta.completion_tokens
        fresh = chunk.output_ids[self._taken :] if len(chunk.output_ids) == total else chunk.output_ids
        piece = ServerAnswerPiece(fresh, cached_tokens=count_of(meta.cached_tokens))
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


def _end(piece: ServerAnswerPiece, finish: _Finish) -> None:
    if finish.type in FINISH_REASONS:
        piece.finish = FINISH_REASONS[finish.type]
        return
    if finish.status_code is not None:
        piece.failure = failure_of_status(TITLE, finish.status_code, finish.message or "")
    else:
        words = finish.message or "no reason given"
        piece.failure = Failure(f"{TITLE} ended the request with {finish.type[:40]!r}", RefusalKind.BROKEN, words)


# -- facts of a server

EVENTS_OPTION = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\' '
    "--page-size 32"
)


Ranks = Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]


class _Publishing(msgspec.Struct):
    """Publishers as newer versions list them."""

    publisher: str = "null"
    endpoint_host: str = "*"
    endpoint_port_base: int = 0
    topic: str = ""
    block_size: int | None = None
    dp_size: Ranks = 0
    """Ranks that publish; 0 = it does not say."""
    replay_endpoint_port_base: int = 0
    """Port of the first rank's replay socket; 0 = there is none, or the version does not say."""


class _Configured(msgspec.Struct):
    """The argument ``--kv-events-config``, which is JSON in a text."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool | None = None
    """Whether it binds its endpoint; ``None`` = where that has a wildcard."""


class _Info(msgspec.Struct):
    version: str = ""
    model_path: str = ""
    tokenizer_path: str | None = None
    page_size: int | None = None
    dp_size: Ranks = 1
    attn_dp_size: Ranks = 1
    """Ranks of ``--enable-dp-attention``, in versions where they are no replicas."""
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_total_num_tokens: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disaggregation_mode: str = ""
    disaggregation_bootstrap_port: int = 8998
    kv_events: _Publishing | None = None
    kv_events_config: str | None = None
    disable_hybrid_swa_memory: bool = False


SWA_TYPES = frozenset(("sliding_attention", "chunked_attention"))
"""Layers that keep whole prompts with ``--disable-hybrid-swa-memory``."""


def _ranks(info: _Info) -> int:
    """Return how many ranks there are: replicas, or ranks of attention, which have no replicas."""
    described = info.kv_events.dp_size if info.kv_events is not None else 0
    return min(RANKS_MAX, max(1, info.dp_size) * max(1, info.attn_dp_size, described // max(1, info.dp_size)))


NAMES_TENANTS_SINCE = (0, 5, 23)
"""The version whose events name salts and adapters."""


def _names_tenants(version: str) -> bool:
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", version)
    return numbers is not None and tuple(map(int, numbers.groups())) >= NAMES_TENANTS_SINCE


class _Model(msgspec.Struct):
    has_image_understanding: bool | None = None


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server; raises ``ServerError`` when it does not answer."""
    info = await client.ask_if_there("/server_info", _Info)
    if info is None:
        info = await client.ask_for("/get_server_info", _Info)
    said = info.kv_events
    block_size = (said.block_size if said is not None else None) or info.page_size
    sources = _sources(info, client.target.host)
    tokens = info.max_total_num_tokens
    hidden = other_layers(info.model_path) - (SWA_TYPES if info.disable_hybrid_swa_memory else set())
    return ServerFacts(
        version=info.version,
        model_path=info.tokenizer_path or info.model_path or model.root or "",
        block_size=block_size,
        max_sequence_length=model.max_model_len,
        total_blocks=tokens // block_size if tokens and block_size else None,
        max_batch_size=info.max_running_requests,
        max_num_tokens=info.chunked_prefill_size if (info.chunked_prefill_size or 0) > 0 else None,
        ranks=_ranks(info),
        sources=sources,
        events_missing="; ".join(each.problem for each in sources if each.problem) or events_leave_out(hidden)
        if sources
        else f"it publishes no cache events: start it with {EVENTS_OPTION}",
        role="aggregated" if info.disaggregation_mode == "null" else info.disaggregation_mode,
        kv_bootstrap_port=info.disaggregation_bootstrap_port if info.disaggregation_mode == "prefill" else 0,
        extra={
            "bootstrap_host": client.target.host,
            "bootstrap_port": info.disaggregation_bootstrap_port,
            "lower_is_earlier": info.schedule_low_priority_values_first,
            "names_tenants": _names_tenants(info.version),
        },
    )


def _sources(info: _Info, host: str) -> tuple[EventSource, ...]:
    """Return the publisher of each rank: they count their ports up from the first one's."""
    if info.kv_events_config:
        try:
            configured = msgspec.json.decode(info.kv_events_config, type=_Configured)
        except (msgspec.MsgspecError, ValueError):
            configured = _Configured()
    elif info.kv_events is not None and info.kv_events.endpoint_port_base:
        said = info.kv_events
        configured = _Configured(
            said.publisher, f"tcp://{said.endpoint_host}:{said.endpoint_port_base}", None, said.topic
        )
    else:
        return ()
    if configured.publisher != "zmq":
        return ()
    counts_replays = info.kv_events is not None and info.kv_events.replay_endpoint_port_base > 0
    return tuple(_source(rank, configured, host, counts_replays) for rank in range(_ranks(info)))


def _source(rank: int, configured: _Configured, host: str, counts_replays: bool) -> EventSource:
    try:
        endpoint = _moved(reachable(configured.endpoint, host), rank)
        replay = configured.replay_endpoint
        # In versions that do not say so replay sockets may not count up; the first rank's is right in any.
        has_replay = replay and (counts_replays or not rank)
        replay_endpoint = _moved(reachable(replay, host), rank) if replay and has_replay else ""
    except ValueError as error:
        return EventSource(rank, "", problem=f"the publisher of rank {rank}: {error}")
    return EventSource(rank, endpoint, replay_endpoint, configured.topic, doubt=_doubt(configured, host))


def _doubt(configured: _Configured, host: str) -> str:
    """Return what is probably wrong with a publisher that is never reached."""
    shown = configured.endpoint
    has_wildcard = any(each in shown for each in ("*", "::", "0.0.0.0"))
    if not (has_wildcard if configured.bind is None else configured.bind):
        return f"its endpoint {shown} has no *, so it connects there instead of binding: {EVENTS_OPTION}"
    return doubt_of_family(shown, host)


def _moved(endpoint: str, ports: int) -> str:
    """Return an endpoint so many ports further; raises ``ValueError`` where that is none."""
    address, _, port = endpoint.rpartition(":")
    if not ports:
        return endpoint
    if not port.isdecimal() or int(port) + ports > PORT_MAX:
        raise ValueError(f"its endpoint is {endpoint!r}, {ports} ports further there is none")
    return f"{address}:{int(port) + ports}"


async def pictures_missing(client: ServerClient) -> str:
    """Return why a server takes no images, and what to do; empty = it takes them, or does not report it."""
    said = await client.ask_if_there("/model_info", _Model)
    if said is None:
        said = await client.ask_if_there("/get_model_info", _Model)
    if said is None or said.has_image_understanding is not False:
        return ""
    return "its model takes none (has_image_understanding): start it with one that does, and with --enable-multimodal"


# -- starting

OWN = {
    "--kv-events-config": "it has cache events published where it reads them (--no-follow-events leaves them off)",
    "--port": "give --engine-port",
    "--api-key": "give --engine-api-key, or POOLGRID_ENGINE_API_KEY",
    "--model-path": "give it before the --",
    "--model": "give --model-path",
    "--ssl-keyfile": "it asks its own server without TLS, on this machine",
    "--ssl-certfile": "it asks its own server without TLS, on this machine",
    "--disable-radix-cache": "without a prefix cache there is nothing to route by",
    "--disaggregation-mode": "give --role",
    "--page-size": "give --kv-block-size",
}
"""What the worker sets, and what to do instead."""

PAGE_SIZE = 32
"""Tokens in a block. SGLang's own default is one, which makes an event of every token."""


def command(wanted: WantedServer) -> ServerCommand:
    """Return the arguments of a server."""
    arguments = ["--model-path", wanted.model_path, *wanted.arguments]
    arguments += ["--port", str(wanted.port), *wanted.unless_given("--host", wanted.host)]
    arguments += wanted.unless_given("--served-model-name", wanted.model_name)
    arguments += ["--page-size", str(wanted.block_size or PAGE_SIZE)]
    if wanted.role != "aggregated":
        arguments += ["--disaggregation-mode", wanted.role]
    if wanted.api_key:
        arguments += ["--api-key", wanted.api_key]
    publishing = wanted.publishing
    if publishing is not None:
        events = {
            "publisher": "zmq",
            "endpoint": publishing.endpoint,
            "replay_endpoint": publishing.replay_endpoint,
        }
        arguments += ["--kv-events-config", msgspec.json.encode(events).decode()]
    return ServerCommand(tuple(arguments))


def only_first_replays(publishing: Publishing) -> Publishing:
    """Return publishers as SGLang has them: replay sockets do not count up with the rank in all versions."""
    first, *others = publishing.sources
    return replace(publishing, sources=(first, *(replace(each, replay_endpoint="") for each in others)))


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> SglangDialect:
    """Return how requests are put to a server."""
    extra = facts.extra or {}
    return SglangDialect(
        ranks=facts.ranks,
        priorities=settings.engine_priorities,
        lower_is_earlier=bool(extra.get("lower_is_earlier")),
        follows_events=settings.follow_events and not facts.events_missing,
        names_tenants=bool(extra.get("names_tenants")),
        takes_pictures=bool(settings.image_placeholder),
        bootstrap_host=str(extra.get("bootstrap_host", "")),
        bootstrap_port=int(extra.get("bootstrap_port") or 8998),
    )


KIND = ServerKind(
    "sglang",
    TITLE,
    "sglang",
    learn,
    make_dialect,
    Launch(
        "python3 -m sglang.launch_server",
        OWN,
        command,
        rank_options=("--dp-size", "--dp", "--data-parallel-size"),
        as_it_publishes=only_first_replays,
    ),
    EVENTS_OPTION,
    "--page-size N",
    pictures_missing,
    figures=EngineFigures("/metrics", b"sglang:num_running_reqs", b"sglang:num_queue_reqs"),
    reuse_option="--enable-cache-report",
)
