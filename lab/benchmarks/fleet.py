"""Processes of a benchmark: started on chosen cores, ended together.

Rules
    1. The process under test has the last core to itself; everything else shares the first.
    2. With one core, or without ``taskset``, nothing is pinned, and ``is_pinned`` says so.
    3. What a process starts is ended with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from lab.benchmarks.http_load import LoadSpec, family
from lab.benchmarks.worker_load import WorkerLoadSpec
from poolgrid.server.transport.bound_socket import ReservedPorts

free_port: Final = ReservedPorts("127.0.0.1").hold
"""Takes a free port for a process that will listen there, and keeps it until this process ends: nothing else is given
it as "any free port" before that process listens, or between two of its lives."""

STOP_TIMEOUT_S = 10.0
"""Several times what any of them takes to end when it is told to; then it is killed."""

LOAD_TIMEOUT_S = 600.0
"""Several times what the longest load takes that a benchmark asks for; then the benchmark fails."""


class Fleet:
    """Processes that are ended together."""

    def __init__(self, logs: Path, *, pin: bool = True) -> None:
        self.logs = logs
        cpus = sorted(os.sched_getaffinity(0))
        self.is_pinned = pin and len(cpus) > 1 and shutil.which("taskset") is not None
        self._side, self._tested = cpus[0], cpus[-1]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str] | None = None,
        *,
        tested: bool = False,
        says_ready: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process, its output in a log file (standard output piped for `ready` lines of ours)."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.pinned(command, tested=tested),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if says_ready or "poolgrid" in command else log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )
        self._processes.append(process)
        return process

    def running(self) -> list[int]:
        """Return the process ids of those that were started and have not ended."""
        return [process.pid for process in self._processes if process.poll() is None]

    def pinned(self, command: list[str], *, tested: bool = False) -> list[str]:
        """Return a command bound to the core of the process under test, or to that of all others."""
        core = self._tested if tested else self._side
        return ["taskset", "-c", str(core), *command] if self.is_pinned else command

    def ready_words(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Return what a ready line of ours says."""
        assert process.stdout is not None
        line = process.stdout.readline().decode().split()
        if not line or line[0] != "ready":
            raise RuntimeError(f"a process did not start; see {self.logs}")
        words = dict(word.split("=", 1) for word in line[1:] if "=" in word)
        words["http"] = next((word for word in line[1:] if word.startswith("http")), "")
        return words

    def load(self, spec: LoadSpec) -> dict[str, Any]:
        """Put a load on a front end, by a process beside those not under test, and return what it measured.

        Raises ``RuntimeError`` with the end of what it printed when it fails.
        """
        return self._measure("lab.benchmarks.http_load", spec)

    def load_worker(self, spec: WorkerLoadSpec) -> dict[str, Any]:
        """Do the same to a worker on its request plane, with nothing between."""
        return self._measure("lab.benchmarks.worker_load", spec)

    def _measure(self, module: str, spec: msgspec.Struct) -> dict[str, Any]:
        file = self.logs / "spec.json"
        file.write_bytes(msgspec.json.encode(spec))
        command = self.pinned([sys.executable, "-m", module, str(file)])
        answer = subprocess.run(command, capture_output=True, timeout=LOAD_TIMEOUT_S, check=False)
        if answer.returncode:
            raise RuntimeError(answer.stderr.decode()[-2000:])
        measured: dict[str, Any] = json.loads(answer.stdout)
        return measured

    def close(self) -> None:
        """End everything, the last started first."""
        members = [pid for process in self._processes for pid in family(process.pid)[1:]]
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in members:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass  # ended with its parent
