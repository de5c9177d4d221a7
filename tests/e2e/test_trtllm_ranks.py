"""``deploy/slurm/rank.sh`` with a stand-in for TensorRT-LLM's launcher: two tasks, one worker, ended by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.benchmarks.fleet import free_port
from tests.e2e.processes import Process, eventually, ready_workers
from tests.fakes import FAKES_PATH

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "rank.sh"
RANKS = 2


def start_task(rank: int, mpi_port: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start what srun starts for one GPU, in a process group of its own."""
    poolgrid = Path(sys.executable).with_name("poolgrid")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(FAKES_PATH), str(poolgrid.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(FAKES_PATH),
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(RANKS),
        "FAKE_MPI_ADDRESS": f"127.0.0.1:{mpi_port}",
    }
    command = [str(SCRIPT), str(poolgrid), "worker", "--engine", "trtllm", "--model-path", "tiny", *options]
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def test_ranks_end_after_the_drain_of_their_worker_and_with_a_worker_that_fails(tmp_path: Path) -> None:
    with Process("router", "--port", "0") as router, contextlib.ExitStack() as stack:
        router.wait_ready()

        def start(*options: str) -> list[subprocess.Popen[bytes]]:
            port = free_port()
            tasks = [start_task(rank, port, tmp_path / f"{rank}.log", *options) for rank in range(RANKS)]
            for task in tasks:
                stack.callback(_end, task)
            return tasks

        common = ("--consolidator", router.word("ingest"), "--kv-block-size", "16", "--worker-id", "w")
        tasks = start(*common, "--tensor-parallel-size", str(RANKS))
        eventually("the worker is ready", lambda: len(ready_workers(router.url)) == 1, 60.0)
        for task in tasks:
            os.killpg(task.pid, signal.SIGTERM)
        assert [task.wait(60) for task in tasks] == [0] * RANKS
        assert "w has ended" in (tmp_path / "0.log").read_text()

        failing, _ = start(*common, "--tensor-parallel-size", "0")
        assert failing.wait(60) == -signal.SIGKILL, "srun ends the other tasks then"


def _end(task: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(task.pid, signal.SIGKILL)
    task.wait()
