"""Two readings of a rank's stream: the router's own, and one that follows the engine's chain whatever it is made of.

Where the two disagree, or where both lack a block, the rules find out why.

Which blocks an exchange implies: the whole blocks of the prompt and of the output, but for the last token.

The last sampled token has no KV yet. Names are the router's sequence hashes, once as the router computes them (with the
seed of LoRA and salt), once for the tokens alone: with these a block is found for any keys in the events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from poolgrid.kernel.kv_events.pub import decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import BlocksRemoved, BlocksStored, CacheCleared
from poolgrid.kernel.wire.hashing import BASE_SEED, block_hashes, hash_seed, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.plugins.engine_check.core.evidence import CheckProbe, ProbeExchange
from poolgrid.plugins.engine_check.core.said import (
    RankStream,
    SaidCleared,
    SaidEvent,
    SaidMessage,
    SaidRemoved,
    SaidStored,
)

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
        """Take in the live messages among the first so many."""
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
            elif not isinstance(event, BlocksStored | BlocksRemoved) or event.group or event.tier is not Tier.DEVICE:
                continue  # the questions are about whole prefixes on the device
            elif isinstance(event, BlocksStored):
                self.held.update(unpack_hashes(event.sequence_hashes))
            else:
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
    """The blocks that a rank reported as stored, found by their parents, in any block size and with any keys."""

    def __init__(self, salts: Collection[str]) -> None:
        self._salts = salts
        self._blocks: dict[int, ChainBlock] = {}
        self.ever: set[ChainBlock] = set()

    def take(self, message: SaidMessage) -> None:
        for event in message.events:
            self.follow(event)

    def follow(self, event: SaidEvent) -> None:
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
        path = self.path_of(event)
        self._blocks.update(zip(event.hashes, path, strict=False))
        self.ever.update(path)
        return path


@dataclass(frozen=True, slots=True)
class ExpectedPath:
    """The blocks of one exchange, from the first."""

    exchange: ProbeExchange
    number: int
    """Its place among all exchanges."""
    names: tuple[int, ...]
    """As the router names them."""
    token_names: tuple[int, ...]
    """For the tokens alone."""
    tokens: tuple[int, ...]
    """Those of prompt and output that have KV."""
    beyond: int | None
    """Token name of the block that the last sampled token would complete; ``None`` = it completes none."""
    size: int
    """Tokens in a block."""

    @property
    def probe(self) -> CheckProbe:
        return self.exchange.probe

    def reusable_blocks(self, block_size: int) -> int:
        """Return how many blocks of the prompt can come from a cache: one token at least is always computed."""
        return (len(self.probe.tokens) - 1) // block_size


def path_names(tokens: Sequence[int], block_size: int, seed: int = BASE_SEED) -> tuple[int, ...]:
    """Return the sequence hashes of the whole blocks of some tokens."""
    return tuple(sequence_hashes(block_hashes(pack_tokens(tokens), block_size, seed)))


def expected_paths(exchanges: Iterable[ProbeExchange], block_size: int) -> list[ExpectedPath]:
    """Return the blocks of every exchange that had an answer."""
    paths = []
    for number, exchange in enumerate(exchanges):
        if exchange.failure:
            continue
        probe = exchange.probe
        tokens = (*probe.tokens, *exchange.output[:-1])
        whole = (*probe.tokens, *exchange.output)
        completes = exchange.output and len(whole) % block_size == 0
        paths.append(
            ExpectedPath(
                exchange,
                number,
                path_names(tokens, block_size, hash_seed(probe.lora, probe.salt)),
                path_names(tokens, block_size),
                tokens,
                path_names(whole, block_size)[-1] if completes else None,
                block_size,
            )
        )
    return paths
