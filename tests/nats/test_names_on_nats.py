"""Names in a bucket of a real NATS server: leases that the servers end, servers that are away, entries of others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from poolgrid.plugins.nats.bucket import ANSWERS_MAX
from poolgrid.plugins.nats.connection import NatsConnection, NatsMessage
from poolgrid.plugins.nats.registrations import STREAM, SUBJECT, NatsRegistrations
from poolgrid.server.cli.router_client import url_of
from poolgrid.server.consolidator.settings import ConsolidatorSettings
from poolgrid.server.discovery.discovery import Discovery
from poolgrid.server.discovery.registry import DiscoveryUnavailable, Scope
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.clock import SystemClock
from tests.discovery.registrations import registration, seen
from tests.discovery.waiting import HTTP, until, until_found
from tests.nats.servers import BINARY, MISSING, NatsServer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path_factory.mktemp("nats"), "names")
    made.start()
    yield made
    made.kill()


def settings_of(server: NatsServer) -> DiscoverySettings:
    return DiscoverySettings(names="nats", nats_url=(server.url,))


def names_on(server: NatsServer, lease_s: int = 30) -> Discovery:
    return Discovery(NatsRegistrations(settings_of(server), lease_s, 1, SystemClock()), "blue", lease_s, SystemClock())


async def listed(store: NatsRegistrations) -> int:
    """Return how many routers a look finds; after a failed one, when the next may be better."""
    try:
        return len(await store.look([Scope("blue", "router")]))
    except DiscoveryUnavailable:
        return 0
    finally:
        await asyncio.sleep(0.05)


async def test_who_registers_is_found_who_closes_is_gone_and_a_wrong_entry_keeps_nobody_out(server: NatsServer) -> None:
    one, other = names_on(server), names_on(server)
    await one.open()
    await other.open()
    other.follow(Scope("blue", "router"), lambda: None)
    await one.register("router", "r1", {"http": "http://127.0.0.1:1"})
    await one.register("worker", "w1", {"http": "http://127.0.0.1:2"})
    connection = NatsConnection(settings_of(server), "stranger", SystemClock())
    await connection.open()
    bad = seen(7)
    wrong = {**json.loads(bad.data), "endpoints": {"http": "http://0.0.0.0:1"}}
    for key, data in ((bad.key, json.dumps(wrong).encode()), ("blue.router.nobody", b"\xff")):
        await connection.client.publish(SUBJECT + key, data)
    await connection.client.flush()

    assert await until_found(other, 1) == ["http://127.0.0.1:1"]
    await until(lambda: other.registry.refused_count == 2)

    assert "endpoints.http is 'http://0.0.0.0:1'" in other.registry.refused[bad.key]
    assert {each.instance for each in (await other.fleet()).data} == {"r1", "w1"}
    await one.close()
    await until_found(other, 0)
    await connection.close()
    await other.close()


async def test_who_is_killed_loses_its_name_with_its_lease_and_who_renews_does_not(server: NatsServer) -> None:
    one, other = names_on(server, lease_s=2), names_on(server)
    await one.open()
    await other.open()
    other.follow(Scope("blue", "decode"), lambda: None)
    killed = registration(3, component="decode")
    await one.register("decode", "d1", {"http": "http://127.0.0.1:1"})
    await until(lambda: bool(other.addresses(killed.name("http"))))
    await one.store.write(killed, json.dumps({}).encode())
    await until(lambda: other.registry.refused_count == 1)

    await until(lambda: other.registry.refused_count == 0)

    assert other.addresses(killed.name("http")) == ["http://127.0.0.1:1"], "it was renewed meanwhile"
    await one.close()
    await other.close()


async def test_a_command_finds_a_router_by_its_name(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLGRID_NAMES", "nats")
    monkeypatch.setenv("POOLGRID_NATS_URL", server.url)

    names = names_on(server)
    await names.open()
    await names.register("router", "r1", {"http": "http://127.0.0.1:1"})

    assert await url_of("dyn://blue.router.http") == "http://127.0.0.1:1"

    await names.close()


async def test_more_entries_than_an_answer_takes_are_all_read(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.plugins.nats.bucket.MESSAGES_PER_ANSWER", 3)

    names = names_on(server)
    await names.open()
    names.follow(Scope("green"), lambda: None)
    await names.first_look()
    await until(lambda: not names.trouble)
    for number in range(1, 8):
        made = seen(number, namespace="green")
        await names.store.write(registration(number, namespace="green"), made.data)

    await until(lambda: len(names.registry.instances("green")) == 7)

    await names.close()


async def test_a_question_that_a_replica_which_is_gone_got_is_asked_again_soon(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.plugins.nats.connection.ASK_AGAIN_S", 0.05)

    names = names_on(server)
    await names.open()
    await names.register("lonely", "r1", {"http": "http://127.0.0.1:1"})
    store = names.store
    assert isinstance(store, NatsRegistrations)
    client = store._bucket.connection.client
    publish, asked = client.publish, 0

    async def lose_each_second(subject: str, *arguments: Any, **more: Any) -> None:
        # As the servers lose a question that they hand to a replica behind a route that is gone.
        nonlocal asked
        asked += "DIRECT.GET" in subject
        if "DIRECT.GET" not in subject or asked % 2 == 0:
            await publish(subject, *arguments, **more)

    monkeypatch.setattr(client, "publish", lose_each_second)

    found = [len(await store.look([Scope("blue", "lonely")])) for _ in range(3)]

    assert found == [1] * 3
    assert asked >= 6
    await names.close()


async def test_a_replica_that_is_behind_takes_nobodys_name_and_brings_nobody_back(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_on(server)
    await names.open()
    await names.register("late", "r1", {"http": "http://127.0.0.1:1"})
    store = names.store
    assert isinstance(store, NatsRegistrations)
    scopes = [Scope("blue", "late")]
    connection = store._bucket.connection
    batch = connection.batch
    old = await batch(STREAM, {"seq": 1, "next_by_subj": SUBJECT + "blue.late.*", "batch": 10})
    await store.write(registration(1, component="late"), seen(1, component="late").data)
    assert len(await store.look(scopes)) == 2

    # As replicas do that have not got all messages, the first of them none at all.
    shown: list[list[NatsMessage]] = [[], old]

    async def answer(stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
        return shown.pop(0) if shown else await batch(stream, question)

    monkeypatch.setattr(connection, "batch", answer)
    assert len(await store.look(scopes)) == 2
    assert shown == []

    shown += [[]] * ANSWERS_MAX
    with pytest.raises(DiscoveryUnavailable, match="behind its leader"):
        await store.look(scopes)

    # Who is gone by all that the leader knows is gone.
    for key in (*names._own, registration(1, component="late").key):
        await store.remove(key)
    names._own.clear()
    assert await store.look(scopes) == []
    await connection.jetstream.purge_stream(STREAM, subject=SUBJECT + "blue.late.>")
    assert await store.look(scopes) == []
    await names.close()


async def test_a_replica_that_has_come_to_a_stand_lets_nobodys_lease_run_out(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = names_on(server, lease_s=2), names_on(server, lease_s=2)
    await one.open()
    await other.open()
    other.follow(Scope("blue", "router"), lambda: None)
    await one.register("router", "r1", {"http": "http://127.0.0.1:1"})
    await until_found(other, 1)
    assert isinstance(other.store, NatsRegistrations)
    connection = other.store._bucket.connection
    stale = await connection.batch(STREAM, {"seq": 1, "next_by_subj": SUBJECT + "blue.router.*", "batch": 10})

    # As a server does that a process is connected to, and that gets no messages of the stream any more.
    async def answer(stream: str, question: Mapping[str, Any]) -> list[NatsMessage]:
        return [each for each in stale if int(each.headers["Nats-Sequence"]) >= question["seq"]]

    monkeypatch.setattr(connection, "batch", answer)
    await until(lambda: "behind its leader" in other.trouble)
    for _ in range(3 * 4):
        await asyncio.sleep(0.25)
        assert other.addresses(HTTP), "who goes on renewing its name keeps it"

    monkeypatch.undo()
    await until(lambda: not other.trouble)
    assert other.addresses(HTTP)
    await one.close()
    await other.close()


async def test_servers_that_are_away_take_nobodys_name_and_do_not_hold_up_a_start(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "away")
    server.start()
    try:
        one, other = names_on(server, lease_s=3), names_on(server)
        await one.open()
        await other.open()
        other.follow(Scope("blue", "router"), lambda: None)
        await one.register("router", "r1", {"http": "http://127.0.0.1:1"})
        await until_found(other, 1)

        server.kill()
        await until(lambda: bool(other.trouble))

        assert len(await until_found(other, 1)) == 1
        late = names_on(server, lease_s=3)
        async with asyncio.timeout(120):
            await late.open()
            await late.register("router", "r2", {"http": "http://127.0.0.1:2"})
        server.start()
        await until_found(other, 2)
        assert isinstance(one.store, NatsRegistrations)
        await one.store._bucket.connection.jetstream.delete_stream(STREAM)
        async with asyncio.timeout(60):
            while await listed(one.store) != 2:  # a bucket that is gone is made and filled anew
                pass
        for names in (one, late, other):
            await names.close()
    finally:
        server.kill()


def test_names_on_nats_need_servers_and_servers_a_use() -> None:
    with pytest.raises(ValidationError, match="names is nats and nats_url is not given"):
        GlobalRouterSettings.model_validate({"config": "x", "names": "nats"})
    with pytest.raises(ValidationError, match="nothing would connect there"):
        ConsolidatorSettings.model_validate({"nats_url": ["nats://h:1"]})
    assert not ConsolidatorSettings.model_validate({"nats_url": ["nats://h:1"], "names": "nats"}).on_nats
