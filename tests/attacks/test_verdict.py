"""Everything that an attack must not achieve is found, and a pool that withstood it is not blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lab.attacks.attack import Attack, Outcome, Scene
from lab.attacks.bystanders import Window
from lab.attacks.pool import Look
from lab.attacks.verdict import LOG_BYTES_MAX, PEAK_GROWTH_MB, Seen, judge


async def nothing(scene: Scene) -> Outcome:
    return Outcome("")


ATTACK = Attack("an attack", "Does nothing.", nothing)
IDLE = Window(requests=200, shorts=150, short_p50_ms=5, short_p99_ms=10, short_max_ms=12)
DURING = Window(requests=400, shorts=300, short_p50_ms=9, short_p99_ms=29, short_max_ms=40)
BEFORE = Look({"router": 100.0, "w": 80.0}, {"router": 40, "w": 20}, {"router: active": 0.0}, 1.0)
AFTER = Look({"router": 119.0, "w": 80.0}, {"router": 43, "w": 20}, {"router: active": 0.0}, 1.0)
HELD = Seen(Outcome("nothing"), IDLE, DURING, BEFORE, AFTER, logs={"router": b"12:00 WARNING so\n"}, connections=3)


def test_a_pool_that_withstood_is_not_blamed() -> None:
    assert judge(ATTACK, HELD) == []
    assert HELD.latency_ratio == pytest.approx(2.9)
    assert HELD.memory_ratio == pytest.approx(1.19)


def during(**fields: Any) -> Seen:
    return replace(HELD, during=msgspec.structs.replace(DURING, **fields))


def after(**fields: Any) -> Seen:
    return replace(HELD, after=replace(AFTER, **fields))


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(HELD, outcome=Outcome("", ["it got a key"])), "it got a key"),
        (replace(HELD, deaths=["w ended with status -11"]), "w ended with status -11"),
        (during(errors=2, samples=["http-500"]), "2 of 400 requests of others failed, the first: http-500"),
        (during(wrong=1, samples=["wrong text"]), "1 of 400 answers to others were wrong: wrong text"),
        (during(short_p99_ms=31.0), "p99 of others' short requests was 31 ms, 3.1 times idle (10 ms)"),
        (during(shorts=3), "only 3 short requests of others were answered"),
        (replace(HELD, peak_growth_mb=PEAK_GROWTH_MB + 1), "memory grew by 1025 MB meanwhile, allowed are 1024"),
        (after(rss_mb={"router": 121.0, "w": 80.0}), "router holds 121 MB, 100 MB before"),
        (after(descriptors={"router": 44, "w": 20}), "router has 44 descriptors open, 40 before"),
        (after(books={"router: active": 1.0}), "router: active is 1, not 0"),
        (after(silent=["reading http://x: timed out"]), "reading http://x: timed out"),
        (after(lease_expiries=3.0), "2 leases of living workers ran out"),
        (replace(HELD, logs={"w": b"a" * (LOG_BYTES_MAX + 1)}), "w wrote 262145 bytes to its log, allowed are 262144"),
        (replace(HELD, logs={"w": b"red \x1b[31m"}), "w wrote control characters of others to its log"),
        (
            replace(HELD, logs={"w": b"Traceback (most recent call last):\n  File x\nKeyError: 'w9'\n"}),
            "w logged an exception that nobody expected: KeyError: 'w9'",
        ),
    ],
)
def test_what_fell_is_said(seen: Seen, said: str) -> None:
    assert judge(ATTACK, seen) == [said]


def test_what_an_attack_does_itself_is_no_fault_of_the_pool() -> None:
    kills = replace(ATTACK, may_kill=True, expiries_max=2, judge_latency=False)
    seen = replace(HELD, deaths=["w ended with status -9"], after=replace(AFTER, lease_expiries=3.0))
    slow = replace(seen, during=msgspec.structs.replace(DURING, short_p99_ms=30_000.0, shorts=3))

    assert judge(kills, slow) == []


def test_times_are_not_judged_where_they_say_nothing() -> None:
    assert judge(ATTACK, during(short_p99_ms=1000.0), judge_latency=False) == []
    assert during(shorts=3).latency_ratio is None
