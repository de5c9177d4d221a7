"""What caches would find with priorities and without, for the same requests: whether keeping blocks pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from poolgrid.router.policies.retention.ghost_cache import GhostCache, Kept
from poolgrid.wire.identifiers import WorkerKey
from poolgrid.wire.requests import RETENTION_DEFAULT

GHOST_GRANULES_MAX = 32_768
"""Room of a ghost, 3 to 5 MiB: 17 million tokens. Of larger caches it has one granule of two, four, …; copied for
a checkpoint in some milliseconds."""

LRU_GHOSTS_MAX = 16
"""Workers of which it is counted what they reuse that they would have lost: enough to see whether keeping helps."""

GHOST_MEMORY_MS = 600_000.0
"""After ten minutes a ghost's find counts 1/e."""

PAYS, PAYS_NO_MORE = 1.1, 1.04
"""How much more the ghost with priorities must find before what is learnt is said, and until it is said no more."""

LATELY_MS = 120_000.0
"""After two minutes a ghost's find counts 1/e where it is asked whether keeping has begun to harm: long enough for some
dozens of prompts, short against the ten minutes after which a gain of before is forgotten."""

NEARLY, OFTEN = 1.1, 0.1
"""How much more room a third ghost has, which has no priorities either, and of what share of all prompts it finds more
than the one with less room where room is nearly enough. Prompts that come in turn lose all in one cache that lacks a
little, and much less in the caches of several workers, of which some lack nothing. Where keeping finds no more than a
tenth more room would, nothing is said then. Of conversations more room finds more of a prompt in a hundred."""

AT_ONCE = 1.25
"""How many times what the third ghost finds keeping must find there before it begins to be said."""

HARMS = 0.98
"""What is learnt is said no more when the ghost with priorities has found less than this of the other's, lately."""

SPENT = 10
"""Priority of what has never come again: the rest behind the last granule, and the output. No host tier gets it."""


class HeldPrompt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prompt that a worker has."""

    granules: list[int]
    kept: list[Kept]
    rest: float
    """Granules that its last tokens and its output fill."""
    granule_tokens: int
    found: int
    """Granules that the worker would have had without priorities; -1 where that is not counted."""
    generation: int
    """Of the ghosts that have it."""
    begun_ms: float
    block_size: int = 0
    blocks: int = 0
    """Of the prompt alone; 0 where that was not noted."""


class PoolGhosts:
    """Three ghosts of all caches together, and ghosts of some workers without priorities."""

    def __init__(self) -> None:
        self.kept, self.plain, self.roomier = GhostCache(1), GhostCache(1), GhostCache(1)
        """All caches together: with priorities, without, and without but with more room."""
        self.every = 1
        """Of which they have one granule of so many, a power of two."""
        self.generation = 0
        self._lru: dict[WorkerKey, GhostCache] = {}
        """Caches of workers as they would be without priorities, for requests that go where they go with them."""
        self.rest = 0.0
        self._rests: dict[WorkerKey, float] = {}
        """Parts of granules that are still to be added to ghosts."""
        self.spent = self._lru_spent = 0
        """Names of what nobody will ask for: apart, as what only counts is in no checkpoint."""
        self.kept_hits = self.plain_hits = self.roomier_hits = 0.0
        self.prompts = self.roomier_prompts = 0.0
        """How many there were, and of how many more room found more; both fade."""
        self.kept_lately = self.plain_lately = 0.0
        self.pays = False
        """Whether what is learnt is said."""
        self.spoke = False
        """Whether it ever was."""

    def begin(self, worker: WorkerKey, room: int, granules: list[int], now_ms: float) -> int:
        """Let ghosts have a prompt; return what the worker would have had of it without priorities."""
        sampled, _ = self._sample(granules, ())
        kept, plain = self.kept.begin(sampled, now_ms), self.plain.begin(sampled, now_ms)
        self.kept_hits += kept
        self.plain_hits += plain
        self.kept_lately += kept
        self.plain_lately += plain
        roomier = self.roomier.begin(sampled, now_ms)
        self.roomier_hits += roomier
        self.prompts += 1.0
        self.roomier_prompts += roomier > plain
        lru = self._lru.get(worker)
        if lru is None:
            if len(self._lru) >= LRU_GHOSTS_MAX:
                return -1
            lru = self._lru[worker] = GhostCache(room)
            self._rests[worker] = 0.0
        return lru.begin(granules, now_ms)

    def _sample(self, granules: list[int], kept: Sequence[Kept]) -> tuple[list[int], Sequence[Kept]]:
        """Return those granules that the ghosts of all caches have."""
        if self.every == 1:
            return granules, kept
        others = self.every - 1
        sampled = [granule for granule in granules if not granule & others]
        levels: list[Kept] = []
        at = 0
        for count, priority, duration_ms in kept:
            there = sum(not granule & others for granule in granules[at : at + count])
            levels.append((there, priority, duration_ms))
            at += count
        return sampled, levels

    def resize(self, granules: int) -> None:
        every = 1
        while granules > every * GHOST_GRANULES_MAX:
            every *= 2
        if every != self.every:
            self.every = every
            self.generation += 1
            self.kept, self.plain, self.roomier = GhostCache(1), GhostCache(1), GhostCache(1)
        self.kept.capacity = self.plain.capacity = max(1, granules // every)
        self.roomier.capacity = max(1, int(NEARLY * granules) // every)

    def end(self, worker: WorkerKey, held: HeldPrompt, now_ms: float) -> None:
        """Let ghosts have what a request left."""
        if held.generation == self.generation:
            granules, kept = self._sample(held.granules, held.kept)
            self.kept.end(granules, kept, now_ms)
            for plain in (self.plain, self.roomier):
                plain.end(granules, ((len(granules), RETENTION_DEFAULT, 0),), now_ms)
            self.rest += held.rest / self.every
            while self.rest >= 1.0:
                self.rest -= 1.0
                self.spent -= 1
                self.kept.add_spent(self.spent, SPENT, now_ms)
                self.plain.add_spent(self.spent, RETENTION_DEFAULT, now_ms)
                self.roomier.add_spent(self.spent, RETENTION_DEFAULT, now_ms)
        lru = self._lru.get(worker)
        if lru is not None and held.found >= 0:
            lru.end(held.granules, ((len(held.granules), RETENTION_DEFAULT, 0),), now_ms)
            rest = self._rests[worker] + held.rest
            while rest >= 1.0:
                rest -= 1.0
                self._lru_spent -= 1
                lru.add_spent(self._lru_spent, RETENTION_DEFAULT, now_ms)
            self._rests[worker] = rest

    def forget(self, worker: WorkerKey) -> None:
        """Forget what one worker would have had; the ghosts of all caches have no way to lose it."""
        self._lru.pop(worker, None)
        self._rests.pop(worker, None)

    def forget_workers(self) -> None:
        self._lru, self._rests = {}, {}

    def judge(self) -> None:
        """Find out whether keeping pays."""
        if self.kept_lately < self.plain_lately * HARMS:
            # What it gained before says nothing of now.
            self.kept_hits = min(self.kept_hits, self.plain_hits)
        enough = self.roomier_hits * (1.0 if self.pays else AT_ONCE)
        is_nearly_enough = self.kept_hits <= enough and self.roomier_prompts > self.prompts * OFTEN
        if self.kept_hits <= self.plain_hits * PAYS_NO_MORE or is_nearly_enough:
            self.pays = False
        elif self.kept_hits > self.plain_hits * PAYS:
            self.pays = self.spoke = True

    def fade(self, passed_ms: float) -> float:
        """Let counts fade; return the share that is left of them."""
        factor = math.exp(-passed_ms / GHOST_MEMORY_MS)
        self.kept_hits *= factor
        self.plain_hits *= factor
        self.roomier_hits *= factor
        self.prompts *= factor
        self.roomier_prompts *= factor
        lately = math.exp(-passed_ms / LATELY_MS)
        self.kept_lately *= lately
        self.plain_lately *= lately
        return factor

    def resize_workers(self, room: Mapping[WorkerKey, int], share: float) -> None:
        for worker, lru in self._lru.items():
            lru.capacity = max(1, int(room[worker] * share))
