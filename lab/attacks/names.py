"""Attacks on names in a directory: entries that another process wrote there."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.pool import NAMESPACE, Shape
from lab.benchmarks.services import PoolFailed

NAMED = Shape(finds="names")
DEAD = "tcp://127.0.0.1:9"
LATEST_LIFE = "f" * 24
GARBAGE = (b"", b"null", b"hello", b"{}", b"[" * 2000, b"\xff" * 100, b"x" * 1_000_000)
JOIN_TIMEOUT_S = 30.0


def forged(life: str, lease_ms: int = 600_000) -> bytes:
    """Return the entry of a consolidator at an address at which nothing listens."""
    entry = {
        "namespace": NAMESPACE,
        "component": "consolidator",
        "instance": "forged",
        "life": life,
        "lease_ms": lease_ms,
        "endpoints": {"ingest": DEAD, "feed": DEAD, "query": DEAD},
    }
    return json.dumps(entry).encode()


async def with_entries(scene: Scene, entries: Iterator[tuple[str, bytes]]) -> Outcome:
    """Write entries, have a worker join beside them, and take them away at the end."""
    pool = scene.pool
    written = []
    for life, data in entries:
        path = pool.names / f"{NAMESPACE}.consolidator.{life}.json"
        begun = path.with_suffix(".begun")
        begun.write_bytes(data)
        os.replace(begun, path)
        written.append(path)
    faults: list[str] = []
    try:
        await asyncio.sleep(scene.seconds)
        ready = await pool.ready_workers(pool.url)
        if ready < 2:
            faults.append(f"{ready} of 2 workers are left")
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                name = f"late-{scene.random.getrandbits(32):08x}"
                late = await scene.at_home(pool.start_worker(name, ""))
        except (PoolFailed, TimeoutError) as error:
            faults.append(f"a worker could not join: {error}")
        else:
            await scene.at_home(late.stop())
            pool.services.remove(late)
    finally:
        for path in written:
            path.unlink(missing_ok=True)
    return Outcome(f"{len(written)} entries", faults)


async def forged_consolidator(scene: Scene) -> Outcome:
    """Register a later consolidator that is not there."""
    return await with_entries(scene, iter([(LATEST_LIFE, forged(LATEST_LIFE))]))


async def garbage(scene: Scene) -> Outcome:
    """Write what is no entry, or one under another name, of another lease or with too many neighbours."""

    def entries() -> Iterator[tuple[str, bytes]]:
        for number, data in enumerate(GARBAGE):
            yield f"{number:024x}", data
        yield "e" * 24, forged("d" * 24)
        yield "c" * 24, forged("c" * 24, lease_ms=10**15)
        for number in range(scene.count(2000, 50)):
            yield f"{number:023x}a", forged(f"{number:023x}a")

    return await with_entries(scene, entries())


PART = Part(
    "names",
    "Service discovery in a directory",
    (
        Attack(
            "forged consolidator",
            "Registers a newer consolidator at an address without a listener; a worker joins.",
            forged_consolidator,
            NAMED,
            expiries_max=1,
            short=False,
            judge_latency=False,
        ),
        Attack(
            "garbage entries",
            "Writes unreadable, oversized, misnamed and thousands of entries; a worker joins.",
            garbage,
            NAMED,
            expiries_max=1,
            short=False,
            judge_latency=False,
        ),
    ),
)
