"""trtllm-serve: its facts, its start. Pure but for its questions.

Endpoints with the server's facts:

/v1/models      model
/version        version
/server_info    tokens in a block and requests in a step, in newer versions; options give the rest

Its cache events are drained over HTTP (``/kv_cache_events``): each event is given to one reader only. From 1.4 on the
server gives out what routers need only, so its numbers have holes, and it keeps the newest ``FANOUT_EVENTS_MAX``.

With ``kv_cache_config.kv_events_config`` it publishes them over ZMQ instead, with replay, and the path over HTTP is
empty. No endpoint over HTTP says so, or where: options do. That stream names no salts, but its own names of first
blocks tell (``poolgrid.server.workers.engines.root_seeds``).

Settings of its cache are taken in a file of YAML only: an operator's own file is taken over, with what the worker
needs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.server.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.server.workers.engines.server.core.launching import (
    Launch,
    Publishing,
    ServerCommand,
    WantedServer,
    without_option,
)
from poolgrid.server.workers.engines.server.core.server_facts import (
    ListedModel,
    ServerFacts,
    events_leave_out,
    other_layers,
)
from poolgrid.server.workers.engines.server.kinds import ServerKind, version_of
from poolgrid.server.workers.engines.server.server_client import ServerClient

TITLE = "trtllm-serve"


EVENTS_PATH = "/kv_cache_events"
FANOUT_EVENTS_MAX = 1024
"""Events that a server with a fan-out keeps for its reader over HTTP."""

EVENTS_OPTION = "kv_cache_config: {event_buffer_max_size: 100000, enable_block_reuse: true} in its YAML"

STREAM = "kv_events_config"


class _Info(msgspec.Struct):
    tokens_per_block: Any = None
    max_batch_size: Any = None


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server; raises ``ServerError`` when it does not answer."""
    version = await version_of(client)
    has_fanout = _has_fanout(version)
    info = await client.ask_if_there("/server_info", _Info) or _Info()
    return ServerFacts(
        version=version,
        block_size=info.tokens_per_block,
        max_batch_size=info.max_batch_size,
        drained_events=EVENTS_PATH,
        kept_events_max=FANOUT_EVENTS_MAX if has_fanout else 0,
        events_missing=events_leave_out(other_layers(model.root or model.id)) if has_fanout else "",
    )


def _has_fanout(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (1, 4)


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
    import yaml  # here: all workers import this module

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
    publishes = wanted.publishing is not None and _publish(cache, wanted.publishing, settings)
    if wanted.follows_events and not publishes:
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
    files = {FILE: yaml.safe_dump(settings)}
    return ServerCommand(tuple(arguments), files=files, block_size=block_size, publishes=publishes)


def _publish(cache: dict[str, Any], places: Publishing, settings: dict[str, Any]) -> bool:
    """Have a server publish where its worker follows it, if its file asks for the stream; return whether it does."""
    stream = cache.get(STREAM)
    if not (isinstance(stream, dict) and stream.get("enable_kv_cache_events")):
        return False
    if settings.get("enable_attention_dp"):
        raise ValueError(
            f"enable_attention_dp is true and kv_cache_config.{STREAM} is given in the file of the server's settings: "
            f"it chooses the rank of a request itself, and each publishes its own events. Leave {STREAM} out"
        )
    addresses = {"endpoint": places.endpoint, "replay_endpoint": places.replay_endpoint}
    cache[STREAM] = {**stream, **addresses, "publisher": "zmq", "topic": ""}
    return True


def _settings(text: str) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        raise ValueError(f"reading the file of the server's settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError("reading the file of the server's settings: it has no map of settings")
    return settings


KIND = ServerKind(
    "trtllm-serve",
    TITLE,
    "tensorrt_llm",
    learn,
    Launch(TITLE, OWN, command, file_options=FILE_OPTIONS, shares_ports=False),
    EVENTS_OPTION,
    "kv_cache_config: {tokens_per_block: N} in its YAML",
    parse_event,
    figures=EngineFigures("/prometheus/metrics", b"trtllm_num_requests_running", b"trtllm_num_requests_waiting"),
    names_salts=False,
    chooses_rank=True,
)
