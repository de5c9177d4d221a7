"""The probes of a check: few, short, and of tokens that no cache has seen.

    probe               what it shows
    ------------------  ----------------------------------------------------------------
    first               blocks of a prompt and of its answer are published
    again               the whole prompt comes from the cache
    branch              two prompts share a beginning
    next turn           a conversation continues behind an answer
    whole blocks        a prompt that ends where a block ends; one token is computed anyway
    whole blocks again
    salted              the same prompt under a salt is another one
    salted again
    adapter             and so is it with a LoRA adapter
    adapter, salted     two keys, and their order

With several data-parallel ranks every rank is sent ``first`` and ``again``, and the first rank the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.engine_check.core.evidence import CheckProbe, ProbeExchange

PROMPT_BLOCKS = 4
"""Whole blocks of the longer prompts: enough to have a beginning, a middle and an end."""

RANKS_MAX = 16
"""Ranks that are sent probes of their own; two requests each. The others' sources are subscribed to all the same."""

OUTPUT_TOKENS_MAX = 130
"""Most tokens that a probe asks for: a block of 128 and two more. With larger blocks no output fills one."""

LOWEST_TOKEN = 256
"""Below it tokenizers keep bytes and marks, which an engine might treat in a way of its own."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan is made for."""

    seed: str
    """Makes the tokens; another one for each check, so that no cache has seen them."""
    block_size: int
    tokens_below: int = 4000
    """Token ids are below this: every model has so many."""
    prompt_tokens_max: int = 2048
    """Longest prompt; larger blocks make for fewer of them."""
    salt: str = ""
    lora: str = ""
    ranks: tuple[int | None, ...] = (None,)
    """Ranks to send to; ``None`` alone = the server has one, and gets none."""

    def __post_init__(self) -> None:
        if self.tokens_below <= LOWEST_TOKEN:
            raise ValueError(f"planning probes: tokens_below is {self.tokens_below}, allowed are above {LOWEST_TOKEN}")
        if self.prompt_tokens_max < 2 * self.block_size + 1:
            raise ValueError(
                f"planning probes: prompt_tokens_max is {self.prompt_tokens_max}, two blocks of {self.block_size} and "
                "a token more are needed"
            )

    @property
    def blocks(self) -> int:
        return max(2, min(PROMPT_BLOCKS, (self.prompt_tokens_max - 1) // (2 * self.block_size)))

    @property
    def output_tokens(self) -> int:
        return self.block_size + 2 if self.block_size + 2 <= OUTPUT_TOKENS_MAX else 4


def fresh_tokens(limits: PlanLimits, what: str, count: int) -> tuple[int, ...]:
    """Return tokens that no other client sends."""
    span = limits.tokens_below - LOWEST_TOKEN
    return tuple(LOWEST_TOKEN + stable_u64(f"{limits.seed}/{what}/{at}") % span for at in range(count))


Earlier = Mapping[str, ProbeExchange]
"""The exchanges so far, by the name of the probe."""

Step = tuple[str, Callable[[Earlier], CheckProbe | None]]


def plan(limits: PlanLimits) -> Iterator[Step]:
    """Yield the probes in their order, each as its name and what makes it from those before; ``None`` = left out."""
    for number, rank in enumerate(limits.ranks[:RANKS_MAX]):
        yield from _basic(limits, rank, f", rank {rank}" if number else "")
    yield from _further(limits, limits.ranks[0])


def _basic(limits: PlanLimits, rank: int | None, behind: str) -> Iterator[Step]:
    size, blocks, output = limits.block_size, limits.blocks, limits.output_tokens
    prompt = fresh_tokens(limits, f"first/{rank}", blocks * size + max(1, size // 2))
    for name in ("first", "again"):
        probe = CheckProbe(f"{name}{behind}", prompt, output, rank=rank)
        yield probe.name, lambda _, probe=probe: probe  # type: ignore[misc]


def _further(limits: PlanLimits, rank: int | None) -> Iterator[Step]:
    size, output = limits.block_size, limits.output_tokens

    def first(earlier: Earlier) -> tuple[int, ...]:
        return earlier["first"].probe.tokens

    def branch(earlier: Earlier) -> CheckProbe:
        begun = first(earlier)[: size * (limits.blocks // 2)]
        return CheckProbe("branch", (*begun, *fresh_tokens(limits, "branch", size + 1)), output, rank=rank)

    def next_turn(earlier: Earlier) -> CheckProbe | None:
        before = earlier["first"]
        if not before.output:
            return None
        turn = fresh_tokens(limits, "turn", max(1, size // 2))
        return CheckProbe("next turn", (*before.probe.tokens, *before.output, *turn), output, rank=rank)

    yield "branch", branch
    yield "next turn", next_turn
    exact = fresh_tokens(limits, "whole", size * limits.blocks)
    for name in ("whole blocks", "whole blocks again"):
        probe = CheckProbe(name, exact, output, rank=rank)
        yield name, lambda _, probe=probe: probe  # type: ignore[misc]
    keyed = []
    if limits.salt:
        keyed += [("salted", limits.salt, ""), ("salted again", limits.salt, "")]
    if limits.lora:
        keyed += [("adapter", "", limits.lora)]
    if limits.lora and limits.salt:
        keyed += [("adapter, salted", limits.salt, limits.lora)]
    for name, salt, lora in keyed:

        def make(earlier: Earlier, name: str = name, salt: str = salt, lora: str = lora) -> CheckProbe:
            return CheckProbe(name, first(earlier), output, salt, lora, rank)

        yield name, make
