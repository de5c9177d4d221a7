"""Limits of tenants over several routers, by shares in a bucket of a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.frontend.access.key_file import KeyDocument, Tenant
from poolgrid.frontend.access.tenants import Tenants
from poolgrid.nats.connection import NatsMessage
from poolgrid.nats.limits import BUCKET, LimitsOnNats, SharedMeter, page_of
from poolgrid.process.clock import SystemClock
from poolgrid.process.tasks import cancel_all
from tests.discovery import waiting as naming
from tests.nats.servers import BINARY, MISSING, NatsServer, one_server

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

LIMIT = 10
LEASE_S = 4
ACME = Tenant(concurrent_requests=LIMIT, requests_per_minute=600)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with one_server() as server:
        yield server


class Router:
    """The limits of one router, and requests that are in flight there for as long as somebody wants."""

    def __init__(self, server: NatsServer, scope: str, place: str = "") -> None:
        settings = DiscoverySettings(names="nats", nats_url=(server.url,))
        self.clock = SystemClock()
        self.registry = CollectorRegistry()
        self.limits = LimitsOnNats(settings, scope, place, LEASE_S, 1, self.clock, self.registry)
        self.told: list[int] = []
        self.limits.on_routers = self.told.append
        self.tenants = Tenants(KeyDocument(1, "5" * 64, {"acme": ACME}), self.limits.meter)
        self.limits.start(lambda: self.tenants)

    def begin(self) -> bool:
        """Have one more request begin, if it may."""
        return not self.meter.begin(self.rules, self.clock.monotonic_ms()).is_full

    def end(self, requests: int) -> None:
        """Have some requests end."""
        for _ in range(requests):
            self.meter.end(self.rules, 0, self.clock.monotonic_ms())

    def change(self, tenant: Tenant) -> None:
        """Have a tenant be allowed something else."""
        self.tenants.use(KeyDocument(1, "5" * 64, {"acme": tenant}))

    @property
    def meter(self) -> SharedMeter:
        meter = self.tenants.accounts["acme"].meter
        assert isinstance(meter, SharedMeter)
        return meter

    @property
    def rules(self) -> Tenant:
        return self.tenants.accounts["acme"].tenant

    @property
    def share(self) -> int:
        return self.meter.shares[0]

    async def kill(self) -> None:
        """End as kill -9 does: nothing is given back, no connection is closed in order."""
        await cancel_all(self.limits._tasks)
        await self.limits._connection.close()


@asynccontextmanager
async def routers(server: NatsServer, scope: str, count: int) -> AsyncIterator[list[Router]]:
    made = [Router(server, scope) for _ in range(count)]
    try:
        yield made
    finally:
        for router in made:
            await router.limits.close()


async def until(what: str, check: Callable[[], bool]) -> None:
    try:
        await naming.until(check)
    except TimeoutError:
        raise AssertionError(what) from None


async def load(made: list[Router], rounds: int) -> int:
    """Have all begin what they may, again and again; return the most that were in flight together."""
    most = 0
    for _ in range(rounds):
        for router in made:
            router.begin()
        most = max(most, sum(router.meter.in_flight for router in made))
        await asyncio.sleep(0.01)
    return most


async def test_two_loaded_routers_allow_the_limit_together_and_an_idle_one_gives_what_it_has(
    server: NatsServer,
) -> None:
    async with routers(server, "two", 2) as (one, other):
        await until("both have an equal part", lambda: one.share == other.share == 5)

        while one.meter.in_flight < 9:
            assert await load([one], 10) <= LIMIT
        assert other.share == 1, "an idle router keeps something for who comes next"
        assert await load([one, other], 50) == LIMIT
        one.end(6)
        while other.meter.in_flight < 5:  # it has a right to an equal part
            assert await load([other], 10) <= LIMIT


DEEP = b"\x91" * 200_000 + b"\x00"
HUGE = [[0, 0, 0], [9, 9, 9], [2**64 - 1] * 3]
GARBAGE = (
    b"null",
    b"",
    b"\xff\xfe",
    b"\x81\xa1t\x81\xa1l\x94" + b"\x93\0\0\0" * 3 + DEEP,
    msgspec.msgpack.encode({"acme": {"x": HUGE}}),
    msgspec.msgpack.encode({"acme": {"x": [[-1, 0, 0]]}}),
)


async def test_values_that_no_router_wrote_end_no_sharing(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async with routers(server, "garbage", 1) as (one,):
        await until("it has all", lambda: one.share == LIMIT)
        connection, page = one.limits._connection, page_of("acme")
        for key in (f"page.{page}", "page.x", f"page.{'9' * 200}", "page.64", "router.x", "x"):
            for body in GARBAGE:
                await connection.jetstream.publish(f"$KV.{BUCKET}.garbage.{key}", body)
        seen = one.limits._seen
        await until("it has read them", lambda: one.limits._seen >= seen + 6)
        one.change(Tenant(concurrent_requests=4))
        await until("it goes on", lambda: one.share == 4)
        assert one.limits._connection is connection
        assert connection.reconnects == 0
    assert "shares of tenants' limits" not in caplog.text


async def test_the_share_of_a_killed_router_is_the_others_after_its_lease_and_one_that_starts_in_its_place_has_it_at_once(  # noqa: E501
    server: NatsServer,
) -> None:
    one, other = Router(server, "killed"), Router(server, "killed", "http://b:1")
    await until("both have an equal part", lambda: one.share == other.share == 5)
    await other.kill()
    again = Router(server, "killed", "http://b:1")

    await until("it has the place, and the part", lambda: again.share == 5)
    assert one.told[-1] == again.told[-1] == 2, "by so many the queue is divided"

    await again.kill()
    before_ms = one.clock.monotonic_ms()
    await until("the part is the other's", lambda: one.share == LIMIT)
    assert one.clock.monotonic_ms() - before_ms > 500 * LEASE_S, "not before the lease was over"
    assert one.told[-1] == 1
    await one.limits.close()


async def test_a_replica_that_has_come_to_a_stand_takes_no_living_routers_share(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routers(server, "stand", 2) as (one, other):
        await until("both have an equal part", lambda: one.share == other.share == 5)

        # As a server does that a router is connected to, and that gets no messages of the stream any more.
        async def nothing_new(stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
            return []

        monkeypatch.setattr(one.limits._connection, "batch", nothing_new)
        failed = "poolgrid_frontend_limit_division_failures_total"
        await until("it is noticed", lambda: bool(one.registry.get_sample_value(failed)))
        before_ms = one.clock.monotonic_ms()
        while one.clock.monotonic_ms() - before_ms < 1500 * LEASE_S:
            assert await load([one, other], 10) == LIMIT
        assert one.share == other.share == 5
        assert one.told[-1] == 2, "by so many the queue is divided"

        monkeypatch.undo()
        age = "poolgrid_frontend_limit_division_age_seconds"
        await until("it is read again", lambda: (one.registry.get_sample_value(age) or 9) < LEASE_S / 2)
        assert one.share == other.share == 5


async def test_a_changed_limit_and_a_router_that_leaves_are_divided_anew(server: NatsServer) -> None:
    async with routers(server, "changed", 2) as made:
        await until("both have an equal part", lambda: all(each.share == 5 for each in made))
        for each in made:
            each.change(Tenant(concurrent_requests=4))
        await until("both have less", lambda: all(each.share == 2 for each in made))
        for each in made:
            each.change(Tenant())
        await until("nobody has any", lambda: all(each.share == 0 for each in made))
        assert all(each.begin() for each in made for _ in range(20)), "there is no limit"
        for each in made:
            each.end(20)
            each.change(ACME)
        await until("both have an equal part again", lambda: all(each.share == 5 for each in made))
        await made[1].limits.close()
        await until("who is left has all", lambda: made[0].share == LIMIT)


async def test_while_nats_is_away_routers_go_on_with_what_they_have_and_nobody_loses_it_by_the_outage(
    tmp_path: Path,
) -> None:
    server = NatsServer(tmp_path, "away")
    server.start()
    try:
        async with routers(server, "away", 2) as (one, other):
            await until("both have an equal part", lambda: one.share == other.share == 5)
            server.kill()
            failed = "poolgrid_frontend_limit_division_failures_total"
            await until("it is noticed", lambda: bool(one.registry.get_sample_value(failed)))
            before_ms = one.clock.monotonic_ms()
            while one.clock.monotonic_ms() - before_ms < 1000 * LEASE_S:
                assert await load([one, other], 10) == LIMIT
            server.start()
            age = "poolgrid_frontend_limit_division_age_seconds"
            await until("it is there again", lambda: (one.registry.get_sample_value(age) or 9) < LEASE_S / 2)
            assert await load([one, other], 50) == LIMIT
            assert one.share == other.share == 5

            jetstream = one.limits._connection.jetstream
            await jetstream.delete_stream(f"KV_{BUCKET}")
            one.end(5)
            other.end(5)
            await until("a bucket that is gone is made and divided anew", lambda: one.share + other.share < LIMIT)
            await until("both have an equal part", lambda: one.share == other.share == 5)
    finally:
        server.kill()
