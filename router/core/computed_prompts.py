"""Prompts that workers have computed and have not told of: a first token is sooner with a router than the events.

An answer of a few tokens is over before the consolidator's stream says what it left in the worker's cache. Who asks
again at once, with the answer or with another question about the same text, would be sent to a worker that has nothing.

Rules
    1. A prompt is here from its first token until its worker's stream tells of the request, or the worker's cache is
       emptied, or the worker leaves. Then the index says what the worker holds, and nothing else does.
    2. A path's sequence hashes name all that is before them, so two paths that agree at a place agree up to there: how
       far they do is found by halving.
    3. At most ``PROMPTS_MAX``, the newest; of those that begin with the same block the newest ``SAME_BEGINNING_MAX``
       are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from poolgrid.wire.identifiers import WorkerKey

PROMPTS_MAX: Final = 1024
"""Streams are milliseconds behind, in which a busy router sees some ten first tokens. More only come together while a
stream is away; the last second is then as much as anybody knows."""

SAME_BEGINNING_MAX: Final = 32
"""Prompts of one system prompt that are compared, a third of a microsecond each."""

TOKENS_MIN: Final = 512
"""A shorter prompt is not worth it: it is computed anew in some milliseconds, and requests of that size are many."""

_Key = tuple[WorkerKey, str]


class ComputedPrompts:
    """Paths of such prompts, by the request and by their first block."""

    def __init__(self) -> None:
        self._first_block: dict[_Key, int] = {}
        self._of_first: dict[int, dict[_Key, Sequence[int]]] = {}

    def add(self, worker: WorkerKey, request_id: str, path: Sequence[int]) -> bool:
        """Take note of a prompt whose first token was seen; ``False`` where it is known. A path is never empty."""
        key = (worker, request_id)
        if key in self._first_block:
            return False
        first = path[0]
        self._first_block[key] = first
        self._of_first.setdefault(first, {})[key] = path
        if len(self._first_block) > PROMPTS_MAX:
            self.drop(*next(iter(self._first_block)))
        return True

    def drop(self, worker: WorkerKey, request_id: str) -> None:
        """Forget a prompt, if it is known."""
        key = (worker, request_id)
        first = self._first_block.pop(key, None)
        if first is not None:
            same = self._of_first[first]
            del same[key]
            if not same:
                del self._of_first[first]

    def drop_all_of(self, worker: WorkerKey) -> None:
        """Forget all prompts of a worker."""
        for key in [key for key in self._first_block if key[0] == worker]:
            self.drop(*key)

    def clear(self) -> None:
        """Forget everything."""
        self._first_block.clear()
        self._of_first.clear()

    def overlaps(self, path: Sequence[int]) -> list[tuple[WorkerKey, int]]:
        """Return how many leading blocks of a path such prompts have, with their workers, of which some come twice."""
        same = self._of_first.get(path[0]) if path else None
        if same is None:
            return []
        newest = islice(reversed(same.items()), SAME_BEGINNING_MAX)
        return [(key[0], _shared_blocks(path, other)) for key, other in newest]

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._first_block)

    def __len__(self) -> int:
        return len(self._first_block)


def _shared_blocks(path: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading blocks two paths share that begin with the same one."""
    low, high = 1, min(len(path), len(other))
    if path[high - 1] == other[high - 1]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) >> 1
        if path[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
