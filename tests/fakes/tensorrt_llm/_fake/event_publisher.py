"""Events that the second cache manager publishes by itself, over ZMQ, as ``kv_events_config`` asks.

1. Each rank binds a PUB socket at the base port plus its rank (or ``_dpN`` behind an ipc path), and with a replay
   endpoint a ROUTER that sends what is kept from a frame on, ended by the frame number -1.
2. A frame is ``[topic, number, payload]``, the number 8 bytes big-endian, the payload msgpack of ``[time, events,
   rank]``, an event a map with its ``type``. Blocks are named by the first 64 bits of their digests, signed, whatever
   the events of the buffer call them.
3. Only whole blocks of the largest window are told of, stored and removed; neither salts nor adapters are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from .block_key import radix_key, truncated
from .profile import PROFILE

Scope = tuple[int | None, int | None]
"""Number of the salt and of the adapter that a chain was stored under."""

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


def _signed(digest: bytes) -> int:
    value = truncated(digest)
    return value - 2 * SIGN if value >= SIGN else value


class RankPublisher:
    """Publishes the events of one rank."""

    def __init__(
        self, rank: int, config: Any, tokens_per_block: int, window: int, scope_of: Callable[[int], Scope]
    ) -> None:
        """``scope_of`` returns the scope of a first block, by what the events of the buffer call it."""
        self._scope_of = scope_of
        self._rank = rank
        self._config = config
        self._block = tokens_per_block
        self._window = window
        self._digests: dict[int, bytes] = {}
        """Of each block that was told, by what the events of the buffer call it."""
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
            parent = data["parent_hash"]
            above = None if parent is None else self._digests[parent]
            scope = self._scope_of(whole[0]["block_hash"]) if parent is None else ()
            digests: list[bytes] = []
            for block in whole:
                tokens = [token["token_id"] for token in block["tokens"]]
                digests.append(radix_key(digests[-1] if digests else above, tokens, *(() if digests else scope)))
                self._digests[block["block_hash"]] = digests[-1]
            return [
                {
                    "type": "BlockStored",
                    "block_hashes": list(map(_signed, digests)),
                    "parent_block_hash": None if above is None else _signed(above),
                    "token_ids": [token["token_id"] for block in whole for token in block["tokens"]],
                    "block_size": self._block,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    **({"mm_keys": [_media(block) for block in whole]} if PROFILE.second_by_default else {}),
                }
            ]
        if data["type"] == "removed":
            gone = (self._digests.pop(each, None) for each in data["block_hashes"])
            names = [_signed(each) for each in gone if each is not None]
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
