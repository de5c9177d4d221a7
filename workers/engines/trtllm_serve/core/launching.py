"""``trtllm-serve`` as a worker starts it. Pure.

It takes settings of its cache in a file of YAML only. Somebody's own file is taken over, with what the worker needs.
"""

from __future__ import annotations

from typing import Any

import yaml

from poolgrid.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer, without_option

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


LAUNCH = Launch("trtllm-serve", OWN, command, file_options=FILE_OPTIONS, publishes=False, shares_ports=False)
