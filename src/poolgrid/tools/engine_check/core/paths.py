"""Which blocks an exchange implies: the whole blocks of the prompt and of the output, but for the last token.

The last sampled token has no KV yet. Names are the router's sequence hashes, once as the router computes them (with the
seed of LoRA and salt), once for the tokens alone: with these a block is found whatever the engine says of its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poolgrid.tools.engine_check.core.evidence import Exchange, Probe
from poolgrid.wire.hashing import BASE_SEED, block_hashes, hash_seed, pack_tokens, sequence_hashes


@dataclass(frozen=True, slots=True)
class ExpectedPath:
    """The blocks of one exchange, from the first."""

    exchange: Exchange
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

    @property
    def probe(self) -> Probe:
        return self.exchange.probe

    def reusable_blocks(self, block_size: int) -> int:
        """Return how many blocks of the prompt can come from a cache: one token at least is always computed."""
        return (len(self.probe.tokens) - 1) // block_size


def path_names(tokens: Sequence[int], block_size: int, seed: int = BASE_SEED) -> tuple[int, ...]:
    """Return the sequence hashes of the whole blocks of some tokens."""
    return tuple(sequence_hashes(block_hashes(pack_tokens(tokens), block_size, seed)))


def expected_paths(exchanges: Iterable[Exchange], block_size: int) -> list[ExpectedPath]:
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
            )
        )
    return paths
