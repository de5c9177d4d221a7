"""Prompts are promised where every KV group can resume them: from an engine's frames to the router's index.

The engine here is naive: it knows for each group which prefixes it has a copy of. Its frames are those of vLLM: blocks
that a window or a state does not keep are left out of the hashes and not out of the tokens, and groups come in any
order.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.pool_state import MemberRank, PoolState
from poolgrid.kernel.index import group_index
from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.index.prefix_index import BYTES_PER_BLOCK, PrefixIndex
from poolgrid.kernel.kv_events import translation
from poolgrid.kernel.kv_events.pub import decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import (
    FOLLOWED_GROUP,
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    GroupsReported,
    JournalRecord,
    KvGroup,
    WorkerJoined,
)
from poolgrid.kernel.wire.hashing import block_hashes, child_hash, pack_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import WINDOW_BLOCKS_MAX
from tests.consolidator.pub_engine import frame_of
from tests.counted_lines import CountedLines
from tests.examples import examples
from tests.real_vllm.hybrid import FrameReader
from tests.real_vllm.promises import Asked, judged
from tests.real_vllm.servers import BLOCK_SIZE
from tests.router.fleet_builder import make_card

BLOCK = 4
BLOCKS = 9
PROMPTS = [
    [family] * 8 + [branch * 100 + at for at in range(BLOCKS * BLOCK - 8)] for family in (1, 2) for branch in (3, 4)
]
"""Two pairs of prompts, each with two blocks in common."""


@dataclass(frozen=True)
class Layers:
    """A group of an engine: its kind as vLLM names it, its window, and the tokens of its blocks."""

    kind: str
    window: int | None = None
    block_size: int = BLOCK

    @property
    def needed(self) -> int:
        """How many of its blocks must be held before a boundary; -1 = all."""
        if self.kind == "sliding_window" and self.window is not None:
            size = max(BLOCK, self.block_size)
            return max(1, -(-(-(-(self.window - 1) // self.block_size) * self.block_size) // size))
        return {"mamba": 1, "chunked_local_attention": 1, "full_attention": -1}[self.kind]


FULL = Layers("full_attention")
MODELS = [
    (FULL,),
    (FULL, FULL),
    (FULL, Layers("sliding_window", 9)),
    (Layers("sliding_window", 6), FULL, Layers("sliding_window", 6), Layers("sliding_window", 14)),
    (FULL, Layers("mamba")),
    (Layers("mamba", None, 2 * BLOCK), Layers("mamba", None, 2 * BLOCK), FULL),
    (FULL, Layers("sliding_window", 12, 2 * BLOCK), Layers("mamba")),
    (Layers("sliding_window", 10),),
    (Layers("mamba"),),
    (FULL, Layers("sliding_window", 9, BLOCK // 2)),
    (Layers("sliding_window", 14, BLOCK // 4), FULL, Layers("mamba")),
    (FULL, Layers("chunked_local_attention")),
]


def names_of(tokens: list[int]) -> list[int]:
    return sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK))


def engine_hash(name: int) -> int:
    return (name * 31 + 7) % 2**64


@dataclass
class Engine:
    """One engine and the worker in front of it."""

    layers: tuple[Layers, ...]
    key: WorkerKey
    copies: list[Counter[int]] = field(default_factory=list)
    translator: EngineTranslator = field(default_factory=lambda: EngineTranslator(BLOCK, 10_000))
    epoch: int = 1
    seq: int = 0
    stored: bool = False

    def __post_init__(self) -> None:
        self.copies = [Counter() for _ in self.layers]

    def store(self, prompt: list[int], begin: int, end: int, left_out: set[int], turned: bool) -> list[Any]:
        """Compute blocks of a prompt; groups without full attention keep those that are not left out."""
        names, events = names_of(prompt), []
        self.stored = True
        for number, layers in enumerate(self.layers):
            stride = max(1, layers.block_size // BLOCK)
            blocks = range(begin // stride, end // stride)
            kept = [b for b in blocks if layers == FULL or FULL not in self.layers or b not in left_out]
            held = [names[(b + 1) * stride - 1] for b in kept]
            if not blocks:
                continue
            for name in held:
                self.copies[number][name] += 1
            first = blocks[0] * stride * BLOCK
            hashes = [engine_hash(name) for name in held]
            if layers.block_size < BLOCK:
                # The last of the small blocks within one of full attention's has its hash.
                hashes = [
                    engine_hash(name) if last else engine_hash(name) ^ at
                    for name in held
                    for at in range(1, 1 + BLOCK // layers.block_size)
                    for last in [at == BLOCK // layers.block_size]
                ]
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": hashes,
                    "parent_block_hash": engine_hash(names[first // BLOCK - 1]) if first else None,
                    "token_ids": prompt[first : (blocks[-1] + 1) * stride * BLOCK],
                    "block_size": layers.block_size,
                    "medium": "GPU",
                    "group_idx": number,
                    "kv_cache_spec_kind": layers.kind,
                    "kv_cache_spec_sliding_window": layers.window,
                }
            )
        return events[::-1] if turned else events

    def remove(self, number: int, names: list[int]) -> list[Any]:
        held = [name for name in names if self.copies[number][name]]
        self.copies[number].subtract(held)
        removed = {"type": "BlockRemoved", "medium": "GPU", "group_idx": number}
        return [{**removed, "block_hashes": [engine_hash(name)]} for name in held]

    def clear(self) -> list[Any]:
        self.copies = [Counter() for _ in self.layers]
        return [{"type": "AllBlocksCleared"}]

    def resumes_at(self, prompt: list[int]) -> int:
        """The naive rule: the deepest boundary before the last token at which every group has what it needs."""
        names = names_of(prompt)
        for depth in range((len(prompt) - 1) // BLOCK, 0, -1):
            for layers, copies in zip(self.layers, self.copies, strict=True):
                stride = max(1, layers.block_size // BLOCK)
                ends = list(range(depth - 1, -1, -stride))
                needed = ends if layers.needed < 0 else ends[: layers.needed]
                if (depth % stride and layers.kind != "full_attention") or not all(copies[names[at]] for at in needed):
                    break
            else:
                return depth
        return 0

    def knows(self, prompt: list[int]) -> int:
        """Return how many leading blocks full attention has; without it, behind how many the engine resumes."""
        names = names_of(prompt)
        full = [copies for layers, copies in zip(self.layers, self.copies, strict=True) if layers == FULL]
        if not full:
            return self.resumes_at([*prompt, 0])
        for depth, name in enumerate(names):
            if not all(copies[name] for copies in full):
                return depth
        return len(names)


class Pool:
    """A consolidator's state and a router's, fed by engines."""

    def __init__(self, models: list[int]) -> None:
        self.engines = [Engine(MODELS[model], WorkerKey(WorkerId(f"w{at}"))) for at, model in enumerate(models)]
        self.state = PoolState()
        self.projection = Projection(PrefixIndex(), LoadLedger())
        for engine in self.engines:
            self.record(engine, [WorkerJoined(make_card())])

    def record(self, engine: Engine, events: list[AnyEvent]) -> None:
        record = JournalRecord(self.state.offset, *engine.key, engine.epoch, engine.seq, 0, 0, events)
        engine.seq += 1
        self.state.apply(record)
        self.projection.apply(record, 0.0)

    def frame(self, engine: Engine, events: list[Any]) -> None:
        self.take(engine, engine.translator.translate(decode_pub(frame_of(events)).events))

    def take(self, engine: Engine, events: list[AnyEvent]) -> None:
        worker = self.state.workers[engine.key]
        taking = MemberRank(worker.key, worker.epoch, worker.card)
        taking.presence, taking.groups = _copy_of(self.state, engine.key)
        out, _, _ = taking.take("worker", events, True)
        self.record(engine, out)

    def restart_engine(self, engine: Engine) -> None:
        engine.clear()
        engine.translator.clear()
        self.take(engine, [CacheCleared()])

    def restart_router(self) -> None:
        frozen = self.state.freeze()
        fresh = Projection(PrefixIndex(), LoadLedger())
        load = fresh.begin_load(frozen.offset, frozen.states(), list(frozen.visible_chains()))
        while load.step(3):
            pass
        fresh.adopt(load, 0.0)
        self.projection = fresh

    def restart_consolidator(self) -> None:
        frozen = self.state.freeze()
        again = PoolState.load(frozen.offset, [each.entry for each in frozen.workers], list(frozen.source_chains()))
        assert again.facts() == self.state.facts()
        self.state = again

    def promised(self, prompt: list[int]) -> list[int]:
        index = self.projection.index
        found = index.find(names_of(prompt), (len(prompt) - 1) // BLOCK)
        return [
            min(next((d for d, mask in found if mask >> index.slot(engine.key) & 1), 0), (len(prompt) - 1) // BLOCK)
            for engine in self.engines
        ]


def _copy_of(state: PoolState, key: WorkerKey) -> tuple[Any, Any]:
    frozen = state.freeze()
    copy = PoolState.load(frozen.offset, [each.entry for each in frozen.workers], list(frozen.source_chains()))
    return copy.workers[key].presence, copy.workers[key].groups


STEPS = st.one_of(
    st.tuples(
        st.just("store"), st.integers(0, 3), st.integers(1, BLOCKS), st.sets(st.integers(0, BLOCKS)), st.booleans()
    ),
    st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 3), st.sets(st.integers(0, BLOCKS - 1)), st.just(0)),
    st.tuples(st.just("tail"), st.integers(0, 3), st.integers(0, 3), st.integers(0, BLOCKS), st.just(0)),
    st.tuples(st.sampled_from(["clear", "engine", "router", "consolidator"]), *[st.just(0)] * 4),
)


@given(
    st.lists(st.integers(0, len(MODELS) - 1), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), STEPS), max_size=25),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_prompt_is_promised_to_exactly_where_every_group_resumes_it(
    models: list[int], program: list[tuple[int, Any]]
) -> None:
    pool = Pool(models)
    for which, (step, at, count, blocks, turned) in program:
        engine = pool.engines[which % len(models)]
        prompt = PROMPTS[at]
        names = names_of(prompt)
        if step == "store":
            begin = min(engine.knows(prompt), BLOCKS)
            begin -= begin % max(1, *(layers.block_size // BLOCK for layers in engine.layers))
            # What a group needs is known once it has stored something.
            end = begin + count if engine.stored else max(2, count)
            pool.frame(engine, engine.store(prompt, begin, min(BLOCKS, end), blocks, bool(turned)))
        elif step == "remove":
            pool.frame(engine, engine.remove(count % len(engine.layers), [names[each] for each in sorted(blocks)]))
        elif step == "tail":
            pool.frame(engine, engine.remove(count % len(engine.layers), names[: blocks - 1 : -1] if blocks else names))
        elif step == "clear":
            pool.frame(engine, engine.clear())
        elif step == "engine":
            pool.restart_engine(engine)
        elif step == "router":
            pool.restart_router()
        else:
            pool.restart_consolidator()
        for each in PROMPTS:
            for asked in (each, each[:-1], each[: 5 * BLOCK], each[: 3 * BLOCK + 1]):
                assert pool.promised(asked) == [engine.resumes_at(asked) for engine in pool.engines]


@given(
    st.sampled_from([(), (KvGroup(3),), (KvGroup(1),), (KvGroup(2), KvGroup(1)), (KvGroup(2, 2),)]),
    st.booleans(),
    st.integers(0, 1),
    st.lists(st.sets(st.integers(0, BLOCKS - 1)), min_size=3, max_size=3),
    st.integers(1, BLOCKS),
    st.booleans(),
)
@settings(max_examples=examples(300))
def test_what_an_engine_computes_again_is_promised_to_nobody(
    groups: tuple[KvGroup, ...], has_full: bool, again: int, held: list[set[int]], blocks: int, ends_with_one: bool
) -> None:
    """Full attention and windows must hold so many blocks behind the place where a prompt is resumed, states need none.

    An engine with one group looks up no block that it may not reuse, one with several does.
    """
    has_full = has_full or not groups
    path = names_of(PROMPTS[0])
    index, worker = PrefixIndex(), WorkerKey(WorkerId("w"))
    index.report_groups(worker, GroupsReported(groups, has_full, again))
    for number, of_group in enumerate(held[: len(groups) + 1]):
        for at in sorted(of_group):
            if number:
                index.change_group(worker, BlocksStored(None, pack_hashes([path[at]]), group=number))
            else:
                index.store(worker, path[at - 1] if at else None, [path[at]])
    asked = path[:blocks]
    deepest = blocks - ends_with_one

    def resumes_at(depth: int) -> bool:
        if has_full and not held[0].issuperset(range(depth + again)):
            return False
        if depth + again > (deepest if len(groups) + has_full == 1 else blocks):
            return False
        for number, group in enumerate(groups, 1):
            step = group.stride_blocks
            behind = again * step if group.needed_blocks > 1 else 0
            if depth % step or depth + behind > blocks:
                return False
            needed = group.needed_blocks + (again if behind else 0)
            ends = range(depth + behind, 0, -step)[:needed]
            if not held[number].issuperset(end - 1 for end in ends):
                return False
        return True

    right = next((depth for depth in range(deepest, 0, -1) if resumes_at(depth)), 0)
    found = index.find(asked, deepest)
    if not groups and has_full and not again:
        right = next((depth for depth in range(blocks, 0, -1) if held[0].issuperset(range(depth))), 0)
    assert (found[0][0] if found else 0) == right


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention", "unknown", "tomorrow", "", 3])
def test_a_model_with_a_group_of_a_kind_that_is_not_known_is_not_promised(kind: Any) -> None:
    pool = Pool([0])
    [engine] = pool.engines
    prompt = PROMPTS[0]
    [stored] = engine.store(prompt, 0, BLOCKS, set(), False)
    pool.frame(engine, [stored, {**stored, "group_idx": 1, "kv_cache_spec_kind": kind}])

    assert pool.promised(prompt) == [0]
    assert pool.state.workers[engine.key].groups == GroupsReported((KvGroup(0),))


def test_a_window_of_unknown_size_needs_the_whole_prefix() -> None:
    pool = Pool([1])
    [engine] = pool.engines
    prompt = PROMPTS[0]
    full, window = engine.store(prompt, 0, BLOCKS, set(), False)
    pool.frame(engine, [full, {**window, "kv_cache_spec_kind": "sliding_window"}])
    assert pool.promised(prompt) == [BLOCKS - 1]
    assert pool.state.workers[engine.key].groups is None

    pool.frame(engine, engine.remove(1, names_of(prompt)[4:5]))
    assert pool.promised(prompt) == [4]


def test_workers_with_one_group_are_found_as_before_beside_hybrid_ones() -> None:
    pool = Pool([0, 2])
    plain, hybrid = pool.engines
    prompt = PROMPTS[0]
    for engine in pool.engines:
        pool.frame(engine, engine.store(prompt, 0, BLOCKS, set(), False))
    pool.frame(hybrid, hybrid.remove(1, names_of(prompt)[5:6]))
    # The window needs two blocks before the boundary: those before block 8 are held, those before 6 and 7 are not.
    assert plain.resumes_at(prompt) == hybrid.resumes_at(prompt) == BLOCKS - 1
    assert pool.promised(prompt) == [BLOCKS - 1, BLOCKS - 1]
    pool.frame(hybrid, hybrid.remove(1, names_of(prompt)[7:8]))
    assert pool.promised(prompt) == [BLOCKS - 1, 5]


def test_blocks_of_groups_are_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex(budget_bytes=100 * BYTES_PER_BLOCK)
    worker = WorkerKey(WorkerId("w"))
    bit = 1 << index.slot(worker)
    index.groups.report(bit, GroupsReported((KvGroup(1),), has_full_attention=False))
    index.groups.store(bit, 1, range(1, 151), Tier.DEVICE)

    assert len(index.groups) == 100
    assert index.groups.evicted_blocks == 50
    assert index.find([50]) == []
    assert index.find([51]) == [(1, bit)]


def test_a_dropped_worker_leaves_nothing_in_its_groups_once_it_is_swept() -> None:
    index = PrefixIndex()
    gone, stays = WorkerKey(WorkerId("gone")), WorkerKey(WorkerId("stays"))
    report = GroupsReported((KvGroup(1),), has_full_attention=False)
    for worker in (gone, stays):
        index.report_groups(worker, report)
    for worker, blocks in ((gone, [1, 2, 3]), (stays, [3, 4])):
        index.groups.store(1 << index.slot(worker), 1, blocks, Tier.HOST)
    index.drop(gone)
    assert index.find([3]) == [(1, 1 << index.slot(stays))]

    index.sweep()
    assert len(index.groups) == 2
    newcomer = WorkerKey(WorkerId("newcomer"))
    index.report_groups(newcomer, report)
    assert index.find([1]) == []


MANAGERS: dict[str, tuple[list[bytes], list[Asked]]] = msgspec.msgpack.decode(
    zlib.decompress((Path(__file__).parents[1] / "data" / "kv_groups" / "managers.msgpack.zlib").read_bytes()),
    type=dict[str, tuple[list[bytes], list[Asked]]],
)
"""What ``tests.real_vllm.cache_recorder`` recorded of the cache managers of vLLM 0.33, by model; they evict."""

LEARNT = {"full-drops": 1}
"""Of how many prompts too much is promised before it is learnt what is computed again."""


@pytest.mark.parametrize("model", MANAGERS)
def test_what_is_promised_is_what_vllms_cache_managers_reuse(model: str) -> None:
    found = judged([MANAGERS[model]], model)
    if "ahead" in model:
        assert found.too_many == 0, "what is behind a block is looked at"
    assert (found.requests, found.too_few) == (40, 0)
    assert found.too_many <= LEARNT.get(model, 0)
    assert found.reused_tokens > 1000


def test_the_tokens_behind_blocks_are_those_of_the_prompt() -> None:
    for size, count, length in product((1, 3, 16), (1, 4), (0, 1, 15, 16, 17, 20, 48, 51)):
        tokens = list(range(1000, 1000 + length))
        following = FollowingTokens.of(pack_tokens(tokens), size, count)
        for blocks in range(1, length // size + 2):
            behind = tokens[blocks * size :][:count]
            told = pack_tokens(behind) if len(behind) == count else b""
            assert following.behind(blocks, count) == told
            assert following.behind(blocks, 1) == told[:4]


def test_a_place_counts_only_with_the_tokens_behind_it() -> None:
    index, worker, tokens = PrefixIndex(), WorkerKey(WorkerId("w")), [*range(100, 114)]
    bit, path = 1 << index.slot(worker), names_of(tokens)
    index.report_groups(worker, GroupsReported((), following_tokens=2))
    index.store(worker, None, path)
    held = [child_hash(pack_tokens(tokens[end : end + 2]), path[end // BLOCK - 1]) for end in (4, 8, 12)]
    index.change_group(worker, BlocksStored(None, pack_hashes(held), Tier.DEVICE, FOLLOWED_GROUP))

    def promised(prompt: list[int]) -> int:
        found = index.find(names_of(prompt), None, FollowingTokens.of(pack_tokens(prompt), BLOCK, 2))
        return max((depth for depth, mask in found if mask & bit), default=0)

    assert promised(tokens) == 3
    assert promised([*tokens[:13], 1]) == 2, "the prompt parts from it within the tokens behind the last block"
    assert promised(tokens[:13]) == 2, "the prompt ends before these"
    assert promised([*tokens[:8], 1, 2, 3, 4, 5, 6]) == 1
    assert index.find(path) == [(3, bit)], "without a prompt's tokens its blocks decide"
    index.change_group(worker, BlocksRemoved(pack_hashes(held[2:]), Tier.DEVICE, FOLLOWED_GROUP))
    assert promised(tokens) == 2


def test_a_window_holds_as_many_of_its_blocks_more_as_are_computed_again() -> None:
    index, worker, path = PrefixIndex(), WorkerKey(WorkerId("w")), names_of([*range(100, 132)])
    bit = 1 << index.slot(worker)
    index.report_groups(worker, GroupsReported((KvGroup(2, 2),), recomputed_blocks=2))
    index.store(worker, None, path)
    index.change_group(worker, BlocksStored(None, pack_hashes(path[3::2]), Tier.DEVICE, 1))
    assert index.find(path, len(path)) == [(6, bit)]
    index.change_group(worker, BlocksRemoved(pack_hashes(path[7:]), Tier.DEVICE, 1))
    assert index.find(path, len(path)) == [], "it lacks the first of the three that the place before needs"


RECORDINGS = Path(__file__).parents[1] / "data" / "kv_groups"


@pytest.mark.parametrize(
    ("kind", "group"), [("window", KvGroup(-(-(96 - 1) // BLOCK_SIZE))), ("state", KvGroup(1))], ids=["window", "state"]
)
def test_what_is_promised_is_what_the_engine_reused(kind: str, group: KvGroup) -> None:
    recorded = zlib.decompress((RECORDINGS / f"{kind}.msgpack.zlib").read_bytes())
    frames, asked = msgspec.msgpack.decode(recorded, type=tuple[list[bytes], list[tuple[list[int], int, int]]])
    reader = FrameReader()
    too_many = reused = 0
    for prompt, cached_tokens, published in asked:
        for payload in frames[len(reader.frames) : published]:
            reader.take(payload)
        promised, by_full_attention_alone = reader.promised(prompt)
        assert promised == cached_tokens
        too_many += max(0, by_full_attention_alone - cached_tokens)
        reused += cached_tokens

    assert reader.groups == [msgspec.to_builtins(GroupsReported((group,)))]
    assert any(b"BlockRemoved" in each for each in frames)
    assert too_many > 0, "full attention alone promises what cannot be resumed"
    assert reused > 10 * BLOCK_SIZE


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("needed", [1, 2, 63, 64, 65, 100, 499, 500, 501, WINDOW_BLOCKS_MAX])
def test_a_window_of_any_length_is_found_and_costs_no_more_than_the_prompt(needed: int, stride: int) -> None:
    index, source = PrefixIndex(), random.Random(needed)
    worker = WorkerKey(WorkerId("w"))
    bit = 1 << index.slot(worker)
    path = [source.getrandbits(64) for _ in range(500)]
    index.groups.report(bit, GroupsReported((KvGroup(needed, stride),), has_full_attention=False))
    of_group = path[stride - 1 :: stride]
    lacking = {source.randrange(len(of_group)) for _ in range(source.choice([0, 1, 3]))}
    index.groups.store(bit, 1, [each for at, each in enumerate(of_group) if at not in lacking], Tier.DEVICE)
    work = CountedLines([group_index])

    found = work.count(index.find, path)

    places = [end for end in range(1, len(of_group) + 1) if lacking.isdisjoint(range(max(0, end - needed), end))]
    assert found == ([(places[-1] * stride, bit)] if places else [])
    assert work.most["find"] < 20_000


@pytest.mark.parametrize(
    "report",
    [[[1, 0]], [[1, WINDOW_BLOCKS_MAX + 1]], [[WINDOW_BLOCKS_MAX + 1]], [[-1]], [[2**32 - 1]]],
    ids=["no stride", "a long stride", "a long window", "a negative window", "a window without end"],
)
def test_groups_that_cannot_be_cost_their_sender_alone(report: list[list[int]]) -> None:
    batch = msgspec.msgpack.encode(["w", 0, 1, 0, 0, [["GroupsReported", report]], "worker"])
    with pytest.raises(DecodeError, match="an event batch"):
        codec.event_batch.decode(batch)


def test_an_engine_with_a_window_without_end_needs_all_that_there_is() -> None:
    pool = Pool([1])
    [engine] = pool.engines
    prompt = PROMPTS[0]
    full, window = engine.store(prompt, 0, BLOCKS, set(), False)
    pool.frame(
        engine, [full, {**window, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2**32 - 1}]
    )

    assert pool.state.workers[engine.key].groups == GroupsReported((KvGroup(WINDOW_BLOCKS_MAX),))
    assert pool.promised(prompt) == [BLOCKS - 1]


def test_a_message_of_ever_new_groups_is_read_once() -> None:
    """One event a group, more groups than are told apart: each event costs the same, however long the message is."""
    lines: list[float] = []
    for size in (400, 4000):
        engine, translator = Pool([0]).engines[0], EngineTranslator(BLOCK, 10_000)
        [stored] = engine.store(PROMPTS[0], 0, 1, set(), False)
        events = decode_pub(frame_of([{**stored, "group_idx": number} for number in range(size)])).events
        work = CountedLines([translation])
        work.count(translator.translate, events)
        lines.append(work.most["translate"] / size)

    assert lines[1] <= lines[0]
