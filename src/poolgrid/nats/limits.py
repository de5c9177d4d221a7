"""Limits of tenants over all routers of a pool: shares of them in a key-value bucket of NATS JetStream.

Rules
    1. Twice a second a router reads what has changed, publishes its demand, and gives what others want and it can spare
       (``poolgrid.nats.limit_shares``). Requests use the shares that are there, without a question to NATS.
    2. A value is written only behind the one that was read (``Nats-Expected-Last-Subject-Sequence``).
    3. A router gives a heartbeat three times per lease. A router that was silent for a lease while others could
       read has its shares taken; when it comes back it finds that out with its first look. While NATS is away no
       router takes any, and each continues with what it has. So it is while only replicas answer that are behind.
    4. A router that has not reached NATS since it started has no shares, and refuses tenants that have limits.
    5. Tenants are spread over ``PAGES`` values by their names, so that one value stays small and few write the same.

What a tenant has used at one of several routers, each of which may grant a share of its limits.

Rules
    1. A limit is this router's share of it, which may change at any time, and may be nothing. What was used stays used,
       and what comes with a share as used up is charged.
    2. What is asked for beyond a share is refused, and noted: it is what this router wants more for.
    3. What is wanted is what was used within the last ten seconds or so, and twice what there is after a refusal.

A meter of the kind that is alone has none of this (``poolgrid.frontend.access.meter``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.frontend.access.key_file import Tenant
from poolgrid.frontend.access.meter import MINUTE_MS, Meter, Rate, RateDecision, TokenBucket
from poolgrid.frontend.access.tenants import TenantAccount, Tenants
from poolgrid.nats.bucket import Bucket, BucketSpec, NotLast, is_deleted, key_of, sequence_of
from poolgrid.nats.connection import NatsUnavailable
from poolgrid.nats.limit_shares import (
    IN_FLIGHT,
    KINDS,
    NOTHING,
    Amounts,
    Holding,
    Page,
    Routers,
    SharePage,
    Use,
    equal_part,
    limits_of,
    settled,
)
from poolgrid.process.clock import Clock
from poolgrid.process.instruments import Counter, Gauge
from poolgrid.process.log_lines import Complaints
from poolgrid.process.nats_settings import NatsSettings
from poolgrid.process.tasks import Restart, cancel_all, supervised
from poolgrid.wire.hashing import stable_u64

WINDOW_MS = 5_000.0
"""What was used counts for one to two of these."""

NO_SHARE_WAIT_S = 1.0
"""When to ask again where there is no share: others give what they can spare within two looks, which is a second."""

_KIND = {Rate.REQUESTS: 1, Rate.TOKENS: 2}


class SharedMeter(Meter):
    """The figures of one tenant at this router. ``note`` is called when something was asked of it."""

    __slots__ = ("_before", "_limited", "_note", "_now", "_owed", "_rules", "_since_ms", "shares")

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.shares: Amounts = NOTHING
        self._note = note
        self._rules: Tenant | None = None
        self._limited: Tenant | None = None
        self._now, self._before = _Window(), _Window()
        self._since_ms = 0.0
        self._owed = 0.0
        """Tokens that were used while there was no share to charge."""

    # What others give and take

    def grant(self, shares: Amounts, charged: Amounts, now_ms: float) -> None:
        """Go by other shares from now on; ``charged`` is used up of them already, or given back where it is less."""
        if shares == self.shares and charged == NOTHING:
            return
        self.shares, self._rules = shares, None
        for rate in Rate:
            share, more = shares[_KIND[rate]], float(charged[_KIND[rate]])
            bucket = self._buckets[rate]
            if rate is Rate.TOKENS:
                more += self._owed
                self._owed = 0.0 if share else more
            if not share:
                self._buckets[rate] = TokenBucket()
                continue
            bucket = bucket.resized(share, now_ms)
            # What is given back is never more than was used.
            self._buckets[rate] = bucket.charged(max(more, -bucket.used(now_ms)), now_ms)

    def use_of(self, rules: Tenant, now_ms: float) -> Use:
        if now_ms - self._since_ms >= WINDOW_MS:
            is_long_ago = now_ms - self._since_ms >= 2 * WINDOW_MS
            self._before, self._now = (_Window() if is_long_ago else self._now), _Window()
            self._now.peak = self.in_flight
            self._since_ms = now_ms
        now, before = self._now, self._before
        per_minute = MINUTE_MS / (WINDOW_MS + now_ms - self._since_ms)
        needed = [max(now.peak, before.peak, self.in_flight)]
        needed += [int((now.taken[rate] + before.taken[rate]) * per_minute * 5 / 4) for rate in Rate]
        limits = limits_of(rules)
        wants = [
            min(limits[kind], 2 * max(needed[kind], self.shares[kind]) + 1)
            if now.refused[kind] or before.refused[kind]
            else min(limits[kind], needed[kind])
            for kind in KINDS
        ]
        used = [int(self._buckets[rate].used(now_ms)) for rate in Rate]
        return Use(self.in_flight, (wants[0], wants[1], wants[2]), (0, used[0], used[1]))

    @property
    def is_quiet(self) -> bool:
        return not self.in_flight and self._now.is_empty and self._before.is_empty

    # What tenants ask

    def begin(self, rules: Tenant, now_ms: float) -> RateDecision:
        """Count a request in, unless it would be one too many at a time or in its minute."""
        self._note()
        limited = self._of_share(rules)
        verdict = super().begin(limited, now_ms)
        if verdict.is_full:
            self._now.refused[IN_FLIGHT] = True
            return verdict._replace(share=limited.concurrent_requests)
        self._now.peak = max(self._now.peak, self.in_flight)
        return verdict

    def end(self, rules: Tenant, output_tokens: int, now_ms: float) -> None:
        super().end(self._of_share(rules), output_tokens, now_ms)

    def standing(self, rules: Tenant, now_ms: float) -> list[tuple[Rate, TokenBucket, float]]:
        limited = self._of_share(rules)
        limits = (limited.requests_per_minute, limited.tokens_per_minute)
        return [
            (rate, self._buckets[rate].resized(limit, now_ms), now_ms)
            for rate, limit in zip(Rate, limits, strict=True)
            if limit
        ]

    def take_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> float:
        return super().take_tokens(self._of_share(rules), tokens, now_ms)

    def give_back_tokens(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        super().give_back_tokens(self._of_share(rules), tokens, now_ms)

    def _of_share(self, rules: Tenant) -> Tenant:
        if rules is not self._rules or self._limited is None:
            self._rules = rules
            here = [min(limit, share) for limit, share in zip(limits_of(rules), self.shares, strict=True)]
            self._limited = msgspec.structs.replace(
                rules,
                concurrent_requests=None if rules.concurrent_requests is None else here[0],
                requests_per_minute=None if rules.requests_per_minute is None else here[1],
                tokens_per_minute=None if rules.tokens_per_minute is None else here[2],
            )
        return self._limited

    def _take(self, rate: Rate, amount: float, per_minute: int, now_ms: float) -> float:
        wait_s = super()._take(rate, amount, per_minute, now_ms) if per_minute else NO_SHARE_WAIT_S
        if wait_s:
            self._now.refused[_KIND[rate]] = True
        else:
            self._now.taken[rate] += amount
        return wait_s

    def _charge(self, rules: Tenant, tokens: int, now_ms: float) -> None:
        self._now.taken[Rate.TOKENS] += tokens
        if rules.tokens_per_minute:
            super()._charge(rules, tokens, now_ms)
        else:
            self._owed += tokens


class _Window:
    __slots__ = ("peak", "refused", "taken")

    def __init__(self) -> None:
        self.peak = 0
        self.taken = [0.0, 0.0]
        self.refused = [False, False, False]

    @property
    def is_empty(self) -> bool:
        return not self.peak and not any(self.taken) and not any(self.refused)


log = logging.getLogger(__name__)

BUCKET = "poolgrid-shares"

PAGES = 64
"""With ``TENANTS_MAX`` tenants some 160 on each, which take 300 kB when 32 routers have shares."""

LOOK_S = 0.5
"""Between two looks; a share that is wanted and can be spared is there after two, one of each router."""

BEATS_PER_LEASE = 3

MESSAGE_BYTES_MAX = 1024 * 1024
"""Largest value: what NATS servers take by default. Tenants of a larger page keep the shares that
they have; it takes a hundred routers, or as many tenants as are allowed."""

BUCKET_BYTES_MAX = 256 * 1024 * 1024
"""What the servers keep for all pools of an account."""

ENTRIES_MAX = 65_536
"""Values of one pool that a look reads: its pages, and heartbeats."""

ATTEMPTS = 4
"""How often a value is made again because another router was faster; then it waits for the next look."""

AMOUNT_MAX = 2**53
"""Largest amount of a page: what is handed over is added to it, and the sum must fit a message."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What reading a value raises that no router wrote; the last for what nests too deep in a part that is passed over."""


class _Sign(msgspec.Struct, frozen=True):
    place: Annotated[str, msgspec.Meta(max_length=1024)]


_decode_page = msgspec.msgpack.Decoder(Page).decode
_decode_sign = msgspec.msgpack.Decoder(_Sign).decode
_encode = msgspec.msgpack.Encoder().encode


def page_of(tenant: str) -> int:
    """Return on which page a tenant is."""
    return stable_u64(tenant) % PAGES


class ShareMetrics:
    """Failures and changes, among how many routers limits are divided, and how old what is known is."""

    def __init__(self, registry: CollectorRegistry, routers: Callable[[], float], age_s: Callable[[], float]) -> None:
        self.failures = Counter(
            "poolgrid_frontend_limit_division_failures",
            "Failed reads or writes of the shares of tenant limits in NATS.",
            registry=registry,
        )
        self.writes = Counter(
            "poolgrid_frontend_limit_division_writes",
            "Changes of shares of tenant limits written by this router.",
            registry=registry,
        )
        Gauge(
            "poolgrid_frontend_limit_division_routers",
            "Routers that share tenant limits, this one included.",
            registry=registry,
        ).set_function(routers)
        Gauge(
            "poolgrid_frontend_limit_division_age_seconds",
            "Time since this router last read all shares. Above the lease, others may have taken its shares, "
            "which it still grants.",
            registry=registry,
        ).set_function(age_s)


class LimitsOnNats:
    """The shares of one router, for one event loop. ``scope`` is what routers of one pool agree on; ``place`` is where
    this one answers, of which only one process can be there; empty = not known."""

    def __init__(
        self,
        settings: NatsSettings,
        scope: str,
        place: str,
        lease_s: int,
        replicas: int,
        clock: Clock,
        registry: CollectorRegistry,
    ) -> None:
        spec = BucketSpec(BUCKET, "limits of poolgrid's tenants", BUCKET_BYTES_MAX, MESSAGE_BYTES_MAX, replicas)
        self._bucket = Bucket(settings, "limits", spec, clock)
        self._connection = self._bucket.connection
        self._reader = self._bucket.reader(f"{scope}.>", lease_s, ENTRIES_MAX)
        self._scope = scope
        self._place = place
        self._lease_s = lease_s
        self._clock = clock
        self._life = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._routers = Routers(self._life, place, 1000.0 * lease_s)
        self._alive: frozenset[str] = frozenset()
        self._pages: dict[int, SharePage] = {}
        self.on_routers: Callable[[int], None] = lambda routers: None
        """Told how many routers there are, whenever that changes."""
        self._tenants: Callable[[], Tenants] = dict  # type: ignore[assignment]  # until it is followed
        self._accounts: dict[str, TenantAccount] | None = None
        self._by_page: dict[int, dict[str, TenantAccount]] = {}
        self._active: set[str] = set()
        self._seen = 0
        self._beat_ms = float("-inf")
        self._was_away = False
        self._tasks: list[asyncio.Task[None]] = []
        self._complaints = Complaints(log, clock)
        self._turned_ms = clock.monotonic_ms()
        self._has_shares = asyncio.Event()
        self._metrics = ShareMetrics(
            registry,
            routers=lambda: float(len(self._alive)),
            age_s=lambda: (self._clock.monotonic_ms() - self._turned_ms) / 1000,
        )

    def meter(self, tenant: str) -> Meter:
        return SharedMeter(lambda: self._active.add(tenant))

    def start(self, tenants: Callable[[], Tenants]) -> None:
        """Share the limits of some tenants from now on; raises ``ValueError`` without nats-py."""
        self._bucket.start("share_state")
        self._tenants = tenants
        self._tasks.append(supervised(self._run, "shares of tenants' limits", Restart(limit=None)))

    async def first_shares(self) -> None:
        """Wait until others have given this router some of every limit, for a lease at most: then it goes without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s):
                await self._has_shares.wait()

    async def close(self) -> None:
        """Give back all shares, and end."""
        await cancel_all(self._tasks)
        try:
            async with asyncio.timeout(self._connection.timeout_s):
                await self._withdraw()
        except (NatsUnavailable, TimeoutError) as error:
            log.warning("giving shares of limits back failed (%s): others take them after the lease", error)
        await self._bucket.close()

    async def _withdraw(self) -> None:
        self._connection.check()
        for index, page in self._pages.items():
            for _ in range(ATTEMPTS):
                made = page.plan({})
                if made is None or await self._wrote(index, page, made):
                    break
        await self._bucket.remove(f"{self._scope}.router.{self._life}", 3 * self._lease_s)

    # Turns

    async def _run(self) -> None:
        await self._bucket.is_open.wait()
        while True:
            try:
                await self._turn()
            except NatsUnavailable as error:
                self._was_away = True
                self._metrics.failures.inc()
                self._complaints.note(
                    "sharing", "sharing limits failed (%s): it is retried without limit, and the shares stay%s", error
                )
            await asyncio.sleep(LOOK_S)

    async def _turn(self) -> None:
        """Look once, and do what follows from it; raises ``NatsUnavailable``."""
        await self._beat()
        changed = await self._look()
        now_ms = self._clock.monotonic_ms()
        if self._was_away:
            self._was_away = False
            self._routers.looked_again(now_ms)
        lives = {life for page in self._pages.values() for row in page.page.values() for life in row}
        self._routers.named(lives, now_ms)
        alive = self._routers.alive(now_ms, lives)
        if self._knows_other_tenants() or alive != self._alive:
            changed.update(self._pages)
        if len(alive) != len(self._alive):
            self.on_routers(max(1, len(alive)))
        self._alive = alive
        changed.update(page_of(tenant) for tenant in self._active)
        for index in sorted(changed):
            await self._settle(index)
        self._active = {
            tenant for tenant in self._active if tenant in self._accounts_now() and not self._meter_of(tenant).is_quiet
        }
        self._turned_ms = self._clock.monotonic_ms()
        if not self._has_shares.is_set() and self._lacks_nothing():
            self._has_shares.set()

    def _lacks_nothing(self) -> bool:
        routers = len(self._alive)
        return all(
            share or not equal_part(limit, routers)
            for accounts in self._by_page.values()
            for name, account in accounts.items()
            for limit, share in zip(limits_of(account.tenant), self._meter_of(name).shares, strict=True)
        )

    def _accounts_now(self) -> dict[str, TenantAccount]:
        return self._accounts or {}

    def _meter_of(self, tenant: str) -> SharedMeter:
        meter = self._accounts_now()[tenant].meter
        assert isinstance(meter, SharedMeter), "made by this"
        return meter

    def _knows_other_tenants(self) -> bool:
        accounts = self._tenants().accounts
        if accounts is self._accounts:
            return False
        self._accounts = accounts
        self._by_page = {}
        for name, account in accounts.items():
            if limits_of(account.tenant) != NOTHING:
                self._by_page.setdefault(page_of(name), {})[name] = account
            else:
                self._meter_of(name).grant(NOTHING, NOTHING, self._clock.monotonic_ms())
        for index in self._by_page:
            self._pages.setdefault(index, SharePage(self._life))
        return True

    async def _beat(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._beat_ms < 1000 * self._lease_s / BEATS_PER_LEASE:
            return
        sign = _encode(_Sign(self._place))
        sequence = await self._bucket.write(f"{self._scope}.router.{self._life}", sign, ttl_s=3 * self._lease_s)
        if sequence <= self._seen:
            log.warning("the bucket %s was created again: limits are divided again", BUCKET)
            self._begin_anew()
        self._beat_ms = now_ms

    def _begin_anew(self) -> None:
        self._seen = 0
        for index, page in self._pages.items():
            page.begun_anew()
            self._grant(index, page, {})

    async def _look(self) -> set[int]:
        """Read what is new; return the pages that have changed."""
        messages = await self._reader.read(self._seen + 1)
        now_ms = self._clock.monotonic_ms()
        changed: set[int] = set()
        for message in messages:
            self._seen = max(self._seen, sequence_of(message))
            kind, _, name = key_of(message, self._bucket.spec).removeprefix(f"{self._scope}.").partition(".")
            try:
                if kind == "router" and is_deleted(message):
                    self._routers.left(name)
                elif kind == "router":
                    self._routers.heard(name, _decode_sign(message.data).place, sequence_of(message), now_ms)
                elif kind == "page" and self._saw(int(name), sequence_of(message), message.data):
                    changed.add(int(name))
            except UNREADABLE as error:
                self._complaints.about(f"the bucket {BUCKET} ({kind} {name[:80]!r})", error)
        return changed

    def _saw(self, index: int, sequence: int, data: bytes) -> bool:
        """Take a page as it is now, and tell whether it is news; raises ``ValueError``."""
        page = self._pages.get(index)
        if page is None:
            if not 0 <= index < PAGES:
                raise ValueError(f"page {index}: allowed are 0 to {PAGES - 1}")
            page = self._pages[index] = SharePage(self._life)
        if sequence <= page.revision:
            return False
        self._grant(index, page, page.saw(sequence, _checked(data)))
        return True

    async def _settle(self, index: int) -> None:
        """Have a page as this router would have it; raises ``NatsUnavailable``."""
        page = self._pages[index]
        for _ in range(ATTEMPTS):
            self._connection.check()
            now_ms = self._clock.monotonic_ms()
            wanted = {
                name: settled(
                    page.page.get(name),
                    self._life,
                    self._alive,
                    limits_of(account.tenant),
                    self._meter_of(name).use_of(account.tenant, now_ms),
                )
                for name, account in self._by_page.get(index, {}).items()
            }
            was_doubtful = page.is_doubtful
            made = page.plan(wanted)
            handed = {} if made is None or was_doubtful else {name: each.handed for name, each in wanted.items()}
            self._grant(index, page, {name: _negative(each) for name, each in handed.items()})
            # Once what was in doubt is certain, what is wanted can be written.
            if made is None or (await self._wrote(index, page, made) and not was_doubtful):
                return

    async def _wrote(self, index: int, page: SharePage, made: Page) -> bool:
        """Write a page behind the value that is known; return whether that was still the last. Raises
        ``NatsUnavailable``."""
        data = _encode(made)
        if len(data) > min(MESSAGE_BYTES_MAX - 1024, self._connection.body_bytes_max):
            self._complaints.note(
                "size",
                "page %d of the shares of limits would have %d bytes, more than NATS takes: the shares on it stay as "
                "they are; have fewer routers, or fewer tenants with limits%s",
                index,
                len(data),
            )
            return True
        try:
            sequence = await self._bucket.write(f"{self._scope}.page.{index}", data, after=page.revision)
        except NotLast:
            await self._read_again(index, page)
            return False
        except NatsUnavailable:
            page.in_doubt()
            raise
        self._metrics.writes.inc()
        self._grant(index, page, page.stored(sequence))
        return True

    async def _read_again(self, index: int, page: SharePage) -> None:
        """Read a page where the servers write it; it is behind no other."""
        message = await self._bucket.last(f"{self._scope}.page.{index}")
        if message is None:
            self._begin_anew()
            return
        if message.seq <= page.revision:
            self._begin_anew()
        try:
            self._saw(index, message.seq, message.data or b"")
        except UNREADABLE as error:
            self._complaints.about(f"the bucket {BUCKET} (page {index})", error)

    def _grant(self, index: int, page: SharePage, charged: dict[str, Amounts]) -> None:
        now_ms = self._clock.monotonic_ms()
        for name in self._by_page.get(index, {}):
            self._meter_of(name).grant(page.goes_by.get(name, NOTHING), charged.get(name, NOTHING), now_ms)


def _checked(data: bytes) -> Page:
    """Return a page; raises ``ValueError``."""
    page = _decode_page(data)
    for tenant, row in page.items():
        for life, held in row.items():
            amounts = (*held.shares, *held.wants, *held.used)
            if min(amounts) < 0 or max(amounts) > AMOUNT_MAX:
                raise ValueError(
                    f"tenant {tenant[:80]!r}, router {life[:80]!r}: an amount is below 0 or above {AMOUNT_MAX}"
                )
    return page


def _negative(amounts: Amounts) -> Amounts:
    return (-amounts[0], -amounts[1], -amounts[2])


assert len(KINDS) == len(Holding().shares)
