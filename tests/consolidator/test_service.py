"""The consolidator on real sockets, files and processes, with faults."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry, generate_latest

from poolgrid.kernel.consolidation import block_ownership
from poolgrid.kernel.consolidation.feed_reader import FeedEffect, FeedState
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal import framing
from poolgrid.kernel.journal.stored_records import stored_records
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    JournalRecord,
    SnapshotBegan,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.feed import FEED_TOPIC, BlockChain, FeedFrame, WorkerState, decode_feed
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier
from poolgrid.kernel.wire.ingest import Hello, JoinRefused, Unknown, Welcome
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot
from poolgrid.server.consolidator import metrics
from poolgrid.server.consolidator.bootstrap import create
from poolgrid.server.consolidator.feed_follower import FeedFollower
from poolgrid.server.consolidator.journal.inspection import check_journal
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from poolgrid.server.consolidator.journal.posix_disk import PosixDisk
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.sources_file import load_sources
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.transport.zmq_socket import Subscription
from tests.consolidator.pub_engine import BLOCK, Cache, PubEngine
from tests.consolidator.pusher import Pusher, pusher_at, removed
from tests.consolidator.tuned import tuned
from tests.router.fleet_builder import make_card, stored

View = dict[str, dict[Tier, set[int]]]

PATIENCE_S = 120.0
"""How long what must come may take on a busy machine; only a failing test waits that long."""


class Reader:
    """A router's view, kept naively; it checks that offsets have no holes."""

    def __init__(self) -> None:
        self.view: View = {}
        self.offset = -1
        self.snapshots = 0
        self.changed = asyncio.Event()

    def on_snapshot(
        self,
        offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        self.offset = offset
        self.snapshots += 1
        self.view = {worker.worker_id: {tier: set() for tier in Tier} for worker in workers}
        for position, chain in chains:
            self.view[workers[position].worker_id][chain.tier] |= set(unpack_hashes(chain.sequence_hashes))
        self.changed.set()

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        for record in records:
            assert record.offset == self.offset
            self.offset += 1
            for event in record.events:
                self._apply(record.worker_id, event)
        self.changed.set()

    def _apply(self, worker: str, event: AnyEvent) -> None:
        if isinstance(event, WorkerJoined):
            self.view[worker] = {tier: set() for tier in Tier}
        elif isinstance(event, WorkerLeft):
            del self.view[worker]
        elif isinstance(event, BlocksStored):
            self.view[worker][event.tier] |= set(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, BlocksRemoved):
            self.view[worker][event.tier] -= set(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, (CacheCleared, SnapshotBegan)):
            for held in self.view[worker].values():
                held.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def truth(*pushers: Pusher) -> View:
    return {pusher.worker_id: {tier: set(held) for tier, held in pusher.truth.items()} for pusher in pushers}


def run(scenario: Callable[[zmq.asyncio.Context], Awaitable[None]]) -> None:
    async def bounded() -> None:
        context = zmq.asyncio.Context()
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await scenario(context)
        finally:
            context.destroy(linger=0)

    asyncio.run(bounded())


async def heard(service: ConsolidatorService, by_somebody: bool = True) -> None:
    """Wait until the feed has readers, or none any more."""
    while service._feed.subscriptions.has_readers is not by_somebody:  # noqa: ASYNC110 - ZMQ tells it and nobody else
        await asyncio.sleep(0.005)


async def started(registry: CollectorRegistry | None = None, **changes: Any) -> ConsolidatorService:
    settings, tuning = tuned(**changes)
    service = create(settings, registry or CollectorRegistry(), SystemClock(), tuning=tuning)
    await service.start()
    return service


def random_work(pusher: Pusher, source: random.Random, batches: int) -> None:
    for _ in range(batches):
        events: list[AnyEvent] = []
        for _ in range(source.randrange(1, 4)):
            tier = source.choice(list(Tier))
            held = pusher.truth[tier]
            if held and source.random() < 0.3:
                events.append(removed(source.sample(list(held), min(3, len(held))), tier))
            else:
                first = source.randrange(1, 500)
                events.append(stored(list(range(first, first + source.randrange(1, 6))), first - 1 or None, tier))
            for event in events[-1:]:
                pusher._note(event)
        pusher._push(events)


def test_drops_duplicates_and_reconnections_lose_nothing() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        service = await started()
        reader = Reader()
        service.subscribe(reader)
        source = random.Random(7)
        pushers = [Pusher(context, service.ingest_endpoint, name) for name in ("a", "b", "c")]
        for pusher in pushers:
            await pusher.join()
            pusher.drop = set(source.sample(range(200), 40))
            pusher.repeat = set(source.sample(range(200), 40))
        for _ in range(4):
            for pusher in pushers:
                random_work(pusher, source, 50)
            pushers[0].reconnect(service.ingest_endpoint)
            for pusher in pushers:
                await pusher.settle()

        assert reader.view == truth(*pushers)
        assert reader.offset == service.offset
        assert service.core.tally.gaps >= 3
        assert service.core.tally.duplicates > 3
        await service.stop()

    run(scenario)


def test_an_outbox_that_does_not_reach_back_restates_the_cache() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        service = await started()
        reader = Reader()
        service.subscribe(reader)
        pusher = await pusher_at(context, service.ingest_endpoint, outbox_max=5)
        pusher.drop = set(range(3, 12))
        random_work(pusher, random.Random(1), 20)
        await pusher.settle()

        assert reader.view == truth(pusher)
        assert service.core.tally.restatements >= 1
        await service.stop()

    run(scenario)


def test_rubbish_on_the_ingest_socket_is_dropped_and_the_process_lives() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        registry = CollectorRegistry()
        service = await started(registry)
        socket = context.socket(zmq.DEALER)
        socket.connect(service.ingest_endpoint)
        for frames in (
            [b""],
            [b"B", b"\xff" * 50],
            [b"C", b""],
            [b"X", b"y"],
            [b"B", b"x", b"y"],
            [b"C", b"\x91" * 5000],
        ):
            await socket.send_multipart(frames)
        query = context.socket(zmq.DEALER)
        query.connect(service.query_endpoint)
        await query.send_multipart([b"rubbish"])
        pusher = Pusher(context, service.ingest_endpoint)
        pusher.control(msgspec.structs.replace(_hello(pusher), card=make_card(hash_spec="other")))
        assert isinstance(await pusher.receive(), JoinRefused)
        pusher.heartbeat()
        assert isinstance(await pusher.receive(), Unknown)  # it answers that with a Hello
        assert isinstance(await pusher.receive(), Welcome)
        pusher.push([stored([1])])
        await pusher.settle()

        text = generate_latest(registry).decode()
        assert "poolgrid_consolidator_undecodable_frames_total" in text
        for name in metrics.COUNTERS:
            assert f"\npoolgrid_consolidator_{name}_total " in text
        assert 'poolgrid_consolidator_event_lag_seconds{worker="w"}' in text
        assert 'poolgrid_consolidator_blocks{tier="device"} 1.0' in text
        socket.close()
        query.close()
        await service.stop()

    run(scenario)


def _hello(pusher: Pusher) -> Any:
    return Hello(pusher.worker_id, 0, pusher.epoch, pusher.card, 0, 0)


def test_a_snapshot_is_that_of_its_offset_although_records_are_stored_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of it is one block long, and workers are heard between any two."""
    monkeypatch.setattr(framing, "ENTRY_BYTES", 1)
    monkeypatch.setattr(block_ownership, "DUMP_STEP_BLOCKS", 1)

    async def scenario(context: zmq.asyncio.Context) -> None:
        service = await started(data_dir=tmp_path, snapshot_every_records=100)
        pusher = await pusher_at(context, service.ingest_endpoint)
        source = random.Random(7)
        late: list[tuple[Reader, FeedFollower]] = []

        def written() -> int:
            return len(list(tmp_path.glob("*.snapshot")))

        while written() < 2:
            random_work(pusher, source, 60)
            await pusher.settle()
            if len(late) < 3:
                reader = Reader()
                late.append(
                    (reader, FeedFollower(service.feed_endpoint, service.query_endpoint, reader, SystemClock()))
                )
                await late[-1][1].start()
        for reader, follower in late:
            await follower.wait_synced()
            await reader.until(lambda reader=reader: reader.offset == service.offset)  # type: ignore[misc]
            assert reader.view == truth(pusher)
            await follower.stop()
        pusher.close()
        await service.stop()

    run(scenario)
    disk = PosixDisk(tmp_path)
    check_journal(disk, 1000)
    for name in disk.names():
        if name.endswith(framing.SUFFIX):
            loaded = framing.load(name, disk.read(name, 0, disk.size(name)), 1_000_000)
            folded = PoolState()
            for record in (each.record for each in stored_records(disk)):
                if record.offset < loaded.offset:
                    folded.apply(record)
            assert loaded.facts() == folded.facts()
    disk.close()


class FailingJournal(MemoryJournal):
    """Memory that refuses appends while told to."""

    failing = False
    in_memory = False

    def append(self, payloads: Sequence[bytes], now_ms: int) -> None:
        if self.failing:
            raise OSError(28, "No space left on device")
        super().append(payloads, now_ms)


def test_what_cannot_be_written_is_neither_acknowledged_nor_published_and_is_caught_up() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        journal = FailingJournal()
        settings, tuning = tuned(append_retry_ms=20, lease_ms=60_000)
        service = ConsolidatorService(settings, CollectorRegistry(), SystemClock(), lambda: journal, tuning=tuning)
        assert service.loading() == [], "a router that restarts is asked before"
        await service.start()
        service.subscribe(reader := Reader())
        pusher = await pusher_at(context, service.ingest_endpoint)
        joined = reader.offset
        journal.failing = True
        random_work(pusher, random.Random(5), 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pusher.socket.recv_multipart(), 0.1)
        assert (service.stalled, service.ready) == (True, False)
        assert reader.offset == joined
        late = Reader()
        service.subscribe(late)  # a reader in this process may know what is on its way
        journal.failing = False
        await pusher.settle()

        assert reader.view == late.view == truth(pusher)
        assert service.ready
        assert len(journal.read(0, 1000, 1 << 30)) == service.offset
        await service.stop()

    run(scenario)


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_a_restarted_consolidator_goes_on_from_its_files(tmp_path: Path, fsync: str) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        changes: dict[str, Any] = {"data_dir": tmp_path, "fsync": fsync, "snapshot_every_records": 100}
        changes |= {"segment_bytes": 65536, "lease_ms": 60_000}
        service = await started(**changes)
        source = random.Random(9)
        pusher = await pusher_at(context, service.ingest_endpoint)

        def is_kept() -> bool:
            return any(tmp_path.glob("*.snapshot"))

        for _ in range(3):
            random_work(pusher, source, 120)
            await pusher.settle()
            while not is_kept():  # an end gives up one that is being made
                random_work(pusher, source, 10)
                await pusher.settle()
            offset = service.offset
            await service.stop()
            service = await started(**changes)
            assert service.offset == offset
            pusher.reconnect(service.ingest_endpoint)
            await pusher.join()
        reader = Reader()
        service.subscribe(reader)

        assert reader.view == truth(pusher)
        await service.stop()

    run(scenario)
    assert list(tmp_path.glob("*.snapshot"))


class HeardFeed:
    """A subscription to the feed: the offset and number of records of each message that has any."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.messages: list[tuple[int, int]] = []
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, FEED_TOPIC)
        self._socket.connect(endpoint)

    async def has(self, messages: int) -> None:
        while len(self.messages) < messages:
            frame = decode_feed(await self._socket.recv_multipart())
            if frame.payloads:
                self.messages.append((frame.offset, len(frame.payloads)))

    def close(self) -> None:
        self._socket.close(linger=0)


def test_records_that_come_within_an_interval_of_the_feed_are_published_in_one_message() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        service = await started(feed_interval_ms=300, feed_keep_alive_ms=60_000, lease_ms=60_000)
        feed = HeardFeed(context, service.feed_endpoint)
        await heard(service)
        pusher = await pusher_at(context, service.ingest_endpoint)
        await feed.has(1)
        random_work(pusher, random.Random(3), 20)
        await pusher.settle()
        await feed.has(2)
        assert feed.messages == [(0, 1), (1, service.offset - 1)]
        assert service.offset > 10
        await service.stop()

    run(scenario)


def test_what_nobody_subscribes_to_is_neither_published_nor_kept_and_who_comes_hears_what_follows() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        service = await started(feed_interval_ms=300, feed_keep_alive_ms=60_000, lease_ms=60_000)
        pusher = await pusher_at(context, service.ingest_endpoint)
        work = random.Random(5)

        async def somebody_listens(records: int) -> None:
            before = service.offset
            feed = HeardFeed(context, service.feed_endpoint)
            await heard(service)
            random_work(pusher, work, records)
            await pusher.settle()
            await feed.has(1)
            random_work(pusher, work, records)  # still to be published when the last one who listens goes
            await pusher.settle()
            feed.close()
            await heard(service, by_somebody=False)
            assert feed.messages[0][0] == before, "what was recorded before is in a snapshot, and not on the feed"

        for _ in range(2):
            random_work(pusher, work, 20)
            await pusher.settle()
            published = service._parts.counts["feed_records"]
            random_work(pusher, work, 20)
            await pusher.settle()
            assert service._parts.counts["feed_records"] == published
            assert not service._feed.unpublished
            await somebody_listens(3)
        await service.stop()

    run(scenario)


def test_a_feed_follower_equals_the_truth_after_losses_a_late_start_and_restarts(tmp_path: Path) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        changes: dict[str, Any] = {"data_dir": tmp_path, "feed_keep_alive_ms": 20, "lease_ms": 60_000}
        service = await started(**changes)
        ports: dict[str, Any] = {
            name: int(endpoint.rsplit(":", 1)[1])
            for name, endpoint in (
                ("ingest_port", service.ingest_endpoint),
                ("feed_port", service.feed_endpoint),
                ("query_port", service.query_endpoint),
            )
        }
        source = random.Random(11)
        pusher = await pusher_at(context, service.ingest_endpoint)
        random_work(pusher, source, 100)
        await pusher.settle()
        reader = Reader()
        follower = FeedFollower(
            service.feed_endpoint, service.query_endpoint, reader, SystemClock(), answer_timeout_ms=100
        )
        await follower.start()
        await follower.wait_synced()

        # Every third message with records gets lost between the consolidator and the router, the first of them too:
        # how many there are depends on how the records fell into messages.
        genuine = follower._reader.receive
        lost = itertools.cycle([True, False, False])

        def receive(frame: FeedFrame, now_ms: float) -> list[FeedEffect]:
            return [] if len(frame.payloads) > 0 and next(lost) else genuine(frame, now_ms)

        follower._reader.receive = receive  # type: ignore[method-assign]
        for _ in range(5):
            random_work(pusher, source, 40)
            await pusher.settle()
        await reader.until(lambda: reader.offset == service.offset)
        assert reader.view == truth(pusher)
        assert follower.holes > 0
        assert reader.snapshots == 1

        # The consolidator restarts where it was, and on an empty disk.
        await service.stop()
        service = await started(**changes, **ports)
        random_work(pusher, source, 40)
        await pusher.settle()
        await reader.until(lambda: reader.offset == service.offset and reader.snapshots == 2)
        assert reader.view == truth(pusher)
        await service.stop()
        service = await started(**{**changes, "data_dir": None}, **ports)
        pusher.heartbeat()
        random_work(pusher, source, 5)
        pusher.acknowledged = 0
        await pusher.settle()
        await reader.until(lambda: reader.offset == service.offset and reader.snapshots == 3)

        assert reader.view == truth(pusher)
        assert follower.state is FeedState.LIVE
        await follower.stop()
        await service.stop()

    run(scenario)


def test_a_follower_that_is_far_behind_a_short_journal_takes_another_snapshot() -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        settings, tuning = tuned(feed_keep_alive_ms=20, lease_ms=60_000)
        journal = MemoryJournal(bytes_max=500)
        service = ConsolidatorService(settings, CollectorRegistry(), SystemClock(), lambda: journal, tuning=tuning)
        await service.start()
        pusher = await pusher_at(context, service.ingest_endpoint)
        reader = Reader()
        follower = FeedFollower(service.feed_endpoint, service.query_endpoint, reader, SystemClock(), 100)
        await follower.start()
        await follower.wait_synced()
        subscription = follower._subscription
        assert isinstance(subscription, Subscription)
        subscription.inbox.pause()
        subscription.socket.setsockopt(zmq.UNSUBSCRIBE, b"poolgrid")
        random_work(pusher, random.Random(13), 200)
        await pusher.settle()
        subscription.socket.setsockopt(zmq.SUBSCRIBE, b"poolgrid")
        subscription.inbox.resume()
        await reader.until(lambda: reader.offset == service.offset)

        assert reader.view == truth(pusher)
        await follower.stop()
        await service.stop()

    run(scenario)


def sources_file(tmp_path: Path, engine: PubEngine, replay: bool = True) -> Path:
    limits = {"max_batch_size": 8, "max_num_tokens": 8192, "total_kv_blocks": 1000, "max_sequence_length": 4096}
    entry: dict[str, Any] = {
        "worker_id": "e",
        "endpoint": engine.endpoint,
        "replay_timeout_ms": 200,
        "card": {
            "model": "m",
            "role": 0,
            "block_size": BLOCK,
            "limits": limits,
            "request_endpoint": "tcp://127.0.0.1:1",
        },
    }
    if replay:
        entry["replay_endpoint"] = engine.replay_endpoint
    path = tmp_path / "sources.json"
    path.write_bytes(msgspec.json.encode([entry]))
    return path


def a_prompt(source: random.Random) -> list[int]:
    return [source.randrange(3)] * BLOCK + [source.randrange(1000) for _ in range(BLOCK * source.randrange(1, 6))]


def some_events(cache: Cache, source: random.Random) -> list[Any]:
    tier = source.choice(list(Tier))
    if source.random() < 0.3:
        return [cache.remove(source.randrange(4), tier)]
    return [cache.store(a_prompt(source), tier), cache.store(a_prompt(source), Tier.DEVICE)]


@pytest.mark.parametrize("dialect", ["vllm", "trtllm"])
def test_a_pub_engine_is_followed_through_losses_and_a_restart(tmp_path: Path, dialect: str) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        source = random.Random(17)
        engine, cache = PubEngine(context), Cache(dialect)
        for _ in range(10):
            await engine.publish(some_events(cache, source))  # before anybody listens
        replays = asyncio.create_task(engine.answer_replays(dialect))
        # On a busy machine seconds pass between the two lives; the lease is not what ends the first.
        service = await started(pub_sources=sources_file(tmp_path, engine), lease_ms=5000)
        reader = Reader()
        service.subscribe(reader)
        await engine.subscribed()
        for _ in range(5):
            for _ in range(30):
                await engine.publish(some_events(cache, source), lose=source.random() < 0.2)
            await engine.publish(some_events(cache, source))
            await reader.until(lambda: reader.view.get("e") == cache.held())
        (shell,) = service.sources()
        assert shell.counts["source_gaps"] > 3
        assert shell.counts["source_losses"] == 0
        assert not shell.degraded

        # The engine dies and another life answers at the same address, with an empty cache.
        endpoint, replay = engine.endpoint, engine.replay_endpoint
        replays.cancel()
        with suppress(asyncio.CancelledError):
            await replays
        engine.close()
        engine, cache = PubEngine(context, endpoint, replay=replay), Cache(dialect, salt=1)
        replays = asyncio.create_task(engine.answer_replays(dialect))
        await engine.subscribed()
        for _ in range(20):
            await engine.publish(some_events(cache, source))
        await reader.until(lambda: reader.view.get("e") == cache.held())

        assert shell.counts["source_restarts"] >= 1
        assert not shell.degraded
        replays.cancel()
        with suppress(asyncio.CancelledError):
            await replays
        engine.close()
        await reader.until(lambda: shell.degraded or "e" not in reader.view)
        await service.stop()

    run(scenario)


@pytest.mark.parametrize("silent", [True, False])
def test_a_pub_engine_that_cannot_replay_is_degraded_and_claims_nothing_false(tmp_path: Path, silent: bool) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        source = random.Random(19)
        engine, cache = PubEngine(context), Cache("vllm")
        service = await started(pub_sources=sources_file(tmp_path, engine, replay=silent))
        reader = Reader()
        service.subscribe(reader)
        (shell,) = service.sources()
        await engine.subscribed()
        for number in range(20):
            await engine.publish(some_events(cache, source), lose=number == 10)
        await reader.until(lambda: shell.counts["source_losses"] >= 1 and reader.view["e"] != {})
        last = cache.store([7, 7, 7, 7])
        await engine.publish([last])
        (new,) = (sequence_hash for sequence_hash in [list(cache.truth[Tier.DEVICE].values())[-1]])
        await reader.until(lambda: new in reader.view["e"][Tier.DEVICE])

        assert shell.degraded
        stream = service.core.pool.workers[shell.key].stream("worker")
        assert stream.state is StreamState.STALE
        assert "events were lost" in stream.reason
        for tier in Tier:
            assert reader.view["e"][tier] <= cache.held()[tier]
        await engine.publish([cache.clear(), cache.store([1, 2, 3, 4])])
        await reader.until(lambda: reader.view["e"] == cache.held())
        assert not shell.degraded
        assert service.core.pool.workers[shell.key].stream("worker").state is StreamState.LIVE
        engine.close()
        await service.stop()

    run(scenario)


def source_text(request_endpoint: str = "tcp://w:1", **changes: object) -> str:
    """Return a sources file of one engine."""
    limits = {"max_batch_size": 8, "max_num_tokens": 8192, "total_kv_blocks": 100, "max_sequence_length": 4096}
    made = {"model": "m", "role": 0, "block_size": 16, "limits": limits, "request_endpoint": request_endpoint}
    return json.dumps([{"worker_id": "e", "endpoint": "tcp://127.0.0.1:1", "card": made, **changes}])


def test_an_engine_that_cannot_be_followed_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        engine, cache = PubEngine(context), Cache("vllm")
        (good,) = load_sources(sources_file(tmp_path, engine))
        bad = msgspec.structs.replace(good, worker_id="bad", endpoint="tcp://nowhere")  # as no file's check lets in
        monkeypatch.setattr("poolgrid.server.consolidator.service.load_sources", lambda *_: [bad, good])
        replays = asyncio.create_task(engine.answer_replays("vllm"))
        service = await started()
        reader = Reader()
        service.subscribe(reader)
        await engine.subscribed()
        await engine.publish([cache.store([1] * BLOCK, Tier.DEVICE)])
        await reader.until(lambda: reader.view.get("e") == cache.held())
        unfollowed, followed = service.sources()
        assert unfollowed.degraded
        assert "connecting to its endpoint 'tcp://nowhere' failed" in (unfollowed.refused or "")
        assert not followed.degraded
        replays.cancel()
        engine.close()
        await service.stop()

    run(scenario)


def test_a_sources_file_that_is_wrong_says_where(tmp_path: Path) -> None:
    path = tmp_path / "sources.json"
    for content, reason in (
        ("[{}]", "entry 0"),
        ("nonsense", "JSON"),
        ('[{"worker_id": "e", "endpoint": "x", "card": {"modell": "m"}}]', "modell"),
        (source_text(endpoint="tcp://engine"), "entry 0: endpoint is 'tcp://engine', which names no port"),
        (source_text(replay_endpoint="tcp://*:5"), r"entry 0: replay_endpoint is 'tcp://\*:5'"),
        (source_text(worker_id=""), "entry 0: worker_id is empty"),
        (source_text(dp_rank=1), "entry 0: dp_rank is 1, the card's dp_size 1 allows 0 to 0"),
        (source_text(replay_timeout_ms=0), "entry 0: replay_timeout_ms is 0, allowed are 1 to 3600000"),
        (source_text(request_endpoint="tcp://w:0"), "entry 0: the card's request_endpoint is 'tcp://w:0'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=reason):
            asyncio.run(started(pub_sources=path))


PROCESS = """
import asyncio, sys
from poolgrid.server.consolidator.bootstrap import serve
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.consolidator.settings import Tuning
from poolgrid.server.process import lifecycle

settings = ConsolidatorProcessSettings.model_validate_json(sys.argv[1])
tuning = Tuning(segment_bytes=65536, snapshot_every_records=200, feed_keep_alive_ms=50)
lifecycle.run(lambda stop: serve(settings, stop, lambda at: print(*at, flush=True), tuning))
"""


class Process:
    """A consolidator in a process of its own."""

    def __init__(self, data_dir: Path, **ports: int) -> None:
        settings = {
            "data_dir": str(data_dir),
            "lease_ms": 600_000,  # longer than any machine takes to start it again
            **ports,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, msgspec.json.encode(settings).decode()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        if len(line) != 4:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1])
        self.ingest, self.feed, self.query, self.http = line

    def ports(self) -> dict[str, int]:
        names = ("ingest_port", "feed_port", "query_port", "http_port")
        return {
            name: int(at.rsplit(":", 1)[1])
            for name, at in zip(names, (self.ingest, self.feed, self.query, self.http), strict=True)
        }

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        body: bytes = answer.read()
        return body


@pytest.mark.e2e
def test_a_killed_consolidator_loses_nothing_and_its_offsets_have_no_holes(tmp_path: Path) -> None:
    async def scenario(context: zmq.asyncio.Context) -> None:
        source = random.Random(23)
        process = Process(tmp_path)
        try:
            pushers = [Pusher(context, process.ingest, name) for name in ("a", "b")]
            for pusher in pushers:
                await pusher.join()
            reader = Reader()
            follower = FeedFollower(process.feed, process.query, reader, SystemClock(), answer_timeout_ms=200)
            await follower.start()
            await follower.wait_synced()
            for _ in range(3):
                for pusher in pushers:
                    random_work(pusher, source, 150)
                process.end(signal.SIGKILL)  # in the middle of it
                for pusher in pushers:
                    random_work(pusher, source, 20)
                process = Process(tmp_path, **process.ports())
                for pusher in pushers:
                    await pusher.settle()
            await reader.until(lambda: reader.view == truth(*pushers))
            assert msgspec.json.decode(await asyncio.to_thread(fetch, process.http + "/ready"))["workers"] == 2
            assert b"poolgrid_consolidator_offset" in await asyncio.to_thread(fetch, process.http + "/metrics")
            await follower.stop()
            assert process.end(signal.SIGTERM) == 0
            disk = PosixDisk(tmp_path)
            offsets = [each.record.offset for each in stored_records(disk)]
            disk.close()
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
        finally:
            if process.process.poll() is None:
                process.end(signal.SIGKILL)

    run(scenario)
