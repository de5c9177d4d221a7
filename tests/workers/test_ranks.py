"""Keepers of ranks and the watch over them: real sockets, real processes below the keepers, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from poolgrid.process.clock import SystemClock
from poolgrid.transport.planes import CurveKeys, PlaneContext, PlaneMetrics, end_security
from poolgrid.transport.security import SecuritySettings
from poolgrid.workers.core.rank_group import RankGroup
from poolgrid.workers.core.rank_place import RankPlace
from poolgrid.workers.ranks.engine_part import EnginePart
from poolgrid.workers.ranks.keeper import RankEndedError, keep_rank
from poolgrid.workers.ranks.metrics import RankMetrics
from poolgrid.workers.ranks.watch import RankLostError, RankWatch
from tests.slurm.cluster import free_ports

LEASE_MS = 20_000.0
"""Nothing here waits for it: what a process does is told at once."""

SIZE = 3
WAITS = ("/bin/sh", "-c", "echo $$ > $0; sleep 600 & wait")
"""A launcher with a process below it; ``$0`` is a file for its number."""


@dataclass
class Ranks:
    """A watch, and keepers that are started one by one."""

    place: Path
    watch: RankWatch
    registry: CollectorRegistry
    port: int
    stopped: list[int] = field(default_factory=list)
    stops: dict[int, asyncio.Event] = field(default_factory=dict)
    keepers: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def keep(self, *ranks: int, group: str = "g") -> None:
        for rank in ranks:
            self.stops[rank] = asyncio.Event()
            keeping = keep_rank(
                RankPlace(rank, SIZE, group, "", "TEST"),
                f"tcp://127.0.0.1:{self.port}",
                (*WAITS, str(self.place / str(rank))),
                {**os.environ, "SLURMD_NODENAME": f"h{rank}"},
                SecuritySettings(),
                self.stops[rank],
                lease_ms=LEASE_MS,
                start_timeout_ms=LEASE_MS,
            )
            self.keepers[rank] = asyncio.get_running_loop().create_task(keeping)

    async def below(self, rank: int) -> list[psutil.Process]:
        """The processes of a rank's part of the engine."""
        while True:
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                launcher = psutil.Process(int((self.place / str(rank)).read_text()))
                sleeping = [each for each in launcher.children() if each.name() == "sleep"]
                if sleeping:
                    return [launcher, *sleeping]
            await asyncio.sleep(0.01)

    def alive(self) -> float | None:
        return self.registry.get_sample_value("poolgrid_worker_ranks_alive")


@contextlib.asynccontextmanager
async def watched(place: Path) -> AsyncIterator[Ranks]:
    context = PlaneContext.make(CurveKeys.load(SecuritySettings()), PlaneMetrics(CollectorRegistry()))
    registry = CollectorRegistry()
    (port,) = free_ports(1)
    stopped: list[int] = []
    watch = RankWatch(
        context,
        "127.0.0.1",
        port,
        RankGroup("g", SIZE, LEASE_MS),
        LEASE_MS,
        SystemClock(),
        RankMetrics(registry),
        lambda: stopped.append(1),
    )
    ranks = Ranks(place, watch, registry, port, stopped)
    try:
        async with asyncio.timeout(60):
            yield ranks
    finally:
        watch.end("the test is over")
        for keeper in ranks.keepers.values():
            keeper.cancel()
        await asyncio.gather(*ranks.keepers.values(), return_exceptions=True)
        await watch.close()
        end_security(context)
        await asyncio.to_thread(context.destroy, linger=0)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


async def until(what: Callable[[], object]) -> None:
    while not what():  # noqa: ASYNC110 - other processes tell nobody
        await asyncio.sleep(0.01)


async def test_a_rank_that_dies_ends_all_with_its_name_and_nothing_is_left_of_any(tmp_path: Path) -> None:
    async with watched(tmp_path) as ranks:
        said: list[str] = []
        ranks.keep(2)
        coming = asyncio.get_running_loop().create_task(ranks.watch.complete(LEASE_MS, said.append))
        await until(lambda: "waiting for ranks 0 and 1 of 3" in said)
        ranks.keep(0, 1)
        await coming
        lost: list[str] = []
        ranks.watch.run(lost.append)
        assert ranks.alive() == 3
        processes = [each for rank in range(SIZE) for each in await ranks.below(rank)]
        os.kill((await ranks.below(1))[0].pid, signal.SIGKILL)
        with pytest.raises(RankEndedError) as ended:
            await ranks.keepers[2]
        reason = "rank 1 on host h1 was lost: its process was killed by SIGKILL"
        assert str(ended.value) == reason
        assert lost == [reason]
        assert ranks.alive() == 2
        with pytest.raises(RankEndedError):
            await ranks.keepers[1]
        assert not ranks.keepers[0].done(), "the worker at rank 0 has its last words to say"
        worker, *_ = await ranks.below(0)
        worker.kill()
        with pytest.raises(RankEndedError):
            await ranks.keepers[0]
        await until(lambda: all_gone(processes))


async def test_a_rank_that_is_told_to_end_ends_none_before_the_engine_is_done(tmp_path: Path) -> None:
    async with watched(tmp_path) as ranks:
        ranks.keep(*range(SIZE))
        await ranks.watch.complete(LEASE_MS, lambda reason: None)
        ranks.watch.run(lambda reason: None)
        processes = [(await ranks.below(rank)) for rank in range(SIZE)]
        ranks.stops[1].set()
        ranks.stops[2].set()
        await until(lambda: ranks.stopped)
        assert not any(all_gone(each) for each in processes)
        ranks.watch.begin_end()
        ranks.watch.end()
        for launcher, *_ in processes:
            launcher.terminate()
        await asyncio.sleep(0)
        assert not any(all_gone(each) for each in processes), "the engine's processes ignore signals"
        for launcher, *_ in processes:
            launcher.kill()
        for rank in range(SIZE):
            await ranks.keepers[rank]
        await until(lambda: all(map(all_gone, processes)))
        assert ranks.stopped == [1]


async def test_ranks_that_do_not_come_and_ranks_of_an_earlier_start_are_named(tmp_path: Path) -> None:
    async with watched(tmp_path) as ranks:
        ranks.keep(0)
        ranks.keep(1, group="before")
        with pytest.raises(RankEndedError, match="group 'before' is over: this is group 'g'"):
            await ranks.keepers[1]
        with pytest.raises(RankLostError, match=r"ranks 1 and 2 of 3 did not come within 50 ms"):
            await ranks.watch.complete(50.0, lambda reason: None)


async def test_a_loss_cuts_short_what_waits_for_the_engine(tmp_path: Path) -> None:
    async with watched(tmp_path) as ranks:
        ranks.keep(*range(SIZE))
        await ranks.watch.complete(LEASE_MS, lambda reason: None)
        loading = asyncio.get_running_loop().create_task(
            ranks.watch.unless_lost(asyncio.Event().wait(), "loading that hangs")
        )
        (await ranks.below(2))[0].kill()
        with pytest.raises(RankLostError, match="rank 2 on host h2 was lost"):
            await loading
        assert await ranks.watch.unless_lost(asyncio.sleep(0, "done"), "what is done already") == "done"


async def test_the_engines_processes_end_when_their_keeper_is_gone(tmp_path: Path) -> None:
    told = tmp_path / "0"
    part = await EnginePart.start((*WAITS, str(told)), os.environ)
    await until(lambda: told.exists() and told.read_text().strip())
    launcher = psutil.Process(int(told.read_text()))
    await until(lambda: any(each.name() == "sleep" for each in launcher.children()))
    processes = [launcher, *launcher.children(recursive=True)]
    stdin = part._process.stdin
    assert stdin is not None
    stdin.close()  # as the kernel does for one that is killed
    assert await part.ended() == "its process was killed by SIGKILL"
    await until(lambda: all_gone(processes))
