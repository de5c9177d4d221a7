"""The admission queue: priority, then fair turns of tenants, then arrival; bounded, and compared with a naive one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from poolgrid.server.serving.admission_queue import DrainRate
from poolgrid.server.serving.fair_queue import SHORT_PROMPT_TOKENS, FairQueue, QueuedRequest, QueueOrder
from tests.examples import examples

NO_BOUND = 10**12


def request(
    name: str, tenant: str = "", priority: int = 0, tokens: int = 10, lane: str = "m", **more: float
) -> QueuedRequest[str]:
    return QueuedRequest(
        name,
        lane,
        tenant,
        more.get("weight", 1.0),
        priority,
        tokens,
        int(more.get("uncached", tokens)),
        more.get("entered_ms", 0.0),
        bool(more.get("resumed", 0)),
    )


def drained(queue: FairQueue[str], lane: str = "m") -> list[str]:
    names = []
    while (head := queue.head(lane)) is not None:
        queue.leave(head, dispatched=True)
        names.append(head.item)
    return names


def names(evicted: list[QueuedRequest[str]]) -> list[str]:
    return [each.item for each in evicted]


def test_a_tenant_that_was_away_has_saved_no_turns() -> None:
    queue: FairQueue[str] = FairQueue(100, NO_BOUND)
    queue.enter(request("away", "away"))
    for number in range(20):
        queue.enter(request(f"busy-{number}", "busy"))
    for _ in range(10):
        head = queue.head("m")
        assert head is not None
        queue.leave(head, dispatched=True)
    for number in range(10):
        queue.enter(request(f"back-{number}", "away"))

    assert sum(name.startswith("back") for name in drained(queue)[:10]) == 5


def test_a_short_prompt_of_a_tenant_does_not_wait_behind_its_long_ones_nor_they_behind_many_short_ones() -> None:
    queue: FairQueue[str] = FairQueue(1000, NO_BOUND)
    for number in range(20):
        queue.enter(request(f"long-{number}", tokens=9000))
    queue.enter(request("short", tokens=40))
    assert drained(queue)[:3] == ["short", "long-0", "long-1"]

    for number in range(3):
        queue.enter(request(f"long-{number}", tokens=9000))
    for number in range(500):
        queue.enter(request(f"short-{number}", tokens=40))
    order = drained(queue)
    # Short ones have as many tokens' worth of turns as long ones, and no more: 226 x 40 tokens exceed 9,000.
    assert [order.index(f"long-{number}") for number in range(3)] == [1, 227, 453]


def test_turns_that_wait_for_a_place_go_in_the_order_of_arrival_whatever_their_length() -> None:
    queue: FairQueue[str] = FairQueue(1000, NO_BOUND)
    for number in range(20):
        each = request(str(number), tokens=9000 if number % 2 else 40)
        each.waits_for_place = True
        queue.enter(each)

    assert drained(queue) == [str(number) for number in range(20)]


def test_kinds_of_prompts_save_no_turns_while_none_of_them_waits() -> None:
    queue: FairQueue[str] = FairQueue(1000, NO_BOUND)
    for number in range(20):
        queue.enter(request(f"long-{number}", tokens=9000))
    for _ in range(10):
        head = queue.head("m")
        assert head is not None
        queue.leave(head, dispatched=True)
    for number in range(400):
        queue.enter(request(f"short-{number}", tokens=40))

    assert drained(queue).index("long-10") == 1


def test_least_uncached_work_goes_first_but_only_for_so_long() -> None:
    queue: FairQueue[str] = FairQueue(100, NO_BOUND, QueueOrder.SHORTEST_UNCACHED_WORK_FIRST, aging_tokens_per_s=1000)
    queue.enter(request("long", uncached=5000, entered_ms=0))
    queue.enter(request("cached", tokens=5000, uncached=50, entered_ms=10))
    queue.enter(request("short-soon", uncached=100, entered_ms=4800))
    queue.enter(request("short-late", uncached=100, entered_ms=4901))

    assert drained(queue) == ["cached", "short-soon", "long", "short-late"]


def test_a_resumed_request_holds_up_newcomers_of_its_own_lane_only() -> None:
    queue: FairQueue[str] = FairQueue(10, 1000)
    waiting = [request(name, resumed=1) for name in ("one", "two")]
    for each in waiting:
        queue.enter(each)
        assert queue.waiting(each.lane)
        assert not queue.waiting("another model")
    for each in waiting:
        assert queue.waiting(each.lane)
        queue.leave(each)
    assert not queue.waiting(waiting[0].lane)
    assert queue.is_empty


def test_who_left_has_no_place_and_costs_no_memory() -> None:
    queue: FairQueue[str] = FairQueue(10_000, NO_BOUND)
    queue.enter(request("first"))
    for number in range(5000):
        gone = request(f"gone-{number}")
        queue.enter(gone)
        queue.leave(gone)
        queue.leave(gone)

    for number in range(5000):
        gone = request(f"gone-again-{number}", "other")
        queue.enter(gone)
        queue.leave(gone)

    band = queue._lanes["m"][0]
    assert len(band.backlogs[""].short.heap) < 50
    assert len(band.turns) < 50
    assert list(queue._shares[0]) == [""]
    assert len(queue) == 1
    assert queue.prompt_tokens == 10
    assert drained(queue) == ["first"]


def test_the_time_to_come_back_is_the_queue_over_the_measured_rate() -> None:
    drain = DrainRate()
    assert drain.retry_after_s(1000, 0.0) == 1.0
    for number in range(11):
        drain.finished(100.0 * number)

    assert drain.retry_after_s(109, 1000.0) == 10.0
    assert drain.retry_after_s(1_000_000, 1000.0) == 60.0


def test_the_backlog_is_the_time_that_the_queue_will_take_and_grows_while_nothing_finishes() -> None:
    drain = DrainRate()
    assert drain.backlog_s(1000, 0.0) == 0.0, "no rate is known"
    for number in range(11):
        drain.finished(100.0 * number)

    assert drain.backlog_s(0, 1000.0) == 0.0
    assert drain.backlog_s(110, 1000.0) == pytest.approx(10.0)
    assert drain.backlog_s(110, 2000.0) == pytest.approx(20.0)
    assert drain.backlog_s(1_100_000, 1000.0) == pytest.approx(100_000.0), (
        "no bound: whoever scales by it needs the truth"
    )


# -- against a naive model ---------------------------------------------------------------------------------------------


@dataclass
class Naive:
    """The rules of the queue, written down without any thought of speed."""

    requests_max: int
    tokens_max: int
    aging_per_ms: float | None
    waiting: list[QueuedRequest[str]] = field(default_factory=list)
    served: dict[tuple[str, int, str], float] = field(default_factory=dict)
    began: dict[tuple[str, int, str], int] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    kinds: dict[tuple[str, int, str, bool], float] = field(default_factory=dict)
    """Tokens that the short and the long prompts of a tenant were served since it began to wait."""

    def tenants(self, lane: str, priority: int) -> set[str]:
        return {each.tenant for each in self.waiting if (each.lane, each.priority) == (lane, priority)}

    def enter(self, newcomer: QueuedRequest[str]) -> list[str]:
        self.arrivals[newcomer.item] = len(self.arrivals)
        candidates = [*self.waiting, newcomer]
        evicted: list[QueuedRequest[str]] = []
        while len(candidates) > 1 or self.requests_max == 0:
            too_many = len(candidates) > self.requests_max
            if not too_many and sum(each.prompt_tokens for each in candidates) <= self.tokens_max:
                break
            lowest = min(each.priority for each in candidates)
            there = [each for each in candidates if each.priority == lowest]

            def share(tenant: str, there: list[QueuedRequest[str]] = there, too_many: bool = too_many) -> float:
                own = [each for each in there if each.tenant == tenant]
                return sum((1 if too_many else each.prompt_tokens) for each in own) / own[0].weight

            most = max(share(each.tenant) for each in there)
            if newcomer in there and share(newcomer.tenant) == most:
                return [newcomer.item]
            largest = [each for each in there if share(each.tenant) == most]
            # Whose request is taken among equal tenants is nobody's promise; the test gives them unequal ones.
            victim = max(largest, key=lambda each: self.arrivals[each.item])
            candidates.remove(victim)
            evicted.append(victim)
        for each in evicted:
            self.leave(each, dispatched=False)
        waiting = self.tenants(newcomer.lane, newcomer.priority)
        band = (newcomer.lane, newcomer.priority)
        if newcomer.tenant not in waiting:
            least = min((self.served[(*band, each)] for each in waiting), default=0.0)
            self.served[(*band, newcomer.tenant)] = max(self.served.get((*band, newcomer.tenant), 0.0), least)
            self.began[(*band, newcomer.tenant)] = self.arrivals[newcomer.item]
            for kind in (False, True):
                self.kinds.pop((*band, newcomer.tenant, kind), None)
        own = [each for each in self.waiting if (each.lane, each.priority, each.tenant) == (*band, newcomer.tenant)]
        is_short = self.is_short(newcomer)
        if all(self.is_short(each) is not is_short for each in own):
            mine, other = (*band, newcomer.tenant, is_short), (*band, newcomer.tenant, not is_short)
            self.kinds[mine] = max(self.kinds.get(mine, 0.0), self.kinds.get(other, 0.0))
        self.waiting.append(newcomer)
        return [each.item for each in evicted]

    def leave(self, gone: QueuedRequest[str], dispatched: bool) -> None:
        if gone not in self.waiting:
            return
        self.waiting.remove(gone)
        band = (gone.lane, gone.priority)
        if dispatched:
            self.served[(*band, gone.tenant)] += max(1, gone.prompt_tokens) / gone.weight
            self.kinds[(*band, gone.tenant, self.is_short(gone))] += gone.prompt_tokens
        if not self.tenants(*band):
            self.served = {key: value for key, value in self.served.items() if key[:2] != band}

    def charge(self, lane: str, tenant: str, weight: float, priority: int, tokens: int) -> None:
        if self.tenants(lane, priority):
            key = (lane, priority, tenant)
            self.served[key] = self.served.get(key, 0.0) + tokens / weight

    def is_short(self, each: QueuedRequest[str]) -> bool:
        return self.aging_per_ms is None and each.prompt_tokens <= SHORT_PROMPT_TOKENS

    def key(self, each: QueuedRequest[str]) -> tuple[float, bool, float, int]:
        arrival = self.arrivals[each.item]
        if self.aging_per_ms is None:
            is_short = self.is_short(each)
            served = self.kinds[(each.lane, each.priority, each.tenant, is_short)]
            return (served, not is_short, arrival, arrival)
        return (0.0, False, each.uncached_tokens + each.entered_ms * self.aging_per_ms, arrival)

    def head(self, lane: str) -> str | None:
        there = [each for each in self.waiting if each.lane == lane]
        if not there:
            return None
        priority = max(each.priority for each in there)
        firsts: dict[str, QueuedRequest[str]] = {}
        for each in there:
            if each.priority == priority:
                first = firsts.get(each.tenant)
                if first is None or self.key(each) < self.key(first):
                    firsts[each.tenant] = each

        def turn(each: QueuedRequest[str]) -> tuple[float, int]:
            band = (lane, priority, each.tenant)
            return self.served[band], self.began[band]

        return min(firsts.values(), key=turn).item


@pytest.mark.parametrize("order", QueueOrder)
@pytest.mark.parametrize("seed", range(examples(12)))
def test_the_queue_does_what_a_naive_one_does(seed: int, order: QueueOrder) -> None:
    random = Random(seed)
    bounds = [(4, NO_BOUND), (30, 400), (8, 200), (1, 50), (0, 100), (40, NO_BOUND), (40, 20_000)]
    requests_max, tokens_max = random.choice(bounds)
    lengths = random.choice([(0, 60), (1000, 1050), (0, 5000)])
    queue: FairQueue[str] = FairQueue(requests_max, tokens_max, order, aging_tokens_per_s=5000)
    naive = Naive(requests_max, tokens_max, 5.0 if order is QueueOrder.SHORTEST_UNCACHED_WORK_FIRST else None)
    # Weights that have nothing in common: no two tenants ever hold or were served exactly the same.
    weights = {"a": 1.0, "b": 2**0.5, "c": 3**0.5, "d": 5**0.5}
    known: list[QueuedRequest[str]] = []
    for step in range(400):
        deed = random.random()
        if deed < 0.55:
            tenant, tokens = random.choice("abcd"), random.randint(*lengths)
            entering = request(
                f"r{step}",
                tenant,
                random.choice((-1, 0, 0, 0, 2)),
                tokens,
                random.choice(("m", "n")),
                weight=weights[tenant],
                uncached=random.randint(0, tokens),
                entered_ms=step * 3.0,
            )
            known.append(entering)
            assert names(queue.enter(entering)) == naive.enter(entering)
        elif deed < 0.8 and queue.lanes():
            lane = random.choice(sorted(queue.lanes()))
            head = queue.head(lane)
            assert head is not None
            assert head.item == naive.head(lane)
            queue.leave(head, dispatched=True)
            naive.leave(head, dispatched=True)
        elif deed < 0.9 and known:
            leaving = random.choice(known)
            queue.leave(leaving)
            naive.leave(leaving, dispatched=False)
        else:
            tenant = random.choice("abcd")
            charge = (random.choice(("m", "n")), tenant, weights[tenant], 0, random.randint(1, 99))
            queue.charge(*charge)
            naive.charge(*charge)
        assert len(queue) == len(naive.waiting)
        assert queue.prompt_tokens == sum(each.prompt_tokens for each in naive.waiting)
        assert {each.item for each in queue} == {each.item for each in naive.waiting}
        for lane in ("m", "n"):
            head = queue.head(lane)
            assert (head.item if head else None) == naive.head(lane)


@pytest.mark.parametrize("seed", range(8))
def test_tenants_that_always_wait_are_served_alike_to_within_one_prompt(seed: int) -> None:
    random = Random(seed)
    queue: FairQueue[str] = FairQueue(10_000, NO_BOUND)
    weights = {"one": 1.0, "two": 2.0, "half": 0.5}
    served = dict.fromkeys(weights, 0.0)
    lengths = {"one": 100, "two": 900, "half": 10}
    number = 0
    for tenant in weights:
        for _ in range(random.randint(1, 50)):
            queue.enter(request(f"{number}", tenant, tokens=random.randint(1, lengths[tenant]), weight=weights[tenant]))
            number += 1
    for _ in range(2000):
        head = queue.head("m")
        assert head is not None
        # Its next request is there before it leaves: nobody ever stops waiting.
        number += 1
        tokens = random.randint(1, lengths[head.tenant])
        queue.enter(request(f"{number}", head.tenant, tokens=tokens, weight=head.weight))
        queue.leave(head, dispatched=True)
        served[head.tenant] += head.prompt_tokens / head.weight
        longest = max(lengths[tenant] / weights[tenant] for tenant in weights)
        assert max(served.values()) - min(served.values()) <= longest


# -- taken while it is seen whether there is room ----------------------------------------------------------------------


def test_who_is_taken_gives_the_turn_to_the_next_and_gets_its_place_back() -> None:
    queue: FairQueue[str] = FairQueue(10, NO_BOUND)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        queue.enter(request(name, tenant))

    taken = [queue.take("m") for _ in range(4)]
    assert [each.item for each in taken if each is not None] == ["a1", "b1", "a2", "b2"], "turns go on"
    assert queue.take("m") is None
    assert queue.waiting("m")
    assert len(queue) == 4
    assert queue.prompt_tokens == 40
    for each in taken:
        assert each is not None
        queue.put_back(each)
        queue.put_back(each)

    assert len(queue) == 4
    assert drained(queue) == ["a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("seed", range(examples(10)))
def test_a_queue_of_which_requests_are_taken_and_put_back_is_the_queue_without(seed: int) -> None:
    random = Random(seed)
    bound = random.choice((400, 4000))
    plain: FairQueue[str] = FairQueue(12, bound)
    tried: FairQueue[str] = FairQueue(12, bound)
    for number in range(120):
        step = random.random()
        lane = random.choice("mn")
        if step < 0.5:
            tokens = random.choice((random.randrange(1, 60), random.randrange(1, 60), random.randrange(1025, 1100)))
            more = (str(number), random.choice("abc"), random.randrange(2), tokens, lane)
            assert names(plain.enter(request(*more))) == names(tried.enter(request(*more)))
        elif step < 0.8:
            # Any number in a row, put back in any order; each of them had the turn that it would have had.
            taken = [each for _ in range(random.randrange(5)) if (each := tried.take(lane)) is not None]
            random.shuffle(taken)
            for each in taken:
                tried.put_back(each)
        elif random.random() < 0.8:
            expected, found = plain.head(lane), tried.take(lane)
            assert (expected and expected.item) == (found and found.item)
            if expected is not None and found is not None:
                plain.leave(expected, dispatched=True)
                tried.leave(found, dispatched=True)
        else:
            plain.charge(lane, "a", 1.0, 0, 30)
            tried.charge(lane, "a", 1.0, 0, 30)
        assert len(plain) == len(tried)
        assert plain.prompt_tokens == tried.prompt_tokens
        assert set(plain.lanes()) == set(tried.lanes())
    assert [drained(plain, lane) for lane in "mn"] == [drained(tried, lane) for lane in "mn"]


def test_who_comes_while_all_others_of_its_tenant_are_tried_has_its_turn() -> None:
    queue: FairQueue[str] = FairQueue(10, NO_BOUND)
    queue.enter(request("a1", "a"))
    first = queue.take("m")
    assert first is not None
    assert queue.head("m") is None

    queue.enter(request("a2", "a"))
    queue.leave(first, dispatched=True)

    head = queue.head("m")
    assert head is not None
    assert head.item == "a2"


def test_trying_in_vain_again_and_again_takes_no_memory() -> None:
    queue: FairQueue[str] = FairQueue(10, NO_BOUND)
    for number in range(6):
        queue.enter(request(str(number), "abc"[number % 3]))
    for _ in range(2000):
        taken = [each for _ in range(4) if (each := queue.take("m")) is not None]
        for each in taken:
            queue.put_back(each)

    (band,) = queue._lanes["m"].values()
    assert len(band.turns) < 50
    assert sum(len(backlog.short.heap) for backlog in band.backlogs.values()) == 6
    assert drained(queue) == ["0", "1", "2", "3", "4", "5"]


def test_there_is_room_where_nobody_has_to_give_way_and_not_more_wait_than_are_wanted() -> None:
    queue: FairQueue[str] = FairQueue(3, 1000)
    short, long = QueuedRequest("short", "m", prompt_tokens=400), QueuedRequest("long", "m", prompt_tokens=700)
    assert queue.has_room(long, 1)
    assert not queue.has_room(long, 0)

    queue.enter(short)

    assert not queue.has_room(long, 10), "its tokens are too many"
    assert queue.has_room(QueuedRequest("another", "m", prompt_tokens=600), 10)
    assert not queue.has_room(QueuedRequest("another", "m", prompt_tokens=1), 1)


def test_first_request_of_the_highest_priority_is_that_which_entered_first() -> None:
    queue: FairQueue[str] = FairQueue(100, NO_BOUND)
    for number, tenant in enumerate(("busy", "busy", "quiet", "quiet")):
        queue.enter(request(f"{tenant}-{number}", tenant, tokens=100, entered_ms=10.0 * number))
    first = queue.first("m")
    assert first is not None
    assert first.item == "busy-0"
    queue.leave(first, dispatched=True)

    assert queue.first("m").item == "busy-1"  # type: ignore[union-attr]
    urgent = request("urgent", "quiet", priority=1, entered_ms=40.0)
    queue.enter(urgent)
    assert queue.first("m") is urgent
    assert queue.first("other") is None
