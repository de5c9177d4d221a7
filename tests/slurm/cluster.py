"""A whole Slurm for one run: munged, slurmctld and a slurmd for each node, all of this machine, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from lab.benchmarks.fleet import free_port
from tests.e2e.processes import eventually

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
NODES = 3
CPUS = 8
"""Of each node, whatever this machine has: simulated engines wait most of the time."""

NOT_HANDED_ON = ("SLURM", "SBATCH", "POOLGRID")
"""Beginnings of variables that would change what is tried here."""

CONFIGURATION = """
ClusterName=poolgrid-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
TmpFS={place}/tmp-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
KillWait=30
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no Slurm can be started here; empty when one can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian's packages slurm-wlm and munge)"
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """A running Slurm."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM", "SBATCH", "POOLGRID"))
            },
            "SLURM_CONF": str(place / "slurm.conf"),
        }

    def run(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's commands and return what it printed; raises ``RuntimeError`` with what it said."""
        program = _program(name)
        assert program is not None
        done = subprocess.run(
            [program, *arguments],
            env={**self.environment, **(environment or {})},
            cwd=self.place,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job; empty when Slurm knows it no more."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def nodes_are_idle(self) -> bool:
        return self.run("sinfo", "--noheader", "--format=%D %t") == f"{NODES} idle"


@contextlib.contextmanager
def running_cluster(place: Path) -> Iterator[Cluster]:
    """Run a Slurm whose files are below ``place``, and end all of it; nothing is left behind."""
    (place / "state").mkdir()
    for number in range(1, NODES + 1):
        (place / f"tmp-n{number}").mkdir()  # PMIx would have one for all nodes of the machine
    key = place / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    place.chmod(0o755)  # munged asks for it
    host = socket.gethostname().partition(".")[0]
    ports = [free_port() for _ in range(NODES + 1)]
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
        for number, port in enumerate(ports[1:], 1)
    )
    user = psutil.Process().username()
    (place / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=ports, user=user, place=place, nodes=nodes))
    cluster = Cluster(place)
    try:
        cluster.run(
            *("munged", "--force", f"--key-file={key}", f"--socket={place}/munge.sock"),
            *(f"--pid-file={place}/munged.pid", f"--log-file={place}/munged.log", f"--seed-file={place}/munge.seed"),
        )
        cluster.run("slurmctld", "-f", str(place / "slurm.conf"))
        for number in range(1, NODES + 1):
            cluster.run("slurmd", "-f", str(place / "slurm.conf"), "-N", f"n{number}")
        eventually("the nodes are idle", cluster.nodes_are_idle)
        try:
            yield cluster
        finally:
            with contextlib.suppress(RuntimeError, AssertionError):
                cluster.run("scancel", f"--user={user}")
                eventually("all jobs have ended", cluster.nodes_are_idle)
    finally:
        _end(place)


def _end(place: Path) -> None:
    """End the daemons, and whatever jobs have left, by what they were started with."""
    left = [each for each in psutil.process_iter() if _is_of(each, place)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, left = psutil.wait_procs(left, timeout=20)


def _is_of(process: psutil.Process, place: Path) -> bool:
    # Slurm's own steps have another environment, and are where their daemon was started.
    try:
        return str(place) in process.cwd() or process.environ().get("SLURM_CONF") == str(place / "slurm.conf")
    except psutil.Error:
        return False
