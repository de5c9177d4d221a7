"""Shares of tenants' limits, against routers that read late, whose writes are lost or in doubt, and that die."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.nats.limit_shares import (
    KINDS,
    NOTHING,
    Amounts,
    Holding,
    Page,
    Routers,
    Settled,
    SharePage,
    Use,
    settled,
)
from tests.examples import examples

IDLE = Use(0, NOTHING, NOTHING)
TENANT = "acme"


def wanting(amount: int, in_flight: int = 0) -> Use:
    return Use(in_flight, (amount, amount, amount), NOTHING)


def row_of(**shares: int) -> dict[str, Holding]:
    return {life: Holding((share, share, share)) for life, share in shares.items()}


@pytest.mark.parametrize(
    ("row", "use", "limit", "mine", "theirs"),
    [
        (None, IDLE, 10, 10, None),  # who comes first has all
        (row_of(a=10, b=0), IDLE, 10, 5, 5),  # what nobody wants is divided equally
        (row_of(a=10, b=0), wanting(10), 10, 10, 0),  # who uses all gives what somebody wants, no more
        (row_of(a=5, b=5), wanting(10), 10, 5, 5),
        (row_of(a=1, b=9), IDLE, 10, 1, 9),  # who has less gives nothing
        (row_of(a=1, b=0), IDLE, 1, 1, 0),  # of less than there are routers nothing is divided
    ],
)
def test_a_row_is_settled_by_the_table(
    row: dict[str, Holding] | None, use: Use, limit: int, mine: int, theirs: int | None
) -> None:
    made = settled(row, "a", {"a", "b"}, (limit, limit, limit), use).row

    assert made["a"].shares == (mine, mine, mine)
    assert theirs is None or made["b"].shares == (theirs, theirs, theirs)


def test_who_wants_gets_all_but_what_an_idle_router_keeps() -> None:
    row = {"a": Holding((5, 50, 500)), "b": Holding((5, 50, 500), wants=(10, 100, 1000))}

    made = settled(row, "a", {"a", "b"}, (10, 100, 1000), IDLE).row

    assert made["a"].shares == (1, 6, 62)
    assert made["b"].shares == (9, 94, 938)


def test_a_share_in_use_is_owed_and_no_new_request_begins_with_it() -> None:
    row = {"a": Holding((10, 0, 0)), "b": Holding((0, 0, 0), wants=(5, 0, 0))}

    busy = settled(row, "a", {"a", "b"}, (10, 0, 0), wanting(10, in_flight=8))

    assert busy.row["a"].shares[0] == 8, "what is in use stays"
    assert busy.goes_by[0] == 5, "an equal part is what the other one has a right to"


def test_a_part_of_a_rate_takes_what_is_used_of_it_along() -> None:
    row = {"a": Holding((0, 60, 0)), "b": Holding()}

    made = settled(row, "a", {"a", "b"}, (0, 60, 0), Use(0, NOTHING, (0, 20, 0)))

    assert made.row["b"] == Holding((0, 30, 0), NOTHING, (0, 10, 0))
    assert made.handed == (0, 10, 0)


def test_what_somebody_leaves_behind_comes_as_used_up() -> None:
    row = {"a": Holding((5, 30, 0)), "gone": Holding((5, 30, 0))}

    made = settled(row, "a", {"a"}, (10, 60, 0), IDLE).row

    assert made == {"a": Holding((10, 60, 0), NOTHING, (0, 30, 0))}


def test_a_smaller_limit_is_gone_by_in_proportion() -> None:
    row = row_of(a=12, b=8)
    limits: Amounts = (5, 5, 5)
    for me in ("a", "b", "a", "b", "a", "b"):
        row = settled(row, me, {"a", "b"}, limits, wanting(20)).row

    assert all(0 < row["a"].shares[kind] + row["b"].shares[kind] <= 5 for kind in KINDS)


def test_routers_with_less_to_share_than_there_are_take_turns() -> None:
    one, other = wanting(1), wanting(1)
    row = settled(None, "a", {"a", "b"}, (1, 0, 0), one).row
    row = settled(row, "b", {"a", "b"}, (1, 0, 0), other).row
    row = settled(row, "a", {"a", "b"}, (1, 0, 0), one).row

    assert (row["a"].shares[0], row["b"].shares[0]) == (0, 1)


def test_who_is_silent_for_a_lease_is_gone_and_an_outage_is_nobodys_silence() -> None:
    routers = Routers("me", "http://here", 10_000)
    routers.heard("b", "http://there", 1, 0)
    routers.heard("before", "http://here", 2, 0)
    routers.named(["unheard", "b"], 0)

    assert routers.alive(0, ["b", "unheard"]) == {"me", "b", "unheard"}, "whose place it has is gone"
    routers.heard("b", "http://there", 1, 9_000)
    assert "b" not in routers.alive(10_001, ["b"]), "the same sign again is none"
    routers.heard("b", "http://there", 3, 11_000)
    assert "b" in routers.alive(20_000, ["b"])
    routers.looked_again(60_000)
    assert "b" in routers.alive(70_000, ["b"])
    routers.left("b")
    assert "b" not in routers.alive(70_000, ["b"])
    routers.looked_again(70_000)
    assert "b" not in routers.alive(70_000, ["b"]), "who has said that it goes does not come back by an outage"


# The model: a value that is replaced behind the one that was read, and everything that can go wrong on the way.


@dataclass
class Router:
    life: str
    page: SharePage
    in_flight: int = 0
    late: list[tuple[int, Page]] = field(default_factory=list)
    """Writes of which it is not known whether they count, and which may arrive at any time."""


class Pool:
    """Routers, and the values that the servers have."""

    def __init__(self, count: int, limit: int) -> None:
        self.limits: Amounts = (limit, limit, limit)
        self.values: list[Page] = [{}]
        self.alive = [Router(life, SharePage(life)) for life in "abcd"[:count]]

    def write(self, expected: int, page: Page) -> bool:
        if expected != len(self.values) - 1:
            return False
        self.values.append(page)
        return True

    def plan(self, router: Router, wanted: int) -> Page | None:
        lives = {each.life for each in self.alive}
        use = Use(router.in_flight, (wanted, wanted, wanted), (0, wanted, wanted))
        made: Settled = settled(router.page.page.get(TENANT), router.life, lives, self.limits, use)
        return router.page.plan({TENANT: made})

    def check(self) -> None:
        row = self.values[-1].get(TENANT, {})
        for kind in KINDS:
            limit = self.limits[kind]
            assert sum(held.shares[kind] for held in row.values()) <= limit
            assert sum(each.page.goes_by.get(TENANT, NOTHING)[kind] for each in self.alive) <= limit
        assert sum(each.in_flight for each in self.alive) <= self.limits[0]
        for each in self.alive:
            assert all(share >= 0 for share in each.page.goes_by.get(TENANT, NOTHING))


class Steps:
    """What a router may do, or what may happen to it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def take(self, what: str, router: Router, amount: int) -> None:
        getattr(self, what)(router, amount)
        self.pool.check()

    def look(self, router: Router, amount: int) -> None:
        """See the latest value, or one of those before."""
        behind = len(self.pool.values) - 1 - amount % 3
        if behind > 0:
            router.page.saw(behind, self.pool.values[behind])

    def turn(self, router: Router, amount: int) -> None:
        """Plan by what was seen, and write it; who is refused sees why."""
        made = self.pool.plan(router, amount)
        self.pool.check()
        if made is None:
            return
        if self.pool.write(router.page.revision, made):
            router.page.stored(len(self.pool.values) - 1)
        else:
            router.page.saw(len(self.pool.values) - 1, self.pool.values[-1])

    def doubt(self, router: Router, amount: int) -> None:
        """Write, and hear nothing of it."""
        made = self.pool.plan(router, amount)
        self.pool.check()
        if made is not None:
            self.pool.write(router.page.revision, made)
            router.page.in_doubt()

    def delay(self, router: Router, amount: int) -> None:
        """Write, hear nothing of it, and have it arrive later or never."""
        made = self.pool.plan(router, amount)
        if made is not None:
            router.late.append((router.page.revision, made))
            router.page.in_doubt()

    def arrive(self, router: Router, amount: int) -> None:
        """Have something arrive that was sent earlier."""
        if router.late:
            self.pool.write(*router.late.pop())

    def begin(self, router: Router, amount: int) -> None:
        """Have as many requests begin as may."""
        router.in_flight = max(router.in_flight, min(amount, router.page.goes_by.get(TENANT, NOTHING)[0]))

    def end(self, router: Router, amount: int) -> None:
        """Have some requests end."""
        router.in_flight = max(0, router.in_flight - amount)

    def kill(self, router: Router, amount: int) -> None:
        """End a router amid everything."""
        if len(self.pool.alive) > 1 and amount > 9:
            self.pool.alive.remove(router)


TURNS = ("look", "look", "turn", "turn", "turn", "doubt", "doubt", "delay", "arrive", "begin", "begin", "end", "kill")


@settings(max_examples=examples(20))
@given(st.integers(2, 3), st.integers(1, 11), st.randoms(use_true_random=False))
def test_whatever_is_late_lost_or_in_doubt_routers_grant_no_more_than_the_limit(
    count: int, limit: int, random: Random
) -> None:
    pool = Pool(count, limit)
    steps = Steps(pool)
    for _ in range(80):
        steps.take(random.choice(TURNS), random.choice(pool.alive), random.randint(0, 12))


@settings(max_examples=examples(15))
@given(st.integers(2, 4), st.integers(1, 200), st.lists(st.integers(0, 300), min_size=4, max_size=4))
def test_once_nothing_goes_wrong_all_is_granted_and_who_wants_an_equal_part_has_it(
    count: int, limit: int, wanted: list[int]
) -> None:
    pool = Pool(count, limit)
    for _ in range(12):
        for router, amount in zip(pool.alive, wanted, strict=False):
            latest = len(pool.values) - 1
            if latest:
                router.page.saw(latest, pool.values[latest])
            made = pool.plan(router, min(amount, limit))
            if made is not None:
                assert pool.write(router.page.revision, made)
                router.page.stored(len(pool.values) - 1)
            pool.check()

    row = pool.values[-1][TENANT]
    assert sum(held.shares[1] for held in row.values()) == limit
    if limit >= count:
        step = max(1, limit // count // 16)
        for router, amount in zip(pool.alive, wanted, strict=False):
            assert row[router.life].shares[1] >= min(amount, limit // count) - step
