"""Responses that are kept in a bucket of a real NATS server, for all routers of a pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import Key, KeyDocument, Tenant
from poolgrid.frontend.responses_api.kept import KeptResponse, Owner
from poolgrid.frontend.settings import FrontendSettings
from poolgrid.frontend.shared_state import Sharing
from poolgrid.inference import Refused
from poolgrid.nats import responses as store_on_nats
from poolgrid.nats.plane import open_shared_state
from poolgrid.nats.responses import BUCKET, NatsResponseStore
from poolgrid.process.clock import SystemClock
from tests.discovery.waiting import until
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process
from tests.nats.servers import BINARY, MISSING, NatsServer, one_server

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

ACME, OTHER = Owner("acme", 2), Owner("other", 2)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with one_server() as server:
        yield server


def response(name: str, previous: str | None = None, size: int = 10) -> KeptResponse:
    text = name.encode().ljust(size, b".")
    return KeptResponse(name, previous, b"in " + text, b"out " + text, b"all " + text)


@asynccontextmanager
async def stores(
    server: NatsServer, scope: str, count: int = 2, timeout_ms: int = 5000
) -> AsyncIterator[list[NatsResponseStore]]:
    settings = DiscoverySettings(names="nats", nats_url=(server.url,))
    made = [NatsResponseStore(settings, scope, 16 * 1024 * 1024, 3600, 1, SystemClock()) for _ in range(count)]
    for store in made:
        store._connection.timeout_s = timeout_ms / 1000
        store.start()
    for store in made:
        await until(lambda store=store: store.is_ready)  # type: ignore[misc]
    try:
        yield made
    finally:
        for store in made:
            await store.disconnect()


async def test_what_one_router_keeps_another_one_goes_on_from_and_forgets(server: NatsServer) -> None:
    async with stores(server, "blue.default") as (one, other):
        first, second, third = response("resp_a"), response("resp_b", "resp_a"), response("resp_c", "resp_b")
        assert await one.keep(ACME, first)
        assert await other.keep(ACME, second)
        assert await one.keep(ACME, third)

        assert await other.response(ACME, "resp_a") == first.response
        assert await other.items(ACME, "resp_c", "input") == third.input
        assert await one.items(ACME, "resp_b", "output") == second.output
        assert await one.conversation(ACME, "resp_c") == [first, second, third]
        assert await other.conversation(ACME, "resp_a") == [first]
        assert await other.forget(ACME, "resp_b")
        assert await one.response(ACME, "resp_b") is None
        assert not await one.forget(ACME, "resp_b")
        assert await one.conversation(ACME, "resp_c") is None, "half a conversation cannot go on"
        assert not await one.keep(ACME, response("resp_d", "resp_b"))
        assert await other.items(ACME, "resp_b", "input") == b"[]"


DEEP = b"\x81\xa1x" + b"\x91" * 200_000 + b"\x00"
"""A field that is passed over, and nests too deep for that."""


@pytest.mark.parametrize(
    ("part", "count", "data"),
    [("0", "9" * 5000, b"x"), ("0", "1", b"hello"), ("0", "1", DEEP), ("0", "1", b""), ("0", "\u00b2", b"x")],
)
async def test_what_no_router_kept_is_no_response_and_costs_no_other(
    server: NatsServer, part: str, count: str, data: bytes
) -> None:
    async with stores(server, "blue.foreign", 1) as (store,):
        assert await store.keep(ACME, response("resp_a"))
        for name, number in (("resp_x", part), ("resp_a", "5"), ("resp_a", "7" * 200)):
            subject = store._bucket.spec.subject + store._key(ACME.name, store_on_nats._digest(name))
            headers = {store_on_nats.PARTS_HEADER: count}
            await store._connection.jetstream.publish(f"{subject}.{number}", data, headers=headers)
        assert await store.response(ACME, "resp_x") is None
        assert await store.response(ACME, "resp_a") == response("resp_a").response


async def test_two_front_ends_of_a_pool_are_one_to_a_tenant(server: NatsServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    allowed = {
        name: Tenant(keys=(Key(key_file.hash_key(f"pg-{name}")),), concurrent_requests=5, requests_per_minute=6000)
        for name in ("acme", "other")
    }
    key_file.write(keys, KeyDocument(1, "5" * 64, allowed))
    nats = DiscoverySettings(names="nats", nats_url=(server.url,))
    acme, other = ({"authorization": f"Bearer pg-{name}"} for name in allowed)

    async with AsyncExitStack() as opened:
        clients, states = [], []
        for number in range(2):
            sharing = Sharing("front.ends", f"host {number}", 5, 1)
            registry = CollectorRegistry()
            state = open_shared_state(opened, nats, FrontendSettings(), sharing, SystemClock(), registry)
            made = application(FakeBackend(), registry=registry, shared=state, api_keys=keys)
            clients.append(await opened.enter_async_context(in_process(made)))
            states.append(state)
        for state in states:
            await state.limits.first_shares()
            await until(lambda state=state: state.responses is not None and state.responses.is_ready)  # type: ignore[misc]

        async def ask(at: int, headers: dict[str, str], **more: object) -> httpx.Response:
            body = {"model": "tiny", "input": "hello", **more}
            return await clients[at].post("/v1/responses", json=body, headers=headers)

        first = (await ask(0, acme)).raise_for_status()
        name = first.json()["id"]
        assert 0 < int(first.headers["x-ratelimit-limit-requests"]) <= 6000
        second = (await ask(1, acme, previous_response_id=name)).raise_for_status().json()
        assert second["previous_response_id"] == name
        assert (await ask(1, other, previous_response_id=name)).status_code == 400
        where = f"/v1/responses/{name}"
        assert (await clients[1].get(where, headers=acme)).json() == first.json()
        assert (await clients[1].get(where, headers=other)).status_code == 404
        assert (await clients[1].delete(where, headers=acme)).status_code == 200
        assert (await clients[0].get(where, headers=acme)).status_code == 404


async def test_nobody_finds_what_another_tenant_or_another_pool_has_kept(server: NatsServer) -> None:
    async with stores(server, "blue.secret", 1) as (blue,), stores(server, "green.secret", 1) as (green,):
        await blue.keep(ACME, response("resp_a"))

        assert await blue.response(OTHER, "resp_a") is None
        assert await green.response(ACME, "resp_a") is None
        assert not await blue.forget(OTHER, "resp_a")
        assert not await blue.keep(OTHER, response("resp_b", "resp_a"))
        assert await blue.response(ACME, "resp_a") == response("resp_a").response
        keys = (await blue._connection.jetstream.stream_info(f"KV_{BUCKET}", subjects_filter=">")).state.subjects
        assert keys
        assert not any("acme" in key or "resp_a" in key for key in keys), "keys do not say whose they are"


async def test_long_responses_and_long_conversations_are_read_whole(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_on_nats, "SUBJECTS_PER_QUESTION", 3)
    monkeypatch.setattr("poolgrid.nats.connection.ANSWER_BYTES_MAX", 700_000)

    async with stores(server, "long.default") as (one, other):
        turns = [response("resp_0", size=700_000)]
        turns += [response(f"resp_{number}", f"resp_{number - 1}") for number in range(1, 8)]
        for turn in turns:
            assert await one.keep(ACME, turn)

        assert await other.conversation(ACME, "resp_7") == turns
        assert not await one.keep(ACME, response("resp_8", size=4 * 1024 * 1024)), "more than half of the room"


async def test_while_nats_is_away_nothing_is_kept_and_clients_are_told_to_come_again(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "away")
    server.start()
    try:
        async with stores(server, "away.default", 1, timeout_ms=300) as (store,):
            assert await store.keep(ACME, response("resp_a"))
            server.kill()

            assert not await store.keep(ACME, response("resp_b"))
            for asked in (store.response, store.conversation, store.forget):
                with pytest.raises(Refused) as refusal:
                    await asked(ACME, "resp_a")
                assert refusal.value.status == 503
            server.start()
            await until(lambda: store.is_ready)
            assert await store.response(ACME, "resp_a") == response("resp_a").response

            await store._connection.jetstream.delete_stream(f"KV_{BUCKET}")
            assert not await store.keep(ACME, response("resp_c")), "the bucket was gone, and is made"
            assert await store.keep(ACME, response("resp_d"))
    finally:
        server.kill()
