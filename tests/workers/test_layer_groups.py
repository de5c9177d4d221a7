"""Prompts are promised where every group of layers resumes them: from TensorRT-LLM's events to the router's index."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kv_events.cache_events import AnyEngineEvent, Created, Diff, Removed, Stored, StoredBlock, Updated
from poolgrid.wire.events import CacheCleared, GroupsReported, KvGroup, SnapshotBegan, SnapshotEnded
from poolgrid.wire.hashing import pack_tokens
from poolgrid.workers.core.event_translation import EventTranslator
from tests.examples import examples
from tests.router.test_kv_groups import BLOCK, BLOCKS, PROMPTS, Pool, names_of

FULL = 1_000
MODELS = [(FULL, 9), (6, FULL, 6, 14), (FULL, FULL), (13, FULL)]
"""Windows of the groups of layers."""


def needed(window: int) -> int:
    return max(1, -(-(window - 1) // BLOCK))


class Engine:
    """Which prefixes each group has; its events name the group that they are about."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self.windows = windows
        self.held: list[set[int]] = [set() for _ in windows]
        self.events: list[AnyEngineEvent] = []
        self.next_id = 0
        for group in range(len(windows)):
            self.tell(Created, group, num_blocks_per_cache_level=(999, 0))

    def tell(self, kind: Any, group: int, **fields: Any) -> None:
        common = {"event_id": self.next_id, "window_size": self.windows[group], "layer_group_id": group}
        self.events.append(kind(**common, **fields))
        self.next_id += 1

    def store(self, prompt: list[int], end: int, turned: bool) -> None:
        names = names_of(prompt)
        groups = range(len(self.windows))
        for group in reversed(groups) if turned else groups:
            for at in range(end):
                if names[at] in self.held[group]:
                    continue
                self.held[group].add(names[at])
                block = StoredBlock(names[at], pack_tokens(prompt[at * BLOCK : (at + 1) * BLOCK]))
                self.tell(Stored, group, parent_hash=names[at - 1] if at else None, blocks=(block,))

    def remove(self, group: int, names: list[int]) -> None:
        gone = [name for name in names if name in self.held[group]]
        self.held[group].difference_update(gone)
        if gone:
            self.tell(Removed, group, block_hashes=tuple(gone))

    def move(self, group: int, names: list[int]) -> None:
        for name in names:
            if name in self.held[group]:
                self.tell(Updated, group, block_hash=name, cache_level=Diff(0, 1))

    def resumes_at(self, prompt: list[int]) -> int:
        """The naive rule: the deepest boundary before the last token at which every group has what it needs."""
        names = names_of(prompt)
        for depth in range((len(prompt) - 1) // BLOCK, 0, -1):
            if all(
                held.issuperset(names[:depth] if window == FULL else names[max(0, depth - needed(window)) : depth])
                for window, held in zip(self.windows, self.held, strict=True)
            ):
                return depth
        return 0


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 3), st.integers(1, BLOCKS), st.booleans()),
    st.tuples(st.sampled_from(["remove", "move"]), st.integers(0, 3), st.integers(0, 3), st.sets(st.integers(0, 8))),
    st.tuples(st.sampled_from(["drain", "drain", "lose", "restate"]), *[st.just(0)] * 3),
)


@given(st.sampled_from(MODELS), st.lists(STEPS, max_size=25))
@settings(max_examples=examples(200), deadline=None)
def test_a_prompt_is_promised_where_every_group_resumes_it_and_after_a_loss_never_further(
    windows: tuple[int, ...], program: list[Any]
) -> None:
    engine, translator, pool = Engine(windows), EventTranslator(BLOCK, len(set(windows))), Pool([0])
    [member] = pool.engines
    lost = False
    for step, at, count, blocks in [*program, ("drain", 0, 0, 0)]:
        if step == "store":
            engine.store(PROMPTS[at], count, bool(blocks))
        elif step in ("remove", "move"):
            names = names_of(PROMPTS[at])
            getattr(engine, step)(count % len(windows), [names[each] for each in sorted(blocks)])
        elif step == "lose":
            lost = lost or bool(engine.events)
            engine.events.clear()
            engine.tell(Updated, 0, block_hash=1, priority=Diff(35, 80))  # by its number the loss is seen
        else:
            pool.take(member, list(translator.translate(engine.events).events))
            engine.events.clear()
            if step == "restate":
                pool.take(member, [SnapshotBegan(), *translator.restate(), SnapshotEnded()])
            for prompt in PROMPTS:
                (promised,), resumed = pool.promised(prompt), engine.resumes_at(prompt)
                assert promised <= resumed if lost else promised == resumed


def test_groups_are_reported_by_what_they_need_and_taken_back_with_an_engine_that_starts_over() -> None:
    engine, translator = Engine((6, FULL, 6, 14)), EventTranslator(BLOCK, 3)
    engine.store(PROMPTS[0], 1, False)
    events = translator.translate(engine.events).events
    assert events[1] == GroupsReported((KvGroup(2), KvGroup(4)))
    assert {event.group for event in events if not isinstance(event, GroupsReported | CacheCleared)} == {0, 1, 2}

    again = translator.translate(Engine((FULL,)).events).events
    assert again == [GroupsReported(()), CacheCleared()]
    assert translator.restate() == []
