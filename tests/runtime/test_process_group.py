from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from poolgrid.runtime.instruments import Counter, Gauge, Histogram
from poolgrid.runtime.process_group import GROUP_VARIABLE, GroupMember, GroupMetrics, GroupPlace


def test_the_parent_tells_a_child_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GROUP_VARIABLE, raising=False)
    assert GroupPlace.from_environment() is None
    place = GroupPlace(Path("/tmp/a:b"), 1, 4)
    monkeypatch.setenv(GROUP_VARIABLE, place.to_environment())
    assert GroupPlace.from_environment() == place


def test_the_group_is_ready_when_every_member_is(tmp_path: Path) -> None:
    first, second = (GroupMember(GroupPlace(tmp_path, index, 2)) for index in range(2))
    assert first.missing() == "HTTP process 0, 1 of 2 is not ready"
    first.set_ready(True)
    assert (first.missing(), second.missing()) == ("HTTP process 1 of 2 is not ready",) * 2
    second.set_ready(True)
    assert first.missing() is second.missing() is None
    # What the kernel does for a process that died.
    second.set_ready(False)
    assert first.missing() == "HTTP process 1 of 2 is not ready"


def registry(requests: int, latency_s: float, offset: int, in_flight: int) -> CollectorRegistry:
    made = CollectorRegistry()
    counter = Counter("poolgrid_frontend_requests_total", "Requests.", ["status"], registry=made)
    counter.labels("200").inc(requests)
    if requests > 5:
        counter.labels("429").inc()
    Histogram("poolgrid_seconds", "Time.", buckets=(0.1, 1), registry=made).observe(latency_s)
    Gauge("poolgrid_router_journal_offset", "Offset.", across="largest", registry=made).set(offset)
    Gauge("poolgrid_frontend_in_flight_requests", "Now.", ["endpoint"], across="sum", registry=made).labels("chat").set(
        in_flight
    )
    return made


def test_metrics_of_all_members_are_those_of_one_service(tmp_path: Path) -> None:
    async def go() -> str:
        registries = [registry(3, 0.05, 100, 1), registry(7, 0.5, 90, 2), registry(0, 5, 100, 0)]
        members = [GroupMember(GroupPlace(tmp_path, index, 4)) for index in range(3)]
        metrics = [GroupMetrics(made, member) for made, member in zip(registries, members, strict=True)]
        for member, shown in zip(members, metrics, strict=True):
            await member.start({"metrics": shown.text})
        try:
            # The fourth member is not there and is left out.
            return (await asyncio.to_thread(generate_latest, metrics[1])).decode()
        finally:
            for member in members:
                await member.stop()

    lines = set(asyncio.run(go()).splitlines())
    assert {
        'poolgrid_frontend_requests_total{status="200"} 10.0',
        'poolgrid_frontend_requests_total{status="429"} 1.0',
        'poolgrid_seconds_bucket{le="0.1"} 1.0',
        'poolgrid_seconds_bucket{le="1.0"} 2.0',
        'poolgrid_seconds_bucket{le="+Inf"} 3.0',
        "poolgrid_seconds_count 3.0",
        "poolgrid_seconds_sum 5.55",
        "poolgrid_router_journal_offset 100.0",
        'poolgrid_frontend_in_flight_requests{endpoint="chat"} 3.0',
        "# TYPE poolgrid_frontend_requests_total counter",
    } <= lines


def test_a_question_that_nobody_knows_is_answered_with_nothing(tmp_path: Path) -> None:
    async def go() -> list[bytes]:
        asked, asking = (GroupMember(GroupPlace(tmp_path, index, 2)) for index in range(2))
        await asked.start({"metrics": lambda: b"x"})
        try:
            return await asyncio.to_thread(asking.ask_siblings, "x" * 5000)
        finally:
            await asked.stop()

    assert asyncio.run(go()) == [b""]
