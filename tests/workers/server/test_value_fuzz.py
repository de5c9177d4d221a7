"""Values of an engine, not bytes: impossible numbers at any place of an answer, an event or a statistic.

``POOLGRID_EXAMPLES_FACTOR=50`` tries fifty times as many (``make fuzz``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.kernel.kv_events.pub import decode_pub
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.kv_events.trtllm import parse_event
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import EventBatch
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.plugins.trtllm.core.outputs import OutputCursor, prompt_logprobs
from poolgrid.plugins.trtllm.core.statistics import load_of, parse_statistics
from poolgrid.plugins.trtllm.metrics import TrtllmMetrics
from tests.examples import examples

NAN, INFINITE = float("nan"), float("inf")
NUMBERS: list[Any] = [
    -1,
    0,
    1,
    2,
    -(2**31),
    2**31,
    2**32 - 1,
    2**32,
    -(2**63),
    2**63,
    2**64 - 1,
    2**64,
    10**40,
    10**400,
]
OTHERS: list[Any] = [0.5, -0.0, 1e308, True, False, None, "", "7", "-1", [], {}, [[]], {"a": 1}]
TOKENS = (11, 12, 13, 14)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container and key of a tree."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def spoilt(source: random.Random, value: Any, more: list[Any] | None = None) -> Any:
    """Return a tree with impossible values at one to three of its places."""
    made = copy.deepcopy(value)
    for _ in range(source.randint(1, 3)):
        found = list(places(made))
        if not found:
            break
        container, key = source.choice(found)
        wrong = copy.deepcopy(source.choice(NUMBERS + OTHERS + (more or [])))
        if isinstance(container[key], list) and source.random() < 0.3:
            wrong = container[key] * source.choice((0, 2, 300))
        container[key] = wrong
    return made


PUBLISHED: list[Any] = [
    1_700_000_000.5,
    [
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": [5, 6, 7, 8, 9, 10, 11, 12],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "group_idx": 0,
        },
        ["BlockStored", [3], 2, [1, 2, 3, 4], 4, None, "CPU", None, None],
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"},
        ["AllBlocksCleared"],
        {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1] * 4, "block_size": 4},
    ],
    0,
]


def test_values_of_a_publisher_are_told_within_the_wires_bounds_or_not_at_all() -> None:
    source = random.Random("values of publishers")
    encode = msgspec.msgpack.Encoder().encode
    translator, told = EngineTranslator(4, 10_000), ReportedBlocks()
    read = 0
    for _ in range(examples(3000)):
        value = spoilt(source, PUBLISHED, [b"", b"x" * 8, b"x" * 80, NAN, INFINITE])
        try:
            payload = encode(value)
        except OverflowError:
            continue  # no message carries it
        try:
            batch = decode_pub(payload)
        except DecodeError:
            continue
        read += 1
        events = translator.translate(batch.events)
        frame = codec.event_batch.encode(EventBatch("w", 0, 1, 0, batch.time_ms, events))
        assert codec.event_batch.decode(frame).events == events
        told.apply(events)
        told.restate()
    assert read > examples(500)


TRTLLM_EVENTS: list[Any] = [
    {"event_id": 0, "window_size": 64, "data": {"type": "created", "num_blocks_per_cache_level": [100, 0]}},
    {
        "event_id": 1,
        "window_size": 64,
        "attention_dp_rank": 0,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {
                    "block_hash": 1,
                    "tokens": [{"token_id": each, "token_extra_id": 0} for each in range(4)],
                    "cache_level": 0,
                    "priority": 35,
                    "mm_keys": [],
                }
            ],
        },
    },
    {
        "event_id": 2,
        "window_size": 64,
        "data": {"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0, "new_value": 1}},
    },
    {"event_id": 3, "window_size": 64, "data": {"type": "removed", "block_hashes": [1]}},
]


def test_values_of_tensorrt_llms_events_are_told_within_the_wires_bounds_or_not_at_all() -> None:
    source = random.Random("values of TensorRT-LLM's events")
    metrics = TrtllmMetrics(CollectorRegistry())
    translator = EventTranslator(4)
    read = 0
    for _ in range(examples(2000)):
        events = []
        for item in spoilt(source, TRTLLM_EVENTS, [NAN, INFINITE]):
            try:
                events.append(parse_event(item))
            except DecodeError:
                continue
        read += len(events)
        translation = translator.translate(events)
        frame = codec.event_batch.encode(EventBatch("w", 0, 1, 0, 0, [*translation.events]))
        assert codec.event_batch.decode(frame).events == translation.events
        metrics.observe_events(0, len(events), translator)
        translator.restate()
    assert read > examples(2000)


STATISTICS: dict[str, Any] = {
    "iter": 5,
    "iterLatencyMS": 1.5,
    "numActiveRequests": 2,
    "numQueuedRequests": 1,
    "attentionDpRank": 0,
    "kvCacheStats": {"maxNumBlocks": 9, "usedNumBlocks": 3, "cacheHitRate": 0.5},
    "inflightBatchingStats": {"numPausedRequests": 1, "numCtxTokens": 3, "numQueuedCtxTokens": None},
}


def test_values_of_statistics_are_shown_or_left_out() -> None:
    source = random.Random("values of statistics")
    metrics = TrtllmMetrics(CollectorRegistry())
    read = 0
    for _ in range(examples(2000)):
        try:
            statistics = parse_statistics(spoilt(source, STATISTICS, [NAN, INFINITE, -1.5]))
        except DecodeError:
            continue
        read += 1
        metrics.observe_load(statistics)
        load = load_of(statistics, 0)
        frame = codec.event_batch.encode(EventBatch("w", 0, 1, 0, 0, [load]))
        assert codec.event_batch.decode(frame).events == [load]
    assert read > examples(100)


class _Entry:
    def __init__(self, logprob: Any) -> None:
        self.logprob = logprob


class _Output:
    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs


def test_values_of_tensorrt_llms_outputs_are_log_probabilities_or_unreadable() -> None:
    source = random.Random("values of outputs")
    wrong = [*NUMBERS, NAN, INFINITE, -INFINITE, -0.5]
    for _ in range(examples(2000)):
        rows = [{source.choice((*TOKENS, *NUMBERS)): _Entry(source.choice(wrong)) for _ in range(2)} for _ in TOKENS]
        token_ids = [source.choice((*TOKENS, *NUMBERS)) if source.random() < 0.1 else each for each in TOKENS]
        try:
            made = (OutputCursor(1).take(_Output(token_ids, rows))[1] or ()) + prompt_logprobs(TOKENS, rows, 1)
        except Exception:
            continue
        for row in made:
            assert -9999.0 <= row.logprob <= 0.0
            for token_id, value in row.alternatives:
                assert 0 <= token_id < 2**32
                assert -9999.0 <= value <= 0.0
