"""Events that the second cache manager publishes by itself, over ZMQ, as ``kv_events_config`` asks.

1. Each rank binds a PUB socket at the base port plus its rank (or ``_dpN`` behind an ipc path), and with a replay
   endpoint a ROUTER that sends what is kept from a frame on, ended by the frame number -1.
2. A frame is ``[topic, number, payload]``, the number 8 bytes big-endian, the payload msgpack of ``[time, events,
   rank]``, an event a map with its ``type``. Blocks are named by the last 64 bits of their digests, signed.
3. Only whole blocks of the largest window are told of, stored and removed; neither salts nor adapters are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from .profile import PROFILE

SIGN = 1 << 63


def of_rank(endpoint: str, rank: int) -> str:
    """Return where a rank binds."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _media(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what 1.4 says of the media that a block depends on."""
    digests = [token["token_id"] for token in block["tokens"] if isinstance(token["token_id"], str)]
    return [{"type": "mm_key", "hash": digest, "start_offset": 0} for digest in digests]


def _signed(name: int | str) -> int:
    value = int(name[-16:], 16) if isinstance(name, str) else name
    return value - 2 * SIGN if value >= SIGN else value


class RankPublisher:
    """Publishes the events of one rank."""

    def __init__(self, rank: int, config: Any, tokens_per_block: int, window: int) -> None:
        self._rank = rank
        self._config = config
        self._block = tokens_per_block
        self._window = window
        self._told: set[int] = set()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(of_rank(config.endpoint, rank))
        self._ended = threading.Event()
        self._answering: threading.Thread | None = None
        if config.replay_endpoint:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.bind(of_rank(config.replay_endpoint, rank))
            self._answering = threading.Thread(target=self._answer, args=(router,), daemon=True)
            self._answering.start()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Send the events of an iteration; what the first manager would tell besides is left out."""
        told = [
            each for event in events if event["window_size"] == self._window for each in self._told_of(event["data"])
        ]
        if not told:
            return
        number = self._next.to_bytes(8, "big")
        self._next += 1
        payload = msgspec.msgpack.encode([time.time(), told, self._rank])
        with self._lock:
            self._kept.append((number, payload))
            self._pub.send_multipart([self._config.topic.encode(), number, payload])

    def close(self) -> None:
        """Stop, and free the ports."""
        self._ended.set()
        if self._answering is not None:
            self._answering.join()
        with self._lock:
            self._pub.close()
        self._context.term()

    def _told_of(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        if data["type"] == "stored":
            whole = []
            for block in data["blocks"]:
                if len(block["tokens"]) < self._block:
                    break
                whole.append(block)
            if not whole:
                return []
            names = [_signed(block["block_hash"]) for block in whole]
            self._told.update(names)
            parent = data["parent_hash"]
            return [
                {
                    "type": "BlockStored",
                    "block_hashes": names,
                    "parent_block_hash": None if parent is None else _signed(parent),
                    "token_ids": [token["token_id"] for block in whole for token in block["tokens"]],
                    "block_size": self._block,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    **({"mm_keys": [_media(block) for block in whole]} if PROFILE.second_by_default else {}),
                }
            ]
        if data["type"] == "removed":
            names = [name for name in map(_signed, data["block_hashes"]) if name in self._told]
            self._told.difference_update(names)
            return [{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}] if names else []
        return []

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        while not self._ended.is_set():
            if not router.poll(20):
                continue
            client, _, start = router.recv_multipart()
            with self._lock:
                kept = [each for each in self._kept if each[0] >= start]
            for number, payload in kept:
                router.send_multipart([client, b"", self._config.topic.encode(), number, payload])
            router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
        router.close()
