"""Engines that publish themselves, written from the peers' documentation: a PUB socket, a replay ROUTER, two dialects.

The cache in it is real: blocks are named by an engine hash of its own, and ``truth`` is what our index must hold.
"""

from __future__ import annotations

import select
import struct
from collections import Counter, deque
from itertools import groupby, islice
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier

BIND_ATTEMPTS = 500

BLOCK = 4
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}


def frame_of(events: list[Any], rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, events, rank])


def block_stored(
    dialect: str,
    hashes: list[Any],
    parent: Any,
    tokens: list[int],
    medium: str | None = "GPU",
    lora: str | None = None,
    salt: str | None = None,
    block_size: int = BLOCK,
) -> Any:
    if dialect == "vllm":
        event: list[Any] = ["BlockStored", hashes, parent, tokens, block_size, None, medium, lora, None]
        return [*event, None, salt, False, None, "full_attention", None, "LOCAL", "news"] if salt else event
    event_map: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": lora,
        "from_the_future": {"x": [1]},
    }
    return {**event_map, "cache_salt": salt} if salt else event_map


def block_removed(dialect: str, hashes: list[Any], medium: str | None = "GPU") -> Any:
    if dialect == "vllm":
        return ["BlockRemoved", hashes, medium]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def all_cleared(dialect: str) -> Any:
    return ["AllBlocksCleared"] if dialect == "vllm" else {"type": "AllBlocksCleared"}


class Cache:
    """An engine's blocks: engine hash (signed, as engines send it) to sequence hash, per tier.

    What is stored again is there twice, as in vLLM: each copy is told of, and each is removed by itself.
    """

    def __init__(self, dialect: str, salt: int = 0) -> None:
        self.dialect = dialect
        self.salt = salt
        self.truth: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._copies: Counter[tuple[Tier, int]] = Counter()

    def store(self, tokens: list[int], tier: Tier = Tier.DEVICE, lora: str | None = None, cut: int = 0) -> Any:
        """Store a prompt from block ``cut`` on."""
        names = sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK, hash_seed(lora or "")))
        engine = [self._engine_hash(name) for name in names]
        for name, engine_hash in zip(names[cut:], engine[cut:], strict=True):
            self.truth[tier][engine_hash] = name
            self._copies[tier, engine_hash] += 1
        parent = engine[cut - 1] if cut else None
        return block_stored(self.dialect, engine[cut:], parent, tokens[cut * BLOCK :], MEDIA[tier], lora)

    def store_missing(self, tokens: list[int], tier: Tier = Tier.DEVICE) -> list[Any]:
        """Store what a tier lacks of a prompt, as an engine does: what it holds is reused, and no event says so."""
        names = sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK))
        held = self.truth[tier]
        lacking = [self._engine_hash(name) not in held for name in names]
        events: list[Any] = []
        begin = 0
        for lacks, run in groupby(lacking):
            end = begin + sum(1 for _ in run)
            if lacks:
                events.append(self.store(tokens[: end * BLOCK], tier, cut=begin))
            begin = end
        return events

    def _engine_hash(self, name: int) -> int:
        value: int = struct.unpack("<q", struct.pack("<Q", (name * 31 + 7 + self.salt) % 2**64))[0]
        return value

    def remove(self, count: int, tier: Tier = Tier.DEVICE) -> Any:
        held = self.truth[tier]
        hashes = list(islice(reversed(held), count))[::-1]
        self._remove_copies(tier, hashes)
        return block_removed(self.dialect, hashes, MEDIA[tier])

    def evict(self, count: int) -> Any:
        """Remove the oldest blocks of the device, parents before their children."""
        held = self.truth[Tier.DEVICE]
        hashes = list(islice(held, count))
        self._remove_copies(Tier.DEVICE, hashes)
        return block_removed(self.dialect, hashes, MEDIA[Tier.DEVICE])

    def _remove_copies(self, tier: Tier, hashes: list[int]) -> None:
        for engine_hash in hashes:
            self._copies[tier, engine_hash] -= 1
            if not self._copies[tier, engine_hash]:
                del self.truth[tier][engine_hash]

    def clear(self) -> Any:
        self._copies.clear()
        for held in self.truth.values():
            held.clear()
        return all_cleared(self.dialect)

    def held(self) -> dict[Tier, set[int]]:
        return {tier: set(held.values()) for tier, held in self.truth.items()}


def bind_again(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Bind, also where a socket of this context was closed just now: ZMQ lets go of its port in the background."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    for _ in range(BIND_ATTEMPTS):
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            select.select([], [], [], 0.01)
    raise AssertionError(f"{endpoint} was never free again")


class PubEngine:
    """The sockets of such an engine, with frames lost on demand."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str = "tcp://127.0.0.1:*",
        keep: int = 10_000,
        replay: str = "",
        rank: int | None = None,
    ) -> None:
        """``rank`` is what its messages say of whom they are; ``None`` = nothing."""
        self._rank = rank
        self.pub = context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.SNDHWM, 0)
        bind_again(self.pub, endpoint)
        self.endpoint: str = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)
        bind_again(self.router, replay or "tcp://127.0.0.1:*")
        self.replay_endpoint: str = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.seq = 0

    async def subscribed(self) -> None:
        """Wait until somebody subscribed."""
        assert (await self.pub.recv())[:1] == b"\x01"

    async def publish(self, events: list[Any], lose: bool = False) -> None:
        payload = frame_of(events, self._rank)
        self.kept.append((self.seq, payload))
        if not lose:
            await self.pub.send_multipart([b"", struct.pack(">Q", self.seq), payload])
        self.seq += 1

    async def answer_replays(self, dialect: str) -> None:
        """Serve the replay socket until cancelled; TensorRT-LLM repeats the topic in each answer."""
        topic = [b""] if dialect == "trtllm" else []
        while True:
            peer, _, start = await self.router.recv_multipart()
            first = struct.unpack(">Q", start)[0]
            for seq, payload in tuple(self.kept):  # more may be published meanwhile
                if seq >= first:
                    await self.router.send_multipart([peer, b"", *topic, struct.pack(">Q", seq), payload])
            await self.router.send_multipart([peer, b"", *([b""] * len(topic)), struct.pack(">q", -1), b""])

    def close(self) -> None:
        self.pub.close()
        self.router.close()
