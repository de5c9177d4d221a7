"""Faults of engines, of what is between them and their workers, and of how workers are configured.

Each is made where it happens: in a cache, an event on its way, a port, a prompt. ``named`` is what it is; a fault
without one cannot be told from others by what a router sees, and the verdict must not name a cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from poolgrid.kernel.wire.events import StreamStateChanged
from poolgrid.kernel.wire.identifiers import StreamState, WorkerId, WorkerKey
from poolgrid.server.diagnosis.causes import Cause
from tests.diagnosis.engine_pool import Edit, Engine, EnginePool, Event, Prompt, Publisher, Traffic
from tests.fakes.engine_server.cache import Block, Drafting, PagedCache, Running

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
RANKS = (A, WorkerKey(WorkerId("a"), 1))


@dataclass
class EngineFault:
    """A fault of worker ``a`` (or of more), and what it may be called."""

    what: str
    named: tuple[Cause, ...]
    """Right verdicts; empty = none is."""
    make: Callable[[], EnginePool]
    traffic: Traffic = field(default_factory=Traffic)
    workers: tuple[str, ...] = ("a",)
    """Those that have it; all others must be clean."""


NOT_KNOWN = frozenset({Cause.REUSES_LESS, Cause.REUSES_MORE, Cause.UNMATCHED, Cause.UNKNOWN, Cause.AGREES})
"""Verdicts that name no cause."""


def pair(engine: Engine | None = None, **options: Any) -> EnginePool:
    """A faulty engine behind ``a``, a good one behind ``b``."""
    pool = EnginePool()
    pool.put("a", engine or Engine(**options))
    pool.put("b", Engine())
    return pool


def alone(**options: Any) -> EnginePool:
    """A pool of one worker, whose cache is too small for its conversations."""
    pool = EnginePool(("a",))
    pool.put("a", Engine(blocks=120, **options))
    return pool


def with_edit(edit: Edit) -> EnginePool:
    pool = pair()
    pool.readers[A].edit = edit
    return pool


def others_share(blocks: int) -> EnginePool:
    """Clients straight on the engine, as many requests as ours, each of tokens of its own."""
    pool = pair(blocks=blocks)
    engine = pool.engines["a"]
    engine.strangers = 2

    def send(pool: EnginePool) -> None:
        tokens = [3 + (pool.sent * 131 + at * 17) % 3900 for at in range(400)]
        running, *_ = engine.begin(Prompt(-1, tokens), 0)
        engine.end(running, 0)
        engine.publish()

    pool.before = send
    return pool


class StepCache(PagedCache):
    """Resumes at multiples of some tokens alone, as models with states do."""

    step = 96

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        sequence, cached = super().begin(tokens, lora, salt, media)
        self._keep(sequence, cached // self.step * self.step // self.block_size)
        return sequence, sequence.filled * self.block_size

    def _keep(self, sequence: Running, kept: int) -> None:
        self.end(Running(sequence.tokens, sequence.lora, sequence.salt, sequence.blocks[kept:]))
        sequence.blocks, sequence.filled = sequence.blocks[:kept], kept


class LongStepCache(StepCache):
    step = 256


class DraftCache(StepCache):
    """Computes the last four blocks of what it finds again."""

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        sequence, cached = PagedCache.begin(self, tokens, lora, salt, media)
        self._keep(sequence, max(0, cached // self.block_size - 4))
        return sequence, sequence.filled * self.block_size


class UncachedEngine(Engine):
    """``--no-enable-prefix-caching``: no block has a hash, no event is published, and nothing is found."""

    def begin(self, prompt: Prompt, rank: int) -> tuple[Running, int, int]:
        return Running(list(prompt.tokens), prompt.lora, prompt.salt), len(prompt.tokens), 0

    def end(self, running: Running, rank: int) -> list[int]:
        answer = super().end(Running(list(running.tokens), "", ""), rank)
        self.outbox[rank].clear()
        return answer


class OffloadingCache(PagedCache):
    """A connector behind it finds on the host what the device evicted, and says nothing of it."""

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        known: set[int] = self.__dict__.setdefault("offloaded", set())
        sequence, cached = super().begin(tokens, lora, salt, media)
        chain = self.chain(tokens, lora, salt, media)
        whole = 0
        for engine_hash in chain[: (len(tokens) - 1) // self.block_size]:
            if engine_hash not in known:
                break
            whole += 1
        known.update(chain)
        return sequence, max(cached, whole * self.block_size)


class LosingCache(PagedCache):
    """Its removals are published on a coin's flip: half of them are lost in its publisher's queue."""

    def _take(self) -> Block:
        publish, self._publish = self._publish, lambda event: None
        try:
            return super()._take()
        finally:
            self._publish = publish


def flushed(every: int) -> EnginePool:
    """The cache is dropped without an event, again and again."""
    pool = pair()
    engine = pool.engines["a"]

    def flush(pool: EnginePool) -> None:
        if not pool.sent % every:
            engine.caches[0].reset()
            engine.outbox[0].clear()

    pool.before = flush
    return pool


def two_behind_one_url(both_streams: bool) -> EnginePool:
    """A balancer sends the requests of ``a`` (and of ``b``) to two engines in turn."""
    pool = EnginePool(("a", "b") if both_streams else ("a",))
    first, second = pool.put("a", Engine()), Engine()
    if both_streams:
        pool.put("b", second)

    def place(prompt: Prompt) -> tuple[Engine, int]:
        return (first, second)[prompt.number % 3 == 0], 0

    pool.places.update(dict.fromkeys(pool.keys, place))
    return pool


def hidden_for_some() -> EnginePool:
    """A balancer keeps each conversation at one of two engines, of which one is followed."""
    pool = EnginePool(("a",))
    first, second = pool.put("a", Engine()), Engine()
    pool.places[A] = lambda prompt: ((first, second)[sum(prompt.tokens[70:86]) % 2], 0)
    return pool


def ranks() -> tuple[EnginePool, Engine]:
    pool = EnginePool(RANKS)
    return pool, pool.put("a", Engine(2))


def swapped_ports() -> EnginePool:
    """Each rank's port is read for the other; an engine behind a gateway has 0 for both in its events."""
    pool, engine = ranks()
    for publisher in engine.publishers:
        publisher.rank = None  # type: ignore[assignment]
        publisher.readers.clear()
    for key in RANKS:
        pool.readers[key].read(engine.publishers[1 - key.dp_rank])
    return pool


def numbered_swapped_ports() -> EnginePool:
    """The same, with the rank in each batch, as vLLM writes it."""
    pool, engine = ranks()
    for publisher in engine.publishers:
        publisher.readers.clear()
    for key in RANKS:
        pool.readers[key].read(engine.publishers[1 - key.dp_rank])
    return pool


def rank_header_lost() -> EnginePool:
    """The engine balances by itself what comes without the header."""
    pool, engine = ranks()
    place: Callable[[Prompt], tuple[Engine, int]] = lambda prompt: (engine, prompt.number * 7 // 3 % 2)  # noqa: E731
    pool.places.update(dict.fromkeys(RANKS, place))
    return pool


def swapped_urls() -> EnginePool:
    pool = pair()
    first, second = pool.engines["a"], pool.engines["b"]
    pool.places.update({A: lambda prompt: (second, 0), B: lambda prompt: (first, 0)})
    return pool


def one_engine_twice() -> EnginePool:
    pool = EnginePool(("a", "b", "c"))
    engine = pool.put("a", Engine())
    pool.put("b", engine)
    pool.put("c", Engine())
    return pool


def stream_of_a_neighbour() -> EnginePool:
    """``a`` is followed at the publisher of ``b``."""
    pool = pair()
    pool.engines["a"].publishers[0].readers.clear()
    pool.readers[A].read(pool.engines["b"].publishers[0])
    return pool


def stream_of_a_stranger() -> EnginePool:
    """``a`` is followed at an engine of another pool, which has traffic of its own."""
    pool = pair()
    stranger = Engine()
    pool.engines["a"].publishers[0].readers.clear()
    pool.readers[A].read(stranger.publishers[0])

    def send(pool: EnginePool) -> None:
        running, *_ = stranger.begin(Prompt(-1, [3 + (pool.sent // 3 * 31 + at * 7) % 3900 for at in range(200)]), 0)
        stranger.end(running, 0)
        stranger.publish()

    pool.before = send
    return pool


def never_connected() -> EnginePool:
    """The event port is another one, at which nothing listens: its publisher is reported as not reached."""
    pool = pair()
    pool.engines["a"].publishers[0].readers.clear()
    pool.readers[A].publisher = Publisher()
    pool.before = lambda pool: pool.note_fault(A, "nothing answers at its event endpoint tcp://gpu1:5557")
    return pool


def source_never_connected() -> EnginePool:
    """The same where the router follows the engine by itself."""
    pool = pair()
    pool.engines["a"].publishers[0].readers.clear()
    pool.readers[A].publisher = Publisher()
    pool.before = lambda pool: (
        pool.say(A, StreamStateChanged("engine", StreamState.ABSENT, "")) if pool.sent < 2 else None
    )
    return pool


def replay_port_closed(history: int) -> EnginePool:
    """The listed replay port is closed; the engine has served before the worker came."""
    pool = pair()
    engine, reader = pool.engines["a"], pool.readers[A]
    reader.is_replayed = False
    for number in range(history):
        running, *_ = engine.begin(Prompt(-1, [3 + (number * 31 + at * 7) % 3900 for at in range(100)]), 0)
        engine.end(running, 0)
        engine.publish()
    return pool


def frames_lost(has_replay: bool) -> EnginePool:
    pool = pair()
    if not has_replay:
        pool.readers[A].without_replay()
    pool.readers[A].is_lost = lambda seq: 40 <= seq < 60
    return pool


def events_from(number: int, is_on: bool) -> EnginePool:
    """The publisher's thread ends, or begins."""
    pool = pair()
    publisher = pool.engines["a"].publishers[0]
    publisher.is_on = not is_on

    def switch(pool: EnginePool) -> None:
        if pool.sent == number:
            publisher.is_on = is_on

    pool.before = switch
    return pool


def late(ms: float) -> EnginePool:
    pool = pair()
    pool.readers[A].late_ms = ms
    return pool


def prompts(change: Callable[[Prompt], list[int]]) -> EnginePool:
    pool = pair()
    pool.engines["a"].tokens_of = change
    return pool


def uncounted(change: Callable[[Prompt], list[int]]) -> EnginePool:
    """The same, where a proxy counts the prompt tokens itself, as the router does."""
    pool = prompts(change)
    engine = pool.engines["a"]
    begin = engine.begin
    engine.begin = lambda prompt, rank: (  # type: ignore[method-assign]
        lambda made: (made[0], len(prompt.tokens), min(made[2], len(prompt.tokens)))
    )(begin(prompt, rank))
    return pool


def salts(apply: bool, tell: bool) -> EnginePool:
    pool = pair() if tell else with_edit(without("extra_keys"))
    if not apply:
        pool.engines["a"].salt_of = lambda prompt: ""
    return pool


def reports(change: Callable[[int], int | None]) -> EnginePool:
    pool = pair()
    pool.engines["a"].reports = change
    return pool


def restarted(tell: bool) -> EnginePool:
    """The engine is another process with an empty cache; its numbers begin at 0 again, or a proxy continues them."""
    pool = pair()
    engine = pool.engines["a"]

    def restart(pool: EnginePool) -> None:
        if pool.sent == 100:
            engine.caches[0].reset()
            engine.outbox[0].clear()
            if tell:
                engine.publishers[0].frames.clear()

    pool.before = restart
    return pool


# -- events on their way -----------------------------------------------------------------------------------------------


def without(name: str) -> Edit:
    return lambda event, sent: [{**event, name: None}] if name in event else [event]


def with_fewer_tokens(event: Event, sent: int) -> list[Event]:
    """A proxy keeps the first 8 tokens of each list, as one does that writes events to a log."""
    return [{**event, "token_ids": event["token_ids"][:8]}] if "token_ids" in event else [event]


def every_fifth_dropped() -> Edit:
    """A relay loses events and numbers its frames itself."""
    stores = iter(range(1_000_000))
    return lambda event, sent: [] if event["type"] == "BlockStored" and next(stores) % 5 == 0 else [event]


def with_other_tokens(event: Event, sent: int) -> list[Event]:
    """The engine hashes other ids than those in its events."""
    return [{**event, "token_ids": [token ^ 1 for token in event["token_ids"]]}] if "token_ids" in event else [event]


def by_number(event: Event, sent: int) -> list[Event]:
    return [{**event, "lora_name": None, "extra_keys": None}] if event.get("lora_name") else [event]


def on_the_host(event: Event, sent: int) -> list[Event]:
    return [{**event, "medium": "CPU"}]


def with_unknown_kind(event: Event, sent: int) -> list[Event]:
    return [{**event, "kv_cache_spec_kind": "news"}] if "kv_cache_spec_kind" in event else [event]


def left_cut(prompt: Prompt) -> list[int]:
    return prompt.tokens[-160:]


def right_cut(prompt: Prompt) -> list[int]:
    return prompt.tokens[:160]


SOME_SALTED = Traffic(salts=lambda slot: "tenant" if slot % 2 else "")
ALL_SALTED = Traffic(salts=lambda slot: f"tenant-{slot}")
SOME_ADAPTED = Traffic(loras=lambda slot: "tuned" if slot % 2 else "")
FEW = Traffic(requests=200, clients=2)
LONG = Traffic(requests=200)
BUSY = Traffic(requests=640, gap_ms=10.0)

FAULTS = [
    EngineFault("events of a neighbour", (Cause.WRONG_ENDPOINT,), stream_of_a_neighbour),
    EngineFault("events of a stranger", (), stream_of_a_stranger),
    EngineFault("event port closed", (Cause.EVENTS_UNFIT,), never_connected),
    EngineFault("event port of a source closed", (Cause.WRONG_ENDPOINT,), source_never_connected),
    EngineFault("replay port closed, after a start", (Cause.EVENTS_UNFIT,), lambda: replay_port_closed(0)),
    EngineFault("replay port closed, in the middle of a life", (Cause.EVENTS_UNFIT,), lambda: replay_port_closed(30)),
    EngineFault("ports of ranks swapped", (Cause.CROSSED,), swapped_ports, workers=("a", "a/1")),
    EngineFault("ports of numbered ranks swapped", (Cause.EVENTS_UNFIT,), numbered_swapped_ports, workers=("a", "a/1")),
    EngineFault("URLs swapped", (Cause.CROSSED,), swapped_urls, workers=("a", "b")),
    EngineFault("rank header lost", (Cause.SHARED_URL,), rank_header_lost, workers=("a", "a/1")),
    EngineFault("two engines, one stream", (Cause.SHARED_URL,), lambda: two_behind_one_url(False), LONG),
    EngineFault("two engines, both streams", (Cause.SHARED_URL,), lambda: two_behind_one_url(True), workers=("a", "b")),
    EngineFault("one engine, two names", (Cause.SAME_ENGINE,), one_engine_twice, workers=("a", "b")),
    EngineFault("BOS before prompts", (Cause.ADDED_TOKENS,), lambda: prompts(lambda each: [1, *each.tokens])),
    EngineFault("a longer template", (Cause.TEMPLATE,), lambda: prompts(lambda each: [*range(9, 21), *each.tokens])),
    EngineFault("prompts cut from the left", (Cause.TRUNCATED,), lambda: prompts(left_cut)),
    EngineFault("prompts cut from the right", (Cause.TRUNCATED,), lambda: prompts(right_cut)),
    EngineFault("BOS that usage does not count", (), lambda: uncounted(lambda each: [1, *each.tokens])),
    EngineFault("salts of all not in events", (), lambda: salts(True, False), ALL_SALTED),
    EngineFault("salts of some not in events", (Cause.SALT,), lambda: salts(True, False), SOME_SALTED),
    EngineFault("salts of all ignored", (), lambda: salts(False, True), ALL_SALTED),
    EngineFault("adapter by its number", (Cause.ADAPTER,), lambda: with_edit(by_number), SOME_ADAPTED),
    EngineFault("token lists shortened", (Cause.EVENTS_UNFIT,), lambda: with_edit(with_fewer_tokens), LONG),
    EngineFault("every fifth store dropped", (Cause.EVENTS_UNFIT,), lambda: with_edit(every_fifth_dropped())),
    EngineFault("BOS before some prompts", (), lambda: prompts(lambda each: [1][each.number % 2 :] + each.tokens)),
    EngineFault("some conversations at a hidden engine", (), hidden_for_some),
    EngineFault("parents stripped", (), lambda: with_edit(without("parent_block_hash"))),
    EngineFault("other tokens in events", (), lambda: with_edit(with_other_tokens)),
    EngineFault("a layer of unknown kind", (Cause.EVENTS_UNFIT,), lambda: with_edit(with_unknown_kind)),
    EngineFault("other block size", (Cause.EVENTS_UNFIT,), lambda: pair(Engine(block_size=24))),
    EngineFault("prefix caching off", (Cause.CACHING_OFF,), lambda: pair(UncachedEngine())),
    EngineFault("reuse in steps of 96", (Cause.GROUP,), lambda: pair(cache=StepCache)),
    EngineFault("reuse in steps of 256", (Cause.GROUP,), lambda: pair(cache=LongStepCache), LONG),
    EngineFault("four last blocks again", (Cause.RECOMPUTED,), lambda: pair(cache=DraftCache)),
    EngineFault("cache dropped every 50 requests", (Cause.ASLEEP,), lambda: flushed(50), LONG),
    EngineFault("cache dropped every 90 requests", (Cause.ASLEEP,), lambda: flushed(90), LONG),
    EngineFault("others on the engine", (Cause.FOREIGN,), lambda: others_share(140)),
    EngineFault("frames lost, no replay", (Cause.GAP,), lambda: frames_lost(False), Traffic(requests=120)),
    EngineFault("events stop", (Cause.EVENTS_STOPPED,), lambda: events_from(100, False), LONG),
    EngineFault("events off", (Cause.NO_EVENTS,), lambda: events_from(10**9, True)),
    EngineFault("events off, of a busy worker", (Cause.NO_EVENTS,), lambda: events_from(10**9, True), BUSY),
    EngineFault("events 5 s late", (Cause.EVENTS_LATE,), lambda: late(5_000), LONG),
    EngineFault("a tier that says nothing", (Cause.TIER,), lambda: alone(cache=OffloadingCache), FEW),
    EngineFault("removals lost", (), lambda: alone(cache=LosingCache), FEW),
    EngineFault("reuse not reported", (Cause.UNREPORTED,), lambda: reports(lambda cached: None)),
    EngineFault("reuse reported as 0", (), lambda: reports(lambda cached: 0)),
    EngineFault("half of the reuse reported", (), lambda: reports(lambda cached: cached // 32 * 16)),
]

HEALTHY = [
    EngineFault("nothing", (), pair),
    EngineFault("small caches", (), lambda: pair(blocks=120)),
    EngineFault("drafting, a block less", (), lambda: pair(drafting=Drafting(drops=True))),
    EngineFault("a restart that its numbers show", (), lambda: restarted(True)),
    EngineFault("frames lost and replayed", (), lambda: frames_lost(True)),
    EngineFault("blocks on the host", (), lambda: with_edit(on_the_host)),
    EngineFault("salts of some", (), pair, SOME_SALTED),
    EngineFault("adapters of some", (), pair, SOME_ADAPTED),
    EngineFault("unrelated prompts", (), pair, Traffic(talks=200, clients=4, system=0)),
]
