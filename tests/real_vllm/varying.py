"""Which checks are lost through a router: answers of random weights vary, and many checks need a certain one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TRIES = 4
"""Of a check that has passed against vLLM and failed through the router."""
VARIES_FROM = 2
"""Failures alone among these from which on a check shows nothing of the router."""

Runs = Callable[[Sequence[str]], set[str]]
"""Runs checks by their names, and returns those that pass."""


@dataclass
class Settled:
    """What became of checks that once failed through the router and passed alone."""

    lost: list[str] = field(default_factory=list)
    """They pass alone, and never through the router."""
    varying: list[str] = field(default_factory=list)
    """They fail alone too."""
    later: list[str] = field(default_factory=list)
    """They pass through the router in a further try."""


def settle(names: Sequence[str], through: Runs, alone: Runs) -> Settled:
    """Run checks again, both ways, until it is known what they are."""
    found, failed_alone = Settled(list(names)), Counter[str]()
    for _ in range(TRIES):
        if not found.lost:
            break
        passed = through(found.lost)
        found.later += [name for name in found.lost if name in passed]
        found.lost = [name for name in found.lost if name not in passed]
        if not found.lost:
            break
        passed = alone(found.lost)
        failed_alone.update(name for name in found.lost if name not in passed)
        found.varying += [name for name in found.lost if failed_alone[name] >= VARIES_FROM]
        found.lost = [name for name in found.lost if failed_alone[name] < VARIES_FROM]
    return found
