"""`poolgrid up` among parts that keep dying and strangers on the ports of its parts."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import psutil

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.pool import HOST, Shape, until

SHAPE = Shape("up")
KILLS_MAX = 40
STRANGER_S = 8.0
BACK_TIMEOUT_S = 90.0
"""Restarts back off: the next try may be a while away."""


def part_of(scene: Scene, *words: str) -> psutil.Process | None:
    """Return the living part whose command line holds all words."""
    try:
        children = psutil.Process(scene.pool.service("up").process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return None  # up itself has ended: a death, which is found elsewhere
    for child in children:
        try:
            if child.status() != psutil.STATUS_ZOMBIE and all(word in child.cmdline() for word in words):
                return child
        except psutil.NoSuchProcess:
            continue
    return None


async def _is_there(scene: Scene, *words: str) -> bool:
    """Tell whether a part lives and listens."""
    part = part_of(scene, *words)
    try:
        return part is not None and any(each.status == "LISTEN" for each in part.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return False


async def _complete(scene: Scene) -> list[str]:
    """Wait until every worker is reached again; return in words what is missing."""

    async def complete() -> bool:
        if scene.pool.deaths():
            raise TimeoutError("up has ended")
        return await scene.pool.ready_workers(scene.pool.url) >= 2

    try:
        await until("all workers are reached again", complete, BACK_TIMEOUT_S)
    except TimeoutError as error:
        return [str(error)]
    return []


def dying(*words: str) -> Run:
    """Return an attack that kills a part whenever it is there."""

    async def run(scene: Scene) -> Outcome:
        deadline = scene.deadline()
        kills = 0
        while asyncio.get_running_loop().time() < deadline and kills < KILLS_MAX:
            part = part_of(scene, *words)
            if part is not None:
                part.kill()
                kills += 1
            await asyncio.sleep(0.1)
        return Outcome(f"{kills} × killed", await _complete(scene))

    return run


async def stranger(scene: Scene) -> Outcome:
    """Kill the consolidator and take its ports before it is back."""
    try:
        # One that an attack before this one killed may be waiting to be started again.
        await until("there is a consolidator", lambda: _is_there(scene, "consolidator"), BACK_TIMEOUT_S)
    except TimeoutError as error:
        return Outcome("", [str(error)])
    consolidator = part_of(scene, "consolidator")
    if consolidator is None:
        return Outcome("", ["the consolidator ended before it was attacked"])
    ports = sorted({each.laddr.port for each in consolidator.net_connections("tcp") if each.status == "LISTEN"})
    taken = 0
    with ExitStack() as stack:
        consolidator.kill()
        for port in ports:
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for _ in range(50):
                try:
                    holder.bind((HOST, port))
                    holder.listen()
                    taken += 1
                    break
                except OSError:
                    await asyncio.sleep(0.01)  # the dead process's socket is not gone yet
        await asyncio.sleep(STRANGER_S)
    faults = await _complete(scene)
    # Another port would be as good, so the address is looked up only to say where it went.
    address = urlsplit(scene.pool.url)
    return Outcome(f"{taken} of {len(ports)} ports taken for {STRANGER_S:.0f} s beside {address.port}", faults)


PART = Part(
    "up",
    "`poolgrid up` and its parts",
    (
        Attack(
            "a worker that keeps dying",
            "Kills one worker after each start.",
            dying("worker", "worker-0"),
            SHAPE,
            short=False,
            judge_latency=False,
            seconds_min=30,
            expiries_max=KILLS_MAX,
        ),
        Attack(
            "a consolidator that keeps dying",
            "Kills the consolidator after each start.",
            dying("consolidator"),
            SHAPE,
            short=False,
            judge_latency=False,
            seconds_min=30,
        ),
        Attack(
            "a stranger on the consolidator's ports",
            "Kills the consolidator and listens on its ports for 8 s.",
            stranger,
            SHAPE,
            short=False,
            judge_latency=False,
            seconds_min=STRANGER_S,
        ),
    ),
)
