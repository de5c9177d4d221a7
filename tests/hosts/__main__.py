"""Three hosts, as network namespaces, with two pools on NATS: each is cut off for 20 s, and every part is killed.

    python -m tests.hosts [--seed N] [--faults cut,nats,consolidator,router,worker,global-router] [--clients N]

Every text is checked, token by token; which failures are excused says ``tests/hosts/verdict.py``: those of a request
whose global router was killed or cut off. After each fault clients pause until the index of every router is what its
workers hold. It needs ``ip`` and ``bridge`` (Debian's iproute2) and a nats-server, and root, or namespaces for users;
nothing of it is left when it ends, however it ends. The exit status is 0 when all holds, 1 when something does not, 2
when it cannot be tried here.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from tests.hosts.clients import Clients
from tests.hosts.fleet import HTTP, LEASE_S, POOLS, Fleet, Part
from tests.hosts.network import WAYS, Host, is_inside, make_hosts, run_inside, why_not
from tests.hosts.verdict import Absence, Outcome, is_excused
from tests.nats.servers import BINARY, MISSING

HOSTS = 3
CUT_S = 20.0
BEFORE_S = 2.0
"""Load before a fault, so that it comes amid streams."""

DOWN_S = 4.0
"""Between the death of a process and its next life."""

AFTER_S = 3.0
"""Load after a fault is over."""

HEAL_S = 90.0
"""Until then all must be true again; TCP tries again as long after a silence as the silence was."""

LONG_S = 20.0
"""When it takes longer until all is true, it is said what was not."""

FAIL_OVER_MAX_S = LEASE_S + 2

STILL_S = 0.5
"""A machine on which nothing ran for so long cannot tell how long anything took: its fail-overs are not judged."""

CLIENTS = 10
LOOK_S = 0.1
KINDS = ("cut", "nats", "consolidator", "router", "worker", "global-router")


def say(text: str) -> None:
    """Tell whoever waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass
class Fault:
    """What is done to the fleet, and undone."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    lasts_s: float
    gone: Callable[[Part], bool]
    """Whether a part is out of reach meanwhile."""


class Trial:
    """One run over all faults."""

    def __init__(self, fleet: Fleet, seed: int, clients: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self._clients = Clients([(part.host.address, HTTP) for part in fleet.of("global-router")], clients, seed)
        self._absences: list[Absence] = []
        self._failures: list[str] = []
        self._still_s = 0.0
        """Longest time for which this process did not come round, since a fault began."""

    def faults(self, kinds: Sequence[str]) -> list[Fault]:
        """Return the faults, in the order of the seed."""
        ways = [*WAYS, self._random.choice(WAYS)]
        self._random.shuffle(ways)
        made: list[Fault] = []
        if "cut" in kinds:
            made += [_cut(host, way) for host, way in zip(self._fleet.hosts, ways, strict=True)]
        if "nats" in kinds:
            pairs = zip(self._fleet.servers, self._fleet.hosts, strict=True)
            made += [
                Fault(f"NATS of {host.name} killed", server.kill, server.start, DOWN_S, lambda _: False)
                for server, host in pairs
            ]
        made += [_death(part) for part in self._fleet.parts if part.kind in kinds]
        self._random.shuffle(made)
        return made

    async def run(self, faults: Sequence[Fault]) -> list[str]:
        """Do all of it; return what did not hold, in words."""
        running = [asyncio.ensure_future(self._clients.run()), asyncio.ensure_future(self._watch())]
        try:
            await self._until_true()
            say(f"{'fault':32} asked  right  retried  excused  failed  longest s  fail-over s  true after s  still s")
            for fault in faults:
                await self._one(fault)
        finally:
            for each in running:
                each.cancel()
            await asyncio.wait(running)
        return self._failures

    async def _watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            self._still_s = max(self._still_s, time.monotonic() - before_s - LOOK_S)

    async def _one(self, fault: Fault) -> None:
        first = len(self._clients.asked)
        leaders = {pool: await self._active(pool) for pool in POOLS}
        self._clients.may_ask.set()
        await asyncio.sleep(BEFORE_S)
        self._still_s = 0.0
        begun_s = time.monotonic()
        await asyncio.to_thread(fault.begin)
        watching = {
            pool: asyncio.ensure_future(self._successor(pool, fault, begun_s))
            for pool, leader in leaders.items()
            if leader is not None and fault.gone(leader)
        }
        await asyncio.sleep(fault.lasts_s)
        await asyncio.to_thread(fault.end)
        healed_s = time.monotonic()
        await asyncio.sleep(AFTER_S)
        self._clients.may_ask.clear()
        await self._clients.until_all_answered()
        true_after_s = await self._until_true(healed_s, fault.name)
        for part in self._fleet.of("global-router"):
            if fault.gone(part):
                ready_s = await self._clients.until_ready(part.host.address, healed_s)
                self._absences.append(Absence(part.host.address, begun_s, ready_s))
        took = {pool: await each for pool, each in watching.items()}
        for pool, took_s in took.items():
            if took_s > FAIL_OVER_MAX_S and self._still_s < STILL_S:
                self._failures.append(f"{fault.name}: {pool} had no active consolidator for {took_s:.1f} s")
        self._row(fault.name, first, begun_s, took, true_after_s)

    def _row(self, name: str, first: int, begun_s: float, took: dict[str, float], true_after_s: float) -> None:
        asked = self._clients.asked[first:]
        bad = [each for each in asked if each.outcome is not Outcome.RIGHT]
        failed = [each for each in bad if not is_excused(each, self._absences)]
        self._failures += [
            f"{name}: {each.outcome.value} at {each.front}, asked {each.begun_s - begun_s:.1f} s after it began and "
            f"ended {each.ended_s - begun_s:.1f} s after that: {each.said}"
            for each in failed
        ]
        longest_s = max((each.ended_s - each.begun_s for each in asked), default=0.0)
        fail_over = ", ".join(f"{each:.1f}" for each in took.values())
        say(
            f"{name:32} {len(asked):5}  {len(asked) - len(bad):5}  {sum(each.retries for each in asked):7}  "
            f"{len(bad) - len(failed):7}  {len(failed):6}  {longest_s:9.1f}  {fail_over:>11}  {true_after_s:12.1f}  "
            f"{self._still_s:7.1f}"
        )

    async def _active(self, pool: str) -> Part | None:
        """Return the consolidator that says it is active."""
        async with httpx.AsyncClient(timeout=1.0) as client:
            for part in self._fleet.of("consolidator", pool):
                try:
                    said = (await client.get(f"{part.url}/health")).json()
                except (httpx.TransportError, ValueError):
                    continue
                if said.get("role") == "active" and said["status"] == "ready":
                    return part
        return None

    async def _successor(self, pool: str, fault: Fault, begun_s: float) -> float:
        """Return after how long another consolidator was active."""
        async with httpx.AsyncClient(timeout=1.0) as client:
            others = [part for part in self._fleet.of("consolidator", pool) if not fault.gone(part)]
            while time.monotonic() - begun_s < HEAL_S:
                for part in others:
                    try:
                        said = (await client.get(f"{part.url}/health")).json()
                    except (httpx.TransportError, ValueError):
                        continue
                    if said.get("role") == "active" and said["status"] == "ready":
                        return time.monotonic() - begun_s
                await asyncio.sleep(LOOK_S)
        return float("inf")

    async def _until_true(self, since_s: float | None = None, name: str = "start") -> float:
        """Return when every index was true; what is not by then is a failure."""
        since_s = time.monotonic() if since_s is None else since_s
        last = [""]
        while True:
            try:
                found = await asyncio.to_thread(self._fleet.untruths)
            except (httpx.TransportError, ValueError, KeyError) as error:
                found = [f"somebody does not answer: {error!r}"]
            took_s = time.monotonic() - since_s
            if not found:
                if took_s > LONG_S and last[0]:
                    say(f"    until then: {last[0]}")
                return took_s
            last = found
            if took_s > HEAL_S:
                self._failures += [f"{name}: {each}" for each in found]
                return took_s
            await asyncio.sleep(LOOK_S)


def _cut(host: Host, way: str) -> Fault:
    def is_there(part: Part) -> bool:
        return part.host == host

    return Fault(f"{host.name} cut off ({way})", partial(host.cut, way), partial(host.heal, way), CUT_S, is_there)


def _death(victim: Part) -> Fault:
    def is_it(part: Part) -> bool:
        return part is victim

    # A consolidator that is back before its lease is over goes on with it, and nobody has to take its place.
    lasts_s = FAIL_OVER_MAX_S + DOWN_S if victim.kind == "consolidator" else DOWN_S
    return Fault(f"{victim.name} killed", victim.kill, victim.start, lasts_s, is_it)


def main() -> int:
    """Run again inside namespaces, and there the trial; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(KINDS), help="with commas: " + ", ".join(KINDS))
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--keep", type=Path, help="an empty directory for the logs, which stay there")
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--faults has {', '.join(sorted(unknown))}; allowed are {', '.join(KINDS)}")
    if not is_inside():
        if missing := (MISSING if not BINARY else why_not()):
            say(missing)
            return 2
        with tempfile.TemporaryDirectory(prefix="poolgrid-hosts-") as temporary:
            keep = [] if arguments.keep is not None else ["--keep", temporary]
            return run_inside("tests.hosts", [*sys.argv[1:], *keep])
    arguments.keep.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(make_hosts(HOSTS), arguments.keep)
    try:
        begun_s = time.monotonic()
        fleet.start()
        took_s = time.monotonic() - begun_s
        say(f"{len(fleet.parts)} processes and {HOSTS} NATS servers on {HOSTS} hosts, after {took_s:.0f} s")
        trial = Trial(fleet, arguments.seed, arguments.clients)
        failures = asyncio.run(trial.run(trial.faults(kinds)))
        failures += fleet.logs_with("Traceback", "this is a bug")
    finally:
        fleet.stop()
    for failure in failures:
        say(f"FAILED: {failure}")
    say("all holds" if not failures else f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
