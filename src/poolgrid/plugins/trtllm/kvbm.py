"""Dynamo's KV block manager (the package ``kvbm``) in a TensorRT-LLM engine: its limits, its variables, its events.

KVBM copies blocks that leave the GPU to host memory and to disk, and publishes what it or the engine holds: a block is
removed there when it is in neither. For that it must be sent the engine's own events. The worker does so, and follows
KVBM's output. Rules:

1. KVBM matches blocks by their tokens alone. Adapters, cache salts, images and prompt log probabilities need more, so
   they are refused by name. So are engines that it has no connector for: generation-only ones, and several ranks.
2. What KVBM publishes is told to routers as blocks on the host. On the device they are told by the engine's events.
3. A block is published to KVBM as soon as it is whole. Frames beyond ``FRAMES_MAX`` are dropped: KVBM then knows less.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent, Cleared, Removed, Stored
from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks, RestatedEvent
from poolgrid.server.process.clock import Clock
from poolgrid.server.transport.bound_socket import bind
from poolgrid.server.transport.zmq_socket import listen, make_socket
from poolgrid.server.workers.engines.server.cache_events import FollowedEvents
from poolgrid.server.workers.engines.server.core.server_facts import EventSource

log = logging.getLogger(__name__)

CACHES = (
    "DYN_KVBM_CPU_CACHE_GB",
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
    "DYN_KVBM_DISK_CACHE_GB",
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
)
"""Variables that give KVBM room; without one it has nothing to keep blocks in."""
ENGINE_PORT = "DYN_KVBM_TRTLLM_ZMQ_PORT"
LEADER_PORT = "DYN_KVBM_LEADER_ZMQ_PUB_PORT"
ACK_PORT = "DYN_KVBM_LEADER_ZMQ_ACK_PORT"
CONSOLIDATES = "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR"
OUTPUT_OFFSET = 1000
"""From the leader's port to that of the output, in kvbm 1.6.1."""
PORT_TRIES = 64
FRAMES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class KvbmPorts:
    """Where the engine's events are published for KVBM, and where it publishes."""

    engine: int
    output: int


def claim_ports(environment: MutableMapping[str, str] | None = None) -> KvbmPorts | None:
    """Set the variables that KVBM reads when the engine starts; those that are set stay.

    Returns ``None`` where its events are turned off. Raises ``ValueError`` where it has no room, or for a wrong port.
    """
    given = os.environ if environment is None else environment
    if not any(given.get(name) for name in CACHES):
        raise ValueError(
            f"starting an engine with KVBM: {CACHES[0]} is not set, allowed are gigabytes of host memory "
            f"({CACHES[2]} for the disk); without room it keeps no blocks"
        )
    if given.get(CONSOLIDATES, "true").strip().lower() not in ("1", "true", "on", "yes"):
        log.warning("%s turns KVBM's events off: blocks on the host and on disk are not known to routers", CONSOLIDATES)
        return None
    ports: dict[str, int] = {}
    for name in (LEADER_PORT, ACK_PORT, ENGINE_PORT):
        text = given.get(name, "")
        highest = 65_535 - (OUTPUT_OFFSET if name == LEADER_PORT else 0)
        if text and not (text.isdigit() and 1 <= int(text) <= highest):
            raise ValueError(f"starting an engine with KVBM: {name} is {text!r}, allowed are ports from 1 to {highest}")
        ports[name] = int(text) if text else _free_port(OUTPUT_OFFSET if name == LEADER_PORT else 0, ports.values())
    given.update({name: str(port) for name, port in ports.items()})
    return KvbmPorts(ports[ENGINE_PORT], ports[LEADER_PORT] + OUTPUT_OFFSET)


def _free_port(above: int, others: Collection[int]) -> int:
    taken = set(others) | {each + OUTPUT_OFFSET for each in others}
    for _ in range(PORT_TRIES):
        with ExitStack() as bound:
            port: int = bound.enter_context(bind("0.0.0.0", 0, ENGINE_PORT)).getsockname()[1]
            if port in taken or port + above > 65_535:
                continue
            if above:
                try:
                    bound.enter_context(bind("0.0.0.0", port + above, LEADER_PORT))
                except OSError:
                    continue
            return port
    raise ValueError(f"starting an engine with KVBM: no two free ports {above} apart, set {LEADER_PORT}")


class KvbmExchange:
    """Sends KVBM the engine's events, and follows what it publishes."""

    def __init__(self, ports: KvbmPorts, block_size: int, context: zmq.Context[Any], clock: Clock) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._window = 0
        self._seq = 0
        self._held: dict[int, None] = {}
        """Whole blocks that KVBM was sent: those that the engine holds."""
        self._socket = make_socket(context, zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, FRAMES_MAX)
        listen(self._socket, f"tcp://127.0.0.1:{ports.engine}")
        doubt = f"KVBM publishes there once its workers are ready, unless {CONSOLIDATES} is off"
        source = EventSource(0, f"tcp://127.0.0.1:{ports.output}", doubt=doubt)
        self._told = ReportedBlocks()
        self._output = FollowedEvents([source], block_size, context, clock)

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        """Begin to follow KVBM's output; what it holds is told as blocks on the host."""

        def on_host(rank: int, events: list[AnyEvent]) -> None:
            made = list(self._on_host(events))
            self._told.apply(made)
            tell(rank, made)

        self._output.open(on_host)

    def restate(self) -> list[RestatedEvent]:
        return self._told.restate()

    def describe(self) -> dict[str, object]:
        return self._output.describe()

    def close(self) -> None:
        self._output.close()
        self._socket.close()

    def publish(self, events: Sequence[AnyEngineEvent], lost: bool) -> None:
        """Send events of the engine; after a loss it is sent that the engine holds nothing, and then what is new."""
        made: list[dict[str, Any]] = [self._cleared()] if lost else []
        for event in events:
            self._window = max(self._window, event.window_size)
            if event.window_size != self._window:
                continue
            if isinstance(event, Stored):
                made += self._stored(event)
            elif isinstance(event, Removed):
                gone = [each for each in event.block_hashes if each in self._held]
                for each in gone:
                    del self._held[each]
                if gone:
                    made.append({"type": "BlockRemoved", "block_hashes": gone})
            elif isinstance(event, Cleared):
                made.append(self._cleared())
        if made:
            payload = msgspec.msgpack.encode([time.time(), made, 0])
            self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
            self._seq += 1

    def _cleared(self) -> dict[str, Any]:
        self._held.clear()
        return {"type": "AllBlocksCleared"}

    def _stored(self, event: Stored) -> Iterator[dict[str, Any]]:
        """Yield the whole blocks of a chain; those behind a partial one, or one not sent, hang off nothing."""
        whole = []
        if event.parent_hash is None or event.parent_hash in self._held:
            for block in event.blocks:
                if len(block.tokens) != self._block_bytes:
                    break
                whole.append(block)
        if whole:
            self._held.update(dict.fromkeys(each.block_hash for each in whole))
            yield {
                "type": "BlockStored",
                "block_hashes": [each.block_hash for each in whole],
                "parent_block_hash": event.parent_hash,
                "token_ids": list(unpack_tokens(b"".join(each.tokens for each in whole))),
                "block_size": self._block_size,
                "lora_id": None,
            }

    def _on_host(self, events: Sequence[AnyEvent]) -> Iterator[AnyEvent]:
        for event in events:
            if isinstance(event, BlocksStored | BlocksRemoved) and not event.group:
                yield msgspec.structs.replace(event, tier=Tier.HOST)
            elif isinstance(event, CacheCleared):
                # What the engine itself holds stays.
                for each in self._told.restate():
                    if isinstance(each, BlocksStored):
                        yield BlocksRemoved(each.sequence_hashes, Tier.HOST)
