"""The second cache manager's own stream of KV events, as engine arguments ask for it (``kv_events_config``). Pure.

Each rank publishes over ZMQ, at the base port plus its rank, and reading events through ``LLM`` gives nothing then. The
worker is on the same machine and connects there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poolgrid.workers.engines.trtllm.arguments.contract import KV_CACHE, ArgumentFault, look_up, shown

KV_EVENTS = "kv_events_config"
PATH = f"{KV_CACHE}.{KV_EVENTS}"
PORT_MAX = 65_535

_TCP = re.compile(r"tcp://(.+):(\d{1,5})")
_EVERYWHERE = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Hosts that are bound and cannot be connected to, and what is."""


@dataclass(frozen=True, slots=True)
class EventStreamEndpoints:
    """Where an engine publishes its events."""

    endpoint: str
    """As rank 0 binds it."""
    replay_endpoint: str = ""
    """Empty = it has none: what is lost stays lost."""
    topic: str = ""

    def of_rank(self, rank: int) -> tuple[str, str]:
        return _of_rank(self.endpoint, rank), _of_rank(self.replay_endpoint, rank) if self.replay_endpoint else ""


def event_stream(values: Mapping[str, Any]) -> EventStreamEndpoints | None:
    """Return the stream that arguments ask for; ``None`` = events are read through ``LLM``."""
    given = (values.get(KV_CACHE) or {}).get(KV_EVENTS)
    if not isinstance(given, Mapping) or not given.get("enable_kv_cache_events"):
        return None
    return EventStreamEndpoints(
        look_up(values, f"{PATH}.endpoint"),
        look_up(values, f"{PATH}.replay_endpoint") or "",
        look_up(values, f"{PATH}.topic"),
    )


def stream_faults(values: Mapping[str, Any], ranks: int) -> list[ArgumentFault]:
    """Return what keeps the stream from being followed; none where there is no stream."""
    stream = event_stream(values)
    if stream is None:
        return []
    faults: list[ArgumentFault] = []
    if look_up(values, f"{PATH}.publisher") == "null":
        faults.append(
            ArgumentFault(f"{PATH}.publisher", "is 'null', which publishes to nobody; allowed is 'zmq', or null")
        )
    if look_up(values, f"{KV_CACHE}.use_kv_cache_manager_v2") is False:
        faults.append(
            ArgumentFault(
                f"{KV_CACHE}.use_kv_cache_manager_v2", f"is false with {PATH}, which only the second manager has"
            )
        )
    if not look_up(values, f"{KV_CACHE}.enable_block_reuse"):
        faults.append(ArgumentFault(PATH, f"is given, and {KV_CACHE}.enable_block_reuse is false: there are no events"))
    for kind in ("pipeline", "context"):
        size = look_up(values, f"{kind}_parallel_size")
        if size and size > 1:
            faults.append(ArgumentFault(f"{kind}_parallel_size", f"is {size} with {PATH}, allowed is 1"))
    spans: dict[str, int] = {}
    for name, endpoint in (("endpoint", stream.endpoint), ("replay_endpoint", stream.replay_endpoint)):
        if endpoint and not endpoint.startswith("ipc://"):
            port = _base_port(endpoint)
            highest = PORT_MAX + 1 - ranks
            if port is None or not 1 <= port <= highest:
                faults.append(
                    ArgumentFault(
                        f"{PATH}.{name}",
                        f"is {shown(endpoint)}, allowed are tcp://HOST:PORT with ports from 1 to {highest} (that of "
                        f"the first of {ranks} ranks), and ipc://PATH",
                    )
                )
            else:
                spans[name] = port
    if len(spans) == 2 and abs(spans["endpoint"] - spans["replay_endpoint"]) < ranks:
        faults.append(
            ArgumentFault(
                f"{PATH}.replay_endpoint",
                f"is {shown(stream.replay_endpoint)}, {ranks} ports from there and from endpoint "
                f"({shown(stream.endpoint)}) on overlap",
            )
        )
    return faults


def _base_port(endpoint: str) -> int | None:
    found = _TCP.fullmatch(endpoint)
    return int(found[2]) if found else None


def _of_rank(endpoint: str, rank: int) -> str:
    found = _TCP.fullmatch(endpoint)
    if found is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"tcp://{_EVERYWHERE.get(found[1], found[1])}:{int(found[2]) + rank}"
