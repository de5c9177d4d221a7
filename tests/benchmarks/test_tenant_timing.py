"""The measurement tells a cache that tenants share from one that they do not, on a clock that only work moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lab.benchmarks import tenant_timing
from lab.benchmarks.tenant_timing import ATTACKER, VICTIM, Ask, Row, Things, measure


def measured(monkeypatch: pytest.MonkeyPatch, shared: bool, one_tenant: bool = False) -> Row:
    now = [0.0]
    kept: set[tuple[str, int]] = set()

    @asynccontextmanager
    async def cache(size: int, source: random.Random) -> AsyncIterator[Things]:
        def things(number: int) -> Ask:
            async def ask(tenant: str) -> None:
                assert tenant in (VICTIM, ATTACKER)
                key = ("" if shared else tenant, number)
                now[0] += source.gauss(0.010 if key in kept else 0.013, 0.003)
                kept.add(key)

            return ask

        yield things

    monkeypatch.setattr(tenant_timing, "CACHES", {"planted": cache})
    monkeypatch.setattr("lab.benchmarks.tenant_timing.time.perf_counter", lambda: now[0])
    [row] = asyncio.run(measure(sizes=(1000,), one_tenant=one_tenant))
    return row


def test_a_cache_that_tenants_share_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, shared=True)

    assert row.told_apart
    assert row.area > 0.7
    assert row.accuracy > 0.6
    assert row.seen_ms < row.unseen_ms


def test_one_that_is_divided_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, shared=False)

    assert not row.told_apart
    assert 0.4 < row.area < 0.6
