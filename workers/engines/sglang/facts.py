"""What SGLang's server says of itself.

/v1/models      model, adapters, max_model_len
/server_info    its arguments and its scheduler's numbers: page size, ranks, publishers, bootstrap port
                (``/get_server_info`` in old versions)
/model_info     whether the model takes pictures (``/get_model_info`` in old versions)
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from poolgrid.workers.engines.server.core.server_facts import (
    RANKS_MAX,
    EventSource,
    ListedModel,
    ModelList,
    ServerFacts,
    adapters_of,
    aliases_of,
    reachable,
)
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.server_client import ServerClient

EVENTS_OPTION = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\' '
    "--page-size 32"
)


class _Publishing(msgspec.Struct):
    """What newer versions say of their publishers."""

    publisher: str = "null"
    endpoint_host: str = "*"
    endpoint_port_base: int = 0
    topic: str = ""
    block_size: int | None = None
    dp_size: int | None = None


class _Configured(msgspec.Struct):
    """The argument ``--kv-events-config``, which is JSON in a text."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""


class _Info(msgspec.Struct):
    version: str = ""
    model_path: str = ""
    tokenizer_path: str | None = None
    page_size: int | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)] = 1
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_total_num_tokens: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    disaggregation_bootstrap_port: int = 8998
    kv_events: _Publishing | None = None
    kv_events_config: str | None = None


class _Model(msgspec.Struct):
    has_image_understanding: bool | None = None


async def learn(client: ServerClient, listed: ModelList, model: ListedModel) -> ServerFacts:
    """Return what a server says of itself; raises ``ServerError`` when it does not answer."""
    info = await client.ask_if_there("/server_info", _Info)
    if info is None:
        info = await client.ask_for("/get_server_info", _Info)
    said = info.kv_events
    block_size = (said.block_size if said is not None else None) or info.page_size
    sources = _sources(info, client.target.host)
    tokens = info.max_total_num_tokens
    return ServerFacts(
        kind=KIND.name,
        version=info.version,
        model=model.id,
        model_path=info.tokenizer_path or info.model_path or model.root or "",
        block_size=block_size,
        max_sequence_length=model.max_model_len,
        total_blocks=tokens // block_size if tokens and block_size else None,
        max_batch_size=info.max_running_requests,
        max_num_tokens=info.chunked_prefill_size if (info.chunked_prefill_size or 0) > 0 else None,
        loras=adapters_of(listed, model),
        aliases=aliases_of(listed, model),
        ranks=max(1, info.dp_size),
        sources=sources,
        events_missing="; ".join(each.problem for each in sources if each.problem)
        if sources
        else f"it publishes no cache events: start it with {EVENTS_OPTION}",
        extra={
            "bootstrap_port": info.disaggregation_bootstrap_port,
            "lower_is_earlier": info.schedule_low_priority_values_first,
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
    return tuple(_source(rank, configured, host) for rank in range(max(1, info.dp_size)))


def _source(rank: int, configured: _Configured, host: str) -> EventSource:
    try:
        endpoint = _moved(reachable(configured.endpoint, host), rank)
        replay = configured.replay_endpoint
        # Replay sockets do not count up in all versions; the first rank's is right in any.
        replay_endpoint = reachable(replay, host) if replay and rank == 0 else ""
    except ValueError as error:
        return EventSource(rank, "", problem=f"the publisher of rank {rank}: {error}")
    doubt = (
        ""
        if "*" in configured.endpoint or "::" in configured.endpoint
        else f"its endpoint {configured.endpoint} has no *, so it connects there instead of binding: {EVENTS_OPTION}"
    )
    return EventSource(rank, endpoint, replay_endpoint, configured.topic, doubt=doubt)


def _moved(endpoint: str, ports: int) -> str:
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + ports}"


async def pictures_missing(client: ServerClient) -> str:
    """Say why a server takes no pictures, and what to do; empty = it takes them, or does not say."""
    said = await client.ask_if_there("/model_info", _Model)
    if said is None:
        said = await client.ask_if_there("/get_model_info", _Model)
    if said is None or said.has_image_understanding is not False:
        return ""
    return "its model takes none (has_image_understanding): start it with one that does, and with --enable-multimodal"


KIND = ServerKind("sglang", "SGLang", "sglang", learn, EVENTS_OPTION, "--page-size N", pictures_missing)
