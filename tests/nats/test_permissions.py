"""Users of a real server who may do what ``docs/several_hosts.md`` says of their part, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.plugins.nats.jetstream import JetStreamJournal, StreamShape, ThreadedStream
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings
from poolgrid.plugins.nats.leader import LeaderLease, read_leader
from poolgrid.plugins.nats.message import Outgoing, StreamUnavailable, empty_body
from poolgrid.plugins.nats.registrations import NatsRegistrations
from poolgrid.server.discovery.registry import DiscoveryUnavailable, Scope
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from tests.clock import HandClock
from tests.consolidator.journal_kinds import BLOCKS_MAX
from tests.consolidator.journal_laws import fill, snapshot
from tests.discovery.registrations import registration, seen
from tests.discovery.waiting import until
from tests.nats.servers import BINARY, MISSING, NatsServer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

PAGE = Path(__file__).parents[2] / "docs" / "several_hosts.md"
ROLES = ("consolidator", "router", "worker", "command")
LOOKS, REGISTERS = "names, read", "names, register"
SIZE = 1024 * 1024


def permissions(role: str) -> tuple[list[str], list[str]]:
    """Return what the page says that a part publishes, and what it subscribes to."""
    page = PAGE.read_text()
    (row,) = re.findall(rf"^\| {role} \| ([^|]*`[^|]*) \| (`[^|]*) \|$", page, re.MULTILINE)
    publishes, subscribes = (_subjects(cell) for cell in row)
    return publishes + (permissions(LOOKS)[0] if "the row above" in row[0] else []), subscribes


def _subjects(cell: str) -> list[str]:
    """Return the subjects of a cell for a pool p and a router r of blue; options are quoted there, too."""
    quotes = [each for each in re.findall(r"`([^`]+)`", cell) if not each.startswith("--")]
    meant = {"POOL": "p", "ROUTER": "r", "NAMESPACE": "blue", "COMPONENT": "router"}
    return [re.sub("|".join(meant), lambda word: meant[word[0]], each) for each in quotes]


def user(role: str) -> str:
    return role.replace(", ", "-").replace(" ", "-")


def quoted(subjects: list[str]) -> str:
    return ", ".join(f'"{each}"' for each in subjects)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = []
    for role in (*ROLES, LOOKS, REGISTERS):
        publishes, subscribes = permissions(role)
        users.append(
            f"{{ user: {user(role)}, password: x, permissions: {{ publish: {{ allow: [{quoted(publishes)}] }}, "
            f"subscribe: {{ allow: [{quoted(subscribes)}] }} }} }}"
        )
    more = f"authorization {{ users: [ {', '.join(users)} ] }}\n"
    made = NatsServer(tmp_path_factory.mktemp("permissions"), "one", more)
    made.start()
    yield made
    made.kill()


def url_of(server: NatsServer, role: str) -> str:
    return server.url.replace("nats://", f"nats://{user(role)}:x@")


async def connected(server: NatsServer, role: str) -> NatsConnection:
    url = url_of(server, role)
    settings = EventPlaneSettings(event_plane="nats", nats_url=(url,), nats_pool="p")
    connection = NatsConnection(settings, role, SystemClock())
    await connection.open()
    return connection


def violations(server: NatsServer) -> list[str]:
    return re.findall(r"(\w+ Violation .*)", (server.directory / "log").read_text())


async def test_each_part_does_its_work_with_what_the_page_gives_it_and_a_router_cannot_write_the_journal(
    server: NatsServer,
) -> None:
    loop = asyncio.get_running_loop()
    consolidator, router, worker, command = [await connected(server, role) for role in ROLES]
    stream = JetStreamJournal(consolidator, StreamShape(1, SIZE))
    await stream.open()
    await stream.open()  # what is there is looked at, and changed
    await JetStreamJournal(consolidator, StreamShape(1, 2 * SIZE)).open()
    lease = LeaderLease(consolidator, "c", 30, SystemClock())
    await lease.take()
    await lease.announce("tcp://h:1")

    def write() -> None:
        sizes = StreamJournalSettings(1, bytes_max=SIZE, durable_after_ms=0)
        journal = StreamJournal(ThreadedStream(stream, loop), "life", HandClock(), sizes)
        journal.recover(BLOCKS_MAX)
        fill(journal, 30, at_once=1)
        for offset in (10, 20, 29):
            snapshot(journal, offset)
        assert journal.retain(0) > 0
        assert journal.recover(BLOCKS_MAX).offset == 30

    await asyncio.to_thread(write)
    assert (await read_leader(command))[1] is not None
    for follower in (worker, router):
        (_, leader) = await read_leader(follower)
        assert leader is not None
        assert leader.ingest == "tcp://h:1"
        await follower.client.subscribe("poolgrid.p.told.leader")
    await worker.client.flush()
    assert violations(server) == [], "nothing that a part needs is refused to it"

    before = await stream.facts()
    forged = Outgoing("forged.1", 0, False, empty_body(30, 0))
    for stranger in (router, worker, command):
        with pytest.raises(StreamUnavailable):
            await JetStreamJournal(stranger).append([forged], before.last_sequence, begins=True)
        with pytest.raises(StreamUnavailable):
            await JetStreamJournal(stranger).remove_before(before.last_sequence)
    assert await stream.facts() == before
    assert "poolgrid.p.journal.forged" in str(violations(server))
    await lease.give_back()
    for connection in (consolidator, router, worker, command):
        await connection.close()


async def test_who_registers_and_who_looks_for_names_do_so_with_what_the_page_gives_them_and_write_nothing_else(
    server: NatsServer,
) -> None:
    before = violations(server)
    registers, looks = [
        NatsRegistrations(DiscoverySettings(names="nats", nats_url=(url_of(server, role),)), 3, 1, SystemClock())
        for role in (REGISTERS, LOOKS)
    ]
    for store in (registers, looks):  # who may make the bucket comes first
        await store.open()
        await until(store._bucket.is_open.is_set)
    scopes = [Scope("blue", "router")]
    await registers.write(registration(1), seen(1).data)
    for store in (registers, looks):
        assert [each.key for each in await store.look(scopes)] == [registration(1).key]
    await registers.remove(registration(1).key)
    assert await looks.look(scopes) == []
    assert violations(server) == before, "nothing that they need is refused to them"

    for store, *key in ((looks, "blue", "router"), (registers, "blue", "worker"), (registers, "green", "router")):
        forged = registration(2, namespace=key[0], component=key[1])
        with pytest.raises(DiscoveryUnavailable):
            await store.write(forged, seen(2).data)
        assert f"$KV.poolgrid-names.{forged.key}" in str(violations(server)[len(before) :])
    assert await looks.look([Scope()]) == []
    for store in (registers, looks):
        await store.close()
