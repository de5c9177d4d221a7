"""``vllm serve`` as a worker starts it. Pure."""

from __future__ import annotations

import msgspec

from poolgrid.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer

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
    # Not among the arguments, which everybody on the machine can read.
    return ServerCommand(tuple(arguments), {"VLLM_API_KEY": wanted.api_key} if wanted.api_key else {})


LAUNCH = Launch("vllm serve", OWN, command, rank_options=("--data-parallel-size", "-dp"))
