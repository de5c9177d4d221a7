"""The journal on a real JetStream server: the laws of every journal, and what only a server can show."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import count, product

import pytest

from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.ingest import Leader
from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.plugins.nats.jetstream import JetStreamJournal, StreamShape, ThreadedStream
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings
from poolgrid.plugins.nats.leader import LeaderLease, read_leader
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.tasks import wait_from_thread
from tests.clock import HandClock
from tests.consolidator.journal_builder import encoded, facts_of, fold
from tests.consolidator.journal_kinds import BLOCKS_MAX, InStream
from tests.consolidator.journal_laws import fill, offsets, snapshot
from tests.nats.servers import BINARY, MISSING, NatsServer, one_server
from tests.router.fleet_builder import stored

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]

SIZE = 1024 * 1024
"""What these streams may hold."""

_names = count()


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with one_server() as server:
        yield server


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own, as the consolidator's is from where the journal is written."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class OnServer(InStream):
    """A pool of its own on the server."""

    def __init__(self, server: NatsServer, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._server = server
        self._settings = EventPlaneSettings(
            event_plane="nats", nats_url=(server.url,), nats_pool=f"pool-{next(_names)}"
        )
        self.connection = NatsConnection(self._settings, "test", SystemClock())
        self.run(self.connection.open())
        super().__init__(ThreadedStream(JetStreamJournal(self.connection, StreamShape(1, SIZE)), loop))

    def run(self, work: object) -> object:
        return wait_from_thread(self.loop, work, "test", 60)  # type: ignore[arg-type]

    def spoil_newest_snapshot(self) -> None:
        """Put one there whose content is another's."""
        newest = self.stream.snapshots()[-1]
        self.stream.put_snapshot(newest, self.stream.get_snapshot(newest)[:-1] + b"\0")

    def refuse(self, refused: bool) -> None:
        """Kill the server, or start it again where it was."""
        if refused:
            self._server.kill()
        else:
            self._server.start()
        self.run(self._until_connected(not refused))

    async def _until_connected(self, connected: bool) -> None:
        while self.connection.client.is_connected != connected:  # noqa: ASYNC110 - the client has no event for it
            await asyncio.sleep(0.02)

    def end(self) -> None:
        self.run(self.connection.close())


@pytest.fixture
def kind(server: NatsServer, loop: asyncio.AbstractEventLoop) -> Iterator[OnServer]:
    kind = OnServer(server, loop)
    yield kind
    kind.end()


def test_a_writer_that_was_overtaken_is_fenced(kind: OnServer) -> None:
    old = fill(kind.open(), 5)
    new = fill(kind.open(), 8)

    with pytest.raises(JournalFenced, match="of another writer, 'life-1"):
        old.append(encoded(5, 1), 0)

    assert facts_of(new.recover(BLOCKS_MAX)) == facts_of(fold(8))


def test_a_stream_that_somebody_deleted_has_no_writer_any_more_and_the_next_one_makes_it_anew(kind: OnServer) -> None:
    journal = fill(kind.open(), 5)
    snapshot(journal, 5)
    kind.run(kind.connection.jetstream.delete_stream(kind.stream.name))

    with pytest.raises(JournalFenced, match="its end is lost"):
        journal.drop_lost()

    again = fill(kind.open(), 3)
    assert offsets(again, 0) == [0, 1, 2]


def test_a_stream_that_somebody_purged_is_begun_again_by_the_next_writer(kind: OnServer) -> None:
    journal = fill(kind.open(), 5)
    snapshot(journal, 5)
    kind.run(kind.connection.jetstream.purge_stream(kind.stream.name))

    with pytest.raises(JournalFenced, match="another writer has taken over"):
        journal.drop_lost()
    with pytest.raises(JournalFenced):
        fill(journal, 6)

    again = fill(kind.open(), 3)
    assert again.recover(BLOCKS_MAX).offset == 3
    assert offsets(again, 0) == [0, 1, 2]
    assert kind.stream.snapshots() == []


FOREIGN_ENTRIES: list[tuple[bytes, str | None]] = [
    (b"hello", None),
    (b"", None),
    (b"null", "3"),
    (codec.leader.encode(Leader("x")), None),
    (codec.leader.encode(Leader("x")), "9" * 5),
    (codec.leader.encode(Leader("x")), "never"),
]


@pytest.mark.parametrize(("body", "ttl"), FOREIGN_ENTRIES)
def test_a_foreign_entry_of_the_leader_keeps_no_consolidator_from_the_lease(
    kind: OnServer, body: bytes, ttl: str | None
) -> None:
    kind.stream.open()
    subject = f"$KV.poolgrid-{kind.connection.pool}.leader"
    publish(kind, subject, body, None if ttl is None else {"Nats-TTL": ttl})

    async def scenario() -> tuple[bool, Leader | None]:
        lease = LeaderLease(kind.connection, "c", 30, SystemClock())
        await lease.take()
        leader = (await read_leader(kind.connection))[1]
        await kind.connection.jetstream.publish(subject, body, headers=None if ttl is None else {"Nats-TTL": ttl})
        other = LeaderLease(kind.connection, "d", 30, SystemClock())
        await other.take()
        await lease.announce("tcp://h:1")
        is_lost = lease.lost.is_set()
        await lease.give_back()
        await other.give_back()
        return is_lost, leader

    assert kind.run(scenario()) == (True, Leader("c"))


FOREIGN_HEADERS: list[dict[str, str] | None] = [
    None,
    {"Nats-Msg-Id": "x.1"},
    {"Nats-Msg-Id": "x.1", "Poolgrid-After": ""},
    {"Nats-Msg-Id": "w1.1", "Poolgrid-After": "w1.1"},
    {"Nats-Msg-Id": "x.1", "Poolgrid-After": "", "Poolgrid-Piece": "\u00b2"},
    {"Poolgrid-After": "x"},
    {"Status": "404"},
    {"Status": "503", "Nats-Sequence": "x", "Nats-Subject": "x", "Nats-Num-Pending": "0"},
]
BODIES = [b"hello", b"", b"null", b"{}", bytes(40)]


def publish(kind: OnServer, subject: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    return int(kind.run(kind.connection.jetstream.publish(subject, body, headers=headers)).seq)  # type: ignore[attr-defined]


def test_foreign_messages_stop_neither_the_writer_nor_the_next_one(
    kind: OnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Between its messages, on its own subject, before the first and behind the last."""
    subject = f"poolgrid.{kind.connection.pool}.journal"
    kind.stream.open()
    publish(kind, f"{subject}.x", b"hello")
    journal = kind.open()
    writer = journal._writer  # type: ignore[attr-defined]
    fill(journal, 3)
    for number, (headers, body) in enumerate(product(FOREIGN_HEADERS, BODIES)):
        named = headers and {**headers, "Nats-Msg-Id": headers.get("Nats-Msg-Id", "") + str(number)}
        publish(kind, f"{subject}.x", body, named)
    fill(journal, 6)
    publish(kind, f"{subject}.{writer}", b"hello")
    fill(journal, 9)
    last = publish(kind, f"{subject}.x", b"hello")
    assert offsets(journal, 0) == list(range(9))
    snapshot(journal, 9)
    journal.drop_lost()

    following = kind.open()
    assert following.recover(BLOCKS_MAX).offset == 9
    fill(following, 12)
    assert offsets(following, 0) == list(range(12))
    assert f"nats stream rmm poolgrid-{kind.connection.pool}" in caplog.text
    assert "this is a bug" not in caplog.text

    kind.run(kind.connection.jetstream.delete_msg(f"poolgrid-{kind.connection.pool}", last))
    fill(following, 13)
    assert kind.open().recover(BLOCKS_MAX).offset == 13


def test_a_foreign_message_that_was_removed_leaves_a_hole_that_nothing_stops_at(kind: OnServer) -> None:
    """Also where it was the last one."""
    pool = kind.connection.pool
    journal = kind.open()
    fill(journal, 2)
    for records in (4, 6):
        number = publish(kind, f"poolgrid.{pool}.journal.x", b"hello")
        kind.run(kind.connection.jetstream.delete_msg(f"poolgrid-{pool}", number))
        fill(journal, records)
    number = publish(kind, f"poolgrid.{pool}.journal.x", b"hello")
    kind.run(kind.connection.jetstream.delete_msg(f"poolgrid-{pool}", number))
    journal.drop_lost()
    assert offsets(journal, 0) == list(range(6))
    following = kind.open()
    assert following.recover(BLOCKS_MAX).offset == 6
    fill(following, 7)
    assert offsets(following, 0) == list(range(7))


NOT_ENTRIES = [
    b"null",
    b"",
    b"hello",
    b"[]",
    b"7",
    b'"x"',
    b"{}",
    b'{"name": null}',
    b'{"name": "x", "nuid": ">"}',
    b'{"name": "x", "nuid": 1, "size": "a", "headers": []}',
    b'{"name": "x", "nuid": "x", "size": -1}',
    b"[" * 5000,
    b"\xff\xfe",
    bytes(100_000),
]


def test_what_is_no_entry_of_a_snapshot_is_skipped_and_those_that_are_stay(
    kind: OnServer, caplog: pytest.LogCaptureFixture
) -> None:
    pool = kind.connection.pool
    journal = kind.open()
    fill(journal, 5)
    snapshot(journal, 5)
    (kept,) = kind.stream.snapshots()
    name = f"{kept.offset:020d}.snapshot"
    forged = {"name": name, "nuid": "other", "size": 10**30, "headers": {"Poolgrid-Sequence": ["\u00b2"]}}
    for number, entry in enumerate([*NOT_ENTRIES, json.dumps(forged).encode()]):
        publish(kind, f"$O.poolgrid-{pool}-snapshots.M.x{number}", entry)

    assert kind.stream.snapshots() == [kept]
    assert kind.open().recover(BLOCKS_MAX).offset == 5
    assert f"nats stream rmm OBJ_poolgrid-{pool}-snapshots" in caplog.text


def test_pieces_of_a_snapshot_whose_writer_was_killed_are_cleared_away(kind: OnServer) -> None:
    journal = fill(kind.open(), 5)
    snapshot(journal, 5)
    bucket = f"{kind.stream.name}-snapshots"
    kind.run(kind.connection.jetstream.publish(f"$O.{bucket}.C.unfinished", b"x" * 1000))

    again = kind.open()

    found = kind.run(kind.connection.jetstream.stream_info(f"OBJ_{bucket}", subjects_filter=f"$O.{bucket}.C.>"))
    assert len(found.state.subjects) == 1  # type: ignore[attr-defined]
    assert facts_of(again.recover(BLOCKS_MAX)) == facts_of(fold(5))


def large_records(first: int) -> list[bytes]:
    """Return records of a quarter of a megabyte together."""
    records = []
    for offset in range(first, first + 3):
        events = [stored(list(range(1 + 10_000 * offset, 10_000 * (offset + 1))))]
        records.append(
            codec.journal_record.encode(JournalRecord(offset, "m", 0, 1, offset - 1, 1000, 2000, [*events], "worker"))
        )
    return records


def test_a_stream_that_is_full_of_large_records_is_taken_over_and_written_again(kind: OnServer) -> None:
    settings = StreamJournalSettings(SIZE // 4, bytes_max=SIZE, durable_after_ms=0)

    def open_journal(writer: str) -> StreamJournal:
        journal = StreamJournal(kind.stream, writer, HandClock(), settings)
        journal.recover(BLOCKS_MAX)
        return journal

    def append_for_ever(journal: StreamJournal) -> None:
        while journal.sizes() is not None:
            journal.append(large_records(journal.next_offset), 0)

    journal = open_journal("first")
    journal.append(encoded(0, 1), 0)
    for writer in ("second", "third"):
        with pytest.raises(OSError, match=f"may hold {SIZE};"):
            append_for_ever(journal)
        journal = open_journal(writer)
        assert journal.crowded
        while not journal.make_room(BLOCKS_MAX, 0):
            assert kind.stream.snapshots()
        stored_before = journal.next_offset
        journal.append(large_records(stored_before), 0)
        assert kind.open().recover(BLOCKS_MAX).offset == stored_before + 3
        journal = open_journal(f"{writer}-again")


def test_the_servers_take_no_more_than_they_keep_room_for(kind: OnServer) -> None:
    journal = StreamJournal(kind.stream, "w", HandClock())
    large = [b"x" * (200 * 1024)] * 10
    journal.append(large, 0)

    def append_more() -> None:
        while journal.sizes() is not None:
            journal.append(large, 0)

    with pytest.raises(OSError, match="maximum bytes exceeded"):
        append_more()
