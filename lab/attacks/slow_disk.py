"""Slow and failing disks: writes below the pool's data directory are delayed by a shim in the C library's place.

The shim (``slow_disk.c``) is compiled when it is needed and loaded with LD_PRELOAD into the processes that write
journals. Without a C compiler these attacks are skipped.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.pool import Shape, until

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "slow_disk.so"
CONTROL = "slow_disk.control"
COUNT = "slow_disk.count"
COMPILE_TIMEOUT_S = 60.0
ONE_WRITE_MS = 4000
"""Longer than a lease (3 s)."""

EVERY_WRITE_MS = 1000
FAILING_LINES_MAX = 20
"""In ten seconds: a line a second and a half is read; ten a second fill a disk that is in trouble already."""

TAKEN_TIMEOUT_S = 20.0
"""A pool under load writes its journal many times a second."""


def missing() -> str:
    """Return why a slow disk cannot be made here; empty = it can."""
    if not sys.platform.startswith("linux"):
        return f"LD_PRELOAD is Linux's, and this is {sys.platform}"
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


def environment(directory: Path) -> dict[str, str]:
    """Compile the shim and return the environment in which everything written below ``directory`` can be slowed."""
    library = directory / LIBRARY
    made = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"compiling {SOURCE}: {made.stderr.strip()[:500]}")
    return {
        "LD_PRELOAD": str(library),
        "ATTACK_DISK_DIRECTORY": str(directory.resolve() / "data"),
        "ATTACK_DISK_CONTROL": str(directory / CONTROL),
        "ATTACK_DISK_COUNT": str(directory / COUNT),
    }


def say(directory: Path, word: str) -> None:
    """Tell the shim what to do, in one step."""
    beside = directory / f"{CONTROL}.new"
    beside.write_text(word)
    beside.replace(directory / CONTROL)


def delayed(directory: Path) -> int:
    """Return how many calls were delayed so far."""
    path = directory / COUNT
    return path.stat().st_size if path.exists() else 0


async def one_write(scene: Scene) -> Outcome:
    """One write of four seconds, of whoever writes first."""
    directory = scene.pool.directory
    before = delayed(directory)
    say(directory, f"once {ONE_WRITE_MS}")

    async def taken() -> bool:
        return delayed(directory) > before

    await until("a write was delayed", taken, TAKEN_TIMEOUT_S, 0.02)
    # The write itself, and what comes of it: timers that are late by then, leases, links.
    await asyncio.sleep(ONE_WRITE_MS / 1000 + 4.0)
    return Outcome(f"one write of {ONE_WRITE_MS} ms")


async def every_write(scene: Scene) -> Outcome:
    """Every write and sync takes a second."""
    directory = scene.pool.directory
    before = delayed(directory)
    say(directory, f"all {EVERY_WRITE_MS}")
    try:
        await asyncio.sleep(scene.seconds)
    finally:
        (directory / CONTROL).unlink(missing_ok=True)
    # A write that has begun ends within its second.
    await asyncio.sleep(2 * EVERY_WRITE_MS / 1000)
    count = delayed(directory) - before
    return Outcome(f"{count} writes of {EVERY_WRITE_MS} ms", [] if count else ["no write was delayed"])


async def failing_syncs(scene: Scene) -> Outcome:
    """Every sync fails; the log says so, and does not say it for each."""
    directory = scene.pool.directory
    before, lines = delayed(directory), _log_lines(scene)
    say(directory, "fail 1")
    try:
        await asyncio.sleep(scene.seconds)
    finally:
        (directory / CONTROL).unlink(missing_ok=True)
    count, said = delayed(directory) - before, _log_lines(scene) - lines
    faults = [] if count else ["no sync failed"]
    if count and not said:
        faults.append(f"{count} syncs failed and no log says so")
    if said > FAILING_LINES_MAX:
        faults.append(f"{count} failed syncs made {said} lines of log, allowed are {FAILING_LINES_MAX}")
    return Outcome(f"{count} syncs failed, {said} lines of log", faults)


def _log_lines(scene: Scene) -> int:
    return sum(service.log.read_bytes().count(b"\n") for service in scene.pool.services)


def _attacks() -> tuple[Attack, ...]:
    found = []
    for topology, said in (("own", "a consolidator of its own"), ("embedded", "the consolidator in the router")):
        shape = Shape(topology, slow_disk=True)  # type: ignore[arg-type]
        found += [
            Attack(
                f"one write of 4 s, {said}",
                "Delays one write of the journal by 4 s, longer than a lease.",
                one_write,
                shape,
                judge_latency=False,
                seconds_min=10,
                short=False,
            ),
            Attack(
                f"every write of 1 s, {said}",
                "Delays every write and sync of the journal by 1 s.",
                every_write,
                shape,
                judge_latency=False,
                seconds_min=10,
                short=False,
            ),
            Attack(
                f"failing syncs, {said}",
                "Lets every sync of the journal fail with EIO.",
                failing_syncs,
                shape,
                judge_latency=False,
                seconds_min=10,
                short=False,
            ),
        ]
    return tuple(found)


PART = Part("slow-disk", "Slow and failing disks", _attacks())
