"""vLLM's server: its facts, its start. Pure but for its questions.

Endpoints with the server's facts:

/v1/models          model, adapters, max_model_len
/version            its version
/metrics            vllm:cache_config_info: block size, device blocks of a rank; vllm:spec_decode: it drafts
/kv_event_sources   publishers by rank (0.26 and newer): a map by rank, or a list
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.worker_protocol.engine_numbers import count_of, digits_of
from poolgrid.server.workers.engines.server.core.engine_figures import EngineFigures, lines_of
from poolgrid.server.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer
from poolgrid.server.workers.engines.server.core.server_facts import (
    RANKS_MAX,
    EventSource,
    ListedModel,
    ServerFacts,
    doubt_of_family,
    reachable,
)
from poolgrid.server.workers.engines.server.kinds import ServerKind, version_of
from poolgrid.server.workers.engines.server.server_client import NOT_THERE, ServerClient, ServerError

TITLE = "vLLM"


CACHE_CONFIG = b"vllm:cache_config_info"
CACHE_CONFIG_BYTES_MAX = 256 * 1024
"""Of its lines that are read, at 0.3 ms a kilobyte: those of 256 ranks."""

DRAFTS = b"vllm:spec_decode"
"""Begins what a server counts from its start where it drafts, be it by n-grams, and never where not."""

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


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server; raises ``ServerError`` when it does not answer."""
    page = await _metrics(client)
    block_size, total_blocks, numbers = _cache_config(page)
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
        drafts=any(lines_of(page, DRAFTS)),
        ranks=max(1, len(numbers), len(sources or ())),
        rank_numbers=numbers,
        sources=sources or (),
        events_missing=missing,
    )


async def _metrics(client: ServerClient) -> bytes:
    try:
        return await client.ask("/metrics")
    except ServerError as error:
        if error.status in NOT_THERE:
            return b""  # started with --disable-metrics, or behind something that has them elsewhere
        raise


def _cache_config(page: bytes) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Return tokens in a block, device blocks of a rank, and the numbers of its ranks; ``None`` = it does not say."""
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


KIND = ServerKind(
    "vllm",
    TITLE,
    "vllm",
    learn,
    Launch("vllm serve", OWN, command, rank_options=("--data-parallel-size", "-dp")),
    EVENTS_OPTION,
    "--block-size N",
    figures=EngineFigures("/metrics", b"vllm:num_requests_running", b"vllm:num_requests_waiting"),
    reuse_option="--enable-prompt-tokens-details",
)
