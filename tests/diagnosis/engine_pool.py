"""A router before engine servers as real ones behave, in one process and on a simulated clock.

Engines have paged caches and publish vLLM's own events in numbered frames; what reads them is the code that a worker
runs, with replays. The router is its own selector, projection and examiner; requests are reported as those that a
router forwards, with what the engine's usage says at the end. What is between them can be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.kv_events.follower import (
    END_OF_REPLAY,
    AskReplay,
    Leave,
    NewLife,
    PubEffect,
    PubFollower,
    SourceState,
)
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import (
    AnyEvent,
    CacheCleared,
    EventBatch,
    JournalRecord,
    LoadReported,
    RequestFinished,
    RequestStarted,
    WorkerJoined,
)
from poolgrid.kernel.wire.hashing import hash_seed, pack_tokens, path_of
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.diagnosis.rules import ReuseVerdict
from poolgrid.server.router.examiner import Examiner
from poolgrid.server.serving.prompt_paths import ReuseSketch
from tests.fakes.engine_server.cache import PagedCache, Running
from tests.router.fleet_builder import make_card

BLOCK = 16
ANSWER = 24
"""Tokens of an answer."""

Event = dict[str, Any]
Edit = Callable[[Event, int], list[Event]]
"""What comes of an event on the way, given how many requests were sent."""


class Publisher:
    """Numbered frames of one rank, and the buffer that replays them."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.frames: list[bytes] = []
        self.readers: list[Reader] = []
        self.is_on = True

    def publish(self, events: Sequence[Event]) -> None:
        if not self.is_on or not events:
            return
        said = [{name: value for name, value in each.items() if name != "cache_salt"} for each in events]
        self.frames.append(msgspec.msgpack.encode([1.5, said, self.rank]))
        for reader in self.readers:
            reader.hear(len(self.frames) - 1, self.frames[-1])


@dataclass
class Prompt:
    """A request on its way."""

    number: int
    tokens: list[int]
    salt: str = ""
    lora: str = ""


class Engine:
    """One engine server with its ranks; what it does wrong is replaced."""

    def __init__(self, ranks: int = 1, blocks: int = 4096, block_size: int = BLOCK, **options: Any) -> None:
        self.block_size = block_size
        self.publishers = [Publisher(rank) for rank in range(ranks)]
        self.outbox: list[list[Event]] = [[] for _ in range(ranks)]
        cache = options.pop("cache", PagedCache)
        self.caches = [
            cache(block_size, blocks, self.outbox[rank].append, id(self) % 9973 + rank, **options)
            for rank in range(ranks)
        ]
        self.tokens_of: Callable[[Prompt], list[int]] = lambda prompt: prompt.tokens
        """What it computes of a prompt."""
        self.salt_of: Callable[[Prompt], str] = lambda prompt: prompt.salt
        self.reports: Callable[[int], int | None] = lambda cached: cached
        self.strangers = 0
        """Requests of others that it has."""

    def begin(self, prompt: Prompt, rank: int) -> tuple[Running, int, int]:
        tokens = self.tokens_of(prompt)
        running, cached = self.caches[rank].begin(tokens, prompt.lora, self.salt_of(prompt))
        self.caches[rank].fill(running, len(tokens))
        return running, len(tokens), cached

    def end(self, running: Running, rank: int) -> list[int]:
        """Generate an answer; return it. The last token has no KV."""
        seed = sum(running.tokens) * 31 + len(running.tokens)
        answer = [3 + (seed + at * 7919) % 4000 for at in range(ANSWER)]
        running.tokens += answer
        self.caches[rank].fill(running, len(running.tokens) - 1)
        self.caches[rank].end(running)
        return answer

    def publish(self) -> None:
        for publisher, events in zip(self.publishers, self.outbox, strict=True):
            publisher.publish(events)
            events.clear()


class Reader:
    """What follows a publisher for a worker, as the worker does."""

    def __init__(self, pool: EnginePool, key: WorkerKey, publisher: Publisher, block_size: int) -> None:
        self.pool, self.key = pool, key
        self.is_replayed = True
        """Whether the replay socket answers."""
        self.is_lost: Callable[[int], bool] = lambda seq: False
        self.edit: Edit | None = None
        self.late_ms = 0.0
        self.follower = PubFollower(key, block_size, 1 << 20, True, 5_000, 30_000)
        self._late: list[tuple[float, int, bytes]] = []
        self.read(publisher)

    def read(self, publisher: Publisher) -> None:
        self.publisher = publisher
        publisher.readers.append(self)

    def without_replay(self) -> None:
        self.follower = PubFollower(self.key, self.follower._translator.block_size, 1 << 20, False, 5_000, 30_000)

    def connect(self) -> None:
        self._carry_out(self.follower.connected(self.pool.now_ms, int(self.pool.now_ms)))

    def hear(self, seq: int, frame: bytes) -> None:
        if self.is_lost(seq):
            return
        if self.late_ms:
            self._late.append((self.pool.now_ms + self.late_ms, seq, frame))
        else:
            self._live(seq, frame)

    def tick(self) -> None:
        now_ms = self.pool.now_ms
        while self._late and self._late[0][0] <= now_ms:
            _, seq, frame = self._late.pop(0)
            self._live(seq, frame)
        due_ms = self.follower.due_ms()
        while due_ms is not None and due_ms <= now_ms:
            self._carry_out(self.follower.tick(now_ms, int(now_ms)))
            due_ms = self.follower.due_ms()

    def _live(self, seq: int, frame: bytes) -> None:
        self._carry_out(self.follower.live(seq, self._edited(frame), self.pool.now_ms, int(self.pool.now_ms)))

    def _edited(self, frame: bytes) -> bytes:
        if self.edit is None:
            return frame
        time_s, events, rank = msgspec.msgpack.decode(frame)
        events = [made for each in events for made in self.edit(each, self.pool.sent)]
        return msgspec.msgpack.encode([time_s, events, rank])

    def _carry_out(self, effects: Sequence[PubEffect]) -> None:
        now_ms, wall_ms = self.pool.now_ms, int(self.pool.now_ms)
        for effect in effects:
            if isinstance(effect, EventBatch):
                self.pool.say(self.key, *effect.events)
            elif isinstance(effect, NewLife | Leave):
                self.pool.say(self.key, CacheCleared())
            elif isinstance(effect, AskReplay) and self.is_replayed:
                for seq in range(effect.from_seq, len(self.publisher.frames)):
                    frame = self._edited(self.publisher.frames[seq])
                    self._carry_out(self.follower.replayed(seq, frame, now_ms, wall_ms))
                self._carry_out(self.follower.replayed(END_OF_REPLAY, b"", now_ms, wall_ms))
        self.pool.note_fault(self.key, self.follower.fault)


@dataclass
class Talk:
    """A conversation: what its next prompt begins with."""

    history: list[int]
    turns: int = 0


@dataclass
class Traffic:
    """Conversations that grow, fork and end; a few at a time."""

    seed: int = 1
    requests: int = 140
    clients: int = 4
    gap_ms: float = 250.0
    """Between two requests."""
    talks: int = 8
    system: int = 70
    """Tokens of the beginning that all share."""
    salts: Callable[[int], str] = lambda number: ""
    """By the number of a request's talk."""
    loras: Callable[[int], str] = lambda number: ""


class EnginePool:
    """The router, its workers, and the engines behind them."""

    def __init__(self, workers: Sequence[WorkerKey | str] = ("a", "b"), block_size: int = BLOCK) -> None:
        self.projection = Projection(PrefixIndex(), LoadLedger())
        self.log = DecisionLog(10_000)
        self.examiner = Examiner(self.projection, self.log.of_dispatch)
        self.sketch = ReuseSketch()
        self.selector = Selector(self.projection, KvAware())
        self.now_ms = 1_000_000.0
        self.sent = 0
        self.block_size = block_size
        self.card: WorkerCard = make_card(block_size=block_size, total_kv_blocks=4096)
        self._offset = 0
        self.keys = [key if isinstance(key, WorkerKey) else WorkerKey(WorkerId(key)) for key in workers]
        self.engines: dict[str, Engine] = {}
        self.places: dict[WorkerKey, Callable[[Prompt], tuple[Engine, int]]] = {}
        """Which engine and rank a request to a worker reaches."""
        self.readers: dict[WorkerKey, Reader] = {}
        self.before: Callable[[EnginePool], None] = lambda pool: None
        """What happens before each request."""
        self.alarms: set[tuple[str, Cause]] = set()
        """Faults that a verdict named at any look, and of whom."""

    def put(self, name: str, engine: Engine) -> Engine:
        """Put an engine behind the workers of a name, and follow its publishers."""
        self.engines[name] = engine
        for key in self.keys:
            if key.worker_id == name:
                self.places[key] = lambda prompt, rank=key.dp_rank: (engine, rank)  # type: ignore[misc]
                self.readers[key] = Reader(self, key, engine.publishers[key.dp_rank], self.block_size)
        return engine

    def say(self, key: WorkerKey, *events: AnyEvent) -> None:
        if not events:
            return
        now = int(self.now_ms)
        record = JournalRecord(self._offset, key.worker_id, key.dp_rank, 1, self._offset, now, now, list(events))
        self._offset += 1
        self.projection.apply(record, self.now_ms)

    def note_fault(self, key: WorkerKey, fault: str) -> None:
        worker = self.projection.fleet.workers.get(key)
        if worker is not None and worker.card.cache_events_fault != fault:
            worker.card = msgspec.structs.replace(worker.card, cache_events_fault=fault)

    def start(self) -> None:
        for key in self.keys:
            self.say(key, WorkerJoined(self.card))
        for reader in self.readers.values():
            reader.connect()
        # A worker joins with what its publisher replays, or when it has asked for that in vain.
        joined_ms = self.now_ms + 60_000.0
        while any(each.follower.state is SourceState.REPLAYING for each in self.readers.values()):
            assert self.now_ms < joined_ms, "a replay is awaited without end"
            self.pass_time(self.now_ms + 1000.0)

    def pass_time(self, until_ms: float) -> None:
        """Let time pass; what is due happens then."""
        while self.now_ms < until_ms:
            self.now_ms = min(until_ms, self.now_ms + 1000.0)
            for reader in self.readers.values():
                reader.tick()

    def play(self, traffic: Traffic, looks_every: int = 0) -> dict[str, ReuseVerdict]:
        """Send requests in waves of as many as there are clients; return the verdict on each worker.

        ``looks_every`` so many waves the verdicts at the time are kept.
        """
        self.start()
        randomness = random.Random(traffic.seed)
        system = [5 + at % 61 for at in range(traffic.system)]
        number = waves = 0
        talks = {slot: Talk(list(system)) for slot in range(traffic.talks)}
        while number < traffic.requests:
            wave = []
            for slot in randomness.sample(sorted(talks), min(traffic.clients, traffic.talks)):
                talk = talks[slot]
                if talk.turns >= 6:
                    other = talks[randomness.choice(sorted(talks))]
                    is_fork = randomness.random() < 0.3 and slot % 8 == 0
                    talk = talks[slot] = Talk(list(other.history if is_fork else system))
                talk.history += [randomness.randrange(3, 4000) for _ in range(randomness.randint(18, 70))]
                talk.turns += 1
                wave.append((talk, Prompt(number, list(talk.history), traffic.salts(slot), traffic.loras(slot))))
                number += 1
            self._serve(wave)
            self.pass_time(self.now_ms + traffic.gap_ms * len(wave))
            waves += 1
            if looks_every and not waves % looks_every:
                self.look()
        return {each.worker: each for each in self.examiner.verdicts()}

    def look(self) -> None:
        self.alarms |= {(each.worker, each.cause) for each in self.examiner.verdicts() if each.cause.is_fault}

    def _serve(self, wave: Sequence[tuple[Talk, Prompt]]) -> None:
        running = []
        for talk, prompt in wave:
            self.sent += 1
            self.before(self)
            decision, key = self._choose(prompt)
            engine, rank = self.places[key](prompt)
            self._report_load(key)
            running.append((talk, prompt, decision, key, engine, rank, *engine.begin(prompt, rank)))
            engine.publish()
            self.now_ms += 3.0
        for talk, _, decision, key, engine, rank, sequence, counted, cached in running:
            talk.history += engine.end(sequence, rank)
            engine.publish()
            self.now_ms += 5.0
            decision.reported_isl = counted
            reported = engine.reports(cached)
            self.say(key, RequestFinished(decision.request.request_id, "stop", reported))

    def _choose(self, prompt: Prompt) -> tuple[Decision, WorkerKey]:
        size, isl = self.block_size, len(prompt.tokens)
        path = path_of(pack_tokens(prompt.tokens), size, hash_seed(prompt.lora, prompt.salt))
        domain = "salt" if prompt.salt else "adapter" if prompt.lora else ""
        request = RoutingRequest(f"r-{prompt.number}", "m", isl, size, -(-isl // size), domain=domain)
        decision = self.selector.select(WorkerWanted(request, path, self.now_ms, int(self.now_ms)))
        assert isinstance(decision, Decision), str(decision)
        decision.seen_tokens = self.sketch.note(path) * size
        self.log.add(decision)
        self.selector.book(decision, path, self.now_ms)
        started = RequestStarted(request.request_id, isl, decision.overlap_tokens, -(-isl // size), cached_later=True)
        self.say(decision.worker, started)
        return decision, decision.worker

    def _report_load(self, key: WorkerKey) -> None:
        engine = self.engines.get(key.worker_id)
        if engine is not None:
            self.say(key, LoadReported(1, 0, 0, 0, 0, 4096, 0, foreign_requests=engine.strangers))
