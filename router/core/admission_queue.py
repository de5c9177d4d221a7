"""Requests that wait for a worker with room: bounded, ordered by priority, fair among tenants.

Rules
    1. Requests wait in *lanes*, one per model: a model without room never holds up another one.
    2. In a lane a higher priority goes first, always. Within a priority it is the turn of the tenant that was served
       the fewest tokens (divided by its weight); within a tenant the order is that of arrival, or of least uncached
       work.
    3. A tenant is charged a request's prompt tokens when it leaves the queue for a worker, and its output tokens when
       they are known. A tenant that begins to wait takes over at least the count of the least served one that waits:
       nobody saves up turns by being away. This is the virtual token counter of Sheng et al., "Fairness in Serving
       Large Language Models", OSDI 2024. While two tenants both wait, what they are served differs by no more than
       the longest prompt, plus the output that was still under way.
    4. Least uncached work first ages: a request may be overtaken only by such that came at most
       ``work difference / aging_tokens_per_s`` later. So every request's turn comes, however many short ones arrive.
    5. The queue is bounded by requests and by prompt tokens, over all lanes. On overflow the lowest priority gives way;
       in it the tenant with the most waiting (of what overflowed, divided by its weight); of that the last arrival. The
       newcomer takes part in this, and loses ties. A request that is alone may have any length.
    6. *Resumed* requests (their clients are being served already) stand before everybody, in order of arrival, are not
       counted against the bounds and never give way.
    7. Whoever left (cancelled, timed out) gives up the place at once.

No sockets, no clock: times are arguments, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueOrder(Enum):
    """Whose turn it is among the requests of one tenant and priority."""

    ARRIVAL = "arrival"
    SHORTEST_UNCACHED_WORK_FIRST = "shortest-uncached-work-first"


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """A place in the queue."""

    item: T
    lane: str
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    """Prompt tokens that the best worker would have to compute, when the request arrived."""
    entered_ms: float = 0.0
    resumed: bool = False
    arrival: int = -1
    """Number in the order of arrival, given by the queue."""
    waits: bool = False
    """Whether it holds a place; kept by the queue."""


@dataclass(slots=True)
class _Backlog(Generic[T]):
    """What one tenant has waiting at one priority of one lane."""

    heap: list[tuple[float, int, QueuedRequest[T]]] = field(default_factory=list)
    live: int = 0
    """Requests in the heap that still wait; the others are dropped when they come up, or when they are the majority."""
    prompt_tokens: int = 0
    weight: float = 1.0

    def push(self, key: float, request: QueuedRequest[T]) -> None:
        heappush(self.heap, (key, request.arrival, request))
        self.live += 1
        self.prompt_tokens += request.prompt_tokens
        self.weight = request.weight

    def drop(self, request: QueuedRequest[T]) -> None:
        self.live -= 1
        self.prompt_tokens -= request.prompt_tokens
        if len(self.heap) > 2 * self.live + 16:
            self.heap = [entry for entry in self.heap if entry[2].waits]
            heapify(self.heap)

    def first(self) -> QueuedRequest[T]:
        while not self.heap[0][2].waits:
            heappop(self.heap)
        return self.heap[0][2]


@dataclass(slots=True)
class _Band(Generic[T]):
    """One priority of one lane."""

    backlogs: dict[str, _Backlog[T]] = field(default_factory=dict)
    """By tenant; only tenants that wait."""
    served: dict[str, float] = field(default_factory=dict)
    """Tokens charged to each tenant, divided by its weight; forgotten with the band."""

    def enter(self, tenant: str) -> None:
        """Lift a tenant that begins to wait to the least served one that waits."""
        if self.backlogs:
            least = min(self.served[each] for each in self.backlogs)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
        else:
            self.served.setdefault(tenant, 0.0)

    def next_tenant(self) -> str:
        """Return the least served tenant; of equals the one whose first request came first."""
        return min(self.backlogs, key=lambda each: (self.served[each], self.backlogs[each].first().arrival))


class AdmissionQueue(Generic[T]):
    """A bounded queue; the time of ``enter``, ``leave`` and ``head`` grows with the tenants, not with the requests."""

    def __init__(
        self,
        requests_max: int,
        prompt_tokens_max: int,
        order: QueueOrder = QueueOrder.ARRIVAL,
        aging_tokens_per_s: float = 4000.0,
    ) -> None:
        self._requests_max = requests_max
        self._prompt_tokens_max = prompt_tokens_max
        self._order = order
        self._aging_tokens_per_ms = aging_tokens_per_s / 1000
        self._lanes: dict[str, dict[int, _Band[T]]] = {}
        self._resumed: dict[int, QueuedRequest[T]] = {}
        self._arrivals = 0
        self._requests = 0
        self._prompt_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the waiting requests, resumed ones left out."""
        return self._prompt_tokens

    def waiting(self, lane: str) -> bool:
        """Tell whether anybody waits in a lane, resumed requests of all lanes included."""
        return lane in self._lanes or bool(self._resumed)

    def enter(self, request: QueuedRequest[T]) -> list[QueuedRequest[T]]:
        """Queue a request; return who gives way for it, out of the queue already.

        It is the request itself, alone and unqueued, when there is no room for it.
        """
        request.arrival = self._arrivals
        self._arrivals += 1
        if request.resumed:
            request.waits = True
            self._resumed[request.arrival] = request
            return []
        evicted = self._make_room(request)
        if evicted == [request]:
            return evicted
        for victim in evicted:
            self.leave(victim)
        band = self._lanes.setdefault(request.lane, {}).setdefault(request.priority, _Band())
        backlog = band.backlogs.get(request.tenant)
        if backlog is None:
            band.enter(request.tenant)
            backlog = band.backlogs[request.tenant] = _Backlog()
        backlog.push(self._key(request), request)
        request.waits = True
        self._requests += 1
        self._prompt_tokens += request.prompt_tokens
        return evicted

    def leave(self, request: QueuedRequest[T], dispatched: bool = False) -> None:
        """Take a request out, wherever it stands; ``dispatched``: to a worker, and its tenant is charged.

        One that does not wait is ignored.
        """
        if not request.waits:
            return
        request.waits = False
        if request.resumed:
            del self._resumed[request.arrival]
            return
        bands = self._lanes[request.lane]
        band = bands[request.priority]
        if dispatched:
            band.served[request.tenant] += max(1, request.prompt_tokens) / request.weight
        backlog = band.backlogs[request.tenant]
        backlog.drop(request)
        self._requests -= 1
        self._prompt_tokens -= request.prompt_tokens
        if backlog.live == 0:
            del band.backlogs[request.tenant]
            if not band.backlogs:
                del bands[request.priority]
                if not bands:
                    del self._lanes[request.lane]

    def charge(self, lane: str, tenant: str, weight: float, priority: int, output_tokens: int) -> None:
        """Count output against a tenant; without effect when nobody waits at that priority."""
        band = self._lanes.get(lane, {}).get(priority)
        if band is not None:
            band.served[tenant] = band.served.get(tenant, 0.0) + output_tokens / weight

    def resumed(self) -> list[QueuedRequest[T]]:
        """Return the resumed requests, in order of arrival."""
        return list(self._resumed.values())

    def lanes(self) -> list[str]:
        """Return the lanes in which somebody waits."""
        return list(self._lanes)

    def head(self, lane: str) -> QueuedRequest[T] | None:
        """Return the request of a lane whose turn it is."""
        bands = self._lanes.get(lane)
        if not bands:
            return None
        band = bands[max(bands)]
        return band.backlogs[band.next_tenant()].first()

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over all waiting requests, in no order that means anything."""
        yield from self._resumed.values()
        for bands in self._lanes.values():
            for band in bands.values():
                for backlog in band.backlogs.values():
                    yield from (request for _, _, request in backlog.heap if request.waits)

    def __len__(self) -> int:
        """Return how many requests wait, resumed ones included."""
        return self._requests + len(self._resumed)

    def _key(self, request: QueuedRequest[T]) -> float:
        if self._order is QueueOrder.ARRIVAL:
            return float(request.arrival)
        # Work minus age, compared between two requests, does not depend on now: both age alike.
        return request.uncached_tokens + request.entered_ms * self._aging_tokens_per_ms

    def _make_room(self, newcomer: QueuedRequest[T]) -> list[QueuedRequest[T]]:
        """Return who must go so that the newcomer fits; only itself when it is the one to give way."""
        excess_requests = self._requests + 1 - self._requests_max
        excess_tokens = self._prompt_tokens + newcomer.prompt_tokens - self._prompt_tokens_max
        if self._requests_max < 1:
            return [newcomer]
        evicted: list[QueuedRequest[T]] = []
        gone: set[int] = set()
        while excess_requests > 0 or (excess_tokens > 0 and self._requests > len(evicted)):
            victim = self._victim(newcomer, gone, by_tokens=excess_requests <= 0)
            if victim is newcomer:
                return [newcomer]
            evicted.append(victim)
            gone.add(victim.arrival)
            excess_requests -= 1
            excess_tokens -= victim.prompt_tokens
        return evicted

    def _victim(self, newcomer: QueuedRequest[T], gone: set[int], by_tokens: bool) -> QueuedRequest[T]:
        """Return who gives way next, if those in ``gone`` already have."""
        lowest = newcomer.priority
        for bands in self._lanes.values():
            for priority, band in bands.items():
                if priority < lowest and (not gone or any(_left(each, gone) for each in band.backlogs.values())):
                    lowest = priority
        held: dict[str, float] = {}
        if lowest == newcomer.priority:
            held[newcomer.tenant] = (newcomer.prompt_tokens if by_tokens else 1) / newcomer.weight
        backlogs: dict[str, list[_Backlog[T]]] = {}
        for bands in self._lanes.values():
            if lowest not in bands:
                continue
            for tenant, backlog in bands[lowest].backlogs.items():
                amount: float = backlog.prompt_tokens if by_tokens else backlog.live
                if gone:
                    left = _left(backlog, gone)
                    if not left:
                        continue
                    amount = sum(each.prompt_tokens for each in left) if by_tokens else len(left)
                held[tenant] = held.get(tenant, 0.0) + amount / backlog.weight
                backlogs.setdefault(tenant, []).append(backlog)
        most = max(held.values())
        if lowest == newcomer.priority and held[newcomer.tenant] >= most:
            return newcomer
        tenant = next(each for each, amount in held.items() if amount == most)
        return max(
            (each for backlog in backlogs[tenant] for each in _left(backlog, gone)), key=lambda each: each.arrival
        )


def _left(backlog: _Backlog[T], gone: set[int]) -> list[QueuedRequest[T]]:
    return [request for _, _, request in backlog.heap if request.waits and request.arrival not in gone]
