"""What one tenant and one priority have waiting in a lane of an admission queue (``admission_queue``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from poolgrid.serving.admission.queued_request import QueuedRequest

T = TypeVar("T")


STALE_FACTOR = 2
STALE_MIN = 16
"""A heap is cleaned when it has this many times what is live in it, and this many more: memory follows what waits."""


@dataclass(slots=True)
class Backlog(Generic[T]):
    """What one tenant has waiting at one priority of one lane."""

    began: int
    """Arrival of the request with which the tenant began to wait here."""
    heap: list[tuple[float, int, QueuedRequest[T]]] = field(default_factory=list)
    live: int = 0
    """Requests that wait, taken ones included; others in the heap are dropped when they come up, or when they are the
    majority."""
    taken: dict[int, QueuedRequest[T]] = field(default_factory=dict)
    """By arrival, those that are taken; they are not in the heap."""

    @property
    def has_turn(self) -> bool:
        """Tell whether somebody waits who is not taken."""
        return self.live > len(self.taken)

    def waiting(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over those that wait, in no order that means anything."""
        yield from self.taken.values()
        yield from (request for _, _, request in self.heap if request.waits)

    def push(self, key: float, request: QueuedRequest[T]) -> None:
        """Let a request wait; the one with the least key goes first."""
        heappush(self.heap, (key, request.arrival, request))
        self.live += 1

    def take(self) -> QueuedRequest[T]:
        """Take the first one that waits, to see whether there is room for it."""
        request = self.first()
        heappop(self.heap)
        self.taken[request.arrival] = request
        return request

    def put_back(self, key: float, request: QueuedRequest[T]) -> None:
        """Let one that was taken wait on."""
        del self.taken[request.arrival]
        heappush(self.heap, (key, request.arrival, request))

    def drop(self, request: QueuedRequest[T]) -> None:
        """Forget one that no longer waits."""
        self.taken.pop(request.arrival, None)
        self.live -= 1
        if len(self.heap) > STALE_FACTOR * self.live + STALE_MIN:
            self.heap = [entry for entry in self.heap if entry[2].waits]
            heapify(self.heap)

    def first(self) -> QueuedRequest[T]:
        """Return whose turn it is; there must be somebody."""
        while not self.heap[0][2].waits:
            heappop(self.heap)
        return self.heap[0][2]


@dataclass(slots=True)
class Band(Generic[T]):
    """One priority of one lane."""

    backlogs: dict[str, Backlog[T]] = field(default_factory=dict)
    """By tenant; only tenants that wait."""
    served: dict[str, float] = field(default_factory=dict)
    """Tokens charged to each tenant, divided by its weight; only grows, and is forgotten with the band."""
    turns: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (served, began, tenant). An entry may be older than the count it speaks of: it is mended at the top."""

    def begin(self, tenant: str, arrival: int) -> Backlog[T]:
        """Let a tenant begin to wait, with at least the count of the least served one that waits."""
        served = self.served.get(tenant, 0.0)
        if self.backlogs:
            least = self.next_tenant()
            among = self.backlogs if least is None else (least,)
            served = max(served, min(self.served[each] for each in among))
        self.served[tenant] = served
        backlog = self.backlogs[tenant] = Backlog(arrival)
        self.await_turn(tenant)
        return backlog

    def discharge(self, tenant: str, tokens: float) -> None:
        """Take back what a tenant was charged."""
        self.served[tenant] -= tokens
        self.await_turn(tenant)

    def await_turn(self, tenant: str) -> None:
        """Enter a tenant among the turns: its count is smaller than it was, or it has somebody again."""
        backlog = self.backlogs.get(tenant)
        if backlog is None:
            return
        if len(self.turns) > STALE_FACTOR * len(self.backlogs) + STALE_MIN:
            self.turns = [(self.served[each], there.began, each) for each, there in self.backlogs.items()]
            heapify(self.turns)
        else:
            heappush(self.turns, (self.served[tenant], backlog.began, tenant))

    def next_tenant(self) -> str | None:
        """Return the least served tenant that waits; of equals the one that began to wait first. ``None``: all that
        wait are taken."""
        turns = self.turns
        while turns:
            served, began, tenant = turns[0]
            backlog = self.backlogs.get(tenant)
            if backlog is None or backlog.began != began or not backlog.has_turn:
                heappop(turns)
            elif self.served[tenant] != served:
                heapreplace(turns, (self.served[tenant], began, tenant))
            else:
                return tenant
        return None


@dataclass(slots=True)
class Held:
    """What one tenant has waiting at one priority, over all lanes."""

    weight: float
    requests: int = 0
    prompt_tokens: int = 0

    def share(self, by_tokens: bool) -> float:
        """Return how much that is, by requests or by tokens, for the tenant's weight."""
        return (self.prompt_tokens if by_tokens else self.requests) / self.weight
