"""KV cache events as TensorRT-LLM emits them, from what the simulated block pool says.

Rules (``contract_1_2_1.json``, ``events._rules``):

1. One ``event_id`` sequence per rank, from 0, over all windows and types.
2. Removals that follow each other in one window are one event.
3. At a request's end its trailing partial block is stored too, in the largest window.
4. A move between GPU and host is ``updated`` with a null ``priority``; a new priority has a null ``cache_level``.
5. The buffer keeps the newest events: the oldest are dropped, and only a hole in ``event_id`` says so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from poolgrid.kernel.wire.events import BlocksRemoved, GroupsReported
from poolgrid.kernel.wire.hashing import unpack_hashes, unpack_tokens
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.multimodal import digest_media, media_hash_u64
from poolgrid.kernel.worker_protocol.cache_facts import CacheEvent
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder, Link, SimulatedGroup

from .block_key import block_key_hash
from .pictures import Picture
from .profile import PROFILE

_log = logging.getLogger("tensorrt_llm")

DEFAULT_PRIORITY = 35


class MediaKey(NamedTuple):
    """A medium that a block depends on."""

    digest: bytes
    start: int
    """Where in the medium the block begins."""
    name: str
    """What events call it."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """What enters a request's block hashes besides its tokens."""

    cache_salt_id: int | None = None
    lora_task_id: int | None = None
    multimodal: tuple[MediaKey, ...] = ()
    """Media of which nothing is known but that they enter the hash of the first block."""
    cache_salt: str = ""
    """Set where events say it (``second_cache_manager``)."""


class EventBuffer:
    """Events of all ranks until they are read, the oldest dropped beyond the maximum."""

    def __init__(self, maximum: int, put: Callable[[dict[str, Any]], int], drop_oldest: Callable[[], None]) -> None:
        self._maximum = maximum
        self._put = put
        self._drop_oldest = drop_oldest
        self.dropped = 0

    def append(self, event: dict[str, Any]) -> None:
        if self._put(event) > self._maximum:
            self._drop_oldest()
            self.dropped += 1
            _log.warning("The event queue has reached the max size of %d. Events have been discarded.", self._maximum)


def groups_of(windows: Sequence[int]) -> tuple[SimulatedGroup, ...]:
    """Return the groups of a simulated engine with these attention windows; the largest stands for all of a prompt."""
    return tuple([SimulatedGroup("window", window) for window in sorted(windows)[:-1]])


class RankEvents(CacheRecorder):
    """Listens to one rank's block pool and speaks TensorRT-LLM."""

    def __init__(
        self,
        block_size: int,
        device_blocks: int,
        host_blocks: int,
        windows: Sequence[int],
        partial_blocks_max: int,
        rank: int | None,
    ) -> None:
        super().__init__()
        self._block_size = block_size
        self._partial_max = partial_blocks_max
        self._rank = rank
        self._windows = sorted(windows, reverse=True)
        self._window = self._windows[0]
        self._next_id = 0
        self._fresh: list[dict[str, Any]] = []
        self._removed: list[int] = []
        self._removed_window = self._window
        self._tenants: dict[int, Tenant] = {}
        self._pictures: dict[int, Picture] = {}
        """By what the simulated engine calls them."""
        self._shown: dict[int, dict[int, int]] = {}
        """How much of each picture the chain up to a block has shown, by the block's sequence hash."""
        self.names: dict[int, int] = {}
        """Engine hash of each resident whole block, by sequence hash."""
        self._scopes: dict[int, tuple[int | None, int | None]] = {}
        """Salt and adapter of each first block, by engine hash."""
        self.levels: dict[int, int] = {}
        """Cache level of each resident whole block, by engine hash."""
        self.partial: OrderedDict[int, int | None] = OrderedDict()
        """Resident partial blocks, each with its parent's sequence hash."""
        self._windows_of: list[list[int]] = []
        """The small windows that the simulated engine's groups stand for."""
        self._changes: list[CacheEvent] = []
        """What became of the blocks of small windows in this iteration."""
        self._made: dict[int, tuple[int | None, dict[str, Any]]] = {}
        """Parent and block of each stored event, by sequence hash, where there are small windows."""
        for window in self._windows:
            self._emit({"type": "created", "num_blocks_per_cache_level": [device_blocks, host_blocks]}, window)

    def register(self, seed: int, tenant: Tenant) -> None:
        """Note what a wire hash seed stands for."""
        self._tenants[seed] = tenant

    def register_picture(self, picture: Picture) -> None:
        """Note a picture that has tokens of its own."""
        self._pictures[media_hash_u64(digest_media(picture.digest))] = picture

    def scope_of(self, name: int) -> tuple[int | None, int | None]:
        """Return the numbers of salt and adapter that a first block was stored under."""
        return self._scopes.get(name, (None, None))

    def drain(self) -> list[dict[str, Any]]:
        """Return the events of an iteration."""
        changes, self._changes = self._changes, []
        for change in changes:
            for window in self._windows_of[change.group - 1]:
                self._tell_small(change, window)
        self._close()
        events, self._fresh = self._fresh, []
        return events

    # what the block pool tells

    def stored(
        self,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Callable[[], bytes],
        block_size: int,
        seed: int,
        media: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        ids = unpack_tokens(tokens())
        tenant = self._tenants[seed]
        above = 0 if parent is None else self.names[parent]
        parent_hash = above or None
        blocks = []
        for at, sequence_hash in enumerate(hashes):
            part = ids[at * block_size : (at + 1) * block_size]
            keys = tenant.multimodal if not above else ()
            touching = media.get(at, ()) if media else ()
            if touching:
                keys = self._keys(parent, sequence_hash, touching, part)
            parent = sequence_hash
            above = block_key_hash(part, above, tenant.cache_salt_id, tenant.lora_task_id, _hashed(keys))
            if parent_hash is None and not at:
                self._scopes[above] = (tenant.cache_salt_id, tenant.lora_task_id)
            self.names[sequence_hash] = above
            self.levels[above] = 0
            blocks.append(_stored_block(above, part, keys, tenant.cache_salt))
            if len(self._windows) > 1:
                self._made[sequence_hash] = (blocks[-2]["block_hash"] if at else parent_hash, blocks[-1])
        self._emit({"type": "stored", "parent_hash": parent_hash, "blocks": blocks}, self._window)

    def _keys(
        self, parent: int | None, sequence_hash: int, touching: Sequence[int], tokens: Sequence[int]
    ) -> tuple[MediaKey, ...]:
        """Return the keys of the pictures that touch a block; their tokens stand together, one picture's in a row."""
        stand_in = max(tokens)
        rows = [len(row) for row in "".join("x" if each == stand_in else " " for each in tokens).split()]
        before = {} if parent is None else self._shown.get(parent, {})
        shown = self._shown[sequence_hash] = {}
        keys = []
        for place, name in enumerate(touching):
            picture, start = self._pictures[name], before.get(name, 0)
            start = start if start < picture.length else 0
            keys.append(MediaKey(picture.digest, start, picture.event_name))
            shown[name] = start + (rows[place] if place < len(rows) else 0)
        return tuple(keys)

    def removed(self, hashes: Sequence[int], tier: Tier) -> None:
        gone = set(hashes)
        orphans = [name for name, parent in self.partial.items() if parent in gone]
        for name in orphans:
            del self.partial[name]
        names = [self.names.pop(sequence_hash) for sequence_hash in hashes]
        for name in names:
            del self.levels[name]
        for sequence_hash in hashes:
            self._shown.pop(sequence_hash, None)
        self._remove(orphans + names, self._window)

    def moved(self, links: Sequence[Link], source: Tier, target: Tier) -> None:
        for sequence_hash, _ in links:
            name = self.names[sequence_hash]
            self.levels[name] = int(target)
            self._update(name, cache_level=(int(source), int(target)))

    # what the executor tells

    def request_ended(
        self, hashes: Sequence[int], tokens: Sequence[int], seed: int, priority: int | None = None
    ) -> None:
        """Store a finished request's trailing partial block.

        ``hashes`` are the sequence hashes of its whole blocks; ``tokens`` all its tokens but the last.
        """
        if any(sequence_hash not in self.names for sequence_hash in hashes):
            return  # its blocks were needed already
        size = self._block_size
        tenant = self._tenants[seed]
        rest = tuple(tokens[len(hashes) * size :])
        if rest:
            parent = self.names[hashes[-1]] if hashes else 0
            keys = tenant.multimodal if not parent else ()
            name = block_key_hash(rest, parent, tenant.cache_salt_id, tenant.lora_task_id, _hashed(keys))
            if name not in self.partial:
                self._emit(
                    {
                        "type": "stored",
                        "parent_hash": parent or None,
                        "blocks": [_stored_block(name, rest, keys, tenant.cache_salt)],
                    },
                    self._window,
                )
                self.partial[name] = hashes[-1] if hashes else None
                if len(self.partial) > self._partial_max:
                    self._remove([self.partial.popitem(last=False)[0]], self._window)
        if priority is not None and priority != DEFAULT_PRIORITY:
            for sequence_hash in hashes:
                self._update(self.names[sequence_hash], priority=(DEFAULT_PRIORITY, priority))

    # small windows

    def tell(self, event: CacheEvent | GroupsReported) -> None:
        """Note what becomes of the blocks of a window: it is told of once the iteration has named them."""
        if isinstance(event, GroupsReported):
            needs = [SimulatedGroup("window", window).needs(self._block_size) for window in self._windows]
            self._windows_of = [
                [window for window, its in zip(self._windows[1:], needs[1:], strict=True) if its == group]
                for group in event.groups
            ]
        else:
            self._changes.append(event)

    def _tell_small(self, change: CacheEvent, window: int) -> None:
        hashes = unpack_hashes(change.sequence_hashes)
        if isinstance(change, BlocksRemoved):
            self._remove([self._made[each][1]["block_hash"] for each in hashes], window)
            return
        runs: list[tuple[int | None, list[dict[str, Any]]]] = []
        for each in hashes:
            parent, block = self._made[each]
            if runs and runs[-1][1][-1]["block_hash"] == parent:
                runs[-1][1].append(block)
            else:
                runs.append((parent, [block]))
        for parent, blocks in runs:
            self._emit({"type": "stored", "parent_hash": parent, "blocks": blocks}, window)

    # events

    def _update(
        self, name: int, cache_level: tuple[int, int] | None = None, priority: tuple[int, int] | None = None
    ) -> None:
        def diff(change: tuple[int, int] | None) -> dict[str, Any] | None:
            return change and {"type": "event_diff", "new_value": change[1], "old_value": change[0]}

        data = {"type": "updated", "block_hash": name, "cache_level": diff(cache_level), "priority": diff(priority)}
        self._emit(data, self._window)

    def _remove(self, names: list[int], window: int) -> None:
        if self._removed and self._removed_window != window:
            self._close()
        self._removed_window = window
        self._removed += names

    def _close(self) -> None:
        if self._removed:
            names, self._removed = self._removed, []
            self._emit({"type": "removed", "block_hashes": names}, self._removed_window)

    def _emit(self, data: dict[str, Any], window: int) -> None:
        if self._removed:
            self._close()
        event: dict[str, Any] = {"event_id": self._next_id, "data": data, "window_size": window}
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        self._next_id += 1
        self._fresh.append(event)


def _hashed(keys: Sequence[MediaKey]) -> list[tuple[bytes, int]]:
    return [(key.digest, key.start) for key in keys]


def _stored_block(name: int, tokens: Sequence[int], keys: Sequence[MediaKey], salt: str) -> dict[str, Any]:
    block: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
        "cache_level": 0,
        "priority": DEFAULT_PRIORITY,
    }
    named = [{"type": "mm_key", "hash": key.name, "start_offset": key.start} for key in keys if key.name]
    if named and PROFILE.media_keys:
        block["mm_keys"] = named
    if salt or PROFILE.second_by_default:
        block["cache_salt"] = salt or None
    return block
