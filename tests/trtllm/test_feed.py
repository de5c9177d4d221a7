"""Events and statistics are read out of the fake completely, in time, and never wrongly; each test names its trap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.events import BlocksStored, CacheCleared
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.plugins.trtllm.core.statistics import EngineStatistics
from poolgrid.plugins.trtllm.feed import TrtllmFeed
from poolgrid.plugins.trtllm.metrics import TrtllmMetrics
from poolgrid.plugins.trtllm.reader import FeedLimits
from poolgrid.server.process.clock import SystemClock
from tests.clock import HandClock
from tests.fakes.tensorrt_llm import LLM, SamplingParams, SchedulingParams
from tests.fakes.tensorrt_llm._fake import behaviour as behaviours
from tests.fakes.tensorrt_llm._fake.executor import Executor
from tests.fakes.tensorrt_llm.executor import RequestError
from tests.fakes.tensorrt_llm.llmapi import KvCacheConfig
from tests.workers.builders import fold

BLOCK = 4
PATIENCE_S = 120.0
"""How long a slow machine may take for what takes milliseconds."""

QUICK = FeedLimits(pause_min_ms=1, pause_max_ms=2, idle_pause_max_ms=5)
Held = dict[Tier, set[int]]


def behave(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    monkeypatch.setattr(behaviours, "behaviour", replace(behaviours.behaviour, **values))


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with room for a few blocks, so that things are evicted."""
    behave(monkeypatch, device_blocks=12, block_bytes=1)


def make(**arguments: Any) -> LLM:
    cache = {"event_buffer_max_size": 10_000, "tokens_per_block": BLOCK, **arguments.pop("kv_cache_config", {})}
    return LLM(
        "m",
        skip_tokenizer_init=True,
        kv_cache_config=KvCacheConfig(**cache),
        **{"enable_iter_perf_stats": True, **arguments},
    )


def executor_of(llm: LLM) -> Executor:
    assert llm._executor is not None
    return llm._executor


async def finish(llm: LLM, prompt: list[int], max_tokens: int = 4, rank: int | None = None) -> None:
    where = SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
    await llm.generate_async(prompt, SamplingParams(max_tokens=max_tokens, end_id=-1), scheduling_params=where)


def truth(llm: LLM, rank: int = 0) -> Held:
    """What a rank of the fake holds; the requests must be done."""
    return fold(llm.resident_blocks(rank))


class Reading:
    """A feed that runs, and what a reader of it believes."""

    def __init__(self, llm: Any, ranks: int = 1, limits: FeedLimits = QUICK, clock: Any = None, **more: Any) -> None:
        self.registry = CollectorRegistry()
        self.feed = TrtllmFeed(llm, ranks, BLOCK, clock or SystemClock(), TrtllmMetrics(self.registry), limits, **more)
        self.held: list[Held] = [{tier: set() for tier in Tier} for _ in range(ranks)]
        self.told: list[object] = []
        self.loads: list[tuple[int, EngineStatistics]] = []
        self._changed = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self.feed.run(self._on_cache, self._on_load))

    def _on_cache(self, rank: int, events: Any) -> None:
        self.told += events
        fold(events, self.held[rank])
        restated = fold(self.feed.restate(rank))
        assert restated == self.held[rank], "a restatement says what was said"
        self._changed.set()

    def _on_load(self, rank: int, statistics: EngineStatistics) -> None:
        self.loads.append((rank, statistics))
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that changes when something is read."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._changed.clear()
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self.task.done():
                    self.task.result()

    async def until_exact(self, llm: LLM) -> None:
        await self.until(lambda: all(held == truth(llm, rank) for rank, held in enumerate(self.held)))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"poolgrid_trtllm_{name}", labels) or 0.0

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def reading(llm: Any, ranks: int = 1, **more: Any) -> AsyncIterator[Reading]:
    made = Reading(llm, ranks, **more)
    begun = asyncio.ensure_future(made.feed.has_begun())
    await asyncio.wait({begun, made.task}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    try:
        yield made
    finally:
        await made.stop()


@contextlib.contextmanager
def unread(llm: LLM) -> Iterator[None]:
    """Let nobody read events inside the block."""
    original = llm.get_kv_cache_events

    def nothing(timeout: float | None = 2) -> Any:
        return []

    llm.get_kv_cache_events = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.get_kv_cache_events = original  # type: ignore[method-assign]


def prompts(count: int, seed: int = 7) -> Iterator[list[int]]:
    """Prompts that share prefixes, of 4 to 15 tokens."""
    for at in range(count):
        yield [(at * seed + each) % 40 if each > 4 else at % 3 for each in range(4 + at * 5 % 12)]


# -- what is read is the truth -----------------------------------------------------------------------------------------


async def test_after_dropped_events_no_block_is_claimed_that_is_not_there_and_all_are_learnt_again(
    small_cache: None,
) -> None:
    """Fails when a hole in the event ids is not noticed: what was removed in it would be claimed for ever."""

    with make(kv_cache_config={"event_buffer_max_size": 40, "host_cache_size": 4}) as llm:
        async with reading(llm) as made:
            await finish(llm, [1, 2, 3, 4, 5])
            await made.until_exact(llm)
            with unread(llm):
                for prompt in prompts(40):
                    llm.generate(prompt, SamplingParams(max_tokens=3, end_id=-1))
            await made.until(lambda: made.metric("kv_event_gaps_total", dp_rank="0") > 0)
            assert made.metric("kv_events_lost_total", dp_rank="0") > 0
            assert made.metric("incomplete", dp_rank="0") == 1
            for at in range(20):
                await finish(llm, [1000 + at * 20 + each for each in range(9)], 2)
                await asyncio.sleep(0.005)
                held = truth(llm)
                await made.until(lambda: all(made.held[0][tier] <= held[tier] for tier in Tier))  # noqa: B023
            await made.until_exact(llm)
            assert made.metric("incomplete", dp_rank="0") == 0
            assert made.metric("kv_event_gaps_total", dp_rank="0") == 1


async def test_the_index_of_four_ranks_is_the_truth_after_offload_windows_and_losses_together(
    small_cache: None,
) -> None:
    """Fails when a rank's loss touches another rank, or when a loss of small-window events goes unnoticed."""

    cache = {"event_buffer_max_size": 30, "host_cache_size": 4, "max_attention_window": [8, 48]}
    with make(max_seq_len=48, tensor_parallel_size=4, enable_attention_dp=True, kv_cache_config=cache) as llm:
        async with reading(llm, ranks=4) as made:
            for rank in range(4):
                await finish(llm, [1, 2, 3, 4, 5], rank=rank)
            await made.until_exact(llm)
            with unread(llm):
                for at, prompt in enumerate(prompts(48)):
                    where = SchedulingParams(attention_dp_rank=at % 4, attention_dp_relax=False)
                    llm.generate(prompt, SamplingParams(max_tokens=3, end_id=-1), scheduling_params=where)

            def gaps() -> list[float]:
                return [made.metric("kv_event_gaps_total", dp_rank=str(rank)) for rank in range(4)]

            await made.until(lambda: all(gaps()))
            for at in range(120):
                await finish(llm, [1000 + at * 20 + each for each in range(9)], 2, rank=at % 4)
                if at % 4 == 3:
                    held = [truth(llm, rank) for rank in range(4)]
                    await made.until(
                        lambda: all(made.held[rank][tier] <= held[rank][tier] for rank in range(4) for tier in Tier)  # noqa: B023
                    )
            await made.until_exact(llm)
            assert gaps() == [1, 1, 1, 1]
            assert all(made.metric("incomplete", dp_rank=str(rank)) == 0 for rank in range(4))


# -- the traps of reading ----------------------------------------------------------------------------------------------


async def test_reading_begins_before_the_first_request() -> None:
    with make() as llm:
        async with reading(llm) as made:
            await asyncio.sleep(0.02)
            assert not made.task.done()
            await finish(llm, [1, 2, 3, 4, 5])
            made.feed.wake()
            await made.until_exact(llm)
            assert made.held[0][Tier.DEVICE]
            assert made.metric("reader_errors_total", reader="events") == 0


async def test_events_after_the_last_request_are_read_too(small_cache: None) -> None:
    with make(kv_cache_config={"host_cache_size": 8}) as llm:
        async with reading(llm) as made:
            await finish(llm, [1, 2, 3, 4, 5], 1)
            await made.until_exact(llm)
            for _ in range(3):  # each time after readings that found nothing
                await asyncio.sleep(0.02)
                executor = executor_of(llm)
                executor.pause()
                recorder = executor.recorders[0]
                (name,) = recorder.names
                tiers = (Tier.DEVICE, Tier.HOST)
                source, target = tiers if name in made.held[0][Tier.DEVICE] else tiers[::-1]
                recorder.moved([(name, None)], source, target)
                executor._publish()
                executor.resume()
                await made.until(lambda: name in made.held[0][target])  # noqa: B023 - awaited here


async def test_a_crash_of_the_serializer_costs_a_rank_its_index_and_nothing_else(
    small_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the loss of an iteration's events is not noticed, or ends the feed."""
    behave(monkeypatch, null_diff_crash=True)

    with make(kv_cache_config={"host_cache_size": 8}) as llm:
        async with reading(llm) as made:
            refused = 0
            for prompt in [*prompts(30), *prompts(3, seed=1)]:
                try:
                    await finish(llm, prompt)
                except RequestError:
                    refused += 1
            assert refused
            await made.until(lambda: made.metric("kv_event_gaps_total", dp_rank="0") > 0)
            executor_of(llm)._behaviour.null_diff_crash = False
            executor_of(llm).background_errors.clear()
            for at in range(20):
                await finish(llm, [1000 + at * 20 + each for each in range(9)], 2)
            await made.until_exact(llm)
            assert not made.task.done()


class ScriptedLlm:
    """Calls that do as told: items are given, exceptions raised; an empty script is an empty buffer."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.statistics: list[Any] = []
        self.endless: dict[str, Any] | None = None
        self.readings = 0

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        self.readings += 1
        return self._read(self.events, timeout)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._read(self.statistics, timeout)

    def _read(self, script: list[Any], timeout: float | None) -> list[Any]:
        assert timeout == 0, "a call with a timeout waits"
        found: list[Any] = []
        while script and not isinstance(script[0], BaseException):
            found.append(script.pop(0))
        if script and not found:
            raise script.pop(0)
        return found or ([self.endless] * 1000 if self.endless is not None else [])


def stored(event_id: int, engine_hash: int, first: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": first + at, "token_extra_id": 0} for at in range(BLOCK)]
    block = {
        "type": "stored_block",
        "block_hash": engine_hash,
        "tokens": tokens,
        "cache_level": 0,
        "priority": 35,
        **more.pop("block", {}),
    }
    return {
        "event_id": event_id,
        "data": {"type": "stored", "parent_hash": parent, "blocks": [block]},
        "window_size": 64,
        **more,
    }


def blocks_in(told: list[object]) -> int:
    return sum(len(unpack_hashes(each.sequence_hashes)) for each in told if isinstance(each, BlocksStored))


async def turns(llm: ScriptedLlm, count: int = 3) -> None:
    """Wait for a number of readings from now on."""
    before = llm.readings
    async with asyncio.timeout(PATIENCE_S):
        while llm.readings < before + count:  # noqa: ASYNC110 - the feed must not notice that it is watched
            await asyncio.sleep(0.001)


async def test_an_endless_flood_of_events_leaves_the_loop_its_turns() -> None:
    """Fails when a turn has no bound: reading what is there never suspends."""

    llm = ScriptedLlm()
    llm.endless = {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [1]}, "window_size": 1}
    async with reading(llm) as made:
        await turns(llm, 5)
        assert not made.task.done()


async def test_a_reader_that_fails_is_tried_again_and_costs_the_index_only_after_long() -> None:
    """Fails when an error ends the feed, or when claims are kept that nobody can vouch for any more."""

    llm, clock = ScriptedLlm(), HandClock()
    llm.events = [stored(0, 1, 0)]
    async with reading(llm, clock=clock) as made:
        await made.until(lambda: blocks_in(made.told) == 1)
        llm.events = [RuntimeError("broken pipe") for _ in range(100_000)]
        await turns(llm)
        assert made.held[0][Tier.DEVICE]
        assert made.feed.describe()["readers"]["events"] == "RuntimeError: broken pipe"  # type: ignore[index]
        clock.now_ms = QUICK.failing_clears_ms
        await made.until(lambda: made.told[-1] == CacheCleared())
        assert made.feed.describe()["ranks"][0]["state"] == "incomplete"  # type: ignore[index]
        llm.events = [stored(1, 2, 4, parent=1)]
        await made.until(lambda: len(made.held[0][Tier.DEVICE]) == 2)
        assert made.told.count(CacheCleared()) == 1
        assert made.feed.describe()["readers"] == {"events": "ok", "statistics": "ok"}


async def test_an_event_of_a_wrong_shape_is_dropped_and_clears_its_rank() -> None:
    """Fails when it ends the feed, or when what it said is forgotten silently."""

    llm = ScriptedLlm()
    llm.events = [stored(0, 1, 0), stored(1, 2, 4, block={"tokens": None}), stored(2, 3, 8)]
    async with reading(llm) as made:
        await made.until(lambda: bool(made.held[0][Tier.DEVICE]))
        assert made.told.count(CacheCleared()) == 1
        assert len(made.held[0][Tier.DEVICE]) == 1
        assert made.metric("undecodable_items_total", reader="events") == 1
        assert made.metric("kv_events_lost_total", dp_rank="0") == 1


async def test_an_event_or_statistics_of_no_rank_of_ours_is_dropped() -> None:
    llm = ScriptedLlm()
    llm.events = [stored(0, 1, 0, attention_dp_rank=7), stored(0, 1, 0), stored(0, 1, 0, attention_dp_rank=1)]
    llm.statistics = [{"iter": 1, "attentionDpRank": 9}, {"iter": None}, {"iter": "x"}]
    async with reading(llm, ranks=2) as made:
        await made.until(lambda: bool(made.held[1][Tier.DEVICE]) and bool(made.loads))
        assert not made.held[0][Tier.DEVICE]
        assert made.metric("undecodable_items_total", reader="events") == 2
        assert made.metric("undecodable_items_total", reader="statistics") == 2


async def test_an_idle_feed_reads_seldom_and_a_request_wakes_it() -> None:
    """Fails when ``wake`` does nothing: the test would wait for an hour."""

    llm = ScriptedLlm()
    limits = FeedLimits(pause_min_ms=1, pause_max_ms=1, pause_growth=1e9, idle_after_ms=0, idle_pause_max_ms=3_600_000)
    async with reading(llm, limits=limits) as made:
        await asyncio.sleep(0.02)
        llm.events = [stored(0, 1, 0)]
        made.feed.wake()
        await made.until(lambda: blocks_in(made.told) == 1)


# -- statistics --------------------------------------------------------------------------------------------------------


async def test_statistics_become_loads_and_metrics() -> None:
    with make() as llm:
        async with reading(llm) as made:
            await finish(llm, [1, 2, 3, 4, 5, 6, 7, 8, 9], 6)
            await finish(llm, [1, 2, 3, 4, 5, 6, 7, 8, 9], 6)
            # What came of both; the engine may step once more, with nothing to do, and its statistics come later.
            done = executor_of(llm)._iteration
            await made.until_exact(llm)
            await made.until(lambda: bool(made.loads) and made.loads[-1][1].iteration >= done)
            cache = made.loads[-1][1].kv_cache
            assert cache is not None
            assert cache.max_num_blocks == 1024
            assert made.metric("kv_hit_ratio", dp_rank="0") > 0
            assert made.metric("kv_events_total", dp_rank="0") > 0
            assert made.metric("indexed_blocks", dp_rank="0", tier="device") == len(made.held[0][Tier.DEVICE])
