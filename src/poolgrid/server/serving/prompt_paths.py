"""The sequence hashes of prompts, computed once for the parts that prompts share, for each tenant by itself.

Rules
    1. A path is always the result of ``poolgrid.kernel.wire.hashing``, to the bit.
    2. It is computed in stretches of ``STRETCH_BLOCKS`` whole blocks. What a stretch adds depends on nothing but the
       sequence hash before it, the seed, the block size and the stretch's own tokens; these are its key, whole and
       unhashed, so two different stretches can never be taken for each other.
    3. Whole prompts are remembered in addition to stretches (``RecentPrompts``): a prompt that continues one of them
       costs the comparison with it and the hashes of its new blocks. Stretches are for what prompts share beyond that.
    4. At most ``BUDGET_BYTES``, half of it for each; the stretch, or prompt, that was used longest ago goes first. Each
       tenant has an equal part: its seed differs, so it finds no other tenant's paths, and it cannot push them out.
    5. A path is an array. As a list it would be an object for each hash, all of which are touched when it is copied or
       freed, and looked at by the garbage collector. A path that is whole is never changed: it is remembered as it is.

So turn n of a conversation costs the hashes of its new text. No clock, no lock: owned by one event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, block_hashes, hash_seed, path_of, sequence_hashes
from poolgrid.kernel.wire.multimodal import known_tokens, media_hash_u64, media_hashes_of_blocks
from poolgrid.server.process.caches import BudgetedLru, TenantCaches

STRETCH_BLOCKS: Final = 32
"""Blocks of one stretch: at 16 to 64 tokens a block, 2 to 8 KiB that are compared in less time than one is hashed."""

BUDGET_BYTES: Final = 64 * 1024 * 1024
"""About 13 M tokens at 16 tokens a block, 15 M at 64, half of them in stretches and half in whole prompts: the
conversations of an hour on a busy pool."""

KNOWN_PER_YIELD: Final = 16
"""Stretches that are only looked up between two yields: together they take what one takes to compute."""

STRETCH_OVERHEAD_BYTES: Final = 300
"""Key, list and map entry."""

SAMPLED_LENGTHS = (512 * 1024, 128 * 1024, 32 * 1024, 8 * 1024)
"""Token bytes that samples are taken of: each prompt's is of the largest that it has. Shorter ones are not kept, their
path takes less than 0.1 ms."""

SAMPLE_BYTES: Final = 64
"""Bytes of a sample, spread evenly."""

SAME_SAMPLE_MAX: Final = 8
"""Prompts of one sample, as those with one long system prompt are; comparing 10k tokens takes a microsecond or two."""

HASH_BYTES: Final = 8
"""One sequence hash in an array."""

PROMPT_OVERHEAD_BYTES: Final = 600
"""Objects, key, map entries."""

_SampleKey = tuple[int, int, int, bytes]


@dataclass(slots=True, eq=False)
class RecentPrompt:
    """A prompt: token ids of whole blocks, and a sequence hash for each block."""

    token_ids: bytes
    path: array[int]
    key: _SampleKey

    @property
    def size_bytes(self) -> int:
        return len(self.token_ids) + HASH_BYTES * len(self.path) + PROMPT_OVERHEAD_BYTES


class RecentPrompts:
    """Whole prompts that were seen lately, with their paths: what a later turn of a conversation begins with.

    A prompt is found when the new one begins with all of it: one comparison of packed bytes, however long it is. A
    sample of the first bytes decides which prompts are compared. A prompt takes the place of the one that it continues.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._of_sample: dict[_SampleKey, tuple[RecentPrompt, ...]] = {}
        self._by_use: BudgetedLru[RecentPrompt, RecentPrompt] = BudgetedLru(
            budget_bytes, lambda prompt, _: prompt.size_bytes, lambda prompt, _: self._unlist(prompt)
        )

    @property
    def used_bytes(self) -> int:
        return self._by_use.used

    def beginning_of(self, token_ids: bytes, block_size: int, seed: int) -> RecentPrompt | None:
        """Return a prompt that ``token_ids`` begins with, the longest that is found; ``None`` without any."""
        for length in SAMPLED_LENGTHS:
            if length <= len(token_ids):
                best: RecentPrompt | None = None
                for prompt in self._of_sample.get(_sample_key(token_ids, length, block_size, seed), ()):
                    longer = best is None or len(prompt.token_ids) > len(best.token_ids)
                    if longer and token_ids.startswith(prompt.token_ids):
                        best = prompt
                if best is not None:
                    return self._by_use.get(best)
        return None

    def keep(
        self, token_ids: bytes, path: array[int], block_size: int, seed: int, continued: RecentPrompt | None
    ) -> None:
        """Remember a prompt; ``continued`` is what it begins with, and what it replaces."""
        length = next((length for length in SAMPLED_LENGTHS if length <= len(token_ids)), None)
        if length is None:
            return
        prompt = RecentPrompt(token_ids, path, _sample_key(token_ids, length, block_size, seed))
        if prompt.size_bytes > self._by_use.budget:
            return
        if continued is not None:
            self._by_use.drop(continued)
        same = self._of_sample.get(prompt.key, ())
        if len(same) >= SAME_SAMPLE_MAX:
            self._by_use.drop(same[-1])
            same = same[:-1]
        self._of_sample[prompt.key] = (prompt, *same)
        self._by_use.keep(prompt, prompt)

    def __len__(self) -> int:
        return len(self._by_use)

    def _unlist(self, prompt: RecentPrompt) -> None:
        left = tuple(each for each in self._of_sample[prompt.key] if each is not prompt)
        if left:
            self._of_sample[prompt.key] = left
        else:
            del self._of_sample[prompt.key]


def _sample_key(token_ids: bytes, length: int, block_size: int, seed: int) -> _SampleKey:
    return length, block_size, seed, token_ids[: length : length // SAMPLE_BYTES]


_StretchKey = tuple[int | None, int, int, bytes]


class PromptPaths:
    """Paths of prompts, with a memory of stretches."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._known: BudgetedLru[_StretchKey, array[int]] = BudgetedLru(budget_bytes - budget_bytes // 2, _size)
        self._recent = RecentPrompts(budget_bytes // 2)
        self.reused_blocks = 0
        """Blocks whose hashes were not computed again."""

    @property
    def used_bytes(self) -> int:
        return self._known.used + self._recent.used_bytes

    def path(
        self,
        token_ids: bytes,
        block_size: int,
        seed: int,
        multimodal_hashes: Mapping[int, Sequence[int]] | None = None,
    ) -> array[int]:
        """Return the sequence hashes of the whole blocks of a prompt (u32 little-endian token ids).

        ``block_size`` is in tokens; ``multimodal_hashes`` as in ``poolgrid.kernel.wire.hashing.block_hashes``: prompts
        with such objects are computed again.
        """
        stretch_bytes = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        if multimodal_hashes:
            return array("Q", sequence_hashes(block_hashes(token_ids, block_size, seed, multimodal_hashes)))
        if len(token_ids) < stretch_bytes:
            return path_of(token_ids, block_size, seed)
        path = array("Q")
        for _ in self.grow(path, token_ids, block_size, seed):
            pass
        return path

    def grow(self, path: array[int], token_ids: bytes, block_size: int, seed: int) -> Iterator[None]:
        """Append the path of a prompt to the empty ``path``; up to 20 µs pass between two yields.

        Others may go between: what they ask for changes nothing of it.
        """
        block_bytes = block_size * TOKEN_BYTES
        stretch_bytes = STRETCH_BLOCKS * block_bytes
        known = self._known
        continued = self._recent.beginning_of(token_ids, block_size, seed)
        parent: int | None = None
        at = 0
        if continued is not None:
            path.extend(continued.path)
            parent = path[-1]
            at = len(continued.token_ids)
            self.reused_blocks += len(path)
        whole = len(token_ids) - len(token_ids) % block_bytes
        while at < whole:
            end = min(at - at % stretch_bytes + stretch_bytes, whole)
            if end - at < stretch_bytes:
                # The rest of a stretch that a prompt ended in, or its beginning.
                rest = block_hashes(memoryview(token_ids)[at:end], block_size, seed)
                hashes = array("Q", sequence_hashes(rest, parent))
            else:
                key = (parent, seed, block_size, token_ids[at:end])
                found = known.get(key)
                if found is not None:
                    self.reused_blocks += STRETCH_BLOCKS
                    path.extend(found)
                    parent = found[-1]
                    at = end
                    if at // stretch_bytes % KNOWN_PER_YIELD == 0:
                        yield
                    continue
                hashes = array("Q", sequence_hashes(block_hashes(key[3], block_size, seed), parent))
                known.keep(key, hashes)
            path.extend(hashes)
            parent = hashes[-1]
            at = end
            yield
        if continued is None or len(continued.path) < len(path):
            self._recent.keep(token_ids[:whole], path, block_size, seed, continued)


def _size(key: _StretchKey, hashes: array[int]) -> int:
    return len(key[3]) + STRETCH_BLOCKS * HASH_BYTES + STRETCH_OVERHEAD_BYTES


class TenantPaths:
    """``PromptPaths`` by tenant."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._caches = TenantCaches(budget_bytes, PromptPaths)
        self._forgetful = PromptPaths(0)

    def of(self, request: InferenceRequest) -> PromptPaths:
        """Return the paths that a request may find and leave; such that keep nothing where it may leave none."""
        return self._caches.of(request.tenant, request.cache_shares) or self._forgetful


def prompt_path(request: InferenceRequest, block_size: int, paths: TenantPaths) -> array[int]:
    """Return the sequence hashes of the prompt's whole blocks of ``block_size`` tokens.

    ``paths`` remembers those of text. With media they end where the engine's own tokens are not known: at the first
    medium of unknown length.
    """
    token_ids = request.token_ids
    touched: dict[int, list[int]] = {}
    media = request.multimodal
    if media is not None:
        known = known_tokens(media.items, len(token_ids) // TOKEN_BYTES)
        touched = media_hashes_of_blocks(media.items, block_size)
        token_ids = token_ids[: TOKEN_BYTES * known]
    return paths.of(request).path(token_ids, block_size, seed_of(request), touched)


TEXT_SEED: Final = "\0text"
"""Added to the salt of prompts that are hashed by their text, which no salt of a client contains."""


def seed_of(request: InferenceRequest) -> int:
    """Return the seed of a request's block hashes."""
    salt = request.cache_salt
    return hash_seed(request.lora_name, salt + TEXT_SEED if request.by_text else salt)


def media_hashes(request: InferenceRequest) -> tuple[int, ...]:
    """Return the u64 hashes of a request's media, in order."""
    media = request.multimodal
    return () if media is None else tuple(media_hash_u64(item.media_hash) for item in media.items)


def media_kinds(request: InferenceRequest) -> tuple[str, ...]:
    """Return the kinds of a request's media, sorted."""
    media = request.multimodal
    return () if media is None else tuple(sorted({item.kind.value for item in media.items}))


BLOCK_BYTES: Final = 9
"""A hash, and the room that an array which grows keeps for the next."""

PART_BYTES: Final = 180
"""Measured: an array, its first hash as a key, and their place in a dict that has just grown."""

SKETCH_BYTES: Final = 64 * 1024 * 1024
"""Of prompts of 8,192 tokens in blocks of 32, half of which is new, at least the last 100 million distinct tokens."""


class _Generation:
    """Parts by their first hash."""

    __slots__ = ("parts", "used_bytes")

    def __init__(self) -> None:
        self.parts: dict[int, array[int]] = {}
        self.used_bytes = 0

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
        stretch = path[known : known + count]
        new = stretch if isinstance(stretch, array) else array("Q", stretch)
        if ending is None:
            if new[0] not in self.parts:
                self.used_bytes += PART_BYTES
            self.parts[new[0]] = new
        else:
            ending.extend(new)
        self.used_bytes += BLOCK_BYTES * count


class ReuseSketch:
    """What an infinite cache that all workers share would have reused: a bounded memory of the prompts that were seen.

    Rules
        1. A prompt is its *path*: the sequence hashes of its whole blocks, each of which stands for its block and all
           before it. So a block was seen exactly if its hash was, and what was seen of a prompt is a prefix of its
           path.
        2. What a prompt added is kept as one *part*, under its first hash. A path is followed from part to part; how
           far it goes along with one is found by halving, since hashes that are equal in one place are equal before
           it.
        3. At most ``budget_bytes`` are used, in two generations. New parts go to the young generation; when that has
           half of the bound, the old one is forgotten and the young one takes its place. What is asked for again
           becomes young again, so at least what was asked for last is known, as much of it as half of the bound takes.
        4. What was forgotten counts as never seen: the figure is a lower bound, exact as long as nothing was
           forgotten.
        5. A path goes into one generation whole, or cut at its end. So each generation holds every ancestor of what it
           holds.
    """

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
        return sum(len(part) for each in (self._young, self._old) for part in each.parts.values())

    @property
    def used_bytes(self) -> int:
        return self._young.used_bytes + self._old.used_bytes
