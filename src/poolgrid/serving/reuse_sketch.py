"""What an infinite cache that all workers share would have reused: a bounded memory of the prompts that were seen.

Rules
    1. A prompt is its *path*: the sequence hashes of its whole blocks, each of which stands for its block and all
       before it. So a block was seen exactly if its hash was, and what was seen of a prompt is a prefix of its path.
    2. What a prompt added is kept as one *part*, under its first hash. A path is followed from part to part; how far it
       goes along with one is found by halving, since hashes that are equal in one place are equal before it.
    3. At most ``budget_bytes`` are used, in two generations. New parts go to the young generation; when that has half
       of the bound, the old one is forgotten and the young one takes its place. What is asked for again becomes young
       again, so at least what was asked for last is known, as much of it as half of the bound takes.
    4. What was forgotten counts as never seen: the figure is a lower bound, exact as long as nothing was forgotten.
    5. A path goes into one generation whole, or cut at its end. So each generation holds every ancestor of what it
       holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

BLOCK_BYTES: Final = 9
"""A hash, and the room that an array which grows keeps for the next."""

PART_BYTES: Final = 180
"""Measured: an array, its first hash as a key, and their place in a dict that has just grown."""

SKETCH_BYTES: Final = 64 * 1024 * 1024
"""Of prompts of 8,192 tokens in blocks of 32, half of which is new, at least the last 100 million distinct tokens."""


class _Generation:
    """Parts by their first hash."""

    __slots__ = ("blocks", "parts")

    def __init__(self) -> None:
        self.parts: dict[int, array[int]] = {}
        self.blocks = 0

    @property
    def used_bytes(self) -> int:
        return BLOCK_BYTES * self.blocks + PART_BYTES * len(self.parts)

    def follow(self, path: Sequence[int]) -> tuple[int, array[int] | None]:
        """Return how many leading blocks of a path are here, and the part that ends with the last of them."""
        parts = self.parts
        length = len(path)
        at = 0
        ending: array[int] | None = None
        while at < length:
            part = parts.get(path[at])
            if part is None:
                break
            end = at + len(part)
            if end <= length and part[-1] == path[end - 1]:
                at, ending = end, part
                continue
            # The path ends within the part, or leaves it for another one.
            known, unknown = 1, min(len(part), length - at)
            while known < unknown:
                middle = (known + unknown + 1) // 2
                if part[middle - 1] == path[at + middle - 1]:
                    known = middle
                else:
                    unknown = middle - 1
            at, ending = at + known, None
        return at, ending

    def add(self, path: Sequence[int], known: int, ending: array[int] | None, room_bytes: int) -> None:
        """Keep what is behind the ``known`` blocks of a path, as much of it as there is room for."""
        if ending is None:
            room_bytes -= PART_BYTES
        count = min(len(path) - known, room_bytes // BLOCK_BYTES)
        if count < 1:
            return
        new = array("Q", path[known : known + count])
        if ending is None:
            self.parts[new[0]] = new
        else:
            ending.extend(new)
        self.blocks += count


class ReuseSketch:
    """The prompts that one router saw."""

    def __init__(self, budget_bytes: int = SKETCH_BYTES) -> None:
        """``budget_bytes`` bounds the memory; 0 keeps nothing, and nothing was ever seen."""
        self._generation_bytes = budget_bytes // 2
        self._young = _Generation()
        self._old = _Generation()

    def note(self, path: Sequence[int]) -> int:
        """Remember a prompt, and return how many of its leading blocks had been seen before."""
        young = self._young
        length = len(path)
        known, ending = young.follow(path)
        if known == length:
            return known
        seen = known
        if self._old.parts:
            seen = max(seen, self._old.follow(path)[0])
        needed_bytes = BLOCK_BYTES * (length - known) + (PART_BYTES if ending is None else 0)
        if young.used_bytes + needed_bytes > self._generation_bytes and young.parts:
            self._old = young
            young = self._young = _Generation()
            known, ending = 0, None
        young.add(path, known, ending, self._generation_bytes - young.used_bytes)
        return seen

    def __len__(self) -> int:
        """Return how many hashes are kept; one that both generations have counts twice."""
        return self._young.blocks + self._old.blocks

    @property
    def used_bytes(self) -> int:
        return self._young.used_bytes + self._old.used_bytes
