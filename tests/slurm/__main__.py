"""Run the job scripts of ``deploy/slurm`` on a real Slurm, with simulated engines.

    python -m tests.slurm

It needs Debian's packages slurm-wlm and munge, and says so where they are missing. This machine is three nodes, and
everything is on loopback. The exit status is 0 when all went well or nothing could be tried, 1 when something did not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil

from lab.benchmarks.fleet import free_port
from poolgrid.plugins.bench.command import measure_one
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.disturbed_load import active_requests, assert_unharmed, load_while
from tests.e2e.expectation import PLAIN, SPOKEN, Verifier
from tests.e2e.processes import Process, eventually, ready_workers, worker_rows
from tests.fakes import FAKES_PATH
from tests.slurm.cluster import NODES, Cluster, running_cluster, why_not

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
PATIENCE_S = 240.0
"""A pool of four processes is there in ten seconds; a busy machine takes longer."""


class Job:
    """A job of one of the scripts, and where it says that it is."""

    def __init__(self, cluster: Cluster, script: str, sbatch: Sequence[str], **variables: str) -> None:
        self.cluster = cluster
        ports = dict(zip(("PORT", "SELECT_PORT", "INGEST_PORT"), (str(free_port()) for _ in range(3)), strict=True))
        own = {
            "SCRIPTS": str(SCRIPTS),
            "POOLGRID": str(Path(sys.executable).with_name("poolgrid")),
            "ENGINE": "simulated",
            "BIND": "127.0.0.1",
            "ADDRESS": "127.0.0.1",
            **ports,
            **variables,
        }
        self.log = cluster.place / f"{script}-{ports['PORT']}.log"
        self.directory = cluster.place / f"run-{ports['PORT']}"
        own["RUN_DIR"] = str(self.directory)
        self.id = cluster.run(
            "sbatch", "--parsable", f"--output={self.log}", *sbatch, str(SCRIPTS / script), environment=own
        )
        self.url = f"http://127.0.0.1:{ports['PORT']}"
        self.ingest_port = ports["INGEST_PORT"]

    def until_ready(self, workers: int) -> None:
        eventually(
            f"{workers} workers of job {self.id} are ready", lambda: len(ready_workers(self.url)) == workers, PATIENCE_S
        )

    def signal_script(self, name: str) -> None:
        """Signal the batch script alone, as Slurm does before the time is over."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.id)

    def logs(self) -> str:
        paths = [self.log, *sorted(self.directory.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in paths if path.exists())


def process_of(word: str) -> psutil.Process:
    """Return the one process of a worker, by its name."""
    found = [each for each in psutil.process_iter(["cmdline"]) if f"--worker-id={word}" in (each.info["cmdline"] or ())]
    assert len(found) == 1, found
    return found[0]


def a_killed_worker_costs_nothing_and_is_started_again(pool: Job) -> None:
    settings = BenchSettings(url=pool.url, concurrency=(8,), isl=300, osl=80, requests=150)
    verify = Verifier(SPOKEN)
    epoch = worker_rows(pool.url)["aggregated-n2-0"]["epoch"]

    def kill() -> None:
        eventually("it has requests", lambda: active_requests(pool.url, "aggregated-n2-0") > 0)
        process_of("aggregated-n2-0").send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    report = measure_one(settings, verify=verify)
    killer.join()

    assert (report.errors, report.wrong_texts, verify.checked) == (0, 0, 150), report.errors_by_kind
    eventually(
        "its next life is there",
        lambda: worker_rows(pool.url).get("aggregated-n2-0", {}).get("epoch", epoch) != epoch,
        PATIENCE_S,
    )
    pool.until_ready(NODES)


def the_end_of_the_time_drains_and_the_job_goes_on_with_its_journal(pool: Job) -> None:
    offset = httpx.get(f"{pool.url}/v1/workers").json()["offset"]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{pool.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        pool.signal_script("USR1")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length", "the stream went to its end while the pool drained"

    eventually("it waits to run again", lambda: pool.cluster.state(pool.id) == "PENDING", PATIENCE_S)
    # Slurm holds a requeued job back for two minutes.
    pool.cluster.run("scontrol", "update", f"JobId={pool.id}", "StartTime=now")
    eventually("it has begun again", lambda: "start 1: pool at" in pool.log.read_text(), PATIENCE_S)
    pool.until_ready(NODES)
    assert httpx.get(f"{pool.url}/v1/workers").json()["offset"] > offset, "the journal goes on"


def both_stages_and_the_global_router_serve(cluster: Cluster, pool: Job) -> list[Job]:
    staged = Job(cluster, "pool.sbatch", ["--nodes=3"], PREFILL="1", DECODE="2", WORKER_OPTIONS="--speedup 20")
    staged.until_ready(3)
    for word in ("one ", "two "):
        asked = {"model": "tiny", "prompt": word * 3000, "max_tokens": 8}
        assert httpx.post(f"{staged.url}/v1/completions", json=asked, timeout=PATIENCE_S).status_code == 200
    roles = {row["role"]: row["requests_total"] for row in worker_rows(staged.url).values() if row["requests_total"]}
    assert set(roles) == {"prefill", "decode"}, roles

    document = json.loads((ROOT / "pool_configs" / "short_and_long.json").read_text())
    config = cluster.place / "pools.json"
    config.write_text(json.dumps(document))
    second = Job(cluster, "pool.sbatch", ["--nodes=1"], WORKERS="1", WORKER_OPTIONS="--speedup 20")
    second.until_ready(1)
    before = Job(
        cluster, "global-router.sbatch", [], CONFIG=str(config), POOLS=f"short={pool.directory} long={second.directory}"
    )
    eventually("both pools are up", lambda: httpx.get(f"{before.url}/ready").status_code == 200, PATIENCE_S)
    served = set()
    for words in (10, 1500):
        answer = httpx.post(
            f"{before.url}/v1/completions",
            json={"model": "tiny", "prompt": "word " * words, "max_tokens": 4},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200, answer.text
        served.add(answer.headers["x-poolgrid-pool"])
    assert served == {"short", "long"}
    return [staged, second, before]


def an_engine_on_two_nodes_loses_a_rank_and_is_started_again_whole(cluster: Cluster) -> Job:
    """The ranks are a real MPI where mpi4py and PMIx (Debian's libpmix-dev) are there, else sockets stand for it."""
    has_mpi = has_real_mpi(cluster)
    fake_mpi = {} if has_mpi else {"FAKE_MPI_ADDRESS": f"127.0.0.1:{free_port()}", "MPI": "none"}
    environment = {
        "PATH": os.pathsep.join([str(FAKES_PATH), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(FAKES_PATH),
        "TRTLLM_FAKE": json.dumps({"vocabulary_size": 4096, "speedup": 5.0}),
        # Open MPI takes nodes for machines: by shared memory its ranks would meet those of the other node.
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }
    options = "--kv-block-size 16 --max-batch-size 64"
    variables = {
        "ENGINE": "trtllm",
        "MODEL_PATH": str(TINY_MODEL_PATH),
        "MODEL_NAME": "tiny",
        "WORKERS": "1",
        "NODES_PER_WORKER": "2",
        "GPUS_PER_WORKER": "4",
        "WORKER_OPTIONS": f"{options} --tensor-parallel-size 4",
        **environment,
        **fake_mpi,
    }
    pool = Job(cluster, "pool.sbatch", ["--nodes=2"], **variables)
    pool.until_ready(1)
    one = Process(
        *("worker", "--engine", "trtllm", "--model-path", str(TINY_MODEL_PATH), "--served-model-name", "tiny"),
        *(*options.split(), "--worker-id", "one", "--consolidator", f"tcp://127.0.0.1:{pool.ingest_port}"),
        log=cluster.place / "one.log",
        environment=environment,
    )
    with one:
        one.wait_ready()
        pool.until_ready(2)
        epoch = worker_rows(pool.url)["aggregated-n1"]["epoch"]

        def kill() -> None:
            eventually("it has requests", lambda: active_requests(pool.url, "aggregated-n1") > 0, PATIENCE_S)
            mpi_rank(3).kill()

        assert_unharmed(load_while(pool.url, kill, requests=150, vocabulary=PLAIN))
        eventually(
            "its next life is there",
            lambda: worker_rows(pool.url).get("aggregated-n1", {}).get("epoch", epoch) != epoch,
            PATIENCE_S,
        )
    return pool


def has_real_mpi(cluster: Cluster) -> bool:
    """Tell whether Slurm starts processes that find each other by PMIx, and this Python knows MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return False
    try:
        cluster.run("srun", "--mpi=pmix", "--nodes=2", "--ntasks=2", "true")
    except (RuntimeError, subprocess.TimeoutExpired):
        return False
    return True


def mpi_rank(rank: int) -> psutil.Process:
    """Return the process that is a rank of MPI in a step of Slurm."""
    found = [
        each
        for each in psutil.process_iter(["cmdline", "environ"])
        if "tensorrt_llm.llmapi.mgmn_worker_node" in (each.info["cmdline"] or ())
        and (each.info["environ"] or {}).get("SLURM_PROCID") == str(rank)
    ]
    assert len(found) == 1, found
    return found[0]


def everything_ends_in_order_when_it_is_cancelled(cluster: Cluster, jobs: Sequence[Job]) -> None:
    cluster.run("scancel", *(job.id for job in jobs))
    eventually("all jobs have ended", cluster.nodes_are_idle, PATIENCE_S)
    restarts: list[str] = []
    for job in jobs:
        for path in job.directory.glob("*.log"):
            if re.search(r"-rank[1-9]", path.name):
                continue  # only the first is a worker
            said = path.read_text()
            assert "has ended" in said[-1500:], f"{path.name} was cut off:\n{said[-600:]}"
            restarts += re.findall(r"ended with status (\d+); it is started again", said)
    assert restarts == ["137"], "one worker was killed; nothing else was started again"


def main() -> int:
    """Try everything; return the exit status."""
    reason = why_not()
    if reason:
        sys.stdout.write(f"skipped: {reason}\n")
        return 0
    os.environ.pop("POOLGRID_URL", None)
    with tempfile.TemporaryDirectory(prefix="poolgrid-slurm-") as place, running_cluster(Path(place)) as cluster:
        jobs: list[Job] = []
        try:
            options = {"WORKERS": str(NODES), "WORKER_OPTIONS": "--speedup 20", "MODEL_PATH": str(TINY_MODEL_PATH)}
            pool = Job(cluster, "pool.sbatch", [f"--nodes={NODES}"], **options)
            jobs.append(pool)
            pool.until_ready(NODES)
            steps: list[tuple[str, Callable[[], object]]] = [
                (
                    "a killed worker costs nothing and is started again",
                    lambda: a_killed_worker_costs_nothing_and_is_started_again(pool),
                ),
                (
                    "the end of the time drains, and the job goes on with its journal",
                    lambda: the_end_of_the_time_drains_and_the_job_goes_on_with_its_journal(pool),
                ),
                (
                    "prefill, decode and a global router serve",
                    lambda: jobs.extend(both_stages_and_the_global_router_serve(cluster, pool)),
                ),
                (
                    "an engine on two nodes loses a rank at no cost, and is started again whole",
                    lambda: jobs.append(an_engine_on_two_nodes_loses_a_rank_and_is_started_again_whole(cluster)),
                ),
                (
                    "everything ends in order when it is cancelled",
                    lambda: everything_ends_in_order_when_it_is_cancelled(cluster, jobs),
                ),
            ]
            for name, step in steps:
                step()
                sys.stdout.write(f"ok: {name}\n")
                sys.stdout.flush()
        except Exception:
            traceback.print_exc()
            sys.stderr.write("\n".join(job.logs() for job in jobs) + "\n")
            return 1
    sys.stdout.write("Slurm: all passed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
