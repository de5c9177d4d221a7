"""Which prompts came before: runs of their blocks, how often each run came, and when it came last.

Rules
    1. The unit is the *granule*: so many whole blocks that they hold about 512 tokens, named by the sequence hash of
       its last block. A shorter prompt, and what is left behind the last granule, is not looked at.
    2. A *run* is a stretch of granules that always came together. Where a prompt leaves a run in its middle the run is
       cut there. So a prompt is a chain of whole runs, and costs as much as it has runs.
    3. What came last longest ago is forgotten first, and of one prompt the end before the beginning: what is known of a
       prompt is always a beginning of it, however much was forgotten.
    4. Runs are values: a copy of the table of runs is a copy of the history.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

GRANULE_TOKENS = 512
"""Small against prompts that are worth keeping, and large enough that a prompt of 8,192 tokens is 16 look-ups."""

GRANULES_MAX = 262_144
"""134 million tokens of prompts, 20 to 60 MiB: an hour of a pool that computes 40,000 tokens a second."""


class PrefixRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Granules that always came together."""

    granules: tuple[int, ...]
    visits: int = 0
    """Prompts that had it."""
    last_ms: float = 0.0
    kind: int = 0
    """What it was taken for at its last visit (``poolgrid.router.policies.retention.return_times``)."""
    turn: int = 0
    """Of the last prompt that ended with this run: which turn of its conversation it was; 0 = none ended here."""
    end_block: int = 0
    """Of that prompt, the number of its last whole block, counted from 1."""
    end_hash: int = 0
    """And its sequence hash."""
    end_tokens: int = 0
    """And its length."""
    priority: int = 0
    """The highest that holds for the run's blocks in any cache, as far as is known; 0 = none was sent."""
    duration_ms: int = 0
    until_ms: float = 0.0
    """When the last of these lapses."""


class PrefixHistory:
    """Runs of prompts that share one seed, bounded by ``granules_max``."""

    def __init__(self, granules_max: int = GRANULES_MAX) -> None:
        if granules_max < 1:
            raise ValueError(f"making a prefix history: granules_max is {granules_max}, allowed are integers from 1")
        self._granules_max = granules_max
        self._runs: dict[int, PrefixRun] = {}
        """By number, those that came last longest ago first."""
        self._run_of: dict[int, int] = {}
        """By granule, the number of its run."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._run_of)

    def find(self, granules: Sequence[int]) -> list[tuple[int, PrefixRun, int]]:
        """Return the known beginning of a prompt: number, run, and how many granules of the run the prompt has.

        All but the last are whole. Changes nothing.
        """
        run_of, runs = self._run_of, self._runs
        found: list[tuple[int, PrefixRun, int]] = []
        at, end = 0, len(granules)
        while at < end:
            number = run_of.get(granules[at])
            if number is None:
                break
            run = runs[number]
            own = run.granules
            size = len(own)
            if size <= end - at and own[-1] == granules[at + size - 1]:
                found.append((number, run, size))
                at += size
                continue
            # A granule's name stands for all before it, so the shared part ends at one place.
            low, high = 1, min(size, end - at)
            while low < high:
                middle = (low + high + 1) >> 1
                if own[middle - 1] == granules[at + middle - 1]:
                    low = middle
                else:
                    high = middle - 1
            found.append((number, run, low))
            break
        return found

    def cut(self, number: int, size: int) -> PrefixRun:
        """Cut a run after ``size`` of its granules and return the front part, which keeps the number."""
        run = self._runs[number]
        tail = msgspec.structs.replace(run, granules=run.granules[size:])
        front = msgspec.structs.replace(
            run, granules=run.granules[:size], turn=0, end_block=0, end_hash=0, end_tokens=0
        )
        self._runs[self._next] = tail
        self._run_of.update(dict.fromkeys(tail.granules, self._next))
        self._next += 1
        self._runs[number] = front
        return front

    def note(self, chain: Sequence[tuple[int | None, PrefixRun]]) -> None:
        """Keep a prompt's runs, in its order, as they are now; those without a number are new."""
        runs, run_of = self._runs, self._run_of
        for known_as, run in reversed(chain):
            if known_as is None:
                run_of.update(dict.fromkeys(run.granules, self._next))
                runs[self._next] = run
                self._next += 1
            else:
                del runs[known_as]
                runs[known_as] = run
        while len(run_of) > self._granules_max:
            number = next(iter(runs))
            for granule in runs.pop(number).granules:
                del run_of[granule]

    def runs(self) -> list[PrefixRun]:
        return list(self._runs.values())

    def restore(self, runs: Sequence[PrefixRun]) -> None:
        """Replace everything by the runs of another history, in their order."""
        self._runs = dict(enumerate(runs))
        self._run_of = {granule: number for number, run in self._runs.items() for granule in run.granules}
        self._next = len(self._runs)
