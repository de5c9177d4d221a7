"""Suspended processes for a while, as after SIGSTOP, a suspended machine or a long stall of its disk."""

from __future__ import annotations

import asyncio

import psutil

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.pool import Shape, Topology, until

PAUSES_S = (4, 8, 30)
"""Longer than a lease (3 s), than the silence after which a worker counts as unreachable (5 s), and than most."""

AFTER_S = 5.0
"""How long the streams go on afterwards: what is judged too late shows itself then."""

REJOIN_TIMEOUT_S = 30.0

WHO: dict[Topology, tuple[tuple[str, str], ...]] = {
    "own": (("consolidator", "consolidator"), ("router", "router"), ("aggregated-0", "a worker")),
    "embedded": (("router", "router with its consolidator"), ("aggregated-0", "a worker")),
    "disaggregated": (
        ("consolidator", "consolidator"),
        ("router", "router"),
        ("prefill-0", "a prefill worker"),
        ("decode-0", "a decode worker"),
    ),
    "fleet": (
        ("global-router", "global router"),
        ("router-one", "a pool's router with its consolidator"),
        ("one-0", "a worker"),
    ),
}
TITLES: dict[Topology, str] = {
    "own": "consolidator of its own",
    "embedded": "consolidator in the router",
    "disaggregated": "disaggregated",
    "fleet": "two pools",
}


def pausing(name: str, seconds: int) -> Run:
    """Return an attack that stops a process for so long."""

    async def run(scene: Scene) -> Outcome:
        pool = scene.pool
        routers = [service for service in pool.services if service.name.startswith("router")]
        before = {router.name: await pool.ready_workers(router.url) for router in routers}
        # Under load when it stops: the first streams are at their middle by then.
        await asyncio.sleep(1.0)
        process = psutil.Process(pool.service(name).process.pid)
        process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            process.resume()
        await asyncio.sleep(AFTER_S)
        faults = []
        for router in routers:
            wanted = before[router.name]

            async def complete(url: str = router.url, wanted: int = wanted) -> bool:
                return await pool.ready_workers(url) >= wanted

            try:
                await until(f"{router.name} reaches all {wanted} workers again", complete, REJOIN_TIMEOUT_S)
            except TimeoutError as error:
                faults.append(str(error))
        return Outcome(f"stopped for {seconds} s", faults)

    return run


def _attack(topology: Topology, name: str, said: str, seconds: int) -> Attack:
    is_worker = "worker" in said
    return Attack(
        f"{said}, {seconds} s, {TITLES[topology]}",
        f"Suspends {said if said.startswith('a ') else f'the {said}'} for {seconds} s.",
        pausing(name, seconds),
        Shape(topology),
        short=False,
        judge_latency=False,
        # A worker that stands still for longer than its lease is not living while it does.
        expiries_max=1 if is_worker else 0,
        seconds_min=seconds + AFTER_S,
    )


PART = Part(
    "pauses",
    "Suspended processes",
    tuple(
        _attack(topology, name, said, seconds)
        for topology, processes in WHO.items()
        for name, said in processes
        for seconds in PAUSES_S
    ),
)
