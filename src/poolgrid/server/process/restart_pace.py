"""How soon a process that died is started again: at once the first time, then at growing intervals, without end.

Rules
    1. The pause doubles with each death, from ``PAUSE_MIN_S`` to ``PAUSE_MAX_S``. It never ends: what keeps a part from
       starting (a port in use, a full disk) may pass, and meanwhile the others serve.
    2. Each pause is up to a quarter shorter or longer, drawn from the part's name and the number of its death: parts
       that died together do not come back together, and the same run does the same again.
    3. A part that has lived for ``STEADY_S`` since it was ready is taken for well: its next death is its first.
"""

from __future__ import annotations

from poolgrid.kernel.wire.hashing import stable_u64

PAUSE_MIN_S = 0.03
"""Far below what an interpreter takes to start: a part that was killed is back as soon as it can be."""

PAUSE_MAX_S = 15.0
"""A part whose trouble is over is back within this time; one that cannot start costs a second of a core as often."""

JITTER = 0.25

STEADY_S = 30.0
"""Twice the longest pause: a part that dies more often than that waits ever longer."""

DEATHS_LOUD = 5
"""From this exit on the log warns that the part ends again and again, and that the others serve."""


class RestartPace:
    """The deaths of one part; in whatever time its caller lives."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.deaths = 0
        """Since it was last well."""

    def died(self, lived_s: float) -> float:
        """Take note of a death, and how long the part had been ready; return the pause before the next start."""
        self.deaths = 1 if lived_s >= STEADY_S else self.deaths + 1
        pause_s: float = min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(self.deaths - 1, 32))
        drawn = stable_u64(f"{self._name}/{self.deaths}") / 2**64
        return pause_s * (1 + JITTER * (2 * drawn - 1))

    @property
    def is_loud(self) -> bool:
        return self.deaths >= DEATHS_LOUD
