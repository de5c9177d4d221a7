"""What vLLM's server says of itself.

/v1/models          model, adapters, max_model_len
/version            its version
/metrics            vllm:cache_config_info: block size, device blocks of a rank
/kv_event_sources   publishers by rank (0.26 and newer): a map by rank, or a list
/openapi.json       whether it takes pictures beside token ids
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from poolgrid.wire.errors import DecodeError
from poolgrid.workers.core.vetting import count_of, digits_of
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
from poolgrid.workers.engines.server.server_client import NOT_THERE, ServerClient, ServerError
from poolgrid.workers.engines.vllm.core.dialect import GENERATE

CACHE_CONFIG = "vllm:cache_config_info"
EVENTS_OPTION = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5657"}\''
)


class _Version(msgspec.Struct):
    version: str = ""


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


async def learn(client: ServerClient, listed: ModelList, model: ListedModel) -> ServerFacts:
    """Return what a server says of itself; raises ``ServerError`` when it does not answer."""
    version = await client.ask_if_there("/version", _Version)
    block_size, total_blocks, engines = await _cache_config(client)
    sources = await _sources(client)
    missing = ""
    if sources is None:
        missing = "this version does not list its publishers (/kv_event_sources): give kv_events_endpoint"
    elif not sources:
        missing = f"it publishes no cache events: start it with {EVENTS_OPTION}"
    else:
        missing = "; ".join(each.problem for each in sources if each.problem)
    return ServerFacts(
        kind=KIND.name,
        version="" if version is None else version.version,
        model=model.id,
        model_path=model.root or "",
        block_size=block_size,
        max_sequence_length=model.max_model_len,
        total_blocks=total_blocks,
        loras=adapters_of(listed, model),
        aliases=aliases_of(listed, model),
        ranks=max(1, engines, len(sources or ())),
        sources=sources or (),
        events_missing=missing,
    )


async def _cache_config(client: ServerClient) -> tuple[int | None, int | None, int]:
    """Return tokens in a block, device blocks of a rank, and how many ranks there are; ``None`` = it does not say."""
    try:
        page = (await client.ask("/metrics")).decode(errors="replace")
    except ServerError as error:
        if error.status in NOT_THERE:
            return None, None, 0  # started with --disable-metrics, or behind something that has them elsewhere
        raise
    lines = [line for line in page.splitlines() if line.startswith(CACHE_CONFIG)]
    try:
        families = text_string_to_metric_families("\n".join(lines[:RANKS_MAX]))
        samples = [sample.labels for family in families for sample in family.samples]
    except ValueError:
        samples = []  # it is no page of metrics
    if not samples:
        return None, None, 0
    blocks = [digits_of(labels.get("num_gpu_blocks"), 1) for labels in samples]
    known = [each for each in blocks if each is not None]
    return digits_of(samples[0].get("block_size"), 1), min(known) if known else None, len(samples)


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
    assert said.endpoint is not None, "it publishes somewhere"
    try:
        endpoint = reachable(said.endpoint, host)
        replay = reachable(said.replay_endpoint, host) if said.replay_endpoint else ""
    except ValueError as error:
        return EventSource(rank, "", problem=f"the publisher of rank {rank}: {error}")
    # It connects where there is no wildcard, unless the system chose its port: then it says its own address here.
    doubt = (
        ""
        if "*" in said.endpoint or "::" in said.endpoint or said.endpoint.startswith("ipc://")
        else f"its endpoint {said.endpoint} has no *, so it probably connects there instead of binding: {EVENTS_OPTION}"
    )
    return EventSource(rank, endpoint, replay, said.topic, doubt=doubt)


async def pictures_missing(client: ServerClient) -> str:
    """Say why a server takes no pictures beside token ids, and what to do; empty = it takes them."""
    said = await client.ask_if_there("/openapi.json", _OpenApi) or _OpenApi()
    asked = said.components.schemas.get("GenerateRequest", _Schema())
    if GENERATE in said.paths and "content_parts" in asked.properties:
        return ""
    return (
        f"its /openapi.json names no content_parts of {GENERATE}: start version 0.32 or newer with --enable-scale-out, "
        "and without --disable-fastapi-docs"
    )


KIND = ServerKind("vllm", "vLLM", "vllm", learn, EVENTS_OPTION, "--block-size N", pictures_missing)
