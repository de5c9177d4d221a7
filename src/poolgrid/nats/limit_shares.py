"""Which part of each tenant's limits a router may grant, so that the routers of a pool together grant no more than all.

Rules
    1. A *row* has each router's part of one tenant's limits: its *shares*, whole numbers. Rows are kept in
       *pages*, each a value that is replaced as a whole, and only behind the value that its writer read.
    2. The shares of a row are never more than the limit. Only who has a share makes it smaller, in favour of another
       one; a router that is gone, which all others judge for themselves, loses its shares to the first that sees it.
    3. A router that is about to give uses the smaller share before it writes that, and the larger one only when it
       knows that what it wrote did not count. So a router uses at most what the latest value of the page gives it, and
       the sum of all shares in use is at most the limit, however late a router reads.
    4. A router gives what another one *wants* and it can spare. Each router that wants has a right to an equal part.
       What none wants is divided equally. An idle router keeps an eighth of its equal part, and at least one.
    5. Requests in flight count against the share they began with: such a share is given once they have ended, and
       meanwhile no new one begins there. What of a rate's share is used up goes along as used up.
    6. A share of a router that is gone, or that none had, comes as used up: its use is unknown. Only a tenant of
       whom there was no row yet begins with all of it.

Pure: which routers are alive, what is used and wanted are arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from poolgrid.frontend.access.key_file import Tenant

Amounts = tuple[int, int, int]
"""Of the three limits of a tenant: requests in flight, requests a minute, tokens a minute."""

IN_FLIGHT = 0
KINDS = range(3)
NOTHING: Amounts = (0, 0, 0)

IDLE_PARTS = 8
"""An idle router keeps one of so many parts of its equal part: what the first requests to come find there."""

STEP_PARTS = 16
"""Less than one of so many parts of an equal part is not worth a message, except to a router that has nothing."""


class Holding(msgspec.Struct, array_like=True, frozen=True):
    """What one router has of one tenant's limits."""

    shares: Amounts = NOTHING
    wants: Amounts = NOTHING
    """What it would like to have; at most its shares = it has enough."""
    used: Amounts = NOTHING
    """How much of all that it was ever given was used up already; it charges the difference to what it saw before."""


Row = dict[str, Holding]
"""By router."""

Page = dict[str, Row]
"""By tenant."""


class Use(NamedTuple):
    """What this router uses of one tenant's limits."""

    in_flight: int
    wants: Amounts
    used: Amounts
    """How much of its buckets is used up now; nothing for requests in flight."""


class Settled(NamedTuple):
    """What a router would have a row be."""

    row: Row
    goes_by: Amounts
    """The shares that it goes by from now on: at most those of the row."""
    handed: Amounts
    """What it hands over as used up, and charges again if the row is not taken."""


def limits_of(tenant: Tenant) -> Amounts:
    """Return a tenant's limits; 0 = none."""
    return (tenant.concurrent_requests or 0, tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0)


def equal_part(limit: int, routers: int) -> int:
    """Return what each of some routers may always have of a limit, when that is at least one."""
    return limit // max(1, routers)


def idle_part(limit: int, routers: int) -> int:
    """Return what a router keeps that has nothing to do."""
    part = equal_part(limit, routers)
    return max(1, part // IDLE_PARTS) if part else 0


def settled(row: Row | None, me: str, alive: Collection[str], limits: Amounts, use: Use) -> Settled:
    """Return a row as one of the routers that are ``alive`` would have it; ``None`` = there is no row yet."""
    others = {life: held for life, held in (row or {}).items() if life != me and life in alive}
    mine = (row or {}).get(me, Holding())
    routers = len({*alive, me})
    turns = [
        _settled_kind(
            kind,
            _Terms(limits[kind], routers, use.wants[kind], use.in_flight if kind == IN_FLIGHT else 0, use.used[kind]),
            mine,
            others,
            takes_all=row is None or all(me < life for life in others),
            as_used_up=row is not None and kind != IN_FLIGHT,
        )
        for kind in KINDS
    ]
    made = {
        life: Holding(
            _amounts(held.shares[kind] + turns[kind].gifts.get(life, _NO_GIFT).amount for kind in KINDS),
            held.wants,
            _amounts(held.used[kind] + turns[kind].gifts.get(life, _NO_GIFT).used for kind in KINDS),
        )
        for life, held in others.items()
    }
    shares = _amounts(turn.share for turn in turns)
    made[me] = Holding(
        shares,
        _amounts(_told(mine.wants[kind], use.wants[kind], shares[kind]) for kind in KINDS),
        _amounts(mine.used[kind] + turns[kind].comes_used for kind in KINDS),
    )
    handed = _amounts(sum(gift.used for gift in turn.gifts.values()) for turn in turns)
    return Settled(made, _amounts(turn.goes_by for turn in turns), handed)


class _Gift(NamedTuple):
    amount: int
    used: int


_NO_GIFT = _Gift(0, 0)


class _Terms(NamedTuple):
    limit: int
    routers: int
    wanted: int
    busy: int
    used: int


class _Turn(NamedTuple):
    share: int
    goes_by: int
    gifts: dict[str, _Gift]
    comes_used: int = 0


def _settled_kind(
    kind: int, terms: _Terms, mine: Holding, others: Mapping[str, Holding], takes_all: bool, as_used_up: bool
) -> _Turn:
    limit, had = terms.limit, mine.shares[kind]
    free = limit - had - sum(held.shares[kind] for held in others.values())
    if free < 0:
        # The limit has become smaller: all routers give up in proportion.
        less = had * limit // (limit - free)
        return _Turn(less, less, {})
    fair = equal_part(limit, terms.routers)
    taken = free if takes_all else min(free, max(0, max(terms.wanted, fair) - had))
    if taken:
        return _Turn(had + taken, had + taken, {}, taken if as_used_up else 0)
    return _given(kind, terms, had, fair, others)


def _given(kind: int, terms: _Terms, had: int, fair: int, others: Mapping[str, Holding]) -> _Turn:
    left = goes_by = had
    gifts: dict[str, _Gift] = {}
    right, idle = max(1, fair), idle_part(terms.limit, terms.routers)
    step = max(1, fair // STEP_PARTS)
    # Who has least comes first.
    for life, held in sorted(others.items(), key=lambda other: (other[1].shares[kind], other[0])):
        theirs, wanted = held.shares[kind], held.wants[kind]
        owed = min(min(wanted, right) - theirs, left - fair)
        spared = min(wanted - theirs, left - max(terms.wanted, idle))
        evened = min(fair - theirs, left - max(terms.wanted, fair))
        if owed > 0:
            goes_by = min(goes_by, left - owed)
        amount = min(max(owed, spared, evened), left - terms.busy)
        if amount <= 0 or (amount < step and theirs > 0):
            continue
        gifts[life] = _Gift(amount, -(-terms.used * amount // had))
        left -= amount
    return _Turn(left, min(left, goes_by), gifts)


def _told(told: int, wanted: int, share: int) -> int:
    """Return the demand to publish: the same as before while that is about right, for each change is a message."""
    if wanted <= share:
        return told if told <= share else 0
    return told if told > share and abs(told - wanted) * STEP_PARTS <= 2 * wanted else wanted


def _amounts(values: Iterable[int]) -> Amounts:
    first, second, third = values
    return first, second, third


class SharePage:
    """One page as one router knows it, and what that router goes by."""

    def __init__(self, me: str) -> None:
        self._me = me
        self.revision = 0
        """Of the value that is known; 0 = there is none."""
        self.page: Page = {}
        self.goes_by: dict[str, Amounts] = {}
        """This router's shares by tenant, as it may grant them."""
        self._planned: dict[str, Settled] = {}
        self._planned_page: Page = {}
        self.is_doubtful = False
        """Whether a value was sent of which it is unknown whether it counts."""

    def saw(self, revision: int, page: Page) -> dict[str, Amounts]:
        """Take a value that is there; one that is no later than the known one changes nothing.

        Returns what is to be charged as used up, by tenant.
        """
        if revision <= self.revision:
            return {}
        charged: dict[str, Amounts] = {}
        for tenant in {**self.page, **page}:
            old, new = self._held(self.page, tenant), self._held(page, tenant)
            more = _amounts(max(0, new.used[kind] - old.used[kind]) for kind in KINDS)
            planned = self._planned.get(tenant)
            if planned is not None:
                # Whether it counted cannot be seen after others' changes since.
                more = _amounts(more[kind] + planned.handed[kind] for kind in KINDS)
            if more != NOTHING:
                charged[tenant] = more
        self._know(revision, page)
        return charged

    def plan(self, wanted: Mapping[str, Settled]) -> Page | None:
        """Return the value to send behind ``revision``; ``None`` when nothing would change.

        ``wanted`` has the rows of all tenants that this router knows of. From now on the smaller shares count.
        """
        if self.is_doubtful:
            # Once this counts, what was sent before it cannot any more.
            return self.page
        made = {tenant: row for tenant, row in self.page.items() if tenant not in wanted}
        for tenant, row in list(made.items()):
            if self._me in row:
                # A tenant that is no more, or has no limits now.
                kept = {life: held for life, held in row.items() if life != self._me}
                if kept:
                    made[tenant] = kept
                else:
                    del made[tenant]
        made.update({tenant: each.row for tenant, each in wanted.items()})
        for tenant, each in wanted.items():
            had = self._held(self.page, tenant).shares
            self.goes_by[tenant] = _amounts(min(had[kind], each.goes_by[kind]) for kind in KINDS)
        for tenant in self.goes_by.keys() - wanted.keys():
            del self.goes_by[tenant]
        if made == self.page:
            return None
        self._planned, self._planned_page = dict(wanted), made
        return made

    def stored(self, revision: int) -> dict[str, Amounts]:
        """Note that what was planned counts; returns what is to be charged as used up, by tenant."""
        if self.is_doubtful:
            return self._resent(revision)
        charged: dict[str, Amounts] = {}
        planned = self._planned
        for tenant, each in planned.items():
            old, new = self._held(self.page, tenant).used, each.row[self._me].used
            if new != old:
                charged[tenant] = _amounts(new[kind] - old[kind] for kind in KINDS)
        self._know(revision, self._planned_page)
        for tenant, each in planned.items():
            self.goes_by[tenant] = each.goes_by
        return charged

    def _resent(self, revision: int) -> dict[str, Amounts]:
        charged = {tenant: each.handed for tenant, each in self._planned.items() if each.handed != NOTHING}
        self._know(revision, self.page)
        return charged

    def in_doubt(self) -> None:
        """Note that it is unknown whether what was sent counts: the smaller shares stay until a later value is seen."""
        self.is_doubtful = True

    def begun_anew(self) -> None:
        """Note that all values are gone, and their numbers with them: no router has anything until there are new
        ones."""
        self._know(0, {})

    def _know(self, revision: int, page: Page) -> None:
        self.revision, self.page = revision, page
        self._planned, self._planned_page, self.is_doubtful = {}, {}, False
        self.goes_by = {tenant: row[self._me].shares for tenant, row in page.items() if self._me in row}

    def _held(self, page: Page, tenant: str) -> Holding:
        return page.get(tenant, {}).get(self._me, Holding())


class _Heard(NamedTuple):
    place: str
    mark: int
    since_ms: float


class Routers:
    """Which routers are alive, as one of them sees it: those whose mark changed within a lease, by its own clock."""

    def __init__(self, me: str, place: str, lease_ms: float) -> None:
        self._me = me
        self._place = place
        self._lease_ms = lease_ms
        self._heard: dict[str, _Heard] = {}

    def heard(self, life: str, place: str, mark: int, now_ms: float) -> None:
        """Note a heartbeat; of whom this router has the place, it is not: that one is gone."""
        known = self._heard.get(life)
        if life != self._me and (known is None or known.mark != mark):
            self._heard[life] = _Heard(place, mark, now_ms)

    def named(self, lives: Iterable[str], now_ms: float) -> None:
        """Note the owners of shares: one without a heartbeat has a lease's time for it."""
        for life in lives:
            if life != self._me and life not in self._heard:
                self._heard[life] = _Heard("", 0, now_ms)

    def left(self, life: str) -> None:
        if life in self._heard:
            self._heard[life] = _Heard("", -1, float("-inf"))

    def looked_again(self, now_ms: float) -> None:
        """Note that no router could be read so far: the leases begin again."""
        self._heard = {
            life: each._replace(since_ms=now_ms) if each.mark >= 0 else each for life, each in self._heard.items()
        }

    def alive(self, now_ms: float, lives: Collection[str]) -> frozenset[str]:
        """Return the routers that are alive, this one too; one that is not, and is none of ``lives`` (those with
        shares), is forgotten."""
        alive = {
            life
            for life, each in self._heard.items()
            if now_ms - each.since_ms <= self._lease_ms and not (self._place and each.place == self._place)
        }
        self._heard = {life: each for life, each in self._heard.items() if life in alive or life in lives}
        return frozenset({*alive, self._me})
