"""Prompts are promised where every group of layers of TensorRT-LLM resumes them: from its events to the router's index.

The engine of the first test is naive: a tree of blocks, and for each group which of them it has a page of. It follows
the radix tree of the second cache manager: what full attention loses leaves the tree with all that hangs off it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.wire.events import AnyEvent, CacheCleared, GroupsReported, KvGroup, RequestStarted
from poolgrid.kernel.wire.hashing import BASE_SEED
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.next_token import Vocabulary
from tests.examples import examples
from tests.fakes.tensorrt_llm._fake.cache_events import RankEvents, Tenant, groups_of
from tests.fakes.tensorrt_llm._fake.second_cache_manager import BlockNames, spoken
from tests.router.test_kv_groups import BLOCK, BLOCKS, PROMPTS, Pool, engine_hash, names_of
from tests.workers.builders import make_request

LONGEST = 4096
STATE = -1
MODELS = [(LONGEST,), (9, LONGEST), (LONGEST, 6, 14), (6, LONGEST, STATE), (LONGEST, LONGEST, 9), (STATE, LONGEST)]
"""Windows of the groups, by number."""


def needed(window: int) -> int:
    return 1 if window in (STATE, LONGEST) else -(-(window - 1) // BLOCK)


class Engine:
    """A naive engine with groups of layers, and the worker in front of it."""

    def __init__(self, windows: tuple[int, ...], names_groups: bool) -> None:
        self.key = WorkerKey(WorkerId("w"))
        self.windows, self.names_groups = windows, names_groups
        self.full = windows.index(LONGEST)
        self.pages: list[set[int]] = [set() for _ in windows]
        self.translator = EventTranslator(BLOCK, len(set(windows)))
        self.epoch, self.seq = 1, 0
        self.begin()

    def begin(self) -> None:
        self.pages = [set() for _ in self.windows]
        self.events: list[dict[str, Any]] = []
        self.next_id = 0
        for group in range(len(self.windows)):
            self.emit(group, {"type": "created", "num_blocks_per_cache_level": [100, 0]})

    def emit(self, group: int, data: dict[str, Any]) -> None:
        event = {"event_id": self.next_id, "data": data, "window_size": self.windows[group]}
        if self.names_groups:
            event |= {"layer_group_id": group, "hash_algo": "v1_block_key"}
        self.next_id += 1
        self.events.append(event)

    def store(self, prompt: list[int], end: int, kept: set[int]) -> None:
        """Commit a prompt's blocks: full attention has all, other groups those that are kept or at the end."""
        names = names_of(prompt)
        begin = next((at for at, name in enumerate(names) if name not in self.pages[self.full]), BLOCKS)
        for group, window in enumerate(self.windows):
            blocks = range(begin if group == self.full else 0, end)
            if group != self.full and window != LONGEST:
                blocks = [at for at in blocks if at in kept or at >= end - needed(window)]  # type: ignore[assignment]
            for at in blocks:
                if names[at] not in self.pages[group]:
                    self.pages[group].add(names[at])
                    self.emit(group, stored(prompt, names, at))

    def evict(self, group: int, prompt: list[int], block: int) -> None:
        names = names_of(prompt)
        if group != self.full and self.windows[group] != LONGEST:
            self.drop(group, [names[block]])
            return
        below = {name for each in PROMPTS for name in names_of(each)[block:] if names_of(each)[block] == names[block]}
        for each in range(len(self.windows)):
            self.drop(each, [name for name in self.pages[each] if name in below])

    def drop(self, group: int, names: list[int]) -> None:
        held = [name for name in names if name in self.pages[group]]
        self.pages[group].difference_update(held)
        if held:
            self.emit(group, {"type": "removed", "block_hashes": [engine_hash(name) for name in held]})

    def move(self, group: int, prompt: list[int], block: int, level: int) -> None:
        name = names_of(prompt)[block]
        if name in self.pages[group]:
            change = {"type": "event_diff", "old_value": 1 - level, "new_value": level}
            updated = {"type": "updated", "block_hash": engine_hash(name), "cache_level": change, "priority": None}
            self.emit(group, updated)

    def resumes_at(self, prompt: list[int]) -> int:
        names = names_of(prompt)
        for depth in range((len(prompt) - 1) // BLOCK, 0, -1):
            if all(name in self.pages[self.full] for name in names[:depth]) and all(
                set(names[max(0, depth - needed(window)) : depth]) <= pages
                for window, pages in zip(self.windows, self.pages, strict=True)
            ):
                return depth
        return 0


def stored(prompt: list[int], names: list[int], at: int) -> dict[str, Any]:
    tokens = [{"token_id": token, "token_extra_id": 0} for token in prompt[at * BLOCK : (at + 1) * BLOCK]]
    block = {"block_hash": engine_hash(names[at]), "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": engine_hash(names[at - 1]) if at else None, "blocks": [block]}


class Reader(Pool):
    """The consolidator's state and a router's, fed with what a worker makes of an engine's events."""

    def __init__(self, engine: Engine) -> None:
        super().__init__([0])
        self.engine = self.engines[0]
        self.trtllm = engine

    def read(self, split: int = 0) -> None:
        """Read what the engine has said, in one turn or in two."""
        events, self.trtllm.events = self.trtllm.events, []
        for part in (events[:split], events[split:]):
            self.take(self.engine, [*self.trtllm.translator.translate(map(parse_event, part)).events])

    def promises(self, prompt: list[int]) -> int:
        return self.promised(prompt)[0]


STEPS = st.tuples(
    st.sampled_from(["store", "store", "store", "evict", "evict", "move", "restart", "router", "lose", "again"]),
    st.integers(0, 3),
    st.integers(0, BLOCKS - 1),
    st.sets(st.integers(0, BLOCKS)),
    st.integers(0, 9),
)


@given(st.sampled_from(MODELS), st.booleans(), st.booleans(), st.lists(STEPS, max_size=25))
@settings(max_examples=examples(150), deadline=None)
def test_a_prompt_is_promised_to_exactly_where_every_layer_group_resumes_it(
    windows: tuple[int, ...], second_manager: bool, loses: bool, program: list[Any]
) -> None:
    engine = Engine(windows, second_manager or len(set(windows)) < len(windows))
    reader = Reader(engine)
    reader.read()
    lost = False
    for step, which, block, kept, place in program:
        prompt, group = PROMPTS[which], place % len(windows)
        if step == "store":
            engine.store(prompt, block + 1, kept)
        elif step == "evict":
            engine.evict(group, prompt, block)
        elif step == "move":
            engine.move(group, prompt, block, place % 2)
        elif step == "restart":
            engine.begin()
            lost = False
        elif step == "router":
            reader.restart_router()
        elif step == "again":
            reader.take(reader.engine, [CacheCleared(), *engine.translator.restate()])
        elif loses:
            engine.events = []
            lost = lost or engine.next_id > 0
            engine.emit(engine.full, {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None})
            engine.next_id += 1
            engine.emit(engine.full, {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None})
        reader.read(place)
        for each in PROMPTS:
            for asked in (each, each[:-1], each[: 5 * BLOCK], each[: 3 * BLOCK + 1]):
                promised, resumed = reader.promises(asked), engine.resumes_at(asked)
                assert promised <= resumed if lost else promised == resumed


def test_a_group_of_an_unknown_kind_is_not_promised() -> None:
    engine = Engine((LONGEST,), names_groups=True)
    reader = Reader(engine)
    engine.store(PROMPTS[0], BLOCKS, set())
    reader.read()
    assert reader.promises(PROMPTS[0]) == BLOCKS - 1

    engine.windows = (LONGEST, 0)
    engine.emit(1, {"type": "removed", "block_hashes": [1]})
    reader.read()
    assert reader.promises(PROMPTS[0]) == 0
    assert reader.state.workers[reader.engine.key].groups == GroupsReported((KvGroup(0),))


@given(
    st.sampled_from([[64], [64, 9], [64, 24, 6]]),
    st.sampled_from([BlockNames.V1, BlockNames.V2_BLOCK_KEY]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(2, 36), st.integers(1, 9)), max_size=20),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_fake_with_small_windows_reuses_what_its_events_promise(
    windows: list[int], names: BlockNames, requests: list[tuple[int, int, int]]
) -> None:
    recorder = RankEvents(BLOCK, 40, 0, windows, 4, None)
    recorder.register(BASE_SEED, Tenant())
    limits = SimulatedLimits(BLOCK, 40, 0, 4, 24, max_sequence_length=64, kv_groups=groups_of(windows))
    engine = SimulatedEngine(limits, Vocabulary(1000, 3, 2, 0.0), recorder=recorder)
    reader = Reader(Engine((LONGEST,), names_groups=False))
    translator = EventTranslator(BLOCK, len(windows))

    def read() -> None:
        told = [spoken(event, names, sorted(windows)) for event in recorder.drain()]
        events: list[AnyEvent] = [*translator.translate(map(parse_event, told)).events]
        reader.take(reader.engine, events)

    read()
    now_ms = 0.0
    for number, (which, isl, osl) in enumerate(requests):
        prompt = PROMPTS[which][:isl]
        promised = BLOCK * reader.promises(prompt)
        engine.submit(make_request(f"r{number}", prompt, osl), now_ms)
        while (outcome := engine.step(now_ms)) is not None:
            now_ms = outcome.ended_ms
            reused = [fact.cached_tokens for fact in outcome.facts if isinstance(fact, RequestStarted)]
            assert reused in ([], [promised])
            read()
