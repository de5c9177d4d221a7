"""SGLang's server: its facts, its start. Pure but for its questions.

Endpoints with the server's facts:

/v1/models      model, adapters, max_model_len
/server_info    its arguments and its scheduler's numbers: page size, ranks, publishers, bootstrap port
                (``/get_server_info`` in old versions)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec

from poolgrid.kernel.wire.addresses import PORT_MAX
from poolgrid.server.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.server.workers.engines.server.core.launching import Launch, Publishing, ServerCommand, WantedServer
from poolgrid.server.workers.engines.server.core.server_facts import (
    RANKS_MAX,
    EventSource,
    ListedModel,
    ServerFacts,
    doubt_of_family,
    events_leave_out,
    other_layers,
    reachable,
)
from poolgrid.server.workers.engines.server.kinds import ServerKind
from poolgrid.server.workers.engines.server.server_client import ServerClient

TITLE = "SGLang"


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


KIND = ServerKind(
    "sglang",
    TITLE,
    "sglang",
    learn,
    Launch(
        "python3 -m sglang.launch_server",
        OWN,
        command,
        rank_options=("--dp-size", "--dp", "--data-parallel-size"),
        as_it_publishes=only_first_replays,
    ),
    EVENTS_OPTION,
    "--page-size N",
    figures=EngineFigures("/metrics", b"sglang:num_running_reqs", b"sglang:num_queue_reqs"),
    reuse_option="--enable-cache-report",
)
