from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from poolgrid.process import process_group
from poolgrid.process.instruments import Counter, Gauge, Histogram
from poolgrid.process.process_group import GROUP_VARIABLE, GroupMember, GroupMetrics, GroupPlace


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


def traced(at: float, trace_id: str) -> CollectorRegistry:
    made = CollectorRegistry()
    histogram = Histogram("poolgrid_seconds", "Time.", ["model"], buckets=(0.1, 1), registry=made)
    histogram.labels("tiny").observe(5)
    histogram.labels("tiny").observe_traced(at, trace_id)
    Counter("poolgrid_requests_total", "# EXEMPLARS are no part of this.", registry=made).inc()
    return made


def test_a_bucket_of_all_members_names_the_latest_trace_of_any(tmp_path: Path) -> None:
    async def go() -> bytes:
        registries = [traced(0.05, "a" * 32), traced(0.06, "b" * 32), traced(0.5, "c" * 32)]
        members = [GroupMember(GroupPlace(tmp_path, index, 3)) for index in range(3)]
        metrics = [GroupMetrics(made, member) for made, member in zip(registries, members, strict=True)]
        for member, shown in zip(members, metrics, strict=True):
            await member.start({"metrics": shown.text})
        try:
            return await asyncio.to_thread(openmetrics, metrics[0])
        finally:
            for member in members:
                await member.stop()

    text = asyncio.run(go()).decode()
    found = {
        (sample.labels["le"], sample.value): sample.exemplar and sample.exemplar.labels["trace_id"][0]
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.name == "poolgrid_seconds_bucket"
    }
    assert found == {("0.1", 2.0): "b", ("1.0", 3.0): "c", ("+Inf", 6.0): None}


def test_an_answer_on_the_event_loop_is_told_what_it_is_about(tmp_path: Path) -> None:
    async def go() -> tuple[bytes, bytes]:
        asked, asking = (GroupMember(GroupPlace(tmp_path, index, 2)) for index in range(2))
        await asked.start({}, {"echo": lambda about: about.encode() * 100_000})
        try:
            return await asking.ask_member(0, "echo a b"), await asking.ask_member(0, "nobody knows")
        finally:
            await asked.stop()

    assert asyncio.run(go()) == (b"a b" * 100_000, b"")


def test_a_member_that_is_not_there_or_says_too_much_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "ANSWER_BYTES_MAX", 10)

    async def go() -> None:
        asked, asking = (GroupMember(GroupPlace(tmp_path, index, 2)) for index in range(2))
        with pytest.raises(FileNotFoundError):
            await asking.ask_member(0, "echo")
        await asked.start({}, {"echo": lambda about: b"x" * 11})
        try:
            with pytest.raises(OSError, match="more than 10 bytes"):
                await asking.ask_member(0, "echo")
        finally:
            await asked.stop()

    asyncio.run(go())


def test_a_question_that_nobody_knows_is_answered_with_nothing(tmp_path: Path) -> None:
    async def go() -> list[bytes]:
        asked, asking = (GroupMember(GroupPlace(tmp_path, index, 2)) for index in range(2))
        await asked.start({"metrics": lambda: b"x"})
        try:
            return await asyncio.to_thread(asking.ask_siblings, "x" * 5000)
        finally:
            await asked.stop()

    assert asyncio.run(go()) == [b""]
