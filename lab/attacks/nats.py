"""Attacks on a pool's NATS streams: messages that no process of the pool wrote."""

from __future__ import annotations

import asyncio

from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.names import forged
from lab.attacks.pool import NAMESPACE, Shape
from tests.nats.pool import last_entry, publish

ON_NATS = Shape(finds="nats")
SUBJECTS = (
    "$O.poolgrid-default-snapshots.M.x",
    "$O.poolgrid-default-snapshots.C.x",
    "poolgrid.default.journal.x",
    f"$KV.poolgrid-names.{NAMESPACE}.consolidator.x",
    f"$KV.poolgrid-names.{NAMESPACE}.worker.x",
)
BODIES = (b"null", b"hello", b"", b"{}", b"[]", b"\xff\xfe", b"9" * 5000)
GROW_TIMEOUT_S = 30.0


async def foreign(scene: Scene) -> Outcome:
    """Publish foreign messages all the while; the journal grows nevertheless."""
    pool = scene.pool
    assert pool.nats is not None
    url = pool.nats.url
    streams = ("poolgrid-default",)
    sent = 0
    until = scene.deadline()
    while True:
        for subject in SUBJECTS:
            await asyncio.to_thread(publish, url, subject, scene.random.choice(BODIES))
            sent += 1
        if asyncio.get_running_loop().time() > until:
            break
    life = "f" * 24
    await asyncio.to_thread(publish, url, f"$KV.poolgrid-names.{NAMESPACE}.consolidator.{life}", forged(life))
    # Nothing foreign comes any more: what grows now is the pool's own.
    faults = []
    before = {stream: await asyncio.to_thread(last_entry, url, stream) for stream in streams}
    for stream in streams:
        try:
            async with asyncio.timeout(GROW_TIMEOUT_S):
                # Another process writes there.
                while await asyncio.to_thread(last_entry, url, stream) <= before[stream]:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        except TimeoutError:
            faults.append(f"nothing is stored in stream {stream} any more")
    return Outcome(f"{sent + 1} messages", faults)


async def takeover(scene: Scene) -> Outcome:
    """Publish foreign messages, and end the active consolidator: the other one takes over."""
    outcome = await foreign(scene)
    pool = scene.pool
    assert pool.nats is not None
    first = pool.service("consolidator")
    await scene.at_home(first.stop())
    pool.services.remove(first)
    before = await asyncio.to_thread(last_entry, pool.nats.url, "poolgrid-default")
    try:
        async with asyncio.timeout(GROW_TIMEOUT_S):
            while await asyncio.to_thread(last_entry, pool.nats.url, "poolgrid-default") <= before + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    except TimeoutError:
        outcome.faults.append("no consolidator took over")
    return outcome


PART = Part(
    "nats",
    "A pool on NATS",
    (
        Attack(
            "foreign messages",
            "Publishes `null`, text and garbage on the subjects of journal, snapshots and names.",
            foreign,
            ON_NATS,
            short=False,
            judge_latency=False,
        ),
        Attack(
            "foreign messages and a takeover",
            "Publishes the same, then ends the active consolidator.",
            takeover,
            ON_NATS,
            short=False,
            judge_latency=False,
            expiries_max=2,
            descriptors_more=32,
        ),
    ),
)
