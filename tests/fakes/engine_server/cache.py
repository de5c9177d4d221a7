"""A paged prefix cache like those of real engines: requests that compute the same block at once hold it twice.

With drafting layers it is as unlike a plain one as theirs. vLLM 0.33 and SGLang 0.5.23: a block's hash covers the
tokens behind it too, so that equal blocks have several. vLLM before, and with a KV connector: the last block of what is
found is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes


@dataclass(frozen=True)
class Drafting:
    """What drafting layers make of a cache."""

    looks_ahead: int = 0
    """How many tokens behind a block its hash covers."""
    drops: bool = False
    """Whether the last block of what is found is computed again."""


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

    def __init__(
        self,
        block_size: int,
        total: int,
        publish: Callable[[dict[str, Any]], None],
        life: int,
        drafting: Drafting | None = None,
        is_tree: bool = False,
    ) -> None:
        """``is_tree``: a block that is cached already is not cached again (SGLang's radix tree)."""
        self.block_size = block_size
        self._drafting = drafting or Drafting()
        self._is_tree = is_tree
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
        size, ahead = self.block_size, self._drafting.looks_ahead
        whole = tokens[: max(0, len(tokens) - ahead) // size * size]
        chain: list[int] = []
        parent = xxh3_64_intdigest(f"{self._life}/{lora}/{salt}".encode())
        for at in range(0, len(whole), size):
            touching = "".join(map(str, media_keys(media, at, at + size))).encode()
            covered = pack_tokens(tokens[at : at + size + ahead])
            parent = xxh3_64_intdigest(parent.to_bytes(8, "big") + covered + touching)
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
        found: list[Block] = []
        looked_up = tokens[:-1] if self._is_tree else tokens
        for engine_hash in self.chain(looked_up, lora, salt, media)[: (len(tokens) - 1) // self.block_size]:
            copies = self._cached.get(engine_hash)
            if not copies:
                break
            found.append(next(iter(copies.values())))
        for block in found[:-1] if self._drafting.drops else found:
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
        chain = self.chain(sequence.tokens, sequence.lora, sequence.salt, sequence.media)
        whole = min(computed // size, len(chain))
        begin = sequence.filled
        while self._is_tree and begin < whole and self._cached.get(chain[begin]):
            begin += 1
        if begin < whole:
            for block, engine_hash in zip(sequence.blocks[begin:whole], chain[begin:whole], strict=True):
                block.engine_hash = engine_hash
                self._cached.setdefault(engine_hash, {})[block.number] = block
            self._publish(self._stored(sequence, chain, begin, whole))
        sequence.filled = max(sequence.filled, whole)

    def report(self, sequence: Running) -> None:
        """Publish what a request reuses, as if it were stored (``kv_cache_report_mode``)."""
        if sequence.filled:
            chain = self.chain(sequence.tokens, sequence.lora, sequence.salt, sequence.media)
            self._publish(self._stored(sequence, chain, 0, sequence.filled))

    def _stored(self, sequence: Running, chain: list[int], begin: int, end: int) -> dict[str, Any]:
        size, ahead = self.block_size, self._drafting.looks_ahead
        keys: list[list[Any]] = [
            [*([sequence.lora] if sequence.lora else []), *media_keys(sequence.media, at * size, (at + 1) * size)]
            for at in range(begin, end)
        ]
        if sequence.salt and not begin:
            keys[0].append(sequence.salt)
        behind = [sequence.tokens[at * size : at * size + ahead] for at in range(begin + 1, end + 1)]
        return {
            "type": "BlockStored",
            "block_hashes": chain[begin:end],
            "parent_block_hash": chain[begin - 1] if begin else None,
            "token_ids": sequence.tokens[begin * size : end * size],
            "block_size": size,
            "lora_id": 7 if sequence.lora else None,
            "medium": "GPU",
            "lora_name": sequence.lora or None,
            "extra_keys": [each or None for each in keys],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "session_id": None,
            "lookahead_token_ids": behind if ahead else None,
            # No server sends this one: it is what a dialect makes its own fields of.
            "cache_salt": sequence.salt or None,
        }

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
