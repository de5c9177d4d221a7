"""Each seeded fault is named within 100 requests of simulated engines; pools without one raise no alarm."""

from __future__ import annotations

import pytest

from poolgrid.plugins.bench.trace import read_trace
from poolgrid.server.diagnosis.causes import Cause
from tests.diagnosis.faulty_pool import (
    Fault,
    FaultyPool,
    an_hour,
    cleared_frames,
    conversations,
    lost_frames,
    mangled,
    silent_host_tier,
    starts,
    steps_from_zero,
    unrelated,
    with_wrong_window,
    without_cache_events,
)
from tests.simulation.builders import CONVERSATION

FAULTS = [
    (Cause.BLOCK_SIZE, Fault("wrong block size", engine_block=128)),
    (Cause.WINDOW, Fault("window wrong", edit=with_wrong_window)),
    (Cause.RESTART, Fault("engine restarted", edit=steps_from_zero, forget_at=50)),
    (Cause.GAP, Fault("gap with replay off", edit=lost_frames)),
    (Cause.GAP, Fault("gap cleared by the worker", edit=cleared_frames)),
    (Cause.TOKENIZER, Fault("tokenizer", edit=starts(lambda each: {"isl": each.isl * 21 // 20}), engine_path=mangled)),
    (Cause.FOREIGN, Fault("foreign traffic", routers=2, blocks=170)),
    (Cause.TIER, Fault("tier without events", edit=silent_host_tier, blocks=130, host_blocks=4000)),
]
"""What engines in one process (``engine_faults``) do not have, or workers that report requests at their start."""


@pytest.mark.parametrize(("cause", "fault"), FAULTS, ids=[fault.name for _, fault in FAULTS])
def test_seeded_fault_is_named_within_a_hundred_requests(cause: Cause, fault: Fault) -> None:
    (verdict,) = FaultyPool(fault).verdicts()

    assert verdict.cause is cause, verdict
    assert verdict.requests <= 100


@pytest.mark.parametrize(
    ("blocks", "delay_ms", "policy"),
    [(2500, 0.0, "kv"), (1900, 20.0, "round-robin")],
    ids=["evicting", "thrashing-round-robin"],
)
def test_load_without_fault_raises_no_alarm(blocks: int | None, delay_ms: float, policy: str) -> None:
    fault = Fault(rows=read_trace(CONVERSATION, 200), blocks=blocks)
    verdicts = FaultyPool(fault, workers=2, event_delay_ms=delay_ms, policy=policy).verdicts()

    assert not [verdict for verdict in verdicts if verdict.cause.is_fault]


@pytest.mark.parametrize("blocks", [None, 1200], ids=["roomy", "evicting"])
def test_an_hour_under_load_raises_no_alarm_at_any_time(blocks: int | None) -> None:
    pool = FaultyPool(Fault(rows=an_hour(1), blocks=blocks), workers=3, event_delay_ms=20.0)

    assert not pool.watched()
    assert pool.sent > 1000


def test_cold_workload_raises_no_alarm_at_any_time() -> None:
    assert not FaultyPool(Fault(rows=unrelated(1000)), workers=2, event_delay_ms=20.0).watched()


def test_cold_workload_is_called_cold() -> None:
    (verdict,) = FaultyPool(Fault(rows=unrelated())).verdicts()

    assert verdict.cause is Cause.COLD


def test_two_routers_with_room_for_both_raise_no_alarm() -> None:
    (verdict,) = FaultyPool(Fault(routers=2)).verdicts()

    assert verdict.cause is Cause.AGREES, verdict


def test_healed_stream_is_acquitted() -> None:
    fault = Fault(edit=without_cache_events(40, 60), rows=conversations(240))
    (verdict,) = FaultyPool(fault).verdicts()

    assert verdict.cause is Cause.AGREES, verdict
