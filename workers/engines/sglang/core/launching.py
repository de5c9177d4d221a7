"""SGLang's server as a worker starts it. Pure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from poolgrid.workers.engines.server.core.launching import Launch, Publishing, ServerCommand, WantedServer

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


LAUNCH = Launch(
    "python3 -m sglang.launch_server",
    OWN,
    command,
    rank_options=("--dp-size", "--dp", "--data-parallel-size"),
    as_it_publishes=only_first_replays,
)
