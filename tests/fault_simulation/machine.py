"""A machine's clocks: monotonic time counts from its own boot, wall-clock time jumps when the scenario says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.fault_simulation.disk import SimulatedDisk
from tests.fault_simulation.virtual_loop import VirtualLoop

EPOCH_MS = 1_700_000_000_000
"""Wall-clock time at the beginning of every run."""


@dataclass(slots=True)
class Machine:
    """What outlives a process: its name, its clocks, its disk."""

    name: str
    loop: VirtualLoop
    rng: Random
    wall_offset_ms: int = 0
    boot_ms: float = 0.0
    lives: int = 0
    disk: SimulatedDisk = field(init=False)

    def __post_init__(self) -> None:
        self.boot_ms = float(self.rng.randrange(10_000, 100_000_000))
        self.wall_offset_ms = self.rng.randrange(-200, 200)
        self.disk = SimulatedDisk(self.rng, self.loop.spend)

    def wall_ms(self) -> int:
        """Return Unix milliseconds as this machine believes."""
        return EPOCH_MS + int(self.loop.time() * 1000) + self.wall_offset_ms

    def monotonic_ms(self) -> float:
        """Return milliseconds since this machine's boot."""
        return self.boot_ms + self.loop.time() * 1000
