"""A worker that pushes and publishers about the same worker, on real sockets and with a real second process."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry, generate_latest

from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.sources_file import load_sources
from tests.consolidator.pub_engine import BLOCK, Cache, PubEngine
from tests.consolidator.publisher_process import Publisher
from tests.consolidator.pusher import Pusher, pusher_at
from tests.consolidator.test_service import Reader, source_text, started
from tests.router.fleet_builder import make_card, stored

W = WorkerKey(WorkerId("w"))
Both = dict[Tier, set[int]]


def entry(engine: PubEngine | Publisher, source: str = "kvbm", **changes: object) -> dict[str, Any]:
    return {
        "worker_id": "w",
        "source": source,
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "replay_timeout_ms": 200,
        **changes,
    }


def sources_file(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    path = tmp_path / "sources.json"
    path.write_bytes(msgspec.json.encode(entries))
    return path


def names(tokens: list[int]) -> list[int]:
    return list(sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK)))


def both(pusher: Pusher, *caches: Cache) -> Both:
    return {tier: set(pusher.truth[tier]).union(*(cache.held()[tier] for cache in caches)) for tier in Tier}


def prompt(number: int, blocks: int = 3) -> list[int]:
    return [number * 1000 + position for position in range(BLOCK * blocks)]


def state(service: ConsolidatorService, source: str = "kvbm") -> StreamState:
    return service.core.pool.workers[W].stream(source).state


async def joined(context: zmq.asyncio.Context, service: ConsolidatorService, epoch: int = 1) -> Pusher:
    return await pusher_at(context, service.ingest_endpoint, epoch=epoch, worker_card=make_card(block_size=BLOCK))


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_worker_and_two_publishers_about_it_are_one_holder_of_blocks(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    engines = [PubEngine(context), PubEngine(context)]
    caches = [Cache("vllm"), Cache("trtllm", salt=1)]
    replays = [
        asyncio.create_task(engine.answer_replays(cache.dialect)) for engine, cache in zip(engines, caches, strict=True)
    ]
    await engines[0].publish([caches[0].store(prompt(1), Tier.HOST)])  # before anybody listens
    registry = CollectorRegistry()
    listed = sources_file(tmp_path, entry(engines[0]), entry(engines[1], "engine"))
    service = await started(registry, pub_sources=listed, lease_ms=60_000)
    reader = Reader()
    service.subscribe(reader)
    told: list[BlocksStored] = []
    listen = reader.on_records

    def on_records(records: Any) -> None:
        told.extend(one for record in records for one in record.events if isinstance(one, BlocksStored))
        listen(records)

    reader.on_records = on_records  # type: ignore[method-assign]
    exposition = await asyncio.to_thread(generate_latest, registry)
    assert b'source_state{source="w:kvbm",state="waiting"} 1.0' in exposition
    assert [source.degraded for source in service.sources()] == [False, False], "nothing is amiss while nobody joined"
    pusher = await joined(context, service)
    for engine in engines:
        await engine.subscribed()
    await reader.until(lambda: reader.view.get("w") == both(pusher, *caches))

    # All three say the same, on two tiers, frames are lost on the way, and each says something of its own.
    pusher.push([stored(names(prompt(2))), stored(names(prompt(1)), None, Tier.HOST)])
    for engine, cache in zip(engines, caches, strict=True):
        await engine.publish([cache.store(prompt(2))], lose=True)
        await engine.publish([cache.store(prompt(2), Tier.HOST), cache.store(prompt(3 + cache.salt), Tier.HOST)])
    await reader.until(lambda: reader.view["w"] == both(pusher, *caches))
    await pusher.settle()
    blocks = [(one.tier, block) for one in told for block in unpack_hashes(one.sequence_hashes)]
    assert len(blocks) == len(set(blocks)), "no block is told of twice"

    # It restates its cache, empty now: what the others said stays.
    for held in pusher.truth.values():
        held.clear()
    pusher.restate()
    await pusher.settle()
    await reader.until(lambda: reader.view["w"] == both(pusher, *caches))
    assert reader.view["w"][Tier.DEVICE] == set(names(prompt(2)))

    await engines[1].publish([caches[1].clear()])
    await reader.until(lambda: reader.view["w"] == both(pusher, *caches))
    assert [state(service, name) for name in ("worker", "kvbm", "engine")] == [StreamState.LIVE] * 3
    exposition = await asyncio.to_thread(generate_latest, registry)
    assert b'source_state{source="w:kvbm",state="live"} 1.0' in exposition
    assert b'source_blocks{source="w:kvbm"} 12.0' in exposition
    assert b'source_blocks{source="w:engine"} 0.0' in exposition
    pusher.goodbye()
    await reader.until(lambda: "w" not in reader.view)
    assert {source.shown_state for source in service.sources()} == {"waiting"}
    for task in replays:
        await ended(task)
    for engine in engines:
        engine.close()
    pusher.close()
    await service.stop()


@pytest.mark.parametrize("how", ["killed", "stands still"])
async def test_a_publisher_that_is_lost_takes_what_only_it_said_and_brings_it_back(
    tmp_path: Path, how: str, context: zmq.asyncio.Context
) -> None:
    with Publisher() as publisher:
        service = await started(pub_sources=sources_file(tmp_path, entry(publisher)), lease_ms=500)
        reader = Reader()
        service.subscribe(reader)
        pusher = await joined(context, service)

        async def live() -> None:
            while True:
                await asyncio.sleep(0.1)  # between two signs of life
                pusher.heartbeat()

        living = asyncio.create_task(live())
        pusher.push([stored(names(prompt(1)), None, Tier.HOST)])
        await asyncio.to_thread(publisher.store, prompt(1))
        await asyncio.to_thread(publisher.store, prompt(2))
        own, together = set(names(prompt(1))), {*names(prompt(1)), *names(prompt(2))}
        await reader.until(lambda: reader.view.get("w", {}).get(Tier.HOST) == together)

        if how == "killed":
            publisher.kill()
        else:
            publisher.signal(signal.SIGSTOP)
        await reader.until(lambda: reader.view["w"][Tier.HOST] == own)
        assert state(service) is StreamState.ABSENT
        assert state(service, "worker") is StreamState.LIVE
        (shell,) = service.sources()
        assert shell.degraded
        assert "not connected for 500 ms" in str(shell.row()["reason"])

        if how == "killed":
            with Publisher(publisher.endpoint, publisher.replay_endpoint) as again:
                await asyncio.to_thread(again.store, prompt(3))
                together = {*own, *names(prompt(3))}
                await reader.until(lambda: reader.view["w"][Tier.HOST] == together)
                await reader.until(lambda: state(service) is StreamState.LIVE)
        else:
            publisher.signal(signal.SIGCONT)
            await reader.until(lambda: reader.view["w"][Tier.HOST] == together)
            await reader.until(lambda: state(service) is StreamState.LIVE)
        await ended(living)
        pusher.close()
        await service.stop()


async def test_a_restarted_consolidator_merges_as_before_and_forgets_what_is_not_listed_any_more(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    engine, cache = PubEngine(context), Cache("vllm")
    replays = asyncio.create_task(engine.answer_replays("vllm"))
    listed = sources_file(tmp_path, entry(engine))
    settings: dict[str, Any] = {"data_dir": tmp_path / "journal", "lease_ms": 60_000}
    service = await started(pub_sources=listed, **settings)
    reader = Reader()
    service.subscribe(reader)
    pusher = await joined(context, service)
    pusher.push([stored(names(prompt(1)), None, Tier.HOST)])
    await engine.publish([cache.store(prompt(1), Tier.HOST), cache.store(prompt(2), Tier.HOST)])
    await reader.until(lambda: reader.view.get("w") == both(pusher, cache))
    await service.stop()

    await engine.publish([cache.remove(1, Tier.HOST), cache.store(prompt(3), Tier.HOST)])
    service = await started(pub_sources=listed, **settings)
    reader = Reader()
    service.subscribe(reader)
    await reader.until(lambda: reader.view.get("w") == both(pusher, cache))
    await service.stop()

    service = await started(**settings)
    reader = Reader()
    service.subscribe(reader)
    await reader.until(lambda: reader.view.get("w") == both(pusher))
    assert state(service) is StreamState.ABSENT
    await ended(replays)
    engine.close()
    pusher.close()
    await service.stop()


FURTHER = {"worker_id": "w", "source": "kvbm", "endpoint": "tcp://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": ""}, "entry 0: source is empty, allowed are 1 to 256 characters"),
        ({"source": "worker"}, "entry 0: source is 'worker', the name of the worker's own stream"),
        ({"source": "consolidator"}, "entry 0: source is 'consolidator'"),
        ({"source": "a\nb"}, "entry 0: source is 'a\\\\nb', allowed are printable characters"),
        ({"source": "x" * 257}, "entry 0: source has 257 bytes, allowed are 1 to 256"),
        ({"source": 7}, "entry 0: source is 7, allowed is a string"),
        ({"outlives_worker": 1}, "entry 0: outlives_worker is 1, allowed is true or false"),
        ({"dp_rank": -1}, "entry 0: dp_rank is -1, allowed are 0 to 4294967295"),
        ({"dp_rank": True}, "entry 0: dp_rank is True, allowed is an integer"),
        ({"endpoint": "tcp://w"}, "entry 0: endpoint is 'tcp://w', which names no port"),
        ({"card": {}}, "entry 0: has card and source 'kvbm'"),
        ({"epoch": 3}, "entry 0: has the unknown field 'epoch'; allowed are worker_id, endpoint"),
    ],
)
def test_an_entry_that_is_wrong_says_file_entry_field_value_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = sources_file(tmp_path, {**FURTHER, **changes})
    with pytest.raises(ValueError, match=reason) as caught:
        load_sources(path)
    assert f"reading the PUB sources {path}: " in str(caught.value)


def test_entries_that_are_wrong_beside_each_other_name_both(tmp_path: Path) -> None:
    (engine,) = msgspec.json.decode(source_text(worker_id="w"))
    plain = {"worker_id": "w", "endpoint": "tcp://127.0.0.1:1"}
    for entries, reason in (
        ([FURTHER, FURTHER], "entry 1: source 'kvbm' of worker w is listed twice, entry 0 lists it already"),
        ([FURTHER, engine], "entry 0: source 'kvbm' reports on worker w, which entry 1 lists with a card"),
        ([engine, engine], "entry 1: worker w is listed twice, entry 0 lists it already"),
        (
            [{**FURTHER, "source": name} for name in "abcdefgh"],
            "entry 7: source 'h' is number 8 of worker w, allowed are at",
        ),
        ([plain], "entry 0: has neither card .* nor source"),
        ([{**engine, "outlives_worker": True}], "entry 0: has outlives_worker True and card"),
        ([7], "entry 0: is 7, allowed is an object"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_sources(sources_file(tmp_path, *entries))
    two_ranks = sources_file(tmp_path, FURTHER, {**FURTHER, "dp_rank": 1})
    assert [source.key for source in load_sources(two_ranks)] == [W, WorkerKey(WorkerId("w"), 1)]


async def test_a_worker_that_comes_and_goes_while_its_publisher_connects_holds_nobody_up(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    """ZMQ's thread tells of connections in the moment in which the subscription is closed."""

    engines = [PubEngine(context) for _ in range(4)]
    entries = [entry(engine, f"source{number}") for number, engine in enumerate(engines)]
    service = await started(pub_sources=sources_file(tmp_path, *entries), lease_ms=60_000)
    reader = Reader()
    service.subscribe(reader)
    for epoch in range(1, 200):
        pusher = await joined(context, service, epoch)
        assert "w" in reader.view
        pusher.goodbye()
        await reader.until(lambda: "w" not in reader.view)
        pusher.close()
    pusher = await joined(context, service, 200)
    cache = Cache("vllm")
    replays = asyncio.create_task(engines[0].answer_replays("vllm"))
    await engines[0].publish([cache.store(prompt(1))])
    await reader.until(lambda: reader.view.get("w") == both(pusher, cache))
    await ended(replays)
    for engine in engines:
        engine.close()
    pusher.close()
    await service.stop()


async def test_a_publisher_that_cannot_be_subscribed_to_costs_its_worker_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: zmq.asyncio.Context,
) -> None:
    engine, cache = PubEngine(context), Cache("vllm")
    (good,) = load_sources(sources_file(tmp_path, entry(engine)))
    bad = msgspec.structs.replace(good, source="bad", endpoint="tcp://nowhere")  # as no file's check lets in
    monkeypatch.setattr("poolgrid.server.consolidator.service.load_sources", lambda *_: [bad, good])
    replays = asyncio.create_task(engine.answer_replays("vllm"))
    service = await started(lease_ms=60_000)
    reader = Reader()
    service.subscribe(reader)
    pusher = await joined(context, service)
    pusher.push([stored(names(prompt(1)))])
    await engine.publish([cache.store(prompt(2), Tier.HOST)])
    await reader.until(lambda: reader.view.get("w") == both(pusher, cache))
    unfollowed, followed = service.sources()
    assert (unfollowed.degraded, followed.degraded) == (True, False)
    assert "connecting to its endpoint 'tcp://nowhere' failed" in str(unfollowed.row()["reason"])
    await ended(replays)
    engine.close()
    pusher.close()
    await service.stop()
