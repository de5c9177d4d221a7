"""Upstream's own ``ZmqEventPublisher`` followed by a worker's follower, through gaps, replays and restarts.

Frames come over a relay that drops some, so that they are missing from the subscription and not from the publisher's
replay; a number that the publisher gave to a batch it then dropped is missing from both.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.asyncio

from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.engines.server.cache_events import FollowedEvents
from poolgrid.server.workers.engines.server.core.server_facts import EventSource
from tests.trtllm_upstream.files import PUBLISHER, RemovedInStream, StoredInStream, UpstreamFiles

BLOCK = 4
PATIENCE_S = 20.0
LOST, GAP, RESTART, QUIET = "unrecoverable loss", "gap and replay", "restart", "no fault"


class StreamingEngine:
    """A modelled cache whose events go out by upstream's publisher."""

    def __init__(self, module: Any, directory: Path, randomness: random.Random) -> None:
        self._module = module
        self._randomness = randomness
        self._config = SimpleNamespace(
            publisher="zmq",
            endpoint=f"ipc://{directory}/events",
            replay_endpoint=f"ipc://{directory}/replay",
            buffer_steps=10_000,
            hwm=100_000,
            max_queue_size=100_000,
            topic="",
        )
        self._source = module._StreamingEventSource(block_size=BLOCK, max_entries=50_000, mm_token_id_offset=32_000)
        self.start()

    def start(self) -> None:
        self.publisher = self._module.create_event_publisher(self._config, 0)
        self.publisher.start()
        self.blocks: dict[int, tuple[int | None, int | None]] = {}
        """Parent and sequence hash of each resident block (``None`` = an image touches it), by engine hash."""

    def restart(self) -> None:
        self.publisher.shutdown()
        self.start()

    def work(self) -> None:
        """Store a chain, some with an image in it, and now and then remove leaves."""
        parent = self._randomness.choice([None, *self.blocks])
        above = self.blocks[parent][1] if parent is not None else None
        is_text = parent is None or above is not None
        event = StoredInStream([], parent, [])
        for _ in range(self._randomness.randint(1, 3)):
            tokens = [self._randomness.randrange(32_000) for _ in range(BLOCK)]
            keys: list[tuple[Any, ...]] = []
            if self._randomness.random() < 0.1:
                keys, is_text = [(self._randomness.randbytes(32), 0, None)], False
            above = sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK), above)[0] if is_text else None
            made = self._randomness.getrandbits(64)
            self.blocks[made] = (event.block_hashes[-1] if event.block_hashes else parent, above)
            event.block_hashes.append(made)
            event.token_ids += [f"{7:064x}" if keys and not at else token for at, token in enumerate(tokens)]
            event.mm_keys.append(keys)
        self._source.event_sink.events.append(event)
        if len(self.blocks) > 60:
            self.remove(20)

    def remove(self, count: int) -> None:
        for _ in range(min(count, len(self.blocks))):
            parents = {parent for parent, _ in self.blocks.values()}
            leaf = self._randomness.choice([each for each in self.blocks if each not in parents])
            del self.blocks[leaf]
            self._source.event_sink.events.append(RemovedInStream([leaf]))

    def publish(self) -> None:
        """Send what happened, as ``StreamingKVCacheEventManager.flush_iteration_events`` does."""
        events = self._source.drain_events()
        if events:
            self.publisher.publish(self._module.KVEventBatch(ts=1.0, events=events, data_parallel_rank=0))

    def lose(self) -> None:
        """Give a batch its number and drop it, as a full queue does."""
        self._source.drain_events()
        next(self.publisher._seq_gen)

    @property
    def names(self) -> set[int]:
        return {name for _, name in self.blocks.values() if name is not None}


async def follow(files: UpstreamFiles, rounds: int, directory: Path, seed: int = 0) -> Counter[str] | None:
    """Return how many faults of each kind were survived; ``None`` where the publisher's file is absent.

    Raises ``AssertionError`` where the index is another than the engine's blocks ``PATIENCE_S`` after a fault.
    """
    module = files.load(PUBLISHER)
    if module is None:
        return None
    randomness = random.Random(seed)
    engine = StreamingEngine(module, directory, randomness)
    context: zmq.Context[Any] = zmq.Context()
    relay = _Relay(directory)
    source = EventSource(0, f"ipc://{directory}/relay", f"ipc://{directory}/replay")
    followed = FollowedEvents([source], BLOCK, context, SystemClock())
    followed.open(lambda rank, events: None)
    survived: Counter[str] = Counter()
    try:
        for number in range(rounds):
            fault = randomness.choices((GAP, RESTART, LOST, QUIET), (6, 1, 1, 1))[0] if number else QUIET
            if fault == RESTART:
                engine.restart()
                passed = relay.passed
                while relay.passed == passed:  # what is sent until the relay has found the new publisher is a gap too
                    engine.work()
                    engine.publish()
                    await asyncio.sleep(0.05)
            elif fault == LOST:
                engine.work()
                engine.lose()
                # What was stored before is not known any more: the cache turns over.
                engine.remove(len(engine.blocks))
                engine.publish()
            elif fault == GAP:
                relay.drops = randomness.randint(1, 5)
                for _ in range(relay.drops):
                    engine.work()
                    engine.publish()
                await _until(lambda: relay.drops == 0, f"round {number}: the relay saw its frames")
            for _ in range(randomness.randint(1, 3)):
                engine.work()
                engine.publish()
            await _until(
                lambda: (
                    {
                        each
                        for event in followed.restate(0)
                        if isinstance(event, BlocksStored)
                        for each in unpack_hashes(event.sequence_hashes)
                    }
                    == engine.names
                ),
                f"round {number} ({fault}): the index is the engine's blocks",
            )
            survived[fault] += 1
    finally:
        followed.close()
        await relay.close()
        engine.publisher.shutdown()
        context.term()
    return survived


async def _until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(int(PATIENCE_S / 0.005)):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{what}: not after {PATIENCE_S} s")


class _Relay:
    """Passes frames on, but for some."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.subscribe(b"")
        self._from.setsockopt(zmq.RECONNECT_IVL, 5)
        self._from.connect(f"ipc://{directory}/events")
        self._to = self._context.socket(zmq.PUB)
        self._to.bind(f"ipc://{directory}/relay")
        self.drops = self.passed = 0
        self._passing = asyncio.create_task(self._pass())

    async def _pass(self) -> None:
        while True:
            frames = await self._from.recv_multipart()
            if self.drops:
                self.drops -= 1
            else:
                await self._to.send_multipart(frames)
                self.passed += 1

    async def close(self) -> None:
        self._passing.cancel()
        await asyncio.gather(self._passing, return_exceptions=True)
        self._from.close(0)
        self._to.close(0)
        self._context.term()
