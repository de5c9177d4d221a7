"""Faults of real engines and of what surrounds them: each is named, or none is, and no other worker is blamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poolgrid.server.diagnosis.causes import Cause
from tests.diagnosis.engine_faults import FAULTS, HEALTHY, NOT_KNOWN, EngineFault, pair
from tests.diagnosis.engine_pool import Engine, Traffic

NAMED_AT_LEAST = 20
"""Different faults that a verdict names."""


def name_of(fault: EngineFault) -> str:
    return fault.what


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_a_fault_is_named_or_reported_as_not_known_with_a_next_step(fault: EngineFault) -> None:
    verdicts = fault.make().play(fault.traffic)

    for worker, verdict in verdicts.items():
        if worker not in fault.workers:
            assert not verdict.cause.is_fault, verdict
        elif fault.named:
            assert verdict.cause in fault.named, verdict
        else:
            assert verdict.cause in (Cause.REUSES_LESS, Cause.REUSES_MORE, Cause.UNMATCHED), verdict
            assert "not yet known why" in verdict.cause.meaning
            assert "run `poolgrid engine-check" in verdict.cause.fix


def test_most_faults_are_named() -> None:
    assert sum(bool(fault.named) for fault in FAULTS) >= NAMED_AT_LEAST
    assert len({cause for fault in FAULTS for cause in fault.named}) >= NAMED_AT_LEAST - 2


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_other_traffic_does_not_make_a_fault_look_like_another(fault: EngineFault) -> None:
    """Every second one within seconds, and the others over minutes."""
    pool = fault.make()
    number = FAULTS.index(fault)
    changes = replace(fault.traffic, seed=number, gap_ms=40.0) if number % 2 else replace(fault.traffic, gap_ms=2_500.0)
    pool.play(changes, looks_every=3)

    blamed = {(worker, cause) for worker, cause in pool.alarms if worker not in fault.workers}
    wrong = {cause for _, cause in pool.alarms} - NOT_KNOWN - {*fault.named}
    assert not blamed
    assert not wrong


@pytest.mark.parametrize("fault", HEALTHY, ids=name_of)
def test_what_is_no_fault_raises_no_alarm_at_any_time(fault: EngineFault) -> None:
    pool = fault.make()
    pool.play(fault.traffic, looks_every=2)

    assert not pool.alarms


A_DAY = Traffic(requests=4_800, gap_ms=18_000.0, talks=12)
"""Four requests every 72 seconds."""


def test_a_healthy_pool_stays_clean_for_a_day() -> None:
    pool = pair()
    pool.put("b", Engine(blocks=180))

    pool.play(A_DAY, looks_every=8)

    assert pool.now_ms >= 86_400_000
    assert not pool.alarms
