"""What each worker is busy with: predicted at the moment of choice, replaced by the worker's own events.

Rules
    1. One entry per request and worker. ``reserve`` makes it when the router chooses; the worker's ``RequestStarted``
       replaces the prediction by the fact, ``PrefillCompleted`` ends its prefill work, ``RequestProgressed`` moves its
       blocks, ``RequestFinished`` (or a release, or the worker's end) removes it.
    2. A worker's sums are always the sums over its entries; an entry that is never confirmed expires. Leases wait in
       the order of their ends, and those that need not end any more go as soon as they are the first.
    3. A worker may report that a request began after its router has taken it off, for events travel longer than a short
       answer. Such a start is expected (``late_starts``): it makes no entry, and is no request of another router.
    4. Requests of other routers appear through the workers' events alone: so routers agree without talking to each
       other, except for predictions in flight. ``others_share`` is their share of late; it is no part of what
       decisions depend on.

Sums live in arrays addressed by the worker's slot in the prefix index, so that a decision over many workers reads them
without a loop. They are arrays of the standard library, whose numbers are read and moved one by one in a fifth of the
time that numpy takes; what numpy works on is the same memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from poolgrid.kernel.wire.identifiers import WorkerKey

INITIAL_SLOTS: Final = 16
"""Array length at the start; doubles as workers come."""


ENTRY_BYTES: Final = 512
"""Budgeted bytes per request: about 475 measured with an id of 40 characters, unconfirmed; the rest for growth."""

LEDGER_BYTES: Final = 256 * 1024 * 1024
"""Memory of the ledger by default: 500,000 requests on workers at a time, a hundred times a large pool."""

CROWDING_RETRIES: Final = 4
"""How often a request may be refused because other routers were quicker. Each retry costs a round trip, well below a
millisecond, and spares a wait behind another request's prompt."""

CROWDING_LEASE_MS: Final = 50.0
"""How long a worker's word for what others sent it counts: longer than its events take, shorter than most prompts."""

OTHERS_STEP: Final = 0.02
"""Weight of the latest request in the share of others: an average over about fifty requests. One whose client
left before its worker reported its start looks like another router's, so a single one must not count much."""

LATE_STARTS_MAX: Final = 1024
"""How many starts may be outstanding of requests that this router has released: those of half a second at 2,000 a
second. Of a dispatch that failed none ever comes; it is the oldest at last, and goes."""

OTHERS: Final = "~others~"
"""Beginning of such entries' ids; no request has one like it (``poolgrid.kernel.wire.identifiers``: a name is never
empty)."""


FOREIGN: Final = "~foreign~"
"""The same for requests that reach an engine past all routers."""

FOREIGN_MAX: Final = 1024
"""Foreign requests of one worker that count: more than engines run at a time. More would not change any choice."""

FOREIGN_TOKENS: Final = 1024
"""Tokens that a foreign request is taken to hold, where nothing is known of it but that it is there: a usual length of
a chat's prompt with its answer."""

Pick = Callable[[Sequence[int]], tuple[int, ...]]
"""Takes certain places of a sequence."""

GONE: Final = -1
"""Slot of an entry that the ledger has forgotten."""


class LoadEntry(msgspec.Struct, gc=False):
    """One request on one worker."""

    slot: int
    prefill_tokens: int
    """Prompt tokens still to be computed; 0 once the first token exists."""
    active_blocks: int
    confirmed: bool
    due_ms: float
    """When it expires without a confirmation."""


Lease = tuple[float, int, WorkerKey, str, LoadEntry]
"""When an entry is to expire, a number that no other lease has, whose the entry is, and the entry."""


class LoadLedger:
    """Active prefill tokens, active decode blocks and requests per worker slot."""

    def __init__(self, reservation_ttl_ms: float = 30_000.0, budget_bytes: int = LEDGER_BYTES) -> None:
        max_entries = budget_bytes // ENTRY_BYTES
        if max_entries < 1:
            raise ValueError(
                f"making a load ledger: budget_bytes is {budget_bytes}, allowed are integers from {ENTRY_BYTES}"
            )
        self._hold([_zeros(INITIAL_SLOTS) for _ in range(3)])
        self._entries: dict[tuple[WorkerKey, str], LoadEntry] = {}
        self._leases: deque[Lease] = deque()
        """Of unconfirmed entries, by due time: nearly all last the same, so the latest is the last one."""
        self._odd_leases: list[Lease] = []
        """A heap of those that end before the last of ``_leases``."""
        self._leased = 0
        """Leases so far."""
        self._crowding: deque[float] = deque()
        """When load that workers reported of other routers expires, in order; ``expire`` drops it."""
        self._foreign: dict[WorkerKey, int] = {}
        """Entries that stand for foreign requests; of a worker they are numbered from 0."""
        self.late_starts: dict[tuple[WorkerKey, str], None] = {}
        """Requests released before their workers reported their start, oldest first."""
        self._reservation_ttl_ms = reservation_ttl_ms
        self._max_entries = max_entries
        self.others_share = 0.0
        """How many of the requests that began of late were not reserved here: those of other routers, mostly."""
        self.expired_reservations = 0
        self.refused_entries = 0
        self.queues_emptied = 0
        """How often a worker had no prompt tokens to compute any more: others may have their turn there."""
        self.relieved = 0
        """How often a worker had a request less, or fewer prompt tokens to compute."""

    def ensure_slot(self, slot: int) -> None:
        length = len(self._requests)
        if slot >= length:
            further = _zeros(max(2 * length, slot + 1) - length)
            self._hold([sums + further for sums in (self._prefill_tokens, self._active_blocks, self._requests)])

    def _hold(self, sums: Sequence[array[int]]) -> None:
        self._prefill_tokens, self._active_blocks, self._requests = sums
        views: list[NDArray[np.int64]] = [np.frombuffer(each, np.int64) for each in sums]
        self.prefill_tokens, self.active_blocks, self.requests = views

    def requests_of_few(self, pick: Pick) -> Sequence[int]:
        """Return the requests of a few workers, whose slots ``pick`` knows."""
        return pick(self._requests)

    def of_few(self, pick: Pick) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the prefill tokens, active blocks and requests of a few workers, whose slots ``pick`` knows."""
        return pick(self._prefill_tokens), pick(self._active_blocks), pick(self._requests)

    def lease_ms(self, wanted_ms: float = 0.0) -> float:
        """Return the lease that a reservation gets: what is wanted, at most the configured one; 0 wants that."""
        return min(wanted_ms, self._reservation_ttl_ms) if wanted_ms > 0 else self._reservation_ttl_ms

    def reserve(
        self,
        worker: WorkerKey,
        slot: int,
        request_id: str,
        prefill_tokens: int,
        active_blocks: int,
        now_ms: float,
        lease_ms: float = 0.0,
    ) -> None:
        """Predict what a request will cost the worker that was chosen for it."""
        due_ms = now_ms + (self.lease_ms(lease_ms) if lease_ms else self._reservation_ttl_ms)
        entry = LoadEntry(slot, prefill_tokens, active_blocks, False, due_ms)
        if self._put(worker, request_id, entry):
            self._lease(worker, request_id, entry)

    def renew(self, worker: WorkerKey, request_id: str, now_ms: float) -> bool:
        """Renew the lease of an unconfirmed reservation; return False when there is none (any more)."""
        entry = self._entries.get((worker, request_id))
        if entry is None or entry.confirmed:
            return False
        self._renew(entry, worker, request_id, now_ms)
        return True

    def _renew(self, entry: LoadEntry, worker: WorkerKey, request_id: str, now_ms: float) -> None:
        entry.due_ms = now_ms + self._reservation_ttl_ms
        self._lease(worker, request_id, entry)

    def _lease(self, worker: WorkerKey, request_id: str, entry: LoadEntry) -> None:
        """Have an entry expire when it is due, unless it is confirmed, renewed or gone by then."""
        leases = self._leases
        # Two for one that comes: they do not pile up, and no call has to do with many.
        if leases and _is_over(leases[0]):
            leases.popleft()
            if leases and _is_over(leases[0]):
                leases.popleft()
        self._leased += 1
        lease = (entry.due_ms, self._leased, worker, request_id, entry)
        if leases and entry.due_ms < leases[-1][0]:
            heappush(self._odd_leases, lease)
        else:
            leases.append(lease)

    def _next_due(self, now_ms: float) -> Lease | None:
        """Take out the lease that ends first, if that is by now."""
        leases, odd = self._leases, self._odd_leases
        if odd and odd[0][0] <= now_ms and (not leases or odd[0] < leases[0]):
            return heappop(odd)
        if leases and leases[0][0] <= now_ms:
            return leases.popleft()
        return None

    def started(
        self, worker: WorkerKey, slot: int, request_id: str, prefill_tokens: int, active_blocks: int, now_ms: float
    ) -> None:
        """Replace the prediction (if any) by what the worker reports."""
        key = (worker, request_id)
        entry = self._entries.get(key)
        if entry is None and key in self.late_starts:
            del self.late_starts[key]
            self.others_share -= self.others_share * OTHERS_STEP
            return
        self.others_share += ((entry is None) - self.others_share) * OTHERS_STEP
        if entry is None or entry.slot != slot:
            self._put(worker, request_id, LoadEntry(slot, prefill_tokens, active_blocks, True, now_ms))
            return
        if entry.prefill_tokens != prefill_tokens:
            self._prefill_tokens[slot] += prefill_tokens - entry.prefill_tokens
            self.relieved += prefill_tokens < entry.prefill_tokens
            self.queues_emptied += not self._prefill_tokens[slot]
            entry.prefill_tokens = prefill_tokens
        if entry.active_blocks != active_blocks:
            self._active_blocks[slot] += active_blocks - entry.active_blocks
            entry.active_blocks = active_blocks
        entry.confirmed = True
        entry.due_ms = now_ms

    def crowded(self, worker: WorkerKey, slot: int, dispatch_id: str, booked_tokens: int, now_ms: float) -> None:
        """Take a worker's word for the prompt tokens that it has still to compute, where that is more than is known.

        What is not known is of other routers' requests; it counts until their events are here.
        """
        self.ensure_slot(slot)
        unknown = booked_tokens - self._prefill_tokens[slot]
        if unknown > 0:
            entry_id = f"{OTHERS}{dispatch_id}"
            self.reserve(worker, slot, entry_id, unknown, 0, now_ms, CROWDING_LEASE_MS)
            self._crowding.append(now_ms + self.lease_ms(CROWDING_LEASE_MS))

    def foreign(self, worker: WorkerKey, slot: int, requests: int, block_size: int, now_ms: float) -> None:
        """Count requests of which a worker's engine reports that it has them, and that no router sent.

        What they have still to compute is not known; they run, and their blocks are taken for those of usual requests.
        """
        blocks = -(-FOREIGN_TOKENS // block_size)
        wanted = min(requests, FOREIGN_MAX)
        present = self._foreign.get(worker, 0)
        for number in range(present, wanted):
            self._put(worker, f"{FOREIGN}{number}", LoadEntry(slot, 0, blocks, True, now_ms))
        for number in range(wanted, present):
            self.finished(worker, f"{FOREIGN}{number}")
        if wanted:
            self._foreign[worker] = wanted
        else:
            self._foreign.pop(worker, None)

    def prefill_completed(self, worker: WorkerKey, request_id: str) -> None:
        entry = self._entries.get((worker, request_id))
        if entry is not None:
            self._count_prompt(entry)
            entry.confirmed = True

    def prompt_seen(self, worker: WorkerKey, request_id: str) -> bool:
        """Count a request's prompt as computed, as reported by the process that sees its answer; its lease is kept.

        Returns whether that changed something.
        """
        entry = self._entries.get((worker, request_id))
        if entry is None or not entry.prefill_tokens:
            return False
        self._count_prompt(entry)
        return True

    def _count_prompt(self, entry: LoadEntry) -> None:
        if entry.prefill_tokens:
            self.relieved += 1
            self._prefill_tokens[entry.slot] -= entry.prefill_tokens
            self.queues_emptied += not self._prefill_tokens[entry.slot]
            entry.prefill_tokens = 0

    def progressed(self, worker: WorkerKey, request_id: str, active_blocks: int) -> None:
        """Set the request's blocks to the number that the worker reports."""
        entry = self._entries.get((worker, request_id))
        if entry is not None:
            self._active_blocks[entry.slot] += active_blocks - entry.active_blocks
            entry.active_blocks = active_blocks

    def finished(self, worker: WorkerKey, request_id: str, is_released: bool = False) -> int | None:
        """Forget a request that is over, or that its router released; return the blocks that it occupied.

        ``None`` for one that is not known.
        """
        key = (worker, request_id)
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        if is_released and not entry.confirmed:
            late = self.late_starts
            if len(late) >= LATE_STARTS_MAX:
                del late[next(iter(late))]
            late[key] = None
        self._subtract(entry)
        return entry.active_blocks

    def drop(self, worker: WorkerKey) -> None:
        self._foreign.pop(worker, None)
        for key in self._keys_of(worker):
            self._subtract(self._entries.pop(key))

    def move(self, worker: WorkerKey, slot: int) -> None:
        """Count a worker's requests at another slot, since the index has given it one."""
        for key in self._keys_of(worker):
            held = self._entries[key]
            entry = LoadEntry(slot, held.prefill_tokens, held.active_blocks, held.confirmed, held.due_ms)
            self._put(*key, entry)
            if not entry.confirmed:
                self._lease(*key, entry)

    def _keys_of(self, worker: WorkerKey) -> list[tuple[WorkerKey, str]]:
        """Return a worker's requests; rarely asked for, so no request pays for an order by worker."""
        return [key for key in self._entries if key[0] == worker]

    def expire(self, now_ms: float, held: Collection[str] = frozenset()) -> tuple[int, list[str]]:
        """Release reservations that no worker confirmed in time, except those that are still ``held`` open.

        Returns how many were released, and the ids of those that were due and held: their leases are renewed.
        """
        renewed: list[str] = []
        expired = 0
        while self._crowding and self._crowding[0] <= now_ms:
            self._crowding.popleft()
        while (lease := self._next_due(now_ms)) is not None:
            if _is_over(lease):
                continue
            _, _, worker, request_id, entry = lease
            if request_id in held:
                self._renew(entry, worker, request_id, now_ms)
                renewed.append(request_id)
                continue
            self.finished(worker, request_id)
            expired += 1
            # A worker's word for what others sent is meant to run out; only missing events are worth a count.
            self.expired_reservations += not request_id.startswith(OTHERS)
        return expired, renewed

    def crowding_ends_ms(self) -> float | None:
        """Return when the first word of a worker for what others sent it runs out, or did; ``None`` without any."""
        return self._crowding[0] if self._crowding else None

    def clear(self) -> None:
        """Forget everything; slots may mean other workers from now on."""
        for entry in self._entries.values():
            self._subtract(entry)
        self._entries.clear()
        self._leases.clear()
        self._odd_leases.clear()
        self._crowding.clear()
        self._foreign.clear()
        self.late_starts.clear()

    def restore(
        self,
        entries: Iterable[tuple[WorkerKey, str, LoadEntry]],
        late_starts: Iterable[tuple[WorkerKey, str]] = (),
    ) -> None:
        """Replace everything by what another ledger had at another time; the entries' slots must be those of here."""
        self.clear()
        self.late_starts.update(dict.fromkeys(late_starts))
        for worker, request_id, entry in entries:
            if self._put(worker, request_id, entry) and not entry.confirmed:
                self._lease(worker, request_id, entry)
            if request_id.startswith(FOREIGN):
                self._foreign[worker] = self._foreign.get(worker, 0) + 1

    def knows(self, worker: WorkerKey, request_id: str) -> bool:
        return (worker, request_id) in self._entries

    def entries(self) -> dict[tuple[WorkerKey, str], LoadEntry]:
        return dict(self._entries)

    def size_bytes(self) -> int:
        return ENTRY_BYTES * len(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _put(self, worker: WorkerKey, request_id: str, entry: LoadEntry) -> bool:
        """Count an entry in the place of the request's earlier one; return False when there is no room for it."""
        key, entries = (worker, request_id), self._entries
        previous = entries.get(key)
        if previous is not None:
            self._subtract(previous)
        elif len(entries) >= self._max_entries:
            self.refused_entries += 1
            return False
        slot = entry.slot
        if slot >= len(self._requests):
            self.ensure_slot(slot)
        entries[key] = entry
        self._prefill_tokens[slot] += entry.prefill_tokens
        self._active_blocks[slot] += entry.active_blocks
        self._requests[slot] += 1
        return True

    def _subtract(self, entry: LoadEntry) -> None:
        slot = entry.slot
        self.relieved += 1
        if entry.prefill_tokens:
            self._prefill_tokens[slot] -= entry.prefill_tokens
            self.queues_emptied += not self._prefill_tokens[slot]
        self._active_blocks[slot] -= entry.active_blocks
        self._requests[slot] -= 1
        entry.slot = GONE


def _is_over(lease: Lease) -> bool:
    """Return whether a lease need not end any more: its entry is confirmed or forgotten, or has a later one."""
    entry = lease[4]
    return entry.confirmed or entry.slot == GONE or entry.due_ms > lease[0]


def _zeros(length: int) -> array[int]:
    return array("q", bytes(8 * length))
