"""The front ends that the HTTP benchmarks compare: how each is started before its mock engines.

``ours``, ``ours-before`` (another version, from a Python that has it) and Dynamo (``dynamo`` with its
default tokenizer, ``dynamo-fast`` with ``fastokens``) tokenize, route by KV cache and detokenize, before mock workers
on their own planes. ``ours-front`` and ``ours-front-before`` are all processes of ``poolgrid up --engine-url`` before
mock OpenAI servers. ``smg`` and ``vllm-router`` pass text through to mock OpenAI servers. All but ours run from another
Python, which has their wheels.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.benchmarks.fleet import Fleet, free_port
from lab.benchmarks.http_worker import TOTAL_BLOCKS

MODEL = "bench"
ENGINES = 4
BLOCK_SIZE = 16
START_TIMEOUT_S = 90.0
IMPORT_TIMEOUT_S = 120.0
MODULE_OF = {
    "dynamo": "dynamo.frontend",
    "dynamo-fast": "dynamo.frontend",
    "smg": "smg",
    "vllm-router": "vllm_router.launch_router",
}
OURS, BEFORE = "ours", "ours-before"
FRONT, FRONT_BEFORE = "ours-front", "ours-front-before"
NAMES = (OURS, BEFORE, FRONT, FRONT_BEFORE, *MODULE_OF)


def import_fault(python: str, module: str) -> str:
    """Return why a Python cannot import a module; empty when it can.

    Looking for it is not enough: a wheel whose requirements are missing is found and does not start.
    """
    probe = subprocess.run(
        [python, "-c", f"import {module}"], capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False
    )
    if probe.returncode == 0:
        return ""
    return (probe.stderr.decode().strip().splitlines() or [f"status {probe.returncode}"])[-1]


def smg_command(python: str, port: int, engines: Sequence[str]) -> list[str]:
    """Return the command of smg in front of servers at these URLs."""
    command = [python, "-m", "smg", "launch", "--policy", "cache_aware", "--max-concurrent-requests", "-1"]
    return [*command, *_http_options(port), "--worker-urls", *engines]


def vllm_router_command(python: str, port: int, engines: Sequence[str], policy: str) -> list[str]:
    """Return the command of vllm-router in front of servers at these URLs."""
    command = [python, "-m", "vllm_router.launch_router", "--policy", policy]
    return [*command, *_http_options(port), "--worker-urls", *engines]


def _http_options(port: int) -> list[str]:
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return ["--host", "127.0.0.1", "--port", str(port), *metrics]


class Peers:
    """Starts front ends in front of the same number of mock engines, with the same model."""

    def __init__(self, peer_python: str, model: Path, http_workers: int = 1, before_python: str = "") -> None:
        """Use the peers' Python, the directory of the model, how many HTTP processes of ours share the port, and a
        Python that has another version of ours."""
        self._peer_python = peer_python
        self._before_python = before_python
        self._model = model
        self._http_workers = http_workers

    def absent_because(self, peer: str) -> str:
        """Return why a peer cannot be started by its Python; empty when it can."""
        if peer in (OURS, FRONT):
            return ""
        if peer in (BEFORE, FRONT_BEFORE):
            return self._before_absent_because()
        return import_fault(self._peer_python, MODULE_OF[peer])

    def start(self, peer: str, fleet: Fleet, step_ms: float = 0.0) -> tuple[int, int]:
        """Start a peer and its engines, wait until it answers, and return its port and process id.

        ``step_ms`` is the time between two tokens of a stream; 0 = as fast as the engines can. Dynamo's mock engine
        has a table of step times of its own, and takes its times from there when it is not 0.
        """
        start: dict[str, Callable[[], tuple[int, int]]] = {
            OURS: lambda: self._start_ours(fleet, step_ms),
            BEFORE: lambda: self._start_ours(fleet, step_ms, self._before_python),
            FRONT: lambda: self._start_front(fleet, step_ms),
            FRONT_BEFORE: lambda: self._start_front(fleet, step_ms, self._before_python),
            "dynamo": lambda: self._start_dynamo(fleet, "hf", step_ms),
            "dynamo-fast": lambda: self._start_dynamo(fleet, "fastokens", step_ms),
            "smg": lambda: self._start_smg(fleet, step_ms),
            "vllm-router": lambda: self._start_vllm_router(fleet, step_ms),
        }
        port, pid = start[peer]()
        await_answer(port, fleet)
        return port, pid

    def start_engine(
        self, fleet: Fleet, number: int = 0, step_ms: float = 0.0, events_port: int = 0
    ) -> tuple[int, int]:
        """Start one mock OpenAI server, wait until it answers, and return its port and process id."""
        port = free_port()
        command = [sys.executable, "-m", "lab.benchmarks.http_engine", str(port), str(step_ms)]
        if events_port:
            command += [str(events_port), str(self._model)]
        process = fleet.start(f"engine{number}", command)
        await_answer(port, fleet)
        return port, process.pid

    def start_worker(self, peer: str, fleet: Fleet) -> str:
        """Start one mock worker of a form of ours and its consolidator, and return the endpoint of its requests."""
        python = self._before_python if peer == BEFORE else sys.executable
        consolidator = fleet.start("consolidator", [python, "-m", "poolgrid", "consolidator", "--log-level", "warning"])
        command = [
            sys.executable,
            "-m",
            "lab.benchmarks.http_worker",
            fleet.ready_words(consolidator)["ingest"],
            "worker-0",
        ]
        worker = fleet.start("worker0", [*command, str(BLOCK_SIZE)], says_ready=True)
        return fleet.ready_words(worker)["requests"]

    def _engines(self, fleet: Fleet, step_ms: float) -> list[str]:
        return [f"http://127.0.0.1:{self.start_engine(fleet, number, step_ms)[0]}" for number in range(ENGINES)]

    def _start_front(self, fleet: Fleet, step_ms: float, python: str = sys.executable) -> tuple[int, int]:
        engines = [self.start_engine(fleet, number, step_ms, free_port())[0] for number in range(ENGINES)]
        fronts = [word for port in engines for word in ("--engine-url", f"http://127.0.0.1:{port}")]
        command = [python, "-m", "poolgrid", "up", *fronts, "--model-path", str(self._model), "--port", "0"]
        up = fleet.start("up", command, tested=True)
        return int(fleet.ready_words(up)["http"].rpartition(":")[2]), up.pid

    def _before_absent_because(self) -> str:
        """Return why the other version of ours cannot be started; empty when it can."""
        if not self._before_python:
            return "no Python is named that has another version of poolgrid"
        asked = subprocess.run(
            [self._before_python, "-m", "poolgrid", "--version"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
        return (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1] if asked.returncode else ""

    def _start_ours(self, fleet: Fleet, step_ms: float, python: str = sys.executable) -> tuple[int, int]:
        ours = [python, "-m", "poolgrid"]
        level = ["--log-level", "warning"]
        consolidator = fleet.start("consolidator", [*ours, "consolidator", *level])
        words = fleet.ready_words(consolidator)
        for number in range(ENGINES):
            command = [sys.executable, "-m", "lab.benchmarks.http_worker", words["ingest"], f"worker-{number}"]
            fleet.start(f"worker{number}", [*command, str(BLOCK_SIZE), str(step_ms)])
        planes = ["--feed-endpoint", words["feed"], "--query-endpoint", words["query"]]
        router = fleet.start(
            "router",
            [
                *ours,
                "router",
                "--port",
                "0",
                "--http-workers",
                str(self._http_workers),
                *planes,
                "--model-path",
                str(self._model),
                "--served-model-name",
                MODEL,
                *level,
            ],
            tested=True,
        )
        url = fleet.ready_words(router)["http"]
        return int(url.rpartition(":")[2]), router.pid

    def _start_smg(self, fleet: Fleet, step_ms: float) -> tuple[int, int]:
        port = free_port()
        command = smg_command(self._peer_python, port, self._engines(fleet, step_ms))
        return port, fleet.start("smg", [*command, "--log-level", "error"], tested=True).pid

    def _start_vllm_router(self, fleet: Fleet, step_ms: float) -> tuple[int, int]:
        port = free_port()
        command = vllm_router_command(self._peer_python, port, self._engines(fleet, step_ms), "cache_aware")
        return port, fleet.start("vllm-router", [*command, "--log-level", "error"], tested=True).pid

    def _start_dynamo(self, fleet: Fleet, tokenizer: str, step_ms: float) -> tuple[int, int]:
        port = free_port()
        store = Path(tempfile.mkdtemp(dir=fleet.logs))
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(store),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_HTTP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        if tokenizer == "fastokens":
            environment["DYN_TOKENIZER"] = "fastokens"
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        command = [self._peer_python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        command += ["--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_SIZE), *planes]
        process = fleet.start("dynamo-frontend", command, environment, tested=True)
        command = [self._peer_python, "-m", "dynamo.mocker", "--model-path", str(self._model), "--model-name", MODEL]
        command += [
            "--block-size",
            str(BLOCK_SIZE),
            "--speedup-ratio",
            "1" if step_ms else "1000000",
            "--num-workers",
            str(ENGINES),
        ]
        command += ["--num-gpu-blocks-override", str(TOTAL_BLOCKS), "--max-num-seqs", "256", *planes]
        fleet.start("dynamo-mocker", command, environment)
        return port, process.pid


def await_answer(port: int, fleet: Fleet) -> None:
    """Return when a completion is answered on a port; raises ``RuntimeError`` when none is for too long."""
    body = json.dumps({"model": MODEL, "prompt": " a b c", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            if time.monotonic() > until:
                raise RuntimeError(f"port {port} never answered ({error}); logs: {fleet.logs}") from error
            time.sleep(0.2)  # noqa: TID251 - another project's process, which announces nothing
