"""Requests that wait for a worker with room: bounded, ordered by priority, fair among tenants.

Rules
    1. Requests wait in *lanes*, one per model: a model without room never holds up another one.
    2. In a lane a higher priority goes first, always. Within a priority it is the turn of the tenant that was served
       the fewest tokens (divided by its weight). Within a tenant, prompts of up to ``SHORT_PROMPT_TOKENS`` and longer
       ones have turns in the same way, each in order of arrival: a short one does not wait behind a backlog of long
       ones, also where nothing distinguishes clients. Those that wait for a place have no such turns. Or the order is
       that of least uncached work.
    3. A tenant is charged a request's prompt tokens when it leaves the queue for a worker, and its output tokens when
       they are known. A tenant that begins to wait takes over at least the count of the least served one that waits:
       a tenant cannot save up turns by being idle. This is the virtual token counter of Sheng et al., "Fairness in
       Serving Large Language Models", OSDI 2024. While two tenants both wait, what they are served differs by no more
       than the longest prompt, plus the output in flight.
    4. Least uncached work first ages: a request may be overtaken only by such that came at most
       ``work difference / aging_tokens_per_s`` later. So every request's turn comes, however many short ones arrive.
    5. The queue is bounded by requests and by prompt tokens, over all lanes. On overflow the lowest priority gives way;
       in it the tenant with the most waiting (of what overflowed, divided by its weight); of that the last arrival. The
       newcomer takes part in this, and loses ties. A request that is alone may have any length.
    6. *Resumed* requests (their clients are being served already) stand before all others, in order of arrival, are not
       counted against the bounds and never give way.
    7. A request that left (cancelled, timed out) gives up its place at once.
    8. Where it takes time to see whether there is room, the request that has the turn is *taken* meanwhile: its tenant
       is charged, and the turn is the next one's. For the bounds it still waits, and may have to give way;
       ``put_back`` returns it to its turn as if it had not been taken.

No sockets, no clock: times are arguments, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")

SHORT_PROMPT_TOKENS = 1024
"""Up to here a prompt is short: it takes twice the time of the smallest step, and joins steps of others."""

STALE_FACTOR = 2
STALE_MIN = 16
"""A heap is cleaned when it has this many times what is live in it, and this many more: memory follows what waits."""


SERVED_KEPT = 4096
"""Tenants beyond those that wait whose counts are kept: of clients without keys, addresses count as tenants."""


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
    waits_for_place: bool = False
    """Whether it waits for a place of its session in caches, which a short prompt takes no sooner than a long one."""
    is_short: bool = False
    """Whether it has its turns among the short prompts of its tenant; kept by the queue."""
    waits: bool = False
    """Whether it holds a place; kept by the queue."""


@dataclass(slots=True)
class Flow(Generic[T]):
    """The short or the long prompts of one tenant that wait."""

    heap: list[tuple[float, int, QueuedRequest[T]]] = field(default_factory=list)
    live: int = 0
    """Requests that wait, taken ones included; others in the heap are dropped when they come up, or when they are the
    majority."""
    taken: int = 0
    served: float = 0.0
    """Prompt tokens charged since its tenant began to wait."""

    @property
    def has_turn(self) -> bool:
        return self.live > self.taken

    def first(self) -> QueuedRequest[T]:
        """Return the request whose turn it is; at least one must have one."""
        while not self.heap[0][2].waits:
            heappop(self.heap)
        return self.heap[0][2]

    def drop(self) -> None:
        self.live -= 1
        if len(self.heap) > STALE_FACTOR * self.live + STALE_MIN:
            self.heap = [entry for entry in self.heap if entry[2].waits]
            heapify(self.heap)


@dataclass(slots=True)
class Backlog(Generic[T]):
    """What one tenant has waiting at one priority of one lane."""

    began: int
    """Arrival of the request with which the tenant began to wait here."""
    short: Flow[T] = field(default_factory=Flow)
    long: Flow[T] = field(default_factory=Flow)
    taken: dict[int, QueuedRequest[T]] = field(default_factory=dict)
    """By arrival, those that are taken; they are in no heap."""

    @property
    def live(self) -> int:
        return self.short.live + self.long.live

    @property
    def has_turn(self) -> bool:
        return self.short.has_turn or self.long.has_turn

    def waiting(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over those that wait, in no order that means anything."""
        yield from self.taken.values()
        for flow in (self.short, self.long):
            yield from (request for _, _, request in flow.heap if request.waits)

    def push(self, key: float, request: QueuedRequest[T]) -> None:
        """Let a request wait; the one with the least key goes first among its kind."""
        flow, other = (self.short, self.long) if request.is_short else (self.long, self.short)
        if not flow.live:
            flow.served = max(flow.served, other.served)
        heappush(flow.heap, (key, request.arrival, request))
        flow.live += 1

    def take(self) -> QueuedRequest[T]:
        """Take the one whose turn it is, to see whether there is room for it."""
        request = self.first()
        flow = self._flow(request)
        heappop(flow.heap)
        flow.taken += 1
        flow.served += request.prompt_tokens
        self.taken[request.arrival] = request
        return request

    def put_back(self, key: float, request: QueuedRequest[T]) -> None:
        self._untake(request)
        heappush(self._flow(request).heap, (key, request.arrival, request))

    def leave(self, request: QueuedRequest[T], dispatched: bool) -> bool:
        """Drop a request, ``dispatched`` to a worker or not; return whether it was taken."""
        was_taken = request.arrival in self.taken
        if was_taken:
            self._untake(request)
        flow = self._flow(request)
        if dispatched:
            flow.served += request.prompt_tokens
        flow.drop()
        return was_taken

    def first(self) -> QueuedRequest[T]:
        """Return the request whose turn it is; at least one must have one. Of equals the short one goes first."""
        short, long = self.short, self.long
        return short.first() if short.has_turn and not (long.has_turn and long.served < short.served) else long.first()

    def oldest(self) -> QueuedRequest[T]:
        """Return the first of those that the order of its kind puts first; none may be taken."""
        firsts = [flow.first() for flow in (self.short, self.long) if flow.has_turn]
        return min(firsts, key=lambda each: (each.entered_ms, each.arrival))

    def _flow(self, request: QueuedRequest[T]) -> Flow[T]:
        return self.short if request.is_short else self.long

    def _untake(self, request: QueuedRequest[T]) -> None:
        del self.taken[request.arrival]
        flow = self._flow(request)
        flow.taken -= 1
        flow.served -= request.prompt_tokens


@dataclass(slots=True)
class Band(Generic[T]):
    """One priority of one lane."""

    backlogs: dict[str, Backlog[T]] = field(default_factory=dict)
    """By tenant; only tenants that wait."""
    served: dict[str, float] = field(default_factory=dict)
    """Tokens charged to each tenant, divided by its weight; only grows. What is known of tenants that do not wait is
    forgotten where it is much, and with the band."""
    turns: list[tuple[float, int, str]] = field(default_factory=list)
    """Heap of (served, began, tenant). An entry may be older than its tenant's count: it is corrected at the top."""

    def begin(self, tenant: str, arrival: int) -> Backlog[T]:
        """Let a tenant begin to wait, with at least the count of the least served one that waits."""
        served = self.served.get(tenant, 0.0)
        if self.backlogs:
            least = self.next_tenant()
            among = self.backlogs if least is None else (least,)
            served = max(served, min(self.served[each] for each in among))
        self._forget_some()
        self.served[tenant] = served
        backlog = self.backlogs[tenant] = Backlog(arrival)
        self.await_turn(tenant)
        return backlog

    def charge(self, tenant: str, tokens: float) -> None:
        """Count output against a tenant, which need not wait."""
        self._forget_some()
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens

    def _forget_some(self) -> None:
        if len(self.served) > STALE_FACTOR * len(self.backlogs) + SERVED_KEPT:
            self.served = {each: self.served[each] for each in self.backlogs}

    def discharge(self, tenant: str, tokens: float) -> None:
        self.served[tenant] -= tokens
        self.await_turn(tenant)

    def await_turn(self, tenant: str) -> None:
        """Enter a tenant among the turns: its count fell, or it has a waiting request again."""
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
class Share:
    """What one tenant has waiting at one priority, over all lanes."""

    weight: float
    requests: int = 0
    prompt_tokens: int = 0

    def of_weight(self, by_tokens: bool) -> float:
        """Return how much that is, by requests or by tokens, for the tenant's weight."""
        return (self.prompt_tokens if by_tokens else self.requests) / self.weight


class FairQueue(Generic[T]):
    """A bounded queue. A turn takes time with the logarithm of its requests and tenants; overflow, with the tenants."""

    def __init__(
        self,
        requests_max: int,
        prompt_tokens_max: int,
        order: QueueOrder = QueueOrder.ARRIVAL,
        aging_tokens_per_s: float = 4000.0,
    ) -> None:
        self.requests_max, self.prompt_tokens_max = requests_max, prompt_tokens_max
        self._order = order
        self._aging_tokens_per_ms = aging_tokens_per_s / 1000
        self._lanes: dict[str, dict[int, Band[T]]] = {}
        self._shares: dict[int, dict[str, Share]] = {}
        """By priority and tenant; only what waits."""
        self._resumed: dict[int, QueuedRequest[T]] = {}
        self._resumed_in: dict[str, int] = {}
        """How many of them are in each lane."""
        self._arrivals = 0
        self._requests = 0
        self._prompt_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    def waiting(self, lane: str) -> bool:
        return lane in self._lanes or lane in self._resumed_in

    @property
    def is_empty(self) -> bool:
        return not (self._lanes or self._resumed)

    def has_room(self, request: QueuedRequest[T], requests_max: int) -> bool:
        """Return whether a request may enter without displacing another, and at most ``requests_max`` wait then."""
        return (
            self._requests < min(self.requests_max, requests_max)
            and self._prompt_tokens + request.prompt_tokens <= self.prompt_tokens_max
        )

    def enter(self, request: QueuedRequest[T]) -> list[QueuedRequest[T]]:
        """Queue a request; return who gives way for it, out of the queue already.

        It is the request itself, alone and unqueued, when there is no room for it.
        """
        request.arrival = self._arrivals
        request.is_short = (
            self._order is QueueOrder.ARRIVAL
            and not request.waits_for_place
            and request.prompt_tokens <= SHORT_PROMPT_TOKENS
        )
        self._arrivals += 1
        if request.resumed:
            request.waits = True
            self._resumed[request.arrival] = request
            self._resumed_in[request.lane] = self._resumed_in.get(request.lane, 0) + 1
            return []
        evicted = self._make_room(request)
        if evicted == [request]:
            return evicted
        for victim in evicted:
            self.leave(victim)
        band = self._lanes.setdefault(request.lane, {}).setdefault(request.priority, Band())
        backlog = band.backlogs.get(request.tenant)
        if backlog is None:
            backlog = band.begin(request.tenant, request.arrival)
        elif not backlog.has_turn:
            band.await_turn(request.tenant)  # all that waited are taken: it is perhaps not among the turns any more
        backlog.push(self._key(request), request)
        request.waits = True
        held = self._shares.setdefault(request.priority, {}).setdefault(request.tenant, Share(request.weight))
        held.weight = request.weight
        held.requests += 1
        held.prompt_tokens += request.prompt_tokens
        self._requests += 1
        self._prompt_tokens += request.prompt_tokens
        return evicted

    def take(self, lane: str) -> QueuedRequest[T] | None:
        """Take the request of a lane whose turn it is, to see whether there is room; ``None``: no turn there.

        ``leave`` or ``put_back`` must follow.
        """
        head = self.head(lane)
        if head is None:
            return None
        band = self._lanes[lane][head.priority]
        band.served[head.tenant] += _charge_of(head)
        return band.backlogs[head.tenant].take()

    def put_back(self, request: QueuedRequest[T]) -> None:
        """Let a request that was taken wait on; one that is not taken, or left meanwhile, is ignored."""
        if not request.waits or request.resumed:
            return
        band = self._lanes[request.lane][request.priority]
        backlog = band.backlogs[request.tenant]
        if request.arrival in backlog.taken:
            backlog.put_back(self._key(request), request)
            band.discharge(request.tenant, _charge_of(request))

    def leave(self, request: QueuedRequest[T], dispatched: bool = False) -> None:
        """Take a request out, from any place; ``dispatched``: to a worker, and its tenant is charged.

        One that does not wait is ignored.
        """
        if not request.waits:
            return
        request.waits = False
        if request.resumed:
            del self._resumed[request.arrival]
            self._resumed_in[request.lane] -= 1
            if not self._resumed_in[request.lane]:
                del self._resumed_in[request.lane]
            return
        bands = self._lanes[request.lane]
        band = bands[request.priority]
        backlog = band.backlogs[request.tenant]
        charged = backlog.leave(request, dispatched)
        if dispatched and not charged:
            band.served[request.tenant] += _charge_of(request)
        if charged and not dispatched:
            band.discharge(request.tenant, _charge_of(request))
        tenants = self._shares[request.priority]
        held = tenants[request.tenant]
        held.requests -= 1
        held.prompt_tokens -= request.prompt_tokens
        if held.requests == 0:
            del tenants[request.tenant]
            if not tenants:
                del self._shares[request.priority]
        self._requests -= 1
        self._prompt_tokens -= request.prompt_tokens
        if backlog.live == 0:
            del band.backlogs[request.tenant]
            if not band.backlogs:
                del bands[request.priority]
                if not bands:
                    del self._lanes[request.lane]

    def charge(self, lane: str, tenant: str, weight: float, priority: int, output_tokens: int) -> None:
        """Count output against a tenant; without effect when no request waits at that priority."""
        band = self._lanes.get(lane, {}).get(priority)
        if band is not None:
            band.charge(tenant, output_tokens / weight)

    def resumed(self) -> list[QueuedRequest[T]]:
        return list(self._resumed.values())

    def lanes(self) -> list[str]:
        return list(self._lanes)

    def head(self, lane: str) -> QueuedRequest[T] | None:
        """Return the request of a lane whose turn it is; taken ones have had theirs."""
        bands = self._lanes.get(lane)
        if not bands:
            return None
        for priority in sorted(bands, reverse=True):
            band = bands[priority]
            tenant = band.next_tenant()
            if tenant is not None:
                return band.backlogs[tenant].first()
        return None

    def first(self, lane: str) -> QueuedRequest[T] | None:
        """Return the request of a lane that entered first, of the highest priority. Nothing may be taken there."""
        head = self.head(lane)
        if head is None:
            return None
        firsts = [backlog.oldest() for backlog in self._lanes[lane][head.priority].backlogs.values()]
        return min(firsts, key=lambda each: (each.entered_ms, each.arrival))

    def has_backlog(self, lane: str, requests: int) -> bool:
        """Return whether several tenants wait, and one of them with more than
        so many requests."""
        bands = self._lanes.get(lane)
        if not bands:
            return False
        backlogs = bands[max(bands)].backlogs
        return len(backlogs) > 1 and any(each.live > requests for each in backlogs.values())

    def first_entered_ms(self, lane: str) -> float | None:
        """Return when the first of those entered that wait in a lane; nothing may be taken there."""
        waiting = (
            (backlog.oldest() for band in self._lanes.get(lane, {}).values() for backlog in band.backlogs.values())
            if self._order is QueueOrder.ARRIVAL
            else self.of_lane(lane)
        )
        return min((each.entered_ms for each in waiting), default=None)

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """Iterate over all waiting requests, in no order that means anything."""
        yield from self._resumed.values()
        for lane in self._lanes:
            yield from self.of_lane(lane)

    def of_lane(self, lane: str) -> Iterator[QueuedRequest[T]]:
        """Iterate over those that wait in a lane, in no order that means anything."""
        for band in self._lanes.get(lane, {}).values():
            for backlog in band.backlogs.values():
                yield from backlog.waiting()

    def __len__(self) -> int:
        return self._requests + len(self._resumed)

    def _key(self, request: QueuedRequest[T]) -> float:
        if self._order is QueueOrder.ARRIVAL:
            return request.entered_ms
        # Work minus age, compared between two requests, does not depend on now: both age alike.
        return request.uncached_tokens + request.entered_ms * self._aging_tokens_per_ms

    def _make_room(self, newcomer: QueuedRequest[T]) -> list[QueuedRequest[T]]:
        """Return who must go so that the newcomer fits; only itself when it is the one to give way.

        Where the bounds have become smaller than what waits, a newcomer takes a place and frees none beyond it.
        """
        if self.requests_max < 1:
            return [newcomer]
        excess_requests = min(1, self._requests + 1 - self.requests_max)
        excess_tokens = self._prompt_tokens + newcomer.prompt_tokens - self.prompt_tokens_max
        excess_tokens = min(excess_tokens, newcomer.prompt_tokens)
        evicted: list[QueuedRequest[T]] = []
        while excess_requests > 0 or (excess_tokens > 0 and self._requests > len(evicted)):
            victim = self._victim(newcomer, evicted, by_tokens=excess_requests <= 0)
            if victim is newcomer:
                return [newcomer]
            evicted.append(victim)
            excess_requests -= 1
            excess_tokens -= victim.prompt_tokens
        return evicted

    def _victim(self, newcomer: QueuedRequest[T], evicted: list[QueuedRequest[T]], by_tokens: bool) -> QueuedRequest[T]:
        """Return who gives way next, if the evicted ones already have."""
        gone: dict[int, dict[str, Share]] = {}
        for each in evicted:
            went = gone.setdefault(each.priority, {}).setdefault(each.tenant, Share(each.weight))
            went.requests += 1
            went.prompt_tokens += each.prompt_tokens

        def left(priority: int) -> dict[str, Share]:
            there = self._shares.get(priority, {})
            without = gone.get(priority)
            if without is None:
                return there
            rest: dict[str, Share] = {}
            for tenant, held in there.items():
                went = without.get(tenant)
                requests, prompt_tokens = held.requests, held.prompt_tokens
                if went is not None:
                    requests -= went.requests
                    prompt_tokens -= went.prompt_tokens
                if requests > 0:
                    rest[tenant] = Share(held.weight, requests, prompt_tokens)
            return rest

        lowest = min(
            (each for each in self._shares if each < newcomer.priority and left(each)), default=newcomer.priority
        )
        tenants = left(lowest)
        if lowest == newcomer.priority:
            own = tenants.get(newcomer.tenant, Share(newcomer.weight))
            share = Share(newcomer.weight, own.requests + 1, own.prompt_tokens + newcomer.prompt_tokens).of_weight(
                by_tokens
            )
            others = (held.of_weight(by_tokens) for tenant, held in tenants.items() if tenant != newcomer.tenant)
            if share >= max(others, default=0.0):
                return newcomer
        tenant = max(tenants, key=lambda each: tenants[each].of_weight(by_tokens))
        spared = {each.arrival for each in evicted}
        return max(
            (
                request
                for bands in self._lanes.values()
                if lowest in bands and tenant in bands[lowest].backlogs
                for request in bands[lowest].backlogs[tenant].waiting()
                if request.arrival not in spared
            ),
            key=lambda each: each.arrival,
        )


def _charge_of(request: QueuedRequest[T]) -> float:
    """Return what a tenant pays for a request that goes to a worker, before its output is known."""
    return max(1, request.prompt_tokens) / request.weight
