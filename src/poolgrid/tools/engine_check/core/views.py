"""Two readings of a rank's stream: the router's own, and one that follows the engine's chain whatever it is made of.

Where the two disagree, or where both lack a block, the rules find out why.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from poolgrid.kv_events.pub import decode_pub
from poolgrid.kv_events.translation import EngineTranslator
from poolgrid.tools.engine_check.core.said import SaidCleared, SaidMessage, SaidRemoved, SaidStored
from poolgrid.tools.engine_check.core.streams import RankStream
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.events import BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.wire.hashing import BASE_SEED, block_hashes, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.wire.identifiers import Tier

BLOCKS_MAX = 1_000_000
"""Blocks that a view takes in, of the engine's whole traffic: as many as a large cache holds."""


class RouterView:
    """What the prefix index of a router would hold of a rank, by the very code that a consolidator runs."""

    def __init__(self, stream: RankStream, block_size: int) -> None:
        self._stream = stream
        self._block_size = block_size
        self._translator = EngineTranslator(block_size, BLOCKS_MAX)
        self._at = 0
        self._next: int | None = None
        self.held: set[int] = set()
        """Blocks of the device now."""
        self.ever: set[int] = set()
        """Blocks that were held at some time."""

    def advance(self, heard: int) -> None:
        """Take in what had been heard live when so many messages had come in all."""
        whole = self._stream.whole
        while self._at < len(whole) and whole[self._at].number < heard:
            message = whole[self._at]
            self._at += 1
            if self._next is not None and message.sequence < self._next:
                self._translator = EngineTranslator(self._block_size, BLOCKS_MAX)
                self.held.clear()
            self._next = message.sequence + 1
            if message.said is not None:
                self._take(message.said.payload)

    def _take(self, payload: bytes) -> None:
        try:
            batch = decode_pub(payload)
        except DecodeError:
            return
        if batch.dp_rank is not None and batch.dp_rank != self._stream.rank:
            return
        for event in self._translator.translate(batch.events):
            if isinstance(event, CacheCleared):
                self.held.clear()
            elif isinstance(event, BlocksStored) and event.tier is Tier.DEVICE:
                self.held.update(unpack_hashes(event.sequence_hashes))
            elif isinstance(event, BlocksRemoved) and event.tier is Tier.DEVICE:
                self.held.difference_update(unpack_hashes(event.sequence_hashes))
        self.ever |= self.held


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """A block as the engine's own chain has it."""

    token_name: int
    """Name of its path for the tokens alone."""
    salt: str
    """The salt that it, or the first block of its path, was stored under, where a probe's salt is among the keys."""
    lora: str


class ChainView:
    """The blocks that a rank said it stored, found by their parents, in whatever block size and whatever keys."""

    def __init__(self, salts: Collection[str]) -> None:
        self._salts = salts
        self._blocks: dict[int, ChainBlock] = {}
        self.ever: set[ChainBlock] = set()

    def take(self, message: SaidMessage) -> None:
        """Take in a message."""
        for event in message.events:
            if isinstance(event, SaidStored):
                self.store(event)
            elif isinstance(event, SaidCleared):
                self._blocks.clear()
            elif isinstance(event, SaidRemoved):
                for name in event.hashes:
                    self._blocks.pop(name, None)

    def knows(self, name: int) -> bool:
        return name in self._blocks

    def path_of(self, event: SaidStored) -> list[ChainBlock]:
        """Return the blocks of a stored event; none when its parent is not known or it has no tokens."""
        size = event.block_size
        parent = None if event.parent is None else self._blocks.get(event.parent)
        if not size or event.tokens is None or (event.parent is not None and parent is None):
            return []
        hashes = block_hashes(pack_tokens(event.tokens), size, BASE_SEED)[: len(event.hashes)]
        salt, lora = ("", event.lora_name) if parent is None else (parent.salt, parent.lora or event.lora_name)
        first = event.keys[0] if event.keys else ()
        salt = event.salt or next((key for key in first if isinstance(key, str) and key in self._salts), salt)
        names = sequence_hashes(hashes, None if parent is None else parent.token_name)
        return [ChainBlock(name, salt, lora) for name in names]

    def store(self, event: SaidStored) -> list[ChainBlock]:
        """Take in a stored event; return its blocks."""
        path = self.path_of(event)
        self._blocks.update(zip(event.hashes, path, strict=False))
        self.ever.update(path)
        return path
