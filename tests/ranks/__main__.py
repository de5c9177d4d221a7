"""Run an engine that spans nodes under a real ``mpirun``, with a stand-in for the engine whose ranks are a real MPI.

    python -m tests.ranks

It needs Debian's package openmpi-bin, and mpi4py in this Python, and says so where they are missing. The nodes are
names on this machine, and everything is on loopback. A pool has one worker that spans them and one that does not, under
load whose every text is checked. The exit status is 0 when all went well or nothing could be tried, 1 when something
did not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from tests.e2e.disturbed_load import active_requests, assert_unharmed, load_while
from tests.e2e.expectation import PLAIN
from tests.e2e.processes import Process, eventually, ready_workers
from tests.fakes import FAKES_PATH
from tests.slurm.cluster import free_ports

RANKS = 4
PATIENCE_S = 240.0
WORKER = ("worker", "--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--max-batch-size", "64")
NODE = 'exec env SLURMD_NODENAME=node$((OMPI_COMM_WORLD_RANK / 2)) "$0" -m poolgrid "$@"'
"""Two ranks on each node, which only their names tell apart."""


def why_not() -> str:
    """Return why nothing can be tried here; empty when it can."""
    missing = [] if shutil.which("mpirun") else ["mpirun (Debian's package openmpi-bin)"]
    if importlib.util.find_spec("mpi4py") is None:
        missing.append("mpi4py (pip install mpi4py)")
    return f"{' and '.join(missing)} not found" if missing else ""


class Group:
    """One worker of several ranks, under ``mpirun``."""

    def __init__(self, place: Path, ingest: str, life: int) -> None:
        self.log = place / f"group-{life}.log"
        rank_port, self.http_port = free_ports(2)
        options = (
            *("--nodes", "2", "--tensor-parallel-size", str(RANKS), "--leader-host", "127.0.0.1"),
            *("--rank-port", str(rank_port), "--http-port", str(self.http_port)),
            *("--worker-id", "wide", "--consolidator", ingest),
        )
        with self.log.open("wb") as log:
            self._mpirun = subprocess.Popen(
                [
                    *("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(RANKS)),
                    *("--mca", "odls_base_sigkill_timeout", "60", "--mca", "btl_vader_single_copy_mechanism", "none"),
                    *("/bin/sh", "-c", NODE, sys.executable, *WORKER, *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def below(self, *words: str) -> list[psutil.Process]:
        """Return the processes below ``mpirun`` whose command line holds all words."""
        found = []
        for each in psutil.Process(self._mpirun.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if all(word in each.cmdline() for word in words):
                    found.append(each)
        return found

    def everything(self) -> list[psutil.Process]:
        return psutil.Process(self._mpirun.pid).children(recursive=True)

    def keeper(self, rank: int) -> psutil.Process:
        """Return the process that keeps a rank."""
        (found,) = [
            each
            for each in self.below("-m", "poolgrid", "--nodes")
            if each.environ().get("OMPI_COMM_WORLD_RANK") == str(rank)
        ]
        return found

    def mpi_rank(self, rank: int) -> psutil.Process:
        """Return the process that is this rank of MPI, below its keeper."""
        name = "tensorrt_llm.llmapi.mgmn_leader_node" if rank == 0 else "tensorrt_llm.llmapi.mgmn_worker_node"
        (found,) = [each for each in self.keeper(rank).children(recursive=True) if name in each.cmdline()]
        return found

    def worker(self) -> psutil.Process:
        (found,) = [each for each in self.below("poolgrid.cli.rank_task") if each.cmdline()[0] == sys.executable]
        return found

    def health(self) -> dict[str, object]:
        answer: dict[str, object] = httpx.get(f"http://127.0.0.1:{self.http_port}/health").json()
        return answer

    def signal(self, number: int) -> None:
        self._mpirun.send_signal(number)

    def ended(self) -> int | None:
        return self._mpirun.poll()

    def end(self) -> None:
        """End all of it, in whatever state it is."""
        left = [psutil.Process(self._mpirun.pid), *self.everything()] if self.ended() is None else []
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._mpirun.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


class Trial:
    """A pool, and one worker after another that spans nodes."""

    def __init__(self, place: Path, router: Process, one: Process) -> None:
        self.place, self.router, self.one = place, router, one
        self.groups: list[Group] = []

    def start(self) -> Group:
        """Start the worker that spans nodes, as whoever supervises it would; return when it is ready."""
        group = Group(self.place, self.router.word("ingest"), len(self.groups))
        self.groups.append(group)
        eventually("both workers are ready", lambda: len(ready_workers(self.router.url)) == 2, PATIENCE_S)
        return group

    def lose(self, group: Group, what: Callable[[], psutil.Process], reason: str) -> None:
        """Kill a process amid load: nothing fails, the reason is told, and nothing is left of any rank."""
        processes = group.everything()

        def disturb() -> None:
            eventually("it has requests", lambda: active_requests(self.router.url, "wide") > 0, PATIENCE_S)
            what().kill()

        assert_unharmed(load_while(self.router.url, disturb, vocabulary=PLAIN))
        eventually("mpirun has ended", lambda: group.ended() is not None, PATIENCE_S)
        assert group.ended() != 0
        assert reason in group.said(), reason
        eventually("nothing is left", lambda: gone(processes), PATIENCE_S)


def its_ranks_are_shown(trial: Trial, group: Group) -> None:
    assert group.health()["ranks"] == {"expected": RANKS, "alive": RANKS, "hosts": ["node0", "node1"]}


def main() -> int:
    """Try everything; return the exit status."""
    reason = why_not()
    if reason:
        sys.stdout.write(f"skipped: {reason}\n")
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")])
    os.environ["PATH"] = os.pathsep.join([str(FAKES_PATH), str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["TRTLLM_FAKE"] = json.dumps({"vocabulary_size": 4096, "speedup": 5.0})
    with tempfile.TemporaryDirectory(prefix="poolgrid-ranks-") as place, running(Path(place)) as trial:
        steps: list[tuple[str, Callable[[], object]]] = [
            (
                "a worker of four ranks joins, and its ranks are shown",
                lambda: its_ranks_are_shown(trial, trial.start()),
            ),
            (
                "a rank of MPI that is killed costs no request, and ends all ranks with its name",
                lambda: trial.lose(
                    trial.groups[-1], lambda: trial.groups[-1].mpi_rank(3), "rank 3 on host node1 was lost"
                ),
            ),
            (
                "MPI's own rank 0 too",
                lambda: lose_next(trial, lambda group: group.mpi_rank(0), "rank 0: its process ended"),
            ),
            ("a keeper too", lambda: lose_next(trial, lambda group: group.keeper(2), "")),
            ("the worker too", lambda: lose_next(trial, lambda group: group.worker(), "")),
            ("a signal drains it, and all ranks end in order", lambda: a_signal_drains(trial)),
        ]
        try:
            for name, step in steps:
                step()
                sys.stdout.write(f"ok: {name}\n")
                sys.stdout.flush()
        except Exception:
            traceback.print_exc()
            sys.stderr.write("\n".join(f"--- {each.log.name}\n{each.said()[-5000:]}" for each in trial.groups[-1:]))
            return 1
    sys.stdout.write("ranks: all passed\n")
    return 0


def lose_next(trial: Trial, what: Callable[[Group], psutil.Process], reason: str) -> None:
    group = trial.start()
    trial.lose(group, lambda: what(group), reason)


def a_signal_drains(trial: Trial) -> None:
    group = trial.start()
    processes = group.everything()

    def disturb() -> None:
        eventually("it has requests", lambda: active_requests(trial.router.url, "wide") > 0, PATIENCE_S)
        group.signal(signal.SIGTERM)

    assert_unharmed(load_while(trial.router.url, disturb, vocabulary=PLAIN))
    eventually("mpirun has ended", lambda: group.ended() is not None, PATIENCE_S)
    assert "was told to end: stopping" in group.said()
    assert group.said().count("has ended: the engine has ended") == RANKS, "in order"
    eventually("nothing is left", lambda: gone(processes), PATIENCE_S)


@contextlib.contextmanager
def running(place: Path) -> Iterator[Trial]:
    """Run a router and a worker on one node, and end everything."""
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Process("router", "--port", "0")).wait_ready()
        one = stack.enter_context(
            Process(*WORKER, "--worker-id", "one", "--consolidator", router.word("ingest"), log=place / "one.log")
        )
        one.wait_ready()
        trial = Trial(place, router, one)
        try:
            yield trial
        finally:
            for group in trial.groups:
                group.end()


if __name__ == "__main__":
    sys.exit(main())
