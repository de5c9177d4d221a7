"""What an attack is, and what it is given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lab.attacks.pool import AttackedPool, Shape

T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """What the attacker saw."""

    got: str
    """In words, for the table."""
    faults: list[str] = field(default_factory=list)
    """What it achieved that it must not, beyond what is judged of every attack."""
    skipped: str = ""
    """Why it could not be tried on this machine; empty = it was."""


@dataclass(slots=True)
class Scene:
    """Where an attack takes place."""

    pool: AttackedPool
    directory: Path
    """Scratch space of the attack."""
    seconds: float
    """How long it may go on."""
    share: float
    """Of its full size, 0 to 1: the short form sends less."""
    random: random.Random
    home: asyncio.AbstractEventLoop
    """The harness's own loop. Its thread has the usual priority, and so have the processes that it starts."""

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the harness's own loop what belongs to the pool and not to the attacker."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.home))

    def count(self, full: int, least: int = 1) -> int:
        """Return how many of ``full`` things to do."""
        return max(least, int(full * self.share))

    def deadline(self) -> float:
        """Return the loop's time at which the attack ends, counted from now."""
        return asyncio.get_running_loop().time() + self.seconds


Run = Callable[[Scene], Coroutine[Any, Any, Outcome]]
"""Runs on a loop of its own, in a thread that gives way to the pool."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table."""

    name: str
    does: str
    """One sentence: what it sends."""
    run: Run
    shape: Shape = Shape()
    short: bool = True
    """Part of the short form."""
    judge_latency: bool = True
    """A process that stands still cannot answer in time."""
    may_kill: bool = False
    """It ends processes itself."""
    expiries_max: int = 0
    """Leases that may run out: those of workers that the attack itself stops."""
    descriptors_more: int = 0
    """Descriptors that a process may keep: those of a role that it takes over."""
    alone: bool = False
    """No bystanders, and no giving way: it measures time itself."""
    seconds_min: float = 0.0
    """Shortest time in which it can do what it says."""


@dataclass(frozen=True, slots=True)
class Part:
    """Attacks of one kind."""

    name: str
    title: str
    attacks: tuple[Attack, ...]
