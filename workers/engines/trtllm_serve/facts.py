"""What trtllm-serve says of itself: the model's name and its version. The rest is said by options.

Its cache events are drained over HTTP (``/kv_cache_events``): who reads them takes them away from everybody else.
"""

from __future__ import annotations

import msgspec

from poolgrid.workers.engines.server.core.server_facts import ListedModel, ModelList, ServerFacts
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.server_client import ServerClient

EVENTS_PATH = "/kv_cache_events"
EVENTS_OPTION = "kv_cache_config: {event_buffer_max_size: 100000, enable_block_reuse: true} in its YAML"


class _Version(msgspec.Struct):
    version: str = ""


async def learn(client: ServerClient, listed: ModelList, model: ListedModel) -> ServerFacts:
    """Return what a server says of itself; raises ``ServerError`` when it does not answer."""
    version = await client.ask_if_there("/version", _Version)
    return ServerFacts(
        kind=KIND.name,
        version="" if version is None else version.version,
        model=model.id,
        drained_events=EVENTS_PATH,
    )


async def pictures_missing(client: ServerClient) -> str:
    """Say that it takes no pictures beside token ids, and what does."""
    return "its /v1/completions takes none beside token ids: a worker with --engine trtllm does"


KIND = ServerKind(
    "trtllm-serve",
    "trtllm-serve",
    "tensorrt_llm",
    learn,
    EVENTS_OPTION,
    "kv_cache_config: {tokens_per_block: N} in its YAML",
    pictures_missing,
)
