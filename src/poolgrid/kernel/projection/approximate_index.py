"""A prefix index without events: the router's own choices, each trusted for a limited time.

Rules
    1. After a choice the worker counts as holding the path. A later choice of the same path renews that.
    2. A belief expires ``ttl_ms`` after its last renewal.
    3. Nothing is ever corrected by the worker: this is for engines whose events cannot be had.
    4. When a worker is dropped, everything chosen for it is dropped; under the same name it starts empty.
    5. ``beliefs`` copies the whole state at once, and ``restore`` resumes from the copy: the same choices and times
       give the same answers, from ``exact_from_ms`` on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.observers import IsOpen, Observer
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey

CHOICES_PER_CHUNK = 1024
"""Choices are kept in chunks, so that a hundred thousand of them are taken elsewhere by a hundred references."""


class BelievedChain(NamedTuple):
    """Blocks that one worker probably holds, each below the one before, from one choice."""

    worker: WorkerKey
    chosen_ms: float
    parent: int | None
    """The block before the first; a younger belief."""
    hashes: tuple[int, ...]


class _Choice(NamedTuple):
    """A path that was sent to a worker."""

    chosen_ms: float
    worker: WorkerKey
    renewed_ms: dict[int, float]
    """Of that epoch of the worker: a later epoch means that the worker was dropped since."""
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beliefs:
    """The index at one moment; another thread may read it while the index itself changes."""

    chunks: Sequence[Sequence[_Choice]]
    """Choices, oldest first."""
    lives: dict[WorkerKey, dict[int, float]]
    ttl_ms: float
    exact_from_ms: float

    def condensed(self, max_blocks: int) -> tuple[list[BelievedChain], float]:
        """Return every belief once, oldest first, and from which time on the index made of them is exact.

        At most ``max_blocks`` blocks, the youngest; what was left out has expired by the time that is returned. Each
        choice owns the end of its path behind what younger ones renewed, so one look-up shows that nothing is left of
        it, and a bisection finds where the rest begins.
        """
        chains: list[BelievedChain] = []
        known: dict[WorkerKey, set[int]] = {}
        exact_from_ms = self.exact_from_ms
        blocks = 0
        for chosen_ms, worker, renewed_ms, path in self._newest_first():
            if self.lives.get(worker) is not renewed_ms:
                continue
            younger = known.setdefault(worker, set())
            if path[-1] in younger:
                continue
            low, high = 0, len(path) - 1
            while low < high:
                middle = (low + high) // 2
                if path[middle] in younger:
                    low = middle + 1
                else:
                    high = middle
            blocks += len(path) - low
            if blocks > max_blocks:
                exact_from_ms = max(exact_from_ms, chosen_ms + self.ttl_ms)
                break
            rest = path[low:]
            younger.update(rest)
            chains.append(BelievedChain(worker, chosen_ms, path[low - 1] if low else None, rest))
        chains.reverse()
        return chains, exact_from_ms

    def _newest_first(self) -> Iterator[_Choice]:
        for chunk in reversed(self.chunks):
            yield from reversed(chunk)


class ApproximateIndex(Observer):
    """Feeds a ``PrefixIndex`` from choices and expiry; as an observer, that of the projection."""

    name = "approximate"

    def __init__(self, index: PrefixIndex, ttl_ms: float) -> None:
        if ttl_ms <= 0:
            raise ValueError(f"making an approximate index: ttl_ms is {ttl_ms}, allowed are values above 0")
        self.index = index
        self._ttl_ms = ttl_ms
        self._renewed_ms: dict[WorkerKey, dict[int, float]] = {}
        self._chunks: deque[list[_Choice]] = deque()
        """Choices in order; a chunk is appended to while it is the last one, and never changed after that."""
        self._expired = 0
        """How many choices of the first chunk have expired."""
        self.exact_from_ms = 0.0
        """From this time on nothing is missing that a longer memory or a longer past would have known."""

    def record(self, worker: WorkerKey, path: Sequence[int], now_ms: float) -> None:
        self.expire(now_ms)
        if not path:
            return
        self._append(self._believe(worker, None, tuple(path), now_ms, now_ms))

    def _believe(
        self, worker: WorkerKey, parent: int | None, path: tuple[int, ...], chosen_ms: float, now_ms: float
    ) -> _Choice:
        counters = self.index.counters
        evicted = counters.evicted_blocks
        self.index.store(worker, parent, path)
        if counters.evicted_blocks != evicted:
            # Which blocks went depends on the order in which they came; all of them would be gone by then.
            self.exact_from_ms = now_ms + self._ttl_ms
        renewed = self._renewed_ms.setdefault(worker, {})
        renewed.update(dict.fromkeys(path, chosen_ms))
        return _Choice(chosen_ms, worker, renewed, path)

    def _append(self, choice: _Choice) -> None:
        if not self._chunks or len(self._chunks[-1]) >= CHOICES_PER_CHUNK:
            self._chunks.append([])
        self._chunks[-1].append(choice)

    def drop(self, worker: WorkerKey) -> None:
        self._renewed_ms.pop(worker, None)
        self.index.drop(worker)

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        if decision.request.stage is not Stage.ENCODE:  # which leaves no block of the prompt there
            self.record(decision.worker, path, now_ms)

    def on_left(self, worker: WorkerKey) -> None:
        self.drop(worker)

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        self.forget_all()

    @property
    def is_empty(self) -> bool:
        return not self._chunks

    def forget_all(self) -> None:
        """Forget all choices; the index has been emptied by its owner."""
        self._renewed_ms.clear()
        self._chunks.clear()
        self._expired = 0
        self.exact_from_ms = 0.0

    def expire(self, now_ms: float) -> None:
        """Drop every belief whose time is over."""
        ttl_ms = self._ttl_ms
        while self._chunks:
            oldest = self._chunks[0]
            if self._expired == len(oldest):
                self._chunks.popleft()
                self._expired = 0
                continue
            chosen_ms, worker, renewed, path = oldest[self._expired]
            if chosen_ms + ttl_ms > now_ms:
                break
            self._expired += 1
            if self._renewed_ms.get(worker) is not renewed:
                continue
            due_ms = chosen_ms + ttl_ms
            over = [h for h in reversed(path) if renewed.get(h, due_ms) + ttl_ms <= due_ms]
            for sequence_hash in over:
                del renewed[sequence_hash]
            self.index.remove(worker, over)

    # For a state that is resumed elsewhere

    def beliefs(self) -> Beliefs:
        """Return the current entries without reading them."""
        chunks: list[Sequence[_Choice]] = list(self._chunks)
        if chunks:
            chunks[-1] = tuple(chunks[-1])
            chunks[0] = chunks[0][self._expired :]
        return Beliefs(chunks, dict(self._renewed_ms), self._ttl_ms, self.exact_from_ms)

    def restore_beliefs(self, chains: Iterable[BelievedChain], exact_from_ms: float, now_ms: float) -> None:
        """Resume from condensed entries, oldest first; the index must be empty."""
        self.forget_all()
        self.exact_from_ms = exact_from_ms
        # Parents are younger: they are stored first, so that no block has to wait for the one before it.
        choices: list[_Choice] = []
        for worker, chosen_ms, parent, hashes in reversed(list(chains)):
            choices.append(self._believe(worker, parent, hashes, chosen_ms, now_ms))
        for choice in reversed(choices):
            self._append(choice)
