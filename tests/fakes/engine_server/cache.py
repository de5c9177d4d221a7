"""A paged prefix cache like those of real engines: requests that compute the same prefix at once hold it twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

from poolgrid.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes


@dataclass
class Block:
    number: int
    engine_hash: int | None = None
    users: int = 0


@dataclass
class Running:
    """The tokens of a request, and the blocks that hold them."""

    tokens: list[int]
    lora: str
    salt: str
    blocks: list[Block] = field(default_factory=list)
    filled: int = 0
    """Blocks that are whole and cached."""
    media: tuple[tuple[int, int, str], ...] = ()
    """Pictures among the tokens: where each begins, how many tokens it has, and what it is called."""


def media_keys(media: Sequence[tuple[int, int, str]], start: int, end: int) -> list[list[Any]]:
    """What an event says of the pictures in one block: their names, and where in the block they begin."""
    return [[name, offset - start] for offset, length, name in media if offset < end and start < offset + length]


class PagedCache:
    """``publish`` gets events as vLLM has them, maps with a ``type``."""

    def __init__(self, block_size: int, total: int, publish: Callable[[dict[str, Any]], None], life: int) -> None:
        self.block_size = block_size
        self._publish = publish
        self._life = life
        self._free: OrderedDict[int, Block] = OrderedDict((number, Block(number)) for number in range(total))
        self._cached: dict[int, dict[int, Block]] = {}
        self._names: dict[int, int] = {}

    def names(self) -> set[int]:
        """What our index must hold: the sequence hash of every block that can be reused."""
        return {self._names[engine_hash] for engine_hash in self._cached if engine_hash in self._names}

    def chain(
        self, tokens: Sequence[int], lora: str, salt: str, media: Sequence[tuple[int, int, str]] = ()
    ) -> list[int]:
        """The engine's hashes of the whole blocks of a prompt; pictures go into those that they touch."""
        size = self.block_size
        whole = tokens[: len(tokens) // size * size]
        chain: list[int] = []
        parent = xxh3_64_intdigest(f"{self._life}/{lora}/{salt}".encode())
        for at in range(0, len(whole), size):
            touching = "".join(map(str, media_keys(media, at, at + size))).encode()
            parent = xxh3_64_intdigest(parent.to_bytes(8, "big") + pack_tokens(whole[at : at + size]) + touching)
            chain.append(parent)
        # From the first picture on a block has no name: its tokens alone do not say what is in it.
        named = whole[: media[0][0] // size * size] if media else whole
        names = sequence_hashes(block_hashes(pack_tokens(named), size, hash_seed(lora, salt)))
        self._names.update(zip(chain, names, strict=False))
        return chain

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        """Take a prompt in; return how many of its tokens were cached. The last token is always computed."""
        sequence = Running(list(tokens), lora, salt, media=media)
        for engine_hash in self.chain(tokens, lora, salt, media)[: (len(tokens) - 1) // self.block_size]:
            copies = self._cached.get(engine_hash)
            if not copies:
                break
            block = next(iter(copies.values()))
            block.users += 1
            self._free.pop(block.number, None)
            sequence.blocks.append(block)
        sequence.filled = len(sequence.blocks)
        return sequence, sequence.filled * self.block_size

    def fill(self, sequence: Running, computed: int) -> None:
        """Note that the KV of so many tokens exists; whole blocks are cached and told of."""
        size = self.block_size
        while len(sequence.blocks) * size < computed:
            sequence.blocks.append(self._take())
        whole = computed // size
        if whole <= sequence.filled:
            return
        chain = self.chain(sequence.tokens[: whole * size], sequence.lora, sequence.salt, sequence.media)
        fresh = chain[sequence.filled :]
        for block, engine_hash in zip(sequence.blocks[sequence.filled : whole], fresh, strict=True):
            block.engine_hash = engine_hash
            self._cached.setdefault(engine_hash, {})[block.number] = block
        keys: list[list[Any]] = [
            [*([sequence.lora] if sequence.lora else []), *media_keys(sequence.media, at * size, (at + 1) * size)]
            for at in range(sequence.filled, whole)
        ]
        if sequence.salt and not sequence.filled:
            keys[0].append(sequence.salt)
        self._publish(
            {
                "type": "BlockStored",
                "block_hashes": fresh,
                "parent_block_hash": chain[sequence.filled - 1] if sequence.filled else None,
                "token_ids": sequence.tokens[sequence.filled * size : whole * size],
                "block_size": size,
                "lora_id": 7 if sequence.lora else None,
                "medium": "GPU",
                "lora_name": sequence.lora or None,
                "extra_keys": [each or None for each in keys],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        sequence.filled = whole

    def end(self, sequence: Running) -> None:
        """Let go of a request's blocks; the end of a prompt is evicted before its beginning."""
        for block in reversed(sequence.blocks):
            block.users -= 1
            if not block.users:
                self._free[block.number] = block
        sequence.blocks = []

    def reset(self) -> None:
        """Forget what is cached; nothing runs then."""
        for copies in self._cached.values():
            for block in copies.values():
                block.engine_hash = None
        self._cached = {}
        self._publish({"type": "AllBlocksCleared"})

    def _take(self) -> Block:
        number, block = self._free.popitem(last=False)
        if block.engine_hash is not None:
            copies = self._cached[block.engine_hash]
            del copies[number]
            if not copies:
                del self._cached[block.engine_hash]
            self._publish(
                {"type": "BlockRemoved", "block_hashes": [block.engine_hash], "medium": "GPU", "group_idx": 0}
            )
            block.engine_hash = None
        block.users = 1
        return block
