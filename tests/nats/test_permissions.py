"""Users of a real server who may do what ``docs/operations.md`` says of their part, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.router.consolidator.adapters.jetstream import (
    JetStreamJournal,
    RouterStream,
    StreamShape,
    ThreadedStream,
)
from poolgrid.router.consolidator.stream.journal import StreamJournal, StreamJournalSettings
from poolgrid.router.consolidator.stream.message import Outgoing, empty_body
from poolgrid.router.consolidator.stream.ports import StreamUnavailable
from poolgrid.router.decision_journal.entries import RequestEnded, encoder
from poolgrid.router.decision_journal.jetstream import JetStreamDecisions, ThreadedDecisions, routers_with_decisions
from poolgrid.router.decision_journal.stream_segments import DecisionsInStream, StreamSegments
from poolgrid.router.nats_feed import NatsFeed
from poolgrid.runtime.clock import SystemClock
from poolgrid.runtime.nats_connection import NatsConnection
from poolgrid.runtime.nats_leader import LeaderLease, read_leader
from poolgrid.runtime.nats_settings import EventPlaneSettings
from tests.consolidator.fake_stream import StillClock
from tests.consolidator.journal_builder import fold
from tests.consolidator.journal_kinds import BLOCKS_MAX
from tests.consolidator.journal_laws import fill, snapshot
from tests.consolidator.test_service import Reader
from tests.nats.servers import BINARY, MISSING, NatsServer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
ROLES = ("consolidator", "router", "worker", "command")
SIZE = 1024 * 1024


def permissions(role: str) -> tuple[list[str], list[str]]:
    """Return what the page says that a part publishes, and what it subscribes to."""
    page = PAGE.read_text()
    (row,) = re.findall(rf"^\| {role} \| (`[^|]*) \| (`[^|]*) \|$", page, re.MULTILINE)
    publishes, subscribes = (_subjects(cell) for cell in row)
    return publishes, subscribes


def _subjects(cell: str) -> list[str]:
    """Return the subjects of a cell for a pool p and a router r; options are quoted there, too."""
    quotes = [each for each in re.findall(r"`([^`]+)`", cell) if not each.startswith("--")]
    return [each.replace("POOL", "p").replace("ROUTER", "r") for each in quotes]


def quoted(subjects: list[str]) -> str:
    return ", ".join(f'"{each}"' for each in subjects)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = []
    for role in ROLES:
        publishes, subscribes = permissions(role)
        users.append(
            f"{{ user: {role}, password: x, permissions: {{ publish: {{ allow: [{quoted(publishes)}] }}, "
            f"subscribe: {{ allow: [{quoted(subscribes)}] }} }} }}"
        )
    more = f"authorization {{ users: [ {', '.join(users)} ] }}\n"
    made = NatsServer(tmp_path_factory.mktemp("permissions"), "one", more)
    made.start()
    yield made
    made.kill()


async def connected(server: NatsServer, role: str) -> NatsConnection:
    url = server.url.replace("nats://", f"nats://{role}:x@")
    settings = EventPlaneSettings(event_plane="nats", nats_url=(url,), nats_pool="p", nats_timeout_ms=2000)
    connection = NatsConnection(settings, role, SystemClock())
    await connection.open()
    return connection


def violations(server: NatsServer) -> list[str]:
    return re.findall(r"(\w+ Violation .*)", (server.directory / "log").read_text())


def test_each_part_does_its_work_with_what_the_page_gives_it_and_a_router_cannot_write_the_journal(
    server: NatsServer,
) -> None:
    async def scenario() -> None:
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
            journal = StreamJournal(ThreadedStream(stream, loop), "life", StillClock(), sizes)
            journal.recover(BLOCKS_MAX)
            fill(journal, 30, at_once=1)
            for offset in (10, 20, 29):
                snapshot(journal, offset)
            assert journal.retain(0) > 0
            assert journal.recover(BLOCKS_MAX).offset == 30

        await asyncio.to_thread(write)
        feed = NatsFeed(router, RouterStream(JetStreamJournal(router), "r"), SystemClock(), BLOCKS_MAX)
        reader = Reader()
        await feed.start(reader)
        assert reader.offset == 30
        assert fold(30).offset == 30
        await JetStreamJournal(router).note_position("r", 7)
        decisions = ThreadedDecisions(JetStreamDecisions(router, "r", SIZE, 60_000), loop)
        decisions.connected = True

        def record() -> list[str]:
            segments = StreamSegments(decisions, "life")
            segments.mend()
            segments.begin([encoder.encode(RequestEnded("r", 1, 1))], 0)
            return DecisionsInStream(decisions).names()

        assert len(await asyncio.to_thread(record)) == 1
        assert await routers_with_decisions(command) == ["r"]
        assert (await JetStreamDecisions(command, "r").facts()).messages == 1
        assert (await read_leader(command))[1] is not None
        (_, leader) = await read_leader(worker)
        assert leader is not None
        assert leader.ingest == "tcp://h:1"
        await worker.client.subscribe("poolgrid.p.told.leader")
        await worker.client.flush()
        assert violations(server) == [], "nothing that a part needs is refused to it"

        before = await stream.facts()
        forged = Outgoing("forged.1", "life.31", 0, False, empty_body(30, 0))
        for stranger in (router, worker, command):
            with pytest.raises(StreamUnavailable):
                await JetStreamJournal(stranger).append([forged], before.last_sequence, begins=True)
            with pytest.raises(StreamUnavailable):
                await JetStreamJournal(stranger).remove_before(before.last_sequence)
        assert await stream.facts() == before
        assert "poolgrid.p.journal.forged" in str(violations(server))
        await lease.give_back()
        await feed.stop()
        for connection in (consolidator, worker, command):
            await connection.close()

    asyncio.run(scenario())
